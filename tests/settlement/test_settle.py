"""The settling loop: what it does on healthy work, on work nobody minds, beside other loops, and with
poison.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from settlement_svc.contention import Undecidable, Verdict
from settlement_svc.settle import IDLE_S, Settler
from shared.domain.records import Answer, answer_digest, encode
from shared.store.codes import Code
from shared.store.connection import ReplyLost
from shared.store.parked import Parked, ParkedItem, next_pause_ms
from shared.store.registry import create_token, revoke_token
from shared.store.replies import ClockRefusal
from shared.store.runtime import Runtime
from tests.settlement.host import DONE, PEER, TENANT, Host, contract
from tests.settlement.scripted import ScriptedHandler
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy


def contents(raw: Any) -> dict[bytes, object]:
    """Everything of the tenant but when it last committed."""
    return {key: raw.dump(key) for key in sorted(raw.keys("lg:{*"))}


@pytest.mark.case(48)
async def test_a_thousand_passes_over_healthy_work_write_nothing(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract(timeout_ms=600_000)) as host:
        await host.open()
        operation = await host.submit("c1")
        await host.submit("c2")
        await host.grant(operation)
        await host.settler.settle(operation)
        before = contents(raw)
        for _ in range(500):
            assert await host.settler.settle(operation) is Verdict.NOTHING
            await host.settler.sweep()
        assert contents(raw) == before


async def test_an_idle_tenant_costs_less_than_a_command_a_second(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract()) as host:
        await host.settler.sweep()
        before = raw.info("commandstats")
        assert await host.settler.sweep() == IDLE_S
        after = raw.info("commandstats")
        calls = {
            name: stat["calls"] - before.get(name, {"calls": 0})["calls"]
            for name, stat in after.items()
            if name not in ("cmdstat_info", "cmdstat_config|get", "cmdstat_time")
        }
        assert sum(calls.values()) <= IDLE_S, {name: count for name, count in calls.items() if count}


@pytest.mark.requirement("RT-DUR-07", "RT-DUR-09")
async def test_an_answer_stays_until_the_decision_that_used_it(redis_url: str, raw: Any) -> None:
    """Storing an answer settles nothing; its bytes go in the same step as the decision, whoever dies in
    between.
    """
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        operation = await host.submit("c1")
        await host.store_answer(await host.grant(operation))
        op = await host.operation("c1")
        assert (op.phase, op.decision) == ("admitted", None)
        assert op.answers[0].body == encode(DONE)
        assert await host.outcomes("c1") == []
    async with Runtime(redis_url) as restarted:
        await restarted.refresh()
        settler = Settler(restarted, await restarted.tenant(TENANT))
        assert await settler.settle(operation) is Verdict.SETTLED
    key = host.handle.keys.op(operation)
    assert raw.hget(key, "r:0") is None
    assert raw.hget(key, "phase") == b"settled"


@pytest.mark.requirement("RT-DUR-08", "DASP-CORE-006b", "RT-STORE-16")
async def test_a_lost_reply_of_the_decision_is_resolved_by_reading_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Host.create(redis_url, contract()) as host, FaultProxy(redis_url) as proxy:
        await host.open()
        for command in ("c0", "c1"):
            operation = await host.submit(command)
            await host.store_answer(await host.grant(operation), Answer(result=msgspec.Raw(b'{"ok":true}')))
            if command == "c0":
                await host.settler.settle(operation)
        async with Runtime(proxy.url) as far:
            await far.refresh()
            handle = await far.tenant(TENANT)
            replace = handle.store.replace
            codes: list[str] = []

            async def cut_off(*args: object) -> object:
                if not codes:
                    proxy.cut_after(0)
                try:
                    reply = await replace(*args)  # type: ignore[arg-type]
                except ReplyLost:
                    codes.append("lost")
                    raise
                codes.append(reply.code)
                return reply

            monkeypatch.setattr(handle.store, "replace", cut_off)
            assert await Settler(far, handle).settle(operation, "s1") is Verdict.NOTHING
            assert codes == ["lost"]
        assert len(await host.outcomes("c1")) == 1


@pytest.mark.case(27, 31)
@pytest.mark.requirement("RT-OWN-03", "DASP-CORE-006b", "RT-OWN-08")
async def test_a_recoverer_that_slept_between_reading_and_writing_is_refused(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two recoverers read the same lost lease; what the slower one decided from it no longer holds."""
    async with Host.create(redis_url, contract(retry={"backoffMs": 1})) as host:
        await host.open()
        operation = await host.submit("c1")
        await host.grant(operation, lease_ms=20)
        read, write = asyncio.Event(), asyncio.Event()

        async with Runtime(redis_url) as other:
            await other.refresh()
            handle = await other.tenant(TENANT)
            slow = Settler(other, handle)
            replace = handle.store.replace

            async def sleepy(*args: object) -> object:
                if not write.is_set():
                    read.set()
                    await write.wait()
                reply = await replace(*args)  # type: ignore[arg-type]
                codes.append(reply.code)
                return reply

            codes: list[Code] = []
            monkeypatch.setattr(handle.store, "replace", sleepy)
            await wait_until(lambda: host.lost(operation))
            sleeping = asyncio.create_task(slow.settle(operation))
            await read.wait()

            # Meanwhile the other one reclaims, a worker takes it over and finishes.
            await host.settler.settle(operation)
            await wait_until(lambda: offered(host, operation))
            await host.store_answer(await host.grant(operation, attempt=2, holder="h2"))
            await host.settler.settle(operation)
            settled = await host.operation("c1")

            write.set()
            assert await sleeping is Verdict.NOTHING
            assert codes == [Code.TERMINAL]
        assert await host.operation("c1") == settled
        assert [o["status"] for o in await host.outcomes("c1")] == ["completed"]


