"""A permission that was taken back stops at the next step, whichever that is, and nothing is done with it
after.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from settlement_svc.carrier import Carrier
from settlement_svc.contention import Verdict
from settlement_svc.handler import Endpoint, Handler
from settlement_svc.leases import Leases
from shared.domain.records import Answer, answer_digest, encode
from shared.store.codes import Code
from shared.store.outbox import Outbox, Request
from tests.settlement.host import DONE, PEER, TENANT, Host, contract
from tests.settlement.policies import apply, denied, ending, learn, settled, stored
from tests.settlement.scripted import Document, ScriptedHandler, done
from tests.support.polling import wait_until

EFFECTS = ("none", "idempotent", "fenced", "unsafe")
AGAIN = Answer(result=msgspec.Raw(b'{"again":true}'))
FAILED = ("revoked", "failed", "revoked")


def after_an_open_gate(effects: str) -> tuple[str, str, str]:
    """How work ends that may have begun."""
    return FAILED if effects == "none" else ("revoked", "uncertain", "revoked")


class Worker:
    """A sidecar's parts without its loops: nobody settles or renews but what a test asks for."""

    def __init__(self, host: Host, url: str) -> None:
        self.host = host
        self.leases = Leases(host.runtime, host.handle)
        self.outbox = Outbox(host.runtime.connection, host.runtime.address, TENANT, PEER, "h1", 1_000)
        handler = Handler(Endpoint.parse(url))
        self.carrier = Carrier(
            host.runtime, host.handle, host.settler, self.outbox, handler, self.leases, PEER, "h1"
        )

    async def next(self) -> Request:
        (request,) = await self.outbox.new(1)
        return request


@contextlib.asynccontextmanager
async def working(host: Host, url: str) -> AsyncIterator[Worker]:
    worker = Worker(host, url)
    renewing = asyncio.create_task(worker.leases.keep())
    try:
        yield worker
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        await worker.outbox.stop()


class Endless:
    """A handler that works for ever and notes when it is left."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def __call__(self, _: Document) -> bytes | None:
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        return None


# Before the work begins


@pytest.mark.requirement("RT-AUTH-08", "RT-AUTH-04", "RT-ADM-35", "RT-ADM-37")
@pytest.mark.parametrize("known", [True, False], ids=["known", "not yet known"])
async def test_what_was_offered_is_not_claimed(redis_url: str, raw: Any, known: bool) -> None:
    """Whether the worker's process has read the new policy already or learns of it by its claim."""
    async with (
        Host.create(redis_url, contract(effects="unsafe")) as host,
        ScriptedHandler() as handler,
        working(host, handler.url) as worker,
    ):
        await host.open()
        operation = await host.submit("c1")
        request = await worker.next()
        revision = await apply(host, denied())
        if known:
            await learn(host)
        await worker.carrier.carry(request)
        assert await settled(host, operation), "by the worker itself"
        assert await ending(host, operation) == FAILED
        assert (await host.handle.snapshots.get()).revisions.policy == revision
        assert handler.calls == []
        branch = (await stored(host, operation)).branches[0]
        assert (branch.holder, branch.gate) == (None, "closed")
        assert raw.xlen(host.handle.keys.outbox(PEER)) == 0


@pytest.mark.requirement("RT-AUTH-08", "RT-OWN-04")
async def test_a_refusal_that_is_no_longer_the_policy_stops_nothing(redis_url: str) -> None:
    """A process that knows an older policy, which refuses, finds the present one before it acts on that."""
    async with (
        Host.create(redis_url, contract(effects="unsafe", lease={"renewMs": 50})) as host,
        ScriptedHandler() as handler,
        working(host, handler.url) as worker,
    ):
        await host.open()
        operation = await host.submit("c1")
        request = await worker.next()
        await apply(host, denied())
        await learn(host)
        await apply(host)
        await worker.carrier.carry(request)
        assert await ending(host, operation) == ("success", "completed", "")
        assert len(handler.calls) == 1


@pytest.mark.requirement("RT-AUTH-08", "RT-ADM-35", "RT-ADM-37")
async def test_a_queued_command_is_not_dispatched_when_its_turn_comes(redis_url: str, raw: Any) -> None:
    """What runs may end as it would; what follows it may not begin."""
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        first = await host.submit("c1")
        others = [await host.submit(f"c{number}") for number in range(2, 40)]
        grant = await host.grant(first)
        await apply(host, denied("branch.assign"))
        await host.store_answer(grant)
        added = raw.xinfo_stream(host.handle.keys.outbox(PEER))["entries-added"]
        await host.settler.settle(first)
        assert await ending(host, first) == ("success", "completed", "")
        while not all([await settled(host, operation) for operation in others]):
            await host.settler.sessions.advance("s1")
        for operation in others:
            assert await ending(host, operation) == FAILED
        assert raw.xinfo_stream(host.handle.keys.outbox(PEER))["entries-added"] == added
        session = await host.session()
        assert (session.busy, session.pending) == ("", 0)


