"""admit and lookup: the record, its fact, its outbox entries or seat, and its wake-up are one step."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.domain.guard import MAX_SAFE_INTEGER, TimeGuard
from shared.domain.profile import MAX_UPDATES
from shared.domain.records import Answer, Branch
from shared.store.codes import Code
from shared.store.connection import ReplyError
from shared.store.replies import NewOperation, OutOfMemory
from tests.scripts.scenes import intercepted, unchanged
from tests.support.world import DIGEST, World


@pytest.mark.requirement(
    "RT-ADM-24", "RT-STORE-02", "RT-TIME-04", "RT-TIME-05", "RT-SEL-05", "RT-OUT-01", "DASP-CORE-004a"
)
async def test_admission_writes_record_fact_outbox_and_wake_up_together(world: World) -> None:
    now = await world.start()
    await world.open()
    new = world.command(timeout_ms=5000)
    reply = await world.admit(new)
    assert (reply.code, reply.now_ms) == (Code.OK, now)
    assert [reply.number(0), reply.number(1), reply.text(2)] == [1, now + 5000, "busy"]
    op = await world.load(new)
    assert (op.admitted_ms, op.deadline_ms, op.sequence) == (now, now + 5000, 1)
    assert (op.phase, op.reservation, op.revision) == ("admitted", "pending", "1")
    branch = op.branches[0]
    assert (branch.status, branch.peer, branch.attempt, branch.fence) == ("pending", "alfa", 1, 1)
    assert (branch.gate, branch.claims, branch.holder) == ("closed", 0, None)
    page = await world.reads.page("s1", 0, 100, world.revisions)
    assert page is not None
    assert [(f.sequence, f.kind, f.command_id, f.payload) for f in page.facts] == [
        (1, "accepted", "c1", b'{"name":"counter.add"}')
    ]
    (entry,) = await world.connection.call("XRANGE", world.keys.outbox("alfa"), "-", "+")
    assert entry[0].decode() == branch.outbox
    fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
    assert fields[b"o"].decode() == new.operation_id
    assert fields[b"m"].decode() == new.offers[0].message_id
    assert await world.reads.due(now + 1000, 10) == [(new.operation_id, now + 1000)]


@pytest.mark.requirement("RT-ADM-24", "RT-SEL-05")
async def test_invocation_starts_every_branch_with_attempt_and_fence_one(world: World) -> None:
    new = world.invocation()
    assert (await world.admit(new)).code is Code.OK
    words = await world.connection.call("HMGET", world.keys.op(new.operation_id), "b:0", "b:1")
    branches = [Branch.parse(w.decode()) for w in words]
    assert [(b.peer, b.attempt, b.fence) for b in branches] == [("alfa", 1, 1), ("bravo", 1, 1)]
    for peer in ("alfa", "bravo"):
        assert await world.connection.call("XLEN", world.keys.outbox(peer)) == 1


@pytest.mark.requirement("RT-ADM-25", "DASP-CORE-004d", "DASP-CORE-003a")
async def test_equal_retry_answers_with_the_original_and_writes_nothing(world: World) -> None:
    await world.open()
    new = world.command()
    first = await world.admit(new)
    before = await world.dump()
    again = await world.admit(new)
    assert again.code is Code.DUPLICATE
    assert again.text(0).split(" ")[2] == first.text(0)
    assert await world.dump() == before


@pytest.mark.requirement("RT-ADM-26", "RT-ADM-29", "DASP-CORE-003b", "DASP-CORE-002a", "DASP-CORE-002b")
@pytest.mark.parametrize("changed", ["input_bytes", "name", "session_id"])
async def test_changed_retry_conflicts_without_disclosure(world: World, changed: str) -> None:
    await world.open()
    await world.open("s2")
    await world.admit(world.command())
    before = await world.dump()
    value: dict[str, object] = {"input_bytes": b'{"amount":4}', "name": "counter.sub", "session_id": "s2"}
    other = world.command(**{changed: value[changed]})  # type: ignore[arg-type]
    reply = await world.admit(other)
    assert (reply.code, reply.values) == (Code.CONFLICT, ())
    assert await world.dump() == before


@pytest.mark.requirement("RT-ADM-27")
async def test_same_key_of_another_principal_or_contract_is_another_operation(world: World) -> None:
    ones = [
        world.invocation(),
        world.invocation(principal="bob"),
        world.invocation(digest="sha256:" + "1" * 64),
    ]
    assert len({new.operation_id for new in ones}) == 3
    assert [(await world.admit(new)).code for new in ones] == [Code.OK] * 3
    assert DIGEST in ones[0].admission.decode()


@pytest.mark.requirement("RT-ADM-25", "RT-ADM-26")
async def test_invocation_repeat_is_a_duplicate_and_changed_input_a_conflict(world: World) -> None:
    new = world.invocation()
    await world.admit(new)
    before = await world.dump()
    assert (await world.admit(new)).code is Code.DUPLICATE
    assert (await world.admit(world.invocation(input_bytes=b'{"x":1}'))).code is Code.CONFLICT
    assert await world.dump() == before


@pytest.mark.requirement("RT-ADM-28", "RT-ADM-29", "DASP-CORE-003c")
async def test_concurrent_admissions_create_one_record(world: World) -> None:
    await world.open()
    same = [world.admit(world.command()) for _ in range(20)]
    other = [world.admit(world.command(input_bytes=b'{"amount":%d}' % n)) for n in range(20, 40)]
    codes = [reply.code for reply in await asyncio.gather(*same, *other)]
    assert codes.count(Code.OK) == 1
    assert codes.count(Code.DUPLICATE) == 19
    assert codes.count(Code.CONFLICT) == 20
    assert await world.connection.call("XLEN", world.keys.outbox("alfa")) == 1


@pytest.mark.requirement(
    "RT-GUARD-02", "RT-GUARD-03", "RT-GUARD-04", "RT-GUARD-05", "RT-GUARD-08", "RT-TIME-01"
)
@pytest.mark.parametrize(
    ("offset", "code"), [(-1, Code.OUTSIDE_WINDOW), (0, Code.OK), (99, Code.OK), (100, Code.OUTSIDE_WINDOW)]
)
async def test_admission_window_is_judged_by_the_store(world: World, offset: int, code: Code) -> None:
    now = await world.start()
    await world.open()
    guard = TimeGuard(now + 500, now + 600)
    await world.at(now + 500 + offset)
    before = await world.dump()
    reply = await world.admit(world.command(), guard)
    assert (reply.code, reply.now_ms) == (code, now + 500 + offset)
    if code is not Code.OK:
        assert await world.dump() == before


@pytest.mark.requirement("RT-GUARD-06", "RT-GUARD-07")
@pytest.mark.parametrize("bounds", [(5, 5), (6, 5)])
async def test_empty_or_reversed_guard_is_refused_by_the_script_too(
    world: World, bounds: tuple[int, int]
) -> None:
    reply = await world.admit(world.invocation(), _unchecked(*bounds))
    assert (reply.code, reply.text(0)) == (Code.INVALID, "guard")


def _unchecked(low: int, high: int) -> TimeGuard:
    class Raw(msgspec.Struct):
        not_before_ms: int
        not_after_ms: int

    return Raw(low, high)  # type: ignore[return-value]


@pytest.mark.requirement("RT-TIME-08", "RT-GUARD-09")
async def test_deadline_beyond_safe_integers_is_refused_before_mutation(world: World) -> None:
    now = await world.start()
    before = await world.dump()
    reply = await world.admit(world.invocation(timeout_ms=MAX_SAFE_INTEGER - now + 1))
    assert (reply.code, reply.text(0)) == (Code.INVALID, "timeout")
    assert await world.dump() == before
    assert (await world.admit(world.invocation(timeout_ms=MAX_SAFE_INTEGER - now))).code is Code.OK


@pytest.mark.parametrize(("timeout_ms", "code"), [(0, Code.INVALID), (1, Code.OK)])
async def test_an_operation_has_time(world: World, timeout_ms: int, code: Code) -> None:
    before = await world.dump()
    assert (await world.admit(world.invocation(timeout_ms=timeout_ms))).code is code
    assert (await world.dump() == before) is (code is Code.INVALID)


@pytest.mark.requirement("RT-ADM-24")
@pytest.mark.parametrize(("count", "code"), [(0, Code.INVALID), (1024, Code.OK), (1025, Code.INVALID)])
async def test_branches_are_bounded(world: World, count: int, code: Code) -> None:
    new = world.invocation()
    new = msgspec.structs.replace(new, offers=new.offers[:1] * count)
    before = await world.dump()
    reply = await world.admit(new)
    assert reply.code is code
    if code is Code.INVALID:
        assert reply.text(0) == "branches"
        assert await world.dump() == before
    else:
        assert await world.connection.call("HEXISTS", world.keys.op(new.operation_id), "b:1023") == 1


@pytest.mark.requirement("RT-TIME-03")
@pytest.mark.parametrize("kind", ["invocation", "command"])
async def test_a_supplied_instant_is_refused(world: World, kind: str) -> None:
    """Neither the typed call nor the script has a place for one; one argument more refuses the whole."""
    await world.open()
    new = world.invocation() if kind == "invocation" else world.command()
    fields = set(new.__struct_fields__)
    assert not fields & {"admitted_ms", "deadline_ms", "admitted_at_ms"}
    for instant in ("admitted_ms", "deadline_ms"):
        with pytest.raises(TypeError):
            NewOperation(**{**msgspec.structs.asdict(new), instant: 1})
    name, keys, args = await intercepted(world, lambda: world.admit(new))
    async with unchanged(world):
        reply = await world.store.run(name, keys, [*args, 1], world.revisions.authority)
    assert (reply.code, reply.text(0)) == (Code.INVALID, "branches")
    assert (await world.admit(new)).code is Code.OK


@pytest.mark.requirement("RT-ADM-24")
@pytest.mark.parametrize("key", ["due", "outbox", "updates", "queue", "session", "op"])
async def test_wrong_typed_key_refuses_the_whole_admission(world: World, key: str) -> None:
    await world.open()
    if key == "queue":
        await world.admit(world.command("c0"))
    new = world.command()
    k = world.keys
    name = {
        "due": k.due,
        "outbox": k.outbox("alfa"),
        "updates": k.updates("s1"),
        "queue": k.queue("s1"),
        "session": k.session("s1"),
        "op": k.op(new.operation_id),
    }[key]
    await world.connection.call("DEL", name)
    await world.connection.call("SET", name, "junk")
    before = await world.dump()
    with pytest.raises(ReplyError) as refused:
        await world.admit(new)
    assert refused.value.code == "WRONGTYPE"
    assert await world.dump() == before


@pytest.mark.requirement("RT-ADM-24", "DASP-CORE-004a")
@pytest.mark.parametrize("fact", ["1-0", "7-0"])
async def test_a_stream_that_is_ahead_of_its_session_refuses_the_whole_admission(
    world: World, fact: str
) -> None:
    """The session lost its head: nothing is admitted on top of facts that it does not know."""
    await world.open()
    key = world.keys.updates("s1")
    await world.connection.call("XADD", key, fact, "k", "accepted", "c", "c0", "p", "{}", "t", "1")
    async with unchanged(world):
        assert (await world.admit(world.command())).code is Code.CORRUPT


async def test_serial_commands_wait_behind_the_busy_one(world: World) -> None:
    now = await world.start()
    await world.open()
    replies = [await world.admit(world.command(f"c{n}")) for n in range(3)]
    assert [reply.text(2) for reply in replies] == ["busy", "queued", "queued"]
    assert await world.connection.call("XLEN", world.keys.outbox("alfa")) == 1
    waiting = world.command("c1")
    assert await world.reads.queued("s1", 5) == [waiting.operation_id, world.command("c2").operation_id]
    assert dict(await world.reads.due(now + 60_000, 10))[waiting.operation_id] == now + 10_000
    concurrent = await world.admit(world.command("c9", kind="concurrent"))
    assert concurrent.text(2) == "none"


@pytest.mark.requirement("DASP-CORE-009a", "DASP-CORE-009d")
async def test_sequences_are_contiguous_per_session_under_concurrent_writers(world: World) -> None:
    for session in ("s1", "s2"):
        await world.open(session)
    jobs = [world.admit(world.command(f"{s}-{n}", session_id=s)) for n in range(50) for s in ("s1", "s2")]
    await asyncio.gather(*jobs)
    for session in ("s1", "s2"):
        page = await world.reads.page(session, 0, 100, world.revisions)
        assert page is not None
        assert [fact.sequence for fact in page.facts] == list(range(1, 51))


@pytest.mark.requirement("DASPX-10")
@pytest.mark.parametrize("opened", [0, 3])
@pytest.mark.parametrize(("beyond", "code"), [(0, Code.OK), (1, Code.SEQUENCE_EXHAUSTED)])
async def test_sequence_space_ends_before_it_wraps(
    world: World, opened: int, beyond: int, code: Code
) -> None:
    """As many sequences are kept back as what is open, this command included, can need to end."""
    await world.open()
    for n in range(opened):
        assert (await world.admit(world.command(f"open-{n}"))).code is Code.OK
    kept_back = (opened + 1) * (MAX_UPDATES + 1)
    head = MAX_SAFE_INTEGER - kept_back - 1 + beyond
    await world.connection.call("HSET", world.keys.session("s1"), "head", head)
    before = await world.dump()
    reply = await world.admit(world.command())
    assert reply.code is code
    if code is Code.OK:
        assert reply.number(0) == head + 1
    else:
        assert await world.dump() == before


@pytest.mark.requirement("RT-ADM-24")
@pytest.mark.parametrize("broken", range(4))
async def test_every_outbox_of_an_invocation_is_looked_at_before_the_first_write(
    world: World, broken: int
) -> None:
    peers = ("alfa", "bravo", "charlie", "delta")
    await world.connection.call("DEL", world.keys.outbox(peers[broken]))
    await world.connection.call("SET", world.keys.outbox(peers[broken]), "junk")
    async with unchanged(world):
        with pytest.raises(ReplyError) as refused:
            await world.admit(world.invocation(peers=peers))
        assert refused.value.code == "WRONGTYPE"


@pytest.mark.requirement("DASP-CORE-003e")
async def test_a_refused_command_does_not_reserve_its_id(world: World) -> None:
    assert (await world.admit(world.command())).code is Code.NOT_FOUND
    await world.open()
    assert (await world.admit(world.command(input_bytes=b'{"amount":9}'))).code is Code.OK


@pytest.mark.requirement("RT-STORE-15")
async def test_every_refusal_of_the_snapshot_has_its_own_code(world: World) -> None:
    await world.open()
    new = world.command()
    moved = msgspec.structs.replace(world.revisions, policy="9")
    reply = await world.store.admit(new, moved, TimeGuard(0, MAX_SAFE_INTEGER))
    assert (reply.code, reply.text(0), reply.text(1)) == (Code.STALE_SNAPSHOT, "policy", "1")
    moved = msgspec.structs.replace(world.revisions, directory="9")
    reply = await world.store.admit(new, moved, TimeGuard(0, MAX_SAFE_INTEGER))
    assert (reply.code, reply.text(0), reply.text(1)) == (Code.STALE_SNAPSHOT, "directory", "3")


async def test_a_recorded_retry_is_answered_before_the_directory_or_the_clock_can_refuse(
    world: World,
) -> None:
    now = await world.start()
    await world.open()
    new = world.command()
    await world.admit(new)
    moved = msgspec.structs.replace(world.revisions, directory="9")
    assert (await world.store.admit(new, moved, TimeGuard(now + 99, now + 100))).code is Code.DUPLICATE
    await world.at(now - 60_000)
    assert (await world.admit(new)).code is Code.DUPLICATE


@pytest.mark.requirement("RT-STORE-01", "RT-STORE-15")
async def test_lookup_tells_absent_duplicate_and_conflict(world: World) -> None:
    await world.open()
    new = world.command()
    look = world.store.lookup
    assert (await look(new.operation_id, new.intent, "s1", world.revisions)).code is Code.ABSENT
    assert (await look(new.operation_id, new.intent, "nowhere", world.revisions)).code is Code.NOT_FOUND
    await world.admit(new)
    before = await world.dump()
    assert (await look(new.operation_id, new.intent, "s1", world.revisions)).code is Code.DUPLICATE
    assert (await look(new.operation_id, b"x" * 32, "s1", world.revisions)).code is Code.CONFLICT
    assert await world.dump() == before


@pytest.mark.requirement("RT-STORE-15")
async def test_out_of_memory_refuses_new_work_and_answers_retries(world: World) -> None:
    await world.open()
    new = world.command()
    await world.admit(new)
    await world.connection.call("CONFIG", "SET", "maxmemory", "1")
    try:
        before = await world.dump()
        with pytest.raises(OutOfMemory):
            await world.admit(world.command("c2"))
        assert await world.dump() == before
        reply = await world.store.lookup(new.operation_id, new.intent, "s1", world.revisions)
        assert reply.code is Code.DUPLICATE
        grant = await world.granted(new)
        assert (await world.answer(grant.lease, Answer(result=msgspec.Raw(b'{"value":3}')))).code is Code.OK
        settled = await world.decide(new, grant.granted_ms)
        assert settled is not None
        assert settled.code is Code.OK
    finally:
        await world.connection.call("CONFIG", "SET", "maxmemory", "0")