async def offered(host: Host, operation: str) -> bool:
    await host.settler.settle(operation)
    op = await host.handle.reads.operation(operation)
    assert op is not None
    return op.branches[0].attempt == 2 and op.branches[0].outbox is not None


@pytest.mark.requirement("RT-OUT-02", "RT-SEL-04", "RT-OWN-08")
async def test_a_retry_is_persisted_before_it_is_offered_and_offered_once(redis_url: str, raw: Any) -> None:
    """Whoever persisted the next attempt may die before it is offered: any other loop offers it, once."""
    async with Host.create(redis_url, contract(retry={"backoffMs": 50})) as host:
        await host.open()
        operation = await host.submit("c1")
        await host.grant(operation, lease_ms=20)
        await wait_until(lambda: host.lost(operation))
        assert await host.settler.settle(operation) is Verdict.ADVANCED
        branch = (await host.operation("c1")).branches[0]
        assert (branch.attempt, branch.fence, branch.holder, branch.outbox) == (2, 2, None, None)
        stream = host.handle.keys.outbox(PEER)
        assert raw.xlen(stream) == 0

        async with Runtime(redis_url) as other:
            await other.refresh()
            heirs = [Settler(other, await other.tenant(TENANT)) for _ in range(4)]

            async def all_look() -> bool:
                await asyncio.gather(*(heir.settle(operation) for heir in heirs))
                return (await host.operation("c1")).branches[0].outbox is not None

            await wait_until(all_look)
        entries = raw.xrange(stream)
        assert [entry[1][b"a"] for entry in entries] == [b"2"]


@pytest.mark.requirement("RT-OUT-05", "RT-ATT-03")
async def test_an_offer_nobody_took_is_sent_again_under_the_same_identity(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract(lease={"claimTimeoutMs": 20})) as host:
        await host.open()
        operation = await host.submit("c1")
        stream = host.handle.keys.outbox(PEER)
        first = raw.xrange(stream)
        async with host.settling():
            await wait_until(lambda: raw.xrange(stream)[:1] not in ([], first))
        (entry,) = raw.xrange(stream)
        assert entry[0] != first[0][0]
        assert entry[1] == first[0][1]
        branch = (await host.operation("c1")).branches[0]
        assert (branch.attempt, branch.claims) == (1, 0)
        assert branch.fence > 1
        await host.grant(operation)


