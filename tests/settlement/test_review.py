"""A changed policy is looked for in everything open, also in what nobody touches; nothing closed moves."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from settlement_svc import review as reviews
from settlement_svc.contention import Verdict
from settlement_svc.review import Review
from settlement_svc.settle import Settler
from shared.store.connection import StoreUnavailable
from shared.store.open_work import START, OpenWork
from shared.store.registry import create_token, revoke_token
from tests.settlement.host import TENANT, Host, contract
from tests.settlement.policies import apply, denied, ending, learn, settled
from tests.support.polling import wait_until

LONG = {"leaseMs": 600_000, "renewMs": 200_000, "claimTimeoutMs": 600_000}


def history(raw: Any, host: Host, *operations: str) -> dict[bytes, object]:
    """Every byte of these operations, and every fact of their session."""
    found: dict[bytes, object] = {}
    for operation in operations:
        found[operation.encode()] = raw.dump(host.handle.keys.op(operation))
    for number, entry in enumerate(raw.xrange(host.handle.keys.updates("s1"))):
        found[b"fact %d" % number] = entry
    return found


@pytest.mark.requirement("RT-ADM-35", "RT-AUTH-08", "RT-DEC-15")
@pytest.mark.parametrize("effects", ["none", "idempotent", "fenced", "unsafe"])
async def test_open_work_that_nobody_touches_ends_and_closed_work_stays(
    redis_url: str, raw: Any, effects: str
) -> None:
    """A lease of ten minutes, commands queued behind it, and an offer that nobody claims; and what ended."""
    terms = contract(effects=effects, lease=LONG, timeout_ms=600_000)
    async with Host.create(redis_url, terms) as host:
        await host.open()
        await host.open("s2")
        async with host.settling():
            closed = await host.submit("c0")
            await host.store_answer(await host.grant(closed))
            assert (await host.outcome("c0"))["status"] == "completed"
            leased = await host.submit("c1")
            await host.grant(leased, lease_ms=600_000)
            queued = [await host.submit(f"c{number}") for number in (2, 3)]
            spared = await host.submit("d1", session_id="s2")
            before = history(raw, host, closed)
            words = raw.hgetall(host.handle.keys.op(spared))
            await apply(host, denied(sessions=["s1"]))
            uncertain = ("revoked", "uncertain", "revoked")
            failed = ("revoked", "failed", "revoked")
            assert await ending(host, leased) == (failed if effects == "none" else uncertain)
            for operation in queued:
                assert await ending(host, operation) == failed
            # The first document of all spares what it allows, and every later one is looked for as well.
            assert raw.hgetall(host.handle.keys.op(spared)) == words
            await apply(host, denied())
            assert await ending(host, spared) == failed
        after = history(raw, host, closed)
        assert {key: after[key] for key in before} == before
        ended = history(raw, host, closed, leased, *queued, spared)
        await apply(host)
        assert not await more_pages(host.settler)
        assert history(raw, host, closed, leased, *queued, spared) == ended


async def more_pages(settler: Settler) -> bool:
    """Whether there was more than one page to look at; looks at all of them."""
    found = False
    while await settler.review.page():
        found = True
    return found


@pytest.mark.requirement("RT-ADM-35")
async def test_a_process_that_was_not_there_looks_when_it_starts(redis_url: str) -> None:
    """The document was changed while nobody settled: whoever comes next looks once."""
    async with Host.create(redis_url, contract(lease=LONG, timeout_ms=600_000)) as host:
        await host.open()
        operation = await host.submit("c1")
        await apply(host, denied())
        async with host.join(redis_url) as restarted, restarted.settling():
            assert await ending(host, operation) == ("revoked", "failed", "revoked")


@pytest.mark.requirement("RT-ADM-35")
async def test_everything_is_met_in_pages_whatever_moves_meanwhile(redis_url: str, raw: Any) -> None:
    """Wake-ups move between the pages, some work ends; what was open all the time was looked at."""
    terms = contract(execution="concurrent", lease=LONG, timeout_ms=600_000)
    async with Host.create(redis_url, terms) as host:
        await host.open()
        operations = [await host.submit(f"c{number}") for number in range(600)]
        walk, cursor, met, pages = OpenWork(host.runtime.connection, TENANT), START, set[str](), 0
        while True:
            cursor, members = await walk.page(cursor, 50)
            met.update(members)
            pages += 1
            for number, operation in enumerate(operations):
                if number % 3 == 0:
                    raw.zadd(host.handle.keys.due, {operation: 10**13 + (number * 7919 + pages) % 1000})
            raw.zrem(host.handle.keys.due, operations[1 + 3 * pages])
            if cursor == START:
                break
        assert pages > 5
        open_all_along = {op for op in operations if raw.zscore(host.handle.keys.due, op) is not None}
        assert open_all_along <= met


class Looked:
    """Counts what a review looks at."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch, page: int = 128) -> None:
        monkeypatch.setattr(reviews, "_PAGE", page)
        self.members: list[str] = []
        self.failing = False
        self.review = Review(host.runtime, host.handle, self._look)

    async def _look(self, member: str) -> None:
        if self.failing:
            raise StoreUnavailable("away")
        self.members.append(member)

    async def whole(self) -> int:
        """Pages until there are no more."""
        pages = 1
        while await self.review.page():
            pages += 1
        return pages