@pytest.mark.requirement("RT-AUTH-08", "RT-BR-05", "RT-ADM-35")
async def test_a_retry_is_not_offered(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract(effects="unsafe", retry={"backoffMs": 20})) as host:
        await host.open()
        operation = await host.submit("c1")
        await host.store_answer(await host.grant(operation), AGAIN)
        assert await host.settler.settle(operation) is Verdict.ADVANCED
        assert (await stored(host, operation)).branches[0].attempt == 2
        await apply(host, denied())
        offers = raw.xinfo_stream(host.handle.keys.outbox(PEER))["entries-added"]

        async def decided() -> bool:
            return await host.settler.settle(operation) is not Verdict.NOTHING

        # When its time has come it is decided to be offered, by a policy that has passed.
        await wait_until(decided)
        assert await ending(host, operation) == FAILED
        assert raw.xinfo_stream(host.handle.keys.outbox(PEER))["entries-added"] == offers


@pytest.mark.requirement("RT-ADM-35", "RT-AUTH-08", "RT-SEL-02")
async def test_a_revoked_peer_loses_its_work_and_gets_none(redis_url: str, raw: Any) -> None:
    """Of two eligible peers ``alfa`` is the first. Its branch ends though ``bravo`` could go on; while
    ``bravo`` is the one revoked, what ``alfa`` does not claim stays with it.
    """
    terms = contract(
        execution="concurrent", effects="idempotent", peers=("alfa", "bravo"), lease={"claimTimeoutMs": 50}
    )
    async with Host.create(redis_url, terms, ("alfa", "bravo")) as host:
        await host.open()
        operation = await host.submit("c1")
        grant = await host.grant(operation, peer="alfa")
        await apply(host, denied(peers=["bravo"]))
        await learn(host)
        unclaimed = await host.submit("c2")
        async with host.settling():

            async def offered_again() -> bool:
                branch = (await stored(host, unclaimed)).branches[0]
                return branch.fence > 3

            await wait_until(offered_again)
            branch = (await stored(host, unclaimed)).branches[0]
            assert (branch.status, branch.peer, branch.attempt) == ("pending", "alfa", 1)
            assert raw.xinfo_stream(host.handle.keys.outbox("bravo"))["entries-added"] == 0
            assert not await settled(host, operation)
            await apply(host, denied(peers=["alfa"]))
            assert await ending(host, unclaimed) == FAILED
            assert await ending(host, operation) == ("revoked", "uncertain", "revoked")
        revisions = (await host.handle.snapshots.get()).revisions
        ((code, _),) = await host.handle.store.renew([grant.lease], 60_000, revisions)
        assert code is Code.TERMINAL


# While it goes on


@pytest.mark.requirement("RT-AUTH-08", "RT-OWN-04", "RT-OWN-07", "RT-ADM-35", "RT-ATT-06")
@pytest.mark.parametrize("effects", EFFECTS)
async def test_a_renewal_ends_work_that_may_not_go_on(redis_url: str, effects: str) -> None:
    """The handler is left long before its lease would end; who waits for the seat has it at once."""
    endless = Endless()
    terms = contract(effects=effects, lease={"leaseMs": 60_000, "renewMs": 50})
    async with (
        Host.create(redis_url, terms) as host,
        ScriptedHandler(endless) as handler,
        working(host, handler.url) as worker,
    ):
        await host.open()
        operation = await host.submit("c1")
        carrying = asyncio.create_task(worker.carrier.carry(await worker.next()))
        await wait_until(lambda: handler.calls)
        await apply(host, denied(sessions=["s1"]))
        await wait_until(endless.left.is_set)
        await carrying
        assert await settled(host, operation), "by the worker itself"
        assert await ending(host, operation) == after_an_open_gate(effects)
        assert (await host.session()).busy == ""


@pytest.mark.requirement("RT-OWN-04", "RT-AUTH-08")
async def test_others_of_the_same_worker_are_renewed(redis_url: str) -> None:
    """Two of three sessions lose their permission; the third is renewed in the same call and finishes."""
    finish = asyncio.Event()

    async def script(document: Document) -> bytes:
        await finish.wait()
        return done(document)

    terms = contract(effects="unsafe", lease={"leaseMs": 60_000, "renewMs": 50})
    async with (
        Host.create(redis_url, terms) as host,
        ScriptedHandler(script) as handler,
        working(host, handler.url) as worker,
    ):
        operations, carrying = [], []
        for number in range(3):
            await host.open(f"s{number}")
            operations.append(await host.submit(f"c{number}", session_id=f"s{number}"))
            carrying.append(asyncio.create_task(worker.carrier.carry(await worker.next())))
        await wait_until(lambda: len(handler.calls) == 3)
        until = (await stored(host, operations[2])).branches[0].until_ms
        await apply(host, denied(sessions=["s0", "s1"]))
        for operation in operations[:2]:
            assert await ending(host, operation) == ("revoked", "uncertain", "revoked")

        async def renewed() -> bool:
            return (await stored(host, operations[2])).branches[0].until_ms > until

        await wait_until(renewed)
        finish.set()
        await asyncio.gather(*carrying)
        assert await ending(host, operations[2]) == ("success", "completed", "")