@pytest.mark.case(49)
@pytest.mark.parametrize(("effects", "status"), [("none", "failed"), ("unsafe", "uncertain")])
async def test_orphans_of_long_ago_are_settled_and_not_dispatched(
    redis_url: str, effects: str, status: str
) -> None:
    terms = contract(effects=effects, execution="concurrent", timeout_ms=80)
    async with Host.create(redis_url, terms) as host, ScriptedHandler() as handler:
        await host.open()
        orphan = await host.submit("c1")
        await host.submit("c2")
        await host.grant(orphan)
        deadline = (await host.operation("c2")).deadline_ms
        await wait_until(lambda: host.runtime.clock.lower_ms() > deadline)
        async with host.sidecar(handler.url):
            assert (await host.outcome("c1"))["status"] == status
            outcome = await host.outcome("c2")
        assert (outcome["status"], outcome["error"]["code"]) == ("failed", "timeout")
        assert handler.calls == []


@pytest.mark.requirement("DASP-CORE-006a", "DASP-CORE-006b", "RT-DUR-08")
async def test_many_loops_side_by_side_settle_each_operation_once(redis_url: str) -> None:
    terms = contract(execution="concurrent", effects="idempotent", lease={"leaseMs": 60, "renewMs": 50})
    async with Host.create(redis_url, terms) as host, Runtime(redis_url) as other:
        await other.refresh()
        await host.open()
        operations = [await host.submit(f"c{number}") for number in range(20)]
        for operation in operations[::2]:
            await host.store_answer(await host.grant(operation), Answer(result=msgspec.Raw(b'{"ok":true}')))
        settlers = [Settler(other, await other.tenant(TENANT)) for _ in range(3)]
        loops = [asyncio.create_task(settler.run()) for settler in (host.settler, *settlers)]
        try:
            for number in range(0, 20, 2):
                assert (await host.outcome(f"c{number}"))["status"] == "completed"
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
        facts = await host.facts()
        assert sorted(f.command_id for f in facts if f.kind == "outcome") == sorted(
            f"c{n}" for n in range(0, 20, 2)
        )
        assert [fact.sequence for fact in facts] == list(range(1, len(facts) + 1))


async def test_one_poisonous_record_is_parked_and_stops_nobody(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract(execution="concurrent")) as host:
        await host.open()
        bad = await host.submit("bad")
        good = await host.submit("good")
        await host.store_answer(await host.grant(good), Answer(result=msgspec.Raw(b'{"ok":true}')))
        raw.hset(host.handle.keys.op(bad), "b:0", "no branch at all")
        raw.zadd(host.handle.keys.due, {bad: 1, "op" + "f" * 64: 1, "turn:nobody": 1})
        async with host.settling():
            assert (await host.outcome("good"))["status"] == "completed"
            parked = Parked(host.admin, TENANT)
            items = await wait_until(lambda: _all_parked(parked, {bad, "op" + "f" * 64, "turn:nobody"}))
        assert "no branch" not in items[bad].reason
        assert items[bad].tries == 1
        # Parked is not forgotten: it is due again, later.
        assert raw.zscore(host.handle.keys.due, bad) == items[bad].next_ms
        assert items[bad].next_ms - items[bad].since_ms == next_pause_ms(1)


async def _all_parked(parked: Parked, members: set[str]) -> dict[str, ParkedItem]:
    items = await parked.items()
    return items if items.keys() >= members else {}


async def test_what_was_parked_goes_on_once_it_can_be_decided(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract(execution="concurrent")) as host:
        await host.open()
        operation = await host.submit("c1")
        await host.store_answer(await host.grant(operation), Answer(result=msgspec.Raw(b'{"ok":true}')))
        key = host.handle.keys.op(operation)
        words = raw.hget(key, "b:0")
        raw.hset(key, "b:0", "broken")
        await host.settler.sweep()
        parked = Parked(host.admin, TENANT)
        assert set(await parked.items()) == {operation}
        raw.hset(key, "b:0", words)
        async with host.settling():
            assert (await host.outcome("c1"))["status"] == "completed"
            await wait_until(lambda: _none_parked(parked))


async def _none_parked(parked: Parked) -> bool:
    return not await parked.items()


