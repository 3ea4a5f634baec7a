"""Policies that change under many leases and under many hands: nothing is lost, nothing is done twice or
without permission.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from settlement_svc.contention import Undecidable
from settlement_svc.leases import HeldLease, Leases
from settlement_svc.rights import question
from shared.domain.decide import Change
from shared.domain.errors import Unavailable
from shared.domain.records import Answer, answer_digest, encode
from shared.store.codes import Code
from shared.store.replies import Claim, Grant
from shared.store.snapshot import SnapshotSource
from tests.settlement.host import PEER, Host, contract
from tests.settlement.policies import apply, denied, settled, stored
from tests.support.polling import wait_until

LEASES = 10_000
PROCESSES = 4
LEASE_MS, RENEW_MS = 300_000, 2_000
LONG = {"leaseMs": LEASE_MS, "renewMs": RENEW_MS, "claimTimeoutMs": 600_000}
OK = Answer(result=msgspec.Raw(b'{"ok":true}'))


async def claimed(host: Host, worker: Host, operation: str) -> HeldLease:
    """A lease of the store, as a carrier holds it."""
    claim = Claim(operation, 0, PEER, 1, f"h{id(worker):x}", LEASE_MS, 3, True, "s1")
    snapshot = await worker.handle.snapshots.get()
    sent_at = worker.runtime.clock.monotonic_ms()
    grant = await worker.handle.store.claim(claim, snapshot.revisions)
    assert isinstance(grant, Grant), grant
    op = await stored(worker, operation)
    asks = question(op.admission, host.contract, "claim", 0, PEER, 1)
    return HeldLease(grant, LEASE_MS, RENEW_MS, sent_at, asks)


async def many(count: int, make: Any) -> list[Any]:
    """``make`` for each number, in crowds that a store connection takes well."""
    made: list[Any] = []
    for start in range(0, count, 250):
        made += await asyncio.gather(*(make(n) for n in range(start, min(count, start + 250))))
    return made


@contextlib.asynccontextmanager
async def renewing(worker: Host, held: list[HeldLease]) -> AsyncIterator[None]:
    """One process that renews what it holds."""
    leases = Leases(worker.runtime, worker.handle)
    with contextlib.ExitStack() as stack:
        for lease in held:
            stack.enter_context(leases.holding(lease))
        keeping = asyncio.create_task(leases.keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


@pytest.mark.requirement("RT-AUTH-08", "RT-OWN-04", "RT-ADM-35")
@pytest.mark.timeout(400)
async def test_a_policy_change_under_ten_thousand_leases_loses_none(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes hold them, another one looks through everything open; each reads the policy once."""
    loads: Counter[SnapshotSource] = Counter()
    load = SnapshotSource._load

    async def counted(source: SnapshotSource) -> Any:
        loads[source] += 1
        await asyncio.sleep(random.uniform(0.0, 0.05))
        return await load(source)

    terms = contract(execution="concurrent", effects="unsafe", lease=LONG, timeout_ms=3_600_000)
    async with contextlib.AsyncExitStack() as stack:
        host = await stack.enter_async_context(Host.create(redis_url, terms))
        workers = [await stack.enter_async_context(host.join(redis_url)) for _ in range(PROCESSES)]
        await host.open()
        operations = await many(LEASES, lambda n: host.submit(f"c{n}"))
        held = await many(LEASES, lambda n: claimed(host, workers[n % PROCESSES], operations[n]))
        for number, worker in enumerate(workers):
            await stack.enter_async_context(renewing(worker, held[number::PROCESSES]))
        monkeypatch.setattr(SnapshotSource, "_load", counted)
        await stack.enter_async_context(host.settling())
        ends = [lease.ends_at for lease in held]
        revision = await apply(host, denied(principals=["bob"]), denied(sessions=["s2"]))

        async def known_to_all() -> bool:
            known = [(await worker.handle.snapshots.get()).revisions.policy for worker in (host, *workers)]
            return set(known) == {revision}

        def renewed_since() -> bool:
            return all(lease.ends_at > end or lease.over for lease, end in zip(held, ends, strict=True))

        await wait_until(known_to_all, 60.0)
        ends = [lease.ends_at for lease in held]
        await wait_until(renewed_since, 120.0, 0.1)
        await wait_until(lambda: host.settler.review._cursor is None, 120.0, 0.1)

        assert [lease for lease in held if lease.over] == []
        assert [loads[worker.handle.snapshots] for worker in workers] == [1] * PROCESSES
        assert loads[host.handle.snapshots] == 1
        branches = [op.branches[0] for op in await many(LEASES, lambda n: stored(host, operations[n]))]
        assert {(b.status, b.fence, b.attempt, b.gate) for b in branches} == {("pending", 1, 1, "open")}
        # The store says of each that it is held still.
        for number, worker in enumerate(workers):
            mine = [lease.lease for lease in held[number::PROCESSES]]
            revisions = (await worker.handle.snapshots.get()).revisions
            for start in range(0, len(mine), 256):
                answers = await worker.handle.store.renew(mine[start : start + 256], LEASE_MS, revisions)
                assert {code for code, _ in answers} == {Code.RENEWED}