@pytest.mark.requirement("RT-OWN-04", "RT-OWN-07", "RT-AUTH-05")
async def test_a_lease_is_not_renewed_while_nobody_knows_whether_it_may_be(redis_url: str, raw: Any) -> None:
    """The stored policy cannot be read: no renewal is sent, and what was held runs out."""
    endless = Endless()
    terms = contract(effects="none", lease={"leaseMs": 700, "renewMs": 50})
    async with (
        Host.create(redis_url, terms) as host,
        ScriptedHandler(endless) as handler,
        working(host, handler.url) as worker,
    ):
        await host.open()
        operation = await host.submit("c1")
        carrying = asyncio.create_task(worker.carrier.carry(await worker.next()))
        await wait_until(lambda: handler.calls)
        raw.hset(host.handle.keys.policy, "document", "what is this")
        raw.hincrby(host.handle.keys.meta, "policy_rev", 1)
        await wait_until(endless.left.is_set)
        await carrying
        branch = (await stored(host, operation)).branches[0]
        assert (branch.status, branch.attempt, branch.gate) == ("pending", 1, "open")


# When it is over


@pytest.mark.requirement("RT-AUTH-08", "RT-RES-10", "RT-OWN-07", "RT-ADM-35")
@pytest.mark.parametrize("known", [True, False], ids=["known", "not yet known"])
@pytest.mark.parametrize("effects", EFFECTS)
async def test_an_answer_is_kept_as_evidence_and_judged_by_the_fold(
    redis_url: str, effects: str, known: bool
) -> None:
    """It is stored whatever the policy says, its request is done with; no vote, no update, no state."""
    async with Host.create(redis_url, contract(effects=effects)) as host:
        await host.open()
        operation = await host.submit("c1")
        grant = await host.grant(operation)
        await apply(host, denied())
        if known:
            await learn(host)
        await host.store_answer(grant)
        op = await stored(host, operation)
        assert (op.phase, op.branches[0].status, op.branches[0].gate) == ("admitted", "pending", "answered")
        assert op.answers[0].body == encode(DONE)
        assert await host.settler.settle(operation) is Verdict.SETTLED
        assert await ending(host, operation) == after_an_open_gate(effects)
        assert [fact.kind for fact in await host.facts()] == ["accepted", "outcome"]
        assert (await host.session()).state_revision == "0"
        # Told again, it is the same answer, and what was decided stays.
        revisions = (await host.handle.snapshots.get()).revisions
        reply = await host.handle.store.answer(
            grant.lease, answer_digest(encode(DONE)), encode(DONE), revisions
        )
        assert reply.code is Code.DUPLICATE
        assert b"revoked" in reply.values[0]


@pytest.mark.requirement("RT-AUTH-06", "RT-AUTH-09")
async def test_a_permission_that_ran_out_before_the_commit_is_asked_for_again(
    redis_url: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim, renewal and fold sleep past the end of what they were permitted: refused, then asked anew."""
    async with (
        Host.create(redis_url, contract(effects="unsafe", lease={"renewMs": 50})) as host,
        ScriptedHandler() as handler,
        working(host, handler.url) as worker,
    ):
        await host.open()
        operation = await host.submit("c1")
        request = await worker.next()
        await apply(host, {**denied(), "effect": "allow", "ttlMs": 100})
        await learn(host)
        codes: dict[str, list[Code]] = {}

        async def past(bound: int) -> None:
            async def over() -> bool:
                seconds, micros = await host.admin.call("TIME")
                return int(seconds) * 1000 + int(micros) // 1000 >= bound

            await wait_until(over)

        run = host.handle.store.run

        async def late(name: str, keys: Any, args: Any, *more: Any) -> Any:
            verb = args[0] if name == "lease" else name
            if verb in ("claim", "replace") and verb not in codes:
                codes[verb] = []
                await past(args[3] if verb == "claim" else args[4])
            reply = await run(name, keys, args, *more)
            codes.setdefault(verb, []).append(reply.code)
            return reply

        monkeypatch.setattr(host.handle.store, "run", late)
        await worker.carrier.carry(request)
        assert await ending(host, operation) == ("success", "completed", "")
        for verb in ("claim", "replace"):
            assert codes[verb][0] is Code.OUTSIDE_WINDOW
            assert codes[verb][-1] is Code.OK
