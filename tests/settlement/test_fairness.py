"""Tenants are settled in turn: what one has due, parked or stuck costs another at most one turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from settlement_svc.backlog import Backlog
from settlement_svc.contention import Verdict
from settlement_svc.settle import Settler
from settlement_svc.turns import SIDE_BY_SIDE, Turns
from shared.domain.records import Answer
from shared.store.parked import Parked
from shared.telemetry import metrics_page
from tests.settlement.host import Host, contract
from tests.settlement.policies import apply, denied
from tests.support.polling import wait_until

pytestmark = pytest.mark.unrestricted("a process of many tenants, which no user of one tenant runs")

LIGHT = "light"
PAGE = 4 * SIDE_BY_SIDE
SUCCESS = Answer(result=msgspec.Raw(b'{"ok":true}'))


class WatchedTurns(Turns):
    """Writes down who asks for a turn and who is given one, in the moment in which it is given."""

    def __init__(self, side_by_side: int) -> None:
        super().__init__(side_by_side)
        self.log: list[tuple[str, str]] = []

    async def _take(self, tenant: str) -> None:
        self.log.append(("asks", tenant))
        if self._free:
            self.log.append(("given", tenant))
        await super()._take(tenant)

    def _give(self) -> None:
        before = {tenant: len(places) for tenant, places in self._waiting.items()}
        super()._give()
        for tenant, places in before.items():
            if len(self._waiting.get(tenant, ())) < places:
                self.log.append(("given", tenant))

    def between(self, light: str, heavy: str) -> list[int]:
        """For each turn of ``light``, how many ``heavy`` was given since it was asked for."""
        counts, since = [], 0
        for event, tenant in self.log:
            if (event, tenant) == ("asks", light):
                since = 0
            elif (event, tenant) == ("given", light):
                counts.append(since)
            elif (event, tenant) == ("given", heavy):
                since += 1
        return counts

    def given(self, tenant: str) -> int:
        return self.log.count(("given", tenant))


@pytest.fixture
async def heavy(redis_url: str) -> AsyncIterator[Host]:
    """The tenant with a backlog."""
    async with Host.create(redis_url, contract(execution="concurrent", timeout_ms=600_000)) as host:
        await host.open()
        yield host


@pytest.fixture
async def light(heavy: Host) -> Host:
    """Another tenant, served by the same process."""
    host = await Host.furnish(heavy.url, heavy.runtime, LIGHT, contract(execution="concurrent"))
    await host.open()
    return host


async def overdue(host: Host, count: int, **more: Any) -> None:
    """Admit commands nobody works on and wait until all of them have to be settled."""
    for start in range(0, count, 50):
        names = [f"c{number}" for number in range(start, min(start + 50, count))]
        await asyncio.gather(*(host.submit(name, timeout_ms=50, **more) for name in names))
    await wait_until(lambda: _all_due(host, count))


async def _all_due(host: Host, count: int) -> bool:
    return await host.handle.reads.count_due(host.runtime.clock.lower_ms() - 50) >= count


async def answered(host: Host, command: str) -> str:
    operation = await host.submit(command)
    await host.store_answer(await host.grant(operation), SUCCESS)
    return operation


@contextmanager
def sharing(turns: Turns, *hosts: Host) -> Iterator[None]:
    """Let hosts be settled as tenants of one process."""
    for host in hosts:
        host.settler = Settler(host.runtime, host.handle, turns)
    yield


async def test_a_backlog_of_one_tenant_is_at_most_one_turn_to_another(heavy: Host, light: Host) -> None:
    turns = WatchedTurns(4)
    await overdue(heavy, 400)
    with sharing(turns, heavy, light):
        async with heavy.settling():
            await wait_until(lambda: turns.given(heavy.handle.tenant) > 4)
            for number in range(5):
                await answered(light, f"c{number}")
                await light.settler.sweep()
                assert [o["status"] for o in await light.outcomes(f"c{number}")] == ["completed"]
            assert turns.given(heavy.handle.tenant) < 400, "the backlog was over too early to prove anything"
            counts = turns.between(LIGHT, heavy.handle.tenant)
            assert len(counts) >= 5
            assert max(counts) <= 1, counts
            await wait_until(lambda: nothing_due(heavy))
    assert turns.given(heavy.handle.tenant) >= 400


async def nothing_due(host: Host) -> bool:
    return await host.handle.reads.next_due_ms() is None


async def test_looking_through_everything_open_is_done_in_turns(heavy: Host, light: Host) -> None:
    """A changed policy has all open work of a tenant looked at: to another that is at most one turn too."""
    turns = WatchedTurns(4)
    await asyncio.gather(*(heavy.submit(f"c{number}") for number in range(300)))
    with sharing(turns, heavy, light):
        async with heavy.settling():
            await apply(heavy, denied())
            await wait_until(lambda: turns.given(heavy.handle.tenant) > 4)
            for number in range(3):
                await answered(light, f"c{number}")
                await light.settler.sweep()
                assert [o["status"] for o in await light.outcomes(f"c{number}")] == ["completed"]
            assert turns.given(heavy.handle.tenant) < 300, "it was over too early to prove anything"
            assert max(turns.between(LIGHT, heavy.handle.tenant)) <= 1
            await wait_until(lambda: nothing_due(heavy))
    assert turns.given(heavy.handle.tenant) >= 300


async def test_one_tenant_looks_at_a_bounded_number_side_by_side_and_in_one_pass(heavy: Host) -> None:
    """What is due is read anew after every page: what was answered meanwhile is then in it."""
    await overdue(heavy, 3 * PAGE)
    under_way = most = 0
    look = heavy.settler.settle

    async def counted(member: str) -> Verdict:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await look(member)
        finally:
            under_way -= 1

    heavy.settler.settle = counted  # type: ignore[method-assign, assignment]
    assert await heavy.settler.sweep() == 0.0
    assert await heavy.handle.reads.count_due(heavy.runtime.clock.lower_ms()) == 2 * PAGE
    assert most == SIDE_BY_SIDE


async def test_a_closing_session_with_a_long_queue_lets_others_have_their_turn(redis_url: str) -> None:
    terms = contract(timeout_ms=600_000)
    async with Host.create(redis_url, terms) as heavy:
        await heavy.open()
        for number in range(150):
            await heavy.submit(f"c{number}")
        await heavy.close()
        light = await Host.furnish(redis_url, heavy.runtime, LIGHT, contract(execution="concurrent"))
        await light.open()
        await answered(light, "c1")
        turns = WatchedTurns(1)
        with sharing(turns, heavy, light):
            closing = asyncio.create_task(heavy.settler.sweep())
            await wait_until(lambda: turns.given(heavy.handle.tenant) == 1, every=0.001)
            await light.settler.sweep()
            assert (await light.outcomes("c1"))[0]["status"] == "completed"
            session = await heavy.session()
            assert session.phase == "closing"
            assert session.pending > 75, "the other tenant waited until the queue was through"
            assert not closing.done()
            await closing
            # Each time it let others go first it was given a turn anew.
            assert turns.given(heavy.handle.tenant) > 1
            async with heavy.settling():
                await wait_until(lambda: closed(heavy))


async def closed(host: Host) -> bool:
    return (await host.session()).phase == "closed"


async def test_a_long_purge_lets_others_have_their_turn(redis_url: str) -> None:
    async with Host.create(redis_url, contract(execution="concurrent")) as heavy:
        await heavy.open()
        await overdue(heavy, 300)
        while not await nothing_due(heavy):
            await heavy.settler.sweep()
        await heavy.close()
        light = await Host.furnish(redis_url, heavy.runtime, LIGHT, contract(execution="concurrent"))
        await light.open()
        await answered(light, "c1")
        turns = WatchedTurns(1)
        with sharing(turns, heavy, light):
            purging = asyncio.create_task(heavy.settler.sweep())
            await wait_until(lambda: turns.given(heavy.handle.tenant) == 1, every=0.001)
            await light.settler.sweep()
            assert (await light.outcomes("c1"))[0]["status"] == "completed"
            await purging
        assert turns.between(LIGHT, heavy.handle.tenant) == [0]
        assert turns.given(heavy.handle.tenant) == 2
        assert await closed(heavy)


async def test_what_rests_hides_nothing_that_comes_after_it(heavy: Host, raw: Any) -> None:
    """More members than a page holds come to nothing at every look and lie before the one that does not."""
    stuck = {f"op{number:064d}": 1 for number in range(2 * PAGE)}
    raw.zadd(heavy.handle.keys.due, stuck)
    await answered(heavy, "c1")
    looks: list[str] = []
    look = heavy.settler.settle

    async def stuck_or_not(member: str) -> Verdict:
        looks.append(member)
        return Verdict.CONTENDED if member in stuck else await look(member)

    heavy.settler.settle = stuck_or_not  # type: ignore[method-assign, assignment]
    for _ in range(3):
        await heavy.settler.sweep()
    assert (await heavy.outcomes("c1"))[0]["status"] == "completed"
    # Each was looked at, and none of them twice before it had rested.
    assert set(looks) >= stuck.keys()
    assert len(looks) < 2 * len(stuck)


async def test_a_tenant_full_of_stuck_and_poisonous_items_costs_another_nothing(
    heavy: Host, light: Host, raw: Any
) -> None:
    poison = {f"op{number:064x}": 1 for number in range(200)}
    raw.zadd(heavy.handle.keys.due, poison)
    turns = WatchedTurns(4)
    with sharing(turns, heavy, light):
        async with heavy.settling(), light.settling():
            await wait_until(lambda: turns.given(heavy.handle.tenant) > 4)
            for number in range(5):
                await answered(light, f"c{number}")
                assert (await light.outcome(f"c{number}"))["status"] == "completed"
            parked = Parked(heavy.runtime.connection, heavy.handle.tenant)
            items = await wait_until(lambda: _parked(parked, len(poison)))
        assert items.keys() == poison.keys()
    assert max(turns.between(LIGHT, heavy.handle.tenant)) <= 1


async def _parked(parked: Parked, count: int) -> dict[str, Any]:
    items = await parked.items()
    return dict(items) if len(items) == count else {}


async def test_a_long_list_of_parked_items_is_tidied_page_by_page(heavy: Host, raw: Any) -> None:
    parked = Parked(heavy.runtime.connection, heavy.handle.tenant)
    key = heavy.handle.keys.parked
    raw.hset(
        key,
        mapping={
            f"op{number:064x}": '{"reason":"","since_ms":1,"tries":1,"next_ms":1}' for number in range(2_000)
        },
    )
    pages = 1
    while not await parked.tidy():
        pages += 1
        assert raw.hlen(key) > 0
    assert pages > 3
    assert raw.hlen(key) == 0


async def test_how_much_is_due_and_how_late_it_is_shows_in_the_metrics(
    heavy: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    await overdue(heavy, PAGE + 20)
    await heavy.settler.sweep()
    page = metrics_page().decode()
    assert f"lockgate_due {PAGE + 20}.0" in page
    (late,) = (
        line.split()[1] for line in page.splitlines() if line.startswith("lockgate_due_oldest_seconds ")
    )
    assert float(late) >= 0.05
    while not await nothing_due(heavy):
        await heavy.settler.sweep()
    await heavy.settler.sweep()
    page = metrics_page().decode()
    assert "lockgate_due 0.0" in page
    assert "lockgate_due_oldest_seconds 0.0" in page


def test_the_backlog_of_a_process_is_the_sum_and_the_oldest_of_its_tenants() -> None:
    backlog = Backlog()
    assert (backlog.items(), backlog.oldest_s()) == (0, 0.0)
    backlog.saw("a", 3, 5_000)
    backlog.saw("b", 1_000, 100)
    assert backlog.items() == 1_003
    assert 5.0 <= backlog.oldest_s() < 60.0
    backlog.saw("a", 0, 0)
    assert backlog.items() == 1_000
    assert backlog.oldest_s() < 5.0