@pytest.mark.requirement("RT-AUTH-05")
async def test_work_that_nobody_knows_may_go_on_waits_and_is_not_parked(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract(execution="concurrent")) as host:
        await host.open()
        operation = await host.submit("c1")
        await host.store_answer(await host.grant(operation), Answer(result=msgspec.Raw(b'{"ok":true}')))
        raw.hset(host.handle.keys.policy, "document", "what is this")
        raw.hincrby(host.handle.keys.meta, "policy_rev", 1)
        host.handle.snapshots.forget()
        before = raw.zscore(host.handle.keys.due, operation)
        await host.settler.sweep()
        assert not await Parked(host.admin, TENANT).items()
        assert raw.zscore(host.handle.keys.due, operation) == before
        raw.hdel(host.handle.keys.policy, "document")
        raw.hincrby(host.handle.keys.meta, "policy_rev", 1)
        host.handle.snapshots.forget()
        async with host.settling():
            assert (await host.outcome("c1"))["status"] == "completed"


async def test_the_list_of_parked_items_forgets_what_another_process_settled(redis_url: str) -> None:
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        operation = await host.submit("c1")
        parked = Parked(host.admin, TENANT)
        assert await parked.park("op" + "e" * 64, "not due", 1) is None
        assert await parked.park(operation, "for some reason", 1_000) is not None
        again = await parked.park(operation, "for another", 2_000)
        assert again is not None
        assert (again.tries, again.since_ms, again.next_ms) == (2, 1_000, 2_000 + next_pause_ms(2))
        assert await parked.tidy()
        assert set(await parked.items()) == {operation}
        await host.admin.call("ZREM", host.handle.keys.due, operation)
        assert await parked.tidy()
        assert await parked.items() == {}


async def test_pauses_of_parked_items_grow_to_a_limit() -> None:
    pauses = [next_pause_ms(tries) for tries in (1, 2, 3, 9, 10, 1_000_000)]
    assert pauses == [1_000, 2_000, 4_000, 256_000, 300_000, 300_000]


@pytest.mark.requirement("RT-GUARD-17")
async def test_nothing_is_decided_while_the_store_clock_is_suspect(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract(lease={"claimTimeoutMs": 20})) as host:
        await host.open()
        operation = await host.submit("c1")
        clock = host.runtime.clock
        far = clock.lower_ms() + 3_600_000
        await wait_until(lambda: host.lost(operation))
        before = contents(raw)
        clock.observe(far, clock.monotonic_ms(), clock.monotonic_ms())
        with pytest.raises(ClockRefusal):
            await host.settler.settle(operation)
        assert await host.settler.sweep() == 1.0
        assert contents(raw) == before


@pytest.mark.requirement("RT-ADM-38")
async def test_a_moved_policy_is_read_again_and_the_decision_made_under_it(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        operation = await host.submit("c1")
        await host.store_answer(await host.grant(operation))
        token = await create_token(host.admin, TENANT, "alice", ("caller",))
        seen = await host.handle.snapshots.get()
        await revoke_token(host.admin, TENANT, token.token_id)
        assert await host.settler.settle(operation) is Verdict.SETTLED
        assert (await host.handle.snapshots.get()).revisions.policy != seen.revisions.policy


async def test_an_operation_of_an_unregistered_contract_is_left_to_a_person(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        operation = await host.submit("c1")
        raw.delete(host.handle.keys.contracts)
        async with Runtime(redis_url) as other:
            await other.refresh()
            settler = Settler(other, await other.tenant(TENANT))
            with pytest.raises(Undecidable, match="not registered"):
                await settler.settle(operation)


@pytest.mark.requirement("DASP-CORE-007c", "DASP-CORE-006a")
@pytest.mark.case(62)
async def test_uncertain_is_terminal_and_says_so_to_every_retry_policy(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract(effects="unsafe")) as host:
        await host.open()
        operation = await host.submit("c1")
        granted = await host.grant(operation, lease_ms=20)
        await wait_until(lambda: host.lost(operation))
        assert await host.settler.settle(operation) is Verdict.SETTLED
        outcome = await host.outcome("c1")
        assert outcome["status"] == "uncertain"
        assert outcome["error"]["retryable"] is False
        assert "fail" not in json.dumps(outcome)
        before = raw.dump(host.handle.keys.op(operation)), raw.dump(host.handle.keys.updates("s1"))
        body = encode(DONE)
        revisions = (await host.handle.snapshots.get()).revisions
        late = await host.handle.store.answer(granted.lease, answer_digest(body), body, revisions)
        assert late.code is Code.TERMINAL
        assert await host.settler.settle(operation) is Verdict.NOTHING
        assert (raw.dump(host.handle.keys.op(operation)), raw.dump(host.handle.keys.updates("s1"))) == before
