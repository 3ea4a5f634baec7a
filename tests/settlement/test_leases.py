"""Leases between sidecars, the store and whatever lies between them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from settlement_svc.carrier import Carrier
from settlement_svc.handler import Endpoint, Handler
from settlement_svc.leases import HeldLease, Leases
from shared.domain.policy import AuthorizationInput
from shared.domain.records import Answer, answer_digest, encode
from shared.store.codes import Code
from shared.store.outbox import Outbox
from shared.store.registry import create_token, revoke_token
from shared.store.replies import Claim, Grant, Lease
from tests.settlement.host import PEER, TENANT, Host, contract
from tests.settlement.scripted import Document, ScriptedHandler, answer, done
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy

OTHER = Answer(result=msgspec.Raw(b'{"ok":true,"late":1}'), state=msgspec.Raw(b'{"n":7}'), state_revision="0")


async def told(host: Host, verb: str, lease: Lease) -> Code:
    """What the store says to a holder that presents ``lease``."""
    revisions = (await host.handle.snapshots.get()).revisions
    if verb == "renew":
        ((code, _),) = await host.handle.store.renew([lease], 60_000, revisions)
        return code
    if verb == "release":
        return (await host.handle.store.release(lease, revisions)).code
    body = encode(OTHER)
    return (await host.handle.store.answer(lease, answer_digest(body), body, revisions)).code


async def taken_over(host: Host, operation: str, attempt: int) -> bool:
    await host.settler.settle(operation)
    op = await host.handle.reads.operation(operation)
    assert op is not None
    return op.branches[0].attempt == attempt and op.branches[0].outbox is not None


@pytest.mark.requirement("RT-OWN-01")
async def test_a_grant_names_peer_attempt_fence_and_end_and_can_be_renewed_and_given_back(
    redis_url: str,
) -> None:
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        operation = await host.submit("c1")
        granted = await host.grant(operation, lease_ms=1_000)
        branch = (await host.operation("c1")).branches[0]
        assert (branch.peer, branch.attempt, branch.fence) == (
            PEER,
            granted.attempt,
            int(granted.lease.fence),
        )
        assert granted.until_ms == granted.granted_ms + 1_000 == branch.until_ms
        assert await told(host, "renew", granted.lease) is Code.RENEWED
        assert (await host.operation("c1")).branches[0].until_ms > granted.until_ms
        assert await told(host, "release", granted.lease) is Code.OK
        assert await told(host, "renew", granted.lease) is Code.LEASE_EXPIRED


@pytest.mark.case(32, 34, 35)
@pytest.mark.requirement("RT-OWN-02", "RT-OWN-05", "RT-OWN-06", "RT-OWN-08", "RT-OWN-11")
async def test_former_holders_can_do_nothing_to_the_present_one(redis_url: str) -> None:
    """claim(f1), expired; claim(f2), given back; claim(f3) runs: f1 and f2 renew, free and finish nothing."""
    async with Host.create(redis_url, contract(timeout_ms=60_000)) as host:
        await host.open()
        operation = await host.submit("c1")
        first = await host.grant(operation, lease_ms=20, holder="h1")
        await wait_until(lambda: host.lost(operation))
        assert [await told(host, verb, first.lease) for verb in ("renew", "answer")] == [
            Code.LEASE_EXPIRED
        ] * 2
        await wait_until(lambda: taken_over(host, operation, 2))
        second = await host.grant(operation, attempt=2, holder="h2")
        assert await told(host, "release", second.lease) is Code.OK
        await wait_until(lambda: taken_over(host, operation, 3))
        third = await host.grant(operation, attempt=3, holder="h3")

        fences = [int(granted.lease.fence) for granted in (first, second, third)]
        assert fences == sorted(set(fences))
        running = (await host.operation("c1")).words
        for former in (first, second):
            for verb in ("renew", "release", "answer"):
                assert await told(host, verb, former.lease) is Code.STALE_FENCE
        forged = msgspec.structs.replace(third.lease, holder="h1")
        unknown = msgspec.structs.replace(third.lease, operation_id="op" + "0" * 64)
        for verb in ("renew", "release", "answer"):
            assert await told(host, verb, forged) is Code.NOT_OWNER
            assert await told(host, verb, unknown) is Code.ABSENT
        op = await host.operation("c1")
        assert op.words == running
        # Nothing of all that was a vote.
        assert (op.phase, op.answers, op.decision) == ("active", {}, None)
        await host.store_answer(third)
        await host.settler.settle(operation)
        assert (await host.outcome("c1"))["status"] == "completed"


@pytest.mark.case(45)
@pytest.mark.requirement("RT-OWN-10")
async def test_twenty_claimers_in_a_loop_get_each_lease_once(redis_url: str) -> None:
    terms = contract(execution="concurrent", timeout_ms=60_000)
    async with Host.create(redis_url, terms) as host, host.join(redis_url) as beside:
        await host.open()
        operations = [await host.submit(f"c{number}") for number in range(50)]
        grants: list[tuple[str, str]] = []

        async def claimer(number: int) -> None:
            view = (host, beside)[number % 2]
            revisions = (await view.handle.snapshots.get()).revisions
            for operation in operations[number:] + operations[:number]:
                claim = Claim(operation, 0, PEER, 1, f"h{number}", 60_000, 3, True, "s1")
                reply = await view.handle.store.claim(claim, revisions)
                if isinstance(reply, Grant):
                    grants.append((operation, reply.lease.fence))
                else:
                    assert reply.code is Code.HELD

        await asyncio.gather(*(claimer(number) for number in range(20)))
        assert sorted(grants) == sorted((operation, "1") for operation in operations)


@pytest.mark.requirement("RT-OWN-10", "RT-OWN-03")
async def test_racing_sidecars_share_the_work_and_repeat_none_of_it(redis_url: str) -> None:
    async def script(_: Document) -> bytes:
        return answer(result={"ok": True})

    terms = contract(execution="concurrent", effects="unsafe", timeout_ms=60_000)
    async with Host.create(redis_url, terms) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url), host.sidecar(handler.url), host.sidecar(handler.url):
            for number in range(30):
                await host.submit(f"c{number}")
            for number in range(30):
                assert (await host.outcome(f"c{number}"))["status"] == "completed"
        called = [call["operationId"] for call in handler.calls]
        assert sorted(called) == sorted(host.operation_id(f"c{number}") for number in range(30))


@pytest.mark.requirement("RT-DUR-10", "RT-DUR-08")
async def test_a_lost_acknowledgement_of_an_answer_repeats_the_answer_and_not_the_work(
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        Host.create(redis_url, contract(effects="unsafe")) as host,
        FaultProxy(redis_url) as proxy,
        ScriptedHandler() as handler,
        host.join(proxy.url) as far,
    ):
        await host.open()
        await warm(host)
        store_answer = far.handle.store.answer
        codes: list[str] = []

        async def cut_off(*args: Any) -> Any:
            if not codes:
                proxy.cut_after(0)
            codes.append("lost")
            reply = await store_answer(*args)
            codes[-1] = reply.code
            return reply

        async def nothing() -> float:
            return 60.0

        monkeypatch.setattr(far.handle.store, "answer", cut_off)
        # The reply that is cut has to be the answer's, not one to a look at what is due.
        monkeypatch.setattr(far.settler, "_look", nothing)
        async with far.sidecar(handler.url):
            await host.submit("c1")
            assert (await host.outcome("c1"))["status"] == "completed"
        assert codes == ["lost", Code.DUPLICATE]
        assert len(handler.calls) == 1


async def warm(host: Host) -> None:
    """Have the store know every script, so that a cut reply is that of the script and not of its loading."""
    operation = await host.submit("c0")
    await host.store_answer(await host.grant(operation))
    await host.settler.settle(operation)


@pytest.mark.parametrize(
    ("effects", "calls", "status"), [("none", 1, "completed"), ("unsafe", 0, "uncertain")]
)
async def test_a_grant_whose_reply_was_lost_sends_nothing(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, effects: str, calls: int, status: str
) -> None:
    """The gate may stand open in the store: that grant is given back unused, and its gate decides what
    follows.
    """
    # Too long to be waited for: it is given back, it does not run out.
    terms = contract(effects=effects, lease={"leaseMs": 60_000, "renewMs": 10_000}, timeout_ms=60_000)
    async with (
        Host.create(redis_url, terms) as host,
        FaultProxy(redis_url) as proxy,
        ScriptedHandler() as handler,
        host.join(proxy.url) as far,
    ):
        await host.open()
        await warm(host)
        claim, asked = far.handle.store.claim, 0

        async def cut_off(*args: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked == 1:
                proxy.cut_after(0)
            return await claim(*args)

        monkeypatch.setattr(far.handle.store, "claim", cut_off)
        async with far.sidecar(handler.url):
            await host.submit("c1")
            assert (await host.outcome("c1"))["status"] == status
        assert [call["attempt"] for call in handler.calls] == [2] * calls


@pytest.mark.requirement("RT-OWN-03")
async def test_a_claim_that_did_not_reach_the_store_is_simply_made_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Host.create(redis_url, contract(effects="unsafe")) as host,
        FaultProxy(redis_url) as proxy,
        ScriptedHandler() as handler,
        host.join(proxy.url) as far,
    ):
        await host.open()
        claim, asked = far.handle.store.claim, 0

        async def unreachable_once(*args: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked == 1:
                proxy.refuse()
                asyncio.get_running_loop().call_later(0.05, proxy.pass_on)
            return await claim(*args)

        monkeypatch.setattr(far.handle.store, "claim", unreachable_once)
        async with far.sidecar(handler.url):
            await host.submit("c1")
            assert (await host.outcome("c1"))["status"] == "completed"
        assert [call["attempt"] for call in handler.calls] == [1]


@pytest.mark.case(52)
@pytest.mark.requirement("RT-OWN-06", "DASP-CORE-006b")
async def test_a_finish_that_was_held_up_lands_in_no_later_attempt(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, attempts = asyncio.Event(), asyncio.Event()

    async def slow(document: Document) -> bytes:
        await gate.wait()
        return done(document, by="first")

    async def second(document: Document) -> bytes:
        attempts.set()
        await finish.wait()
        return done(document, by="second")

    finish = asyncio.Event()
    # What the one that is cut off is handed meanwhile is soon offered to the other.
    lease = {"leaseMs": 1_000, "renewMs": 100, "claimTimeoutMs": 300}
    async with (
        Host.create(redis_url, contract(lease=lease)) as host,
        FaultProxy(redis_url) as proxy,
        ScriptedHandler(slow) as slow_handler,
        ScriptedHandler(second) as handler,
        host.join(proxy.url) as far,
    ):
        await host.open()
        refusals: list[Code] = []
        store_answer = far.handle.store.answer

        async def listening(*args: Any) -> Any:
            reply = await store_answer(*args)
            refusals.append(reply.code)
            return reply

        monkeypatch.setattr(far.handle.store, "answer", listening)
        async with far.sidecar(slow_handler.url):
            operation = await host.submit("c1")
            await wait_until(lambda: slow_handler.calls)
            proxy.hold()
            gate.set()
            async with host.sidecar(handler.url):
                await attempts.wait()
                running = (await host.operation("c1")).branches[0]
                proxy.pass_on()
                await wait_until(lambda: refusals)
                assert (await host.operation("c1")).branches[0].fence == running.fence
                finish.set()
                outcome = await host.outcome("c1")
        assert refusals == [Code.STALE_FENCE]
        assert outcome["output"]["by"] == "second"
        assert (await host.operation("c1")).id == operation


@pytest.mark.case(39)
async def test_a_late_reply_lengthens_no_lease(redis_url: str, raw: Any) -> None:
    """The holder's own end of a lease is counted from before it asked, whatever the network did to the
    reply.
    """
    async with (
        Host.create(redis_url, contract(lease={"leaseMs": 1_000, "renewMs": 300})) as host,
        FaultProxy(redis_url) as proxy,
        ScriptedHandler() as handler,
        host.join(proxy.url) as far,
    ):
        await host.open()
        await host.submit("c1")
        outbox = Outbox(far.runtime.connection, far.runtime.address, TENANT, PEER, "h1", 1_000)
        leases = Leases(far.runtime, far.handle)
        carrier = Carrier(
            far.runtime,
            far.handle,
            far.settler,
            outbox,
            Handler(Endpoint.parse(handler.url)),
            leases,
            PEER,
            "h1",
        )
        (request,) = await outbox.new(1)
        task = await carrier._task(request)
        assert task is not None
        proxy.delay(0.5)
        clock = far.runtime.clock
        held = await carrier._claim(task, clock.monotonic_ms() + 60_000)
        await outbox.stop()
        assert held is not None
        proxy.pass_on()

        # The store's clock against the local one, as a sample bounds it from below.
        seconds, micros = raw.time()
        store_ahead = seconds * 1000 + micros / 1000 - clock.monotonic_ms()
        # Wall clocks are slewed: they agree to far less than the delay that must not count.
        assert held.ends_at + store_ahead <= held.grant.until_ms + 100
        assert held.stops_at < held.ends_at
        assert clock.monotonic_ms() - held.ends_at + held.lease_ms >= 500


async def test_renewal_is_one_call_for_all_leases(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = asyncio.Event()

    async def script(_: Document) -> bytes:
        await finish.wait()
        return answer(result={"ok": True})

    lease = {"leaseMs": 1_500, "renewMs": 60}
    terms = contract(execution="concurrent", effects="unsafe", lease=lease)
    async with Host.create(redis_url, terms) as host, ScriptedHandler(script) as handler:
        await host.open()
        renew, sizes = host.handle.store.renew, list[int]()

        async def counted(leases: list[Lease], *args: Any) -> Any:
            sizes.append(len(leases))
            return await renew(leases, *args)

        monkeypatch.setattr(host.handle.store, "renew", counted)
        async with host.sidecar(handler.url, concurrency=8):
            for number in range(8):
                await host.submit(f"c{number}")
            await wait_until(lambda: len(handler.calls) == 8)
            at = len(sizes) + 1
            # Longer than any lease lasts: renewal alone keeps them.
            ends = host.runtime.clock.lower_ms() + lease["leaseMs"]
            await wait_until(lambda: host.runtime.clock.lower_ms() > ends and len(sizes) > at)
            assert set(sizes[at:]) == {8}
            finish.set()
            for number in range(8):
                assert (await host.outcome(f"c{number}"))["status"] == "completed"
        assert len(handler.calls) == 8


@pytest.mark.requirement("RT-AUTH-08")
async def test_grants_and_renewals_go_on_under_a_policy_that_moved(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stale snapshot: read again, decided again, repeated at once; no lease is lost by it."""
    finish = asyncio.Event()

    async def script(document: Document) -> bytes:
        await finish.wait()
        return done(document)

    async with (
        Host.create(redis_url, contract(effects="unsafe", lease={"renewMs": 100})) as host,
        ScriptedHandler(script) as handler,
    ):
        await host.open()
        codes: list[Code] = []
        renew = host.handle.store.renew

        async def listening(*args: Any) -> Any:
            answers = await renew(*args)
            codes.append(answers[0][0])
            return answers

        async def nothing() -> bool:
            return False

        monkeypatch.setattr(host.handle.store, "renew", listening)
        # The settling loop would hear of the change and read it before the renewal is told of it.
        monkeypatch.setattr(host.settler.review, "page", nothing)
        async with host.sidecar(handler.url), host.join(redis_url) as operator:
            await move_policy(operator)
            await operator.submit("c1")
            await wait_until(lambda: handler.calls)
            await move_policy(operator)
            await wait_until(lambda: Code.STALE_SNAPSHOT in codes)
            at = codes.index(Code.STALE_SNAPSHOT)
            await wait_until(lambda: len(codes) > at + 1)
            assert codes[at + 1] is Code.RENEWED
            finish.set()
            assert (await host.outcome("c1"))["status"] == "completed"