@pytest.mark.requirement("RT-ADM-35")
async def test_one_look_for_every_document_and_none_for_anything_else(
    redis_url: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = contract(execution="concurrent", lease=LONG, timeout_ms=600_000)
    async with Host.create(redis_url, terms) as host:
        await host.open()
        operations = sorted([await host.submit(f"c{number}") for number in range(300)])
        looked = Looked(host, monkeypatch, 20)
        async with looked.review:
            assert (await looked.whole(), looked.members) == (1, [])
            await apply(host)
            pages = []

            async def found() -> bool:
                pages.append(await looked.whole())
                return sorted(set(looked.members)) == operations

            await wait_until(found)
            assert max(pages) > 5
            assert len(looked.members) < 2 * len(operations), "once"
            looked.members.clear()
            # A token that is taken back moves the revision, not the document.
            token = await create_token(host.admin, TENANT, "alice", ("caller",))
            await revoke_token(host.admin, TENANT, token.token_id)
            await learn(host)
            before = raw.info("commandstats")["cmdstat_zscan"]["calls"]
            assert (await looked.whole(), looked.members) == (1, [])
            assert raw.info("commandstats")["cmdstat_zscan"]["calls"] == before
            # A document that changes in the middle begins anew.
            await apply(host, denied(sessions=["s9"]))
            await wait_until(looked.review.page)
            await apply(host, denied(sessions=["s8"]))
            looked.members.clear()
            await learn(host)
            await looked.whole()
            assert sorted(set(looked.members)) == operations


@pytest.mark.requirement("RT-ADM-35")
@pytest.mark.parametrize("hinted", [True, False])
async def test_a_change_is_heard_of_by_a_hint_and_without_one_found_out(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, hinted: bool
) -> None:
    """Entered and never asking, or not entered and always asking."""
    monkeypatch.setattr(reviews, "CHECK_S", 1e9 if hinted else 0.0)
    async with Host.create(redis_url, contract(lease=LONG)) as host, contextlib.AsyncExitStack() as stack:
        await host.open()
        operation = await host.submit("c1")
        looked = Looked(host, monkeypatch)
        if hinted:
            await stack.enter_async_context(looked.review)
            await wait_until(lambda: host.runtime.wake.subscribed(TENANT))
        assert await looked.whole() == 1
        await apply(host)

        async def found() -> bool:
            await looked.whole()
            return looked.members == [operation]

        await wait_until(found)


@pytest.mark.requirement("RT-ADM-35")
async def test_a_page_that_the_store_interrupted_is_looked_at_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Host.create(redis_url, contract(lease=LONG)) as host:
        await host.open()
        operation = await host.submit("c1")
        looked = Looked(host, monkeypatch)
        await apply(host)
        await learn(host)
        looked.failing = True
        with pytest.raises(StoreUnavailable):
            await looked.review.page()
        looked.failing = False
        assert (await looked.whole(), looked.members) == (1, [operation])
        # The settler's own look: what concerns the whole store is no verdict on one operation.
        settle = host.settler.settle

        async def away(*_: object, **__: object) -> Verdict:
            raise StoreUnavailable("away")

        await apply(host, denied())
        await learn(host)
        monkeypatch.setattr(host.settler, "settle", away)
        with pytest.raises(StoreUnavailable):
            await host.settler.review.page()
        monkeypatch.setattr(host.settler, "settle", settle)
        await host.settler.review.page()
        assert await settled(host, operation)


async def test_a_look_that_costs_nothing(redis_url: str, raw: Any) -> None:
    """Nothing changed: no command of the store but a check of the revision now and then."""
    async with Host.create(redis_url, contract()) as host:
        await host.settler.review.page()
        before = raw.info("stats")["total_commands_processed"]
        for _ in range(100):
            await host.settler.review.page()
        # The count of the first look at the statistics itself.
        assert raw.info("stats")["total_commands_processed"] - before == 1


@pytest.mark.requirement("RT-ADM-35")
async def test_what_cannot_be_judged_hides_nothing(redis_url: str, raw: Any) -> None:
    """Of two open commands one's record is damaged: the other ends, and the damaged one waits until it is
    due.
    """
    terms = contract(execution="concurrent", lease=LONG, timeout_ms=600_000)
    async with Host.create(redis_url, terms) as host:
        await host.open()
        poison, good = await host.submit("c1"), await host.submit("c2")
        raw.hset(host.handle.keys.op(poison), "b:0", "gibberish")
        async with host.settling():
            await apply(host, denied())
            assert await ending(host, good) == ("revoked", "failed", "revoked")
        assert raw.zscore(host.handle.keys.due, poison) is not None


@pytest.mark.requirement("RT-ADM-35", "RT-AUTH-08")
async def test_loops_side_by_side_settle_each_once(redis_url: str) -> None:
    terms = contract(execution="concurrent", effects="unsafe", lease=LONG, timeout_ms=600_000)
    async with Host.create(redis_url, terms) as host, host.join(redis_url) as second:
        await host.open()
        operations = [await host.submit(f"c{number}") for number in range(60)]
        for operation in operations[:40]:
            await host.grant(operation, lease_ms=600_000)
        async with host.settling(), second.settling():
            await apply(host, denied())

            async def all_settled() -> bool:
                return all([await settled(host, operation) for operation in operations])

            await wait_until(all_settled)
        await learn(host)
        outcomes = [fact.command_id for fact in await host.facts() if fact.kind == "outcome"]
        assert sorted(outcomes) == sorted(f"c{number}" for number in range(60))
        for number, operation in enumerate(operations):
            expected = ("revoked", "uncertain" if number < 40 else "failed", "revoked")
            assert await ending(host, operation) == expected