class Witness:
    """Puts jitter between what was decided and what is committed, and keeps what was committed under which
    policy.
    """

    def __init__(self, host: Host, allowed: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
        self.committed: Counter[tuple[str, bool]] = Counter()
        self.stale = 0
        self._allowed = allowed
        store = host.handle.store
        claim, renew, replace = store.claim, store.renew, store.replace

        async def late_claim(wish: Claim, revisions: Any, *more: Any) -> Any:
            await self._jitter()
            reply = await claim(wish, revisions, *more)
            self._note("claim", Code.OK if isinstance(reply, Grant) else reply.code, revisions.policy)
            return reply

        async def late_renew(leases: Any, lease_ms: int, revisions: Any, *more: Any) -> Any:
            await self._jitter()
            answers = await renew(leases, lease_ms, revisions, *more)
            for code, _ in answers:
                self._note("renew", code, revisions.policy)
            return answers

        async def late_replace(op: Any, change: Change, revisions: Any, *more: Any) -> Any:
            await self._jitter()
            reply = await replace(op, change, revisions, *more)
            reason = change.decision.reason if change.decision is not None else "goes on"
            if not change.only_wakes:
                self._note(reason, reply.code, revisions.policy)
            return reply

        monkeypatch.setattr(store, "claim", late_claim)
        monkeypatch.setattr(store, "renew", late_renew)
        monkeypatch.setattr(store, "replace", late_replace)

    async def _jitter(self) -> None:
        await asyncio.sleep(random.choice([0.0, 0.0, 0.001, 0.005, 0.02]))

    def _note(self, what: str, code: Code, revision: str) -> None:
        self.stale += code is Code.STALE_SNAPSHOT
        if code in (Code.OK, Code.RENEWED):
            self.committed[what, self._allowed[revision]] += 1


async def worked(worker: Host, leases: Leases, operation: str) -> None:
    """What a carrier does for one operation, as often as its policy lets it: claim, work a while, answer."""
    while not await settled(worker, operation):
        op = await stored(worker, operation)
        branch = op.branches[0]
        asks = question(op.admission, worker.contract, "claim", 0, PEER, branch.attempt)
        snapshot = await worker.handle.snapshots.get()
        right = snapshot.policy.decide(asks, worker.runtime.clock.lower_ms())
        if right.allowed and branch.holder is None and branch.outbox is not None:
            claim = Claim(operation, 0, PEER, branch.attempt, f"h{id(worker):x}", 2_000, 9, True, "s1")
            sent_at = worker.runtime.clock.monotonic_ms()
            reply = await worker.handle.store.claim(claim, snapshot.revisions, right.expires_ms)
            if isinstance(reply, Grant):
                held = HeldLease(reply, 2_000, 20, sent_at, asks)
                await answered(worker, leases, held)
            elif reply.code is Code.STALE_SNAPSHOT:
                await worker.handle.snapshots.reload(snapshot)
        with contextlib.suppress(Unavailable, Undecidable):
            await worker.settler.settle(operation, "s1")
        await asyncio.sleep(0.001)


async def answered(worker: Host, leases: Leases, held: HeldLease) -> None:
    with leases.holding(held), contextlib.suppress(TimeoutError):
        async with asyncio.timeout(random.uniform(0.0, 0.1)):
            await leases.wait_over(held)
    revisions = (await worker.handle.snapshots.get()).revisions
    if held.revoked:
        await worker.handle.store.release(held.lease, revisions)
        return
    body = encode(OK)
    await worker.handle.store.answer(held.lease, answer_digest(body), body, revisions)


@pytest.mark.requirement("RT-AUTH-08", "RT-ADM-35", "RT-OWN-04", "RT-OWN-07", "RT-RES-10", "DASP-CORE-006b")
@pytest.mark.timeout(180)
async def test_policies_that_race_with_claims_renewals_and_folds(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permission comes and goes. What is committed was permitted by the very policy
    it was committed under; every command ends once, and honestly.
    """
    terms = contract(execution="concurrent", effects="unsafe", timeout_ms=600_000)
    async with contextlib.AsyncExitStack() as stack:
        host = await stack.enter_async_context(Host.create(redis_url, terms))
        workers = [await stack.enter_async_context(host.join(redis_url)) for _ in range(3)]
        await host.open()
        first = (await host.handle.snapshots.get()).revisions.policy
        allowed: dict[str, bool] = {first: True}
        operations = [await host.submit(f"c{number}") for number in range(240)]
        witnesses = [Witness(worker, allowed, monkeypatch) for worker in workers]
        over, room = asyncio.Event(), asyncio.Semaphore(30)

        def ended_under(permit: bool) -> int:
            reason = "accepted" if permit else "revoked"
            return sum(witness.committed[reason, permit] for witness in witnesses)

        async def operator() -> None:
            permit = True
            while not over.is_set():
                permit = not permit
                expected = str(int(max(allowed, key=int)) + 1)
                allowed[expected] = permit
                assert await apply(host, *([] if permit else [denied()])) == expected
                # Some policies pass at once, under others some work ends.
                goal = ended_under(permit) + random.choice([0, 0, 8])
                while ended_under(permit) < goal and not over.is_set():
                    await asyncio.sleep(0.002)

        async def one(number: int, operation: str) -> None:
            async with room:
                await worked(workers[number % 3], keepers[number % 3], operation)

        changing = asyncio.create_task(operator())
        keepers = [Leases(worker.runtime, worker.handle) for worker in workers]
        keeping = [asyncio.create_task(leases.keep()) for leases in keepers]
        try:
            await asyncio.gather(*(one(number, operation) for number, operation in enumerate(operations)))
        finally:
            over.set()
            await changing
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

        committed = sum((witness.committed for witness in witnesses), Counter[tuple[str, bool]]())
        assert committed["accepted", True] > 0
        assert committed["revoked", False] > 0
        for (what, permitted), count in committed.items():
            assert (what == "revoked") != permitted, (what, permitted, count)
        assert sum(witness.stale for witness in witnesses) > 0
        assert committed["accepted", True] + committed["revoked", False] <= len(operations)
        await host.handle.snapshots.reload(await host.handle.snapshots.get())
        ended = Counter(fact.command_id for fact in await host.facts() if fact.kind == "outcome")
        assert ended == {f"c{number}": 1 for number in range(240)}
        for operation in operations:
            op = await stored(host, operation)
            assert op.decision is not None
            reasons = {"success": ["accepted"], "failed": ["revoked"]}
            uncertain = ["revoked", "worker-lost"]
            assert op.decision.reason in reasons.get(op.decision.outcome, uncertain)
            assert (op.branches[0].gate == "closed") == (op.decision.outcome == "failed")