async def move_policy(operator: Host) -> None:
    token = await create_token(operator.admin, TENANT, "alice", ("caller",))
    await revoke_token(operator.admin, TENANT, token.token_id)
    operator.handle.snapshots.forget()
    operator.door.snapshots.forget()


async def test_work_stops_when_its_lease_went_to_somebody_else(redis_url: str, raw: Any) -> None:
    left = asyncio.Event()

    async def script(_: Document) -> bytes | None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return None

    terms = contract(lease={"leaseMs": 60_000, "renewMs": 50}, timeout_ms=60_000)
    async with Host.create(redis_url, terms) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url):
            operation = await host.submit("c1")
            await wait_until(lambda: handler.calls)
            # As if another process had taken it over: the fence rises under another holder.
            words = raw.hget(host.handle.keys.op(operation), "b:0").decode().split(" ")
            words[4], words[5] = "7", "somebody"
            raw.hset(host.handle.keys.op(operation), "b:0", " ".join(words))
            await wait_until(left.is_set)
            assert (await host.operation("c1")).branches[0].fence == 7


def held(lease_ms: int, deadline_in_ms: int) -> HeldLease:
    lease = Lease("op", 0, PEER, "1", "1", "h1")
    grant = Grant(lease, 1, 5_000 + lease_ms, 5_000, 5_000 + deadline_in_ms, b"", b"")
    asks = AuthorizationInput("alice", "claim", peer=PEER)
    return HeldLease(grant, lease_ms, lease_ms // 3, sent_at=100.0, asks=asks)


async def test_the_local_end_of_a_lease() -> None:
    lease = held(1_000, 60_000)
    assert (lease.ends_at, lease.stops_at) == (1_100.0, 1_000.0)
    assert held(60_000, 90_000).stops_at == 100.0 + 60_000 - 200
    assert held(1_000, 400).stops_at == 500.0
    lease.renewed(600.0)
    assert lease.ends_at == 1_600.0
    lease.renewed(300.0)
    assert lease.ends_at == 1_600.0
    assert not await lease.until_over(1_499.0)
    assert await lease.until_over(1_500.0)
    lease.refuse(Code.STALE_FENCE)
    assert await lease.until_over(0.0)
    given = held(1_000, 60_000)
    given.give_up()
    assert await given.until_over(0.0)
