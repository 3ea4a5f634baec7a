"""Turns: in rotation among tenants, never lost, given away in the middle of long work."""

from __future__ import annotations

import asyncio

import pytest

from settlement_svc.contention import Resting
from settlement_svc.turns import Turns

pytestmark = pytest.mark.unrestricted("nothing here speaks to the store")


class Worker:
    """Does items of tenants that take as long as the test wants; ``done`` is their order."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.done: list[str] = []
        self.gate = asyncio.Event()

    async def item(self, tenant: str) -> None:
        async with self.turns.turn(tenant):
            await self.gate.wait()
            self.done.append(tenant)

    def start(self, tenants: str) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.item(tenant)) for tenant in tenants]


async def settle_down() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def free(turns: Turns) -> int:
    """How many turns can be had at once."""
    had = 0

    async def hold() -> None:
        nonlocal had
        async with turns.turn("probe"):
            had += 1
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(hold()) for _ in range(100)]
    await settle_down()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return had


@pytest.mark.parametrize("backlog", [1, 100, 10_000])
async def test_a_backlog_of_any_size_is_one_turn_to_another_tenant(backlog: int) -> None:
    worker = Worker(Turns(2))
    tasks = worker.start("a" * (2 + backlog))
    await settle_down()
    tasks += worker.start("b")
    await settle_down()
    worker.gate.set()
    await asyncio.gather(*tasks)
    # Two turns of a were under way, and at most one more came before b's.
    assert worker.done.index("b") <= 2 + 1


async def test_tenants_wait_for_one_turn_of_each_other() -> None:
    worker = Worker(Turns(1))
    tasks = worker.start("x")
    await settle_down()
    tasks += worker.start("aaabbbccd")
    await settle_down()
    worker.gate.set()
    await asyncio.gather(*tasks)
    assert "".join(worker.done) == "xabcdabcab"


async def test_turns_that_are_no_longer_wanted_are_not_lost() -> None:
    turns = Turns(3)
    worker = Worker(turns)
    tasks = worker.start("aaaaaabbbbb")
    await settle_down()
    # Some that hold one, some that wait, and some in the moment in which they are given one.
    for task in (tasks[0], tasks[4], tasks[7]):
        task.cancel()
    worker.gate.set()
    await asyncio.sleep(0)
    for task in tasks[3:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await free(turns) == 3


async def test_long_work_lets_others_go_first_and_goes_on() -> None:
    turns = Turns(1)
    order: list[str] = []

    async def long_work() -> None:
        async with turns.turn("a"):
            for step in range(3):
                order.append(f"a{step}")
                await asyncio.sleep(0)
                await turns.give_way()

    async def short_work(tenant: str) -> None:
        async with turns.turn(tenant):
            order.append(tenant)

    await asyncio.gather(long_work(), short_work("b"), short_work("c"))
    assert order == ["a0", "b", "c", "a1", "a2"]
    assert await free(turns) == 1


async def test_work_that_is_ended_while_others_go_first_returns_nothing_it_has_not() -> None:
    turns = Turns(1)
    held = asyncio.Event()

    async def long_work() -> None:
        async with turns.turn("a"):
            await asyncio.sleep(0)
            await turns.give_way()

    async def other() -> None:
        async with turns.turn("b"):
            held.set()
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(long_work()), asyncio.create_task(other())]
    await held.wait()
    tasks[0].cancel()
    await settle_down()
    assert await free(turns) == 0
    tasks[1].cancel()
    await settle_down()
    assert await free(turns) == 1


async def test_giving_way_outside_of_a_turn_is_nothing() -> None:
    turns = Turns(1)
    await turns.give_way()
    assert await free(turns) == 1


def test_what_comes_to_nothing_again_and_again_rests_longer_up_to_a_limit() -> None:
    resting = Resting()
    now, rests = 1_000.0, []
    for _ in range(10):
        resting.rest("x", now)
        (until,) = resting.ends(now).values()
        rests.append(until - now)
        now = until
    assert all(0.05 <= rest <= 2.0 for rest in rests)
    assert rests[0] <= 0.1
    assert min(rests[-4:]) >= 1.0
    assert resting.ends(now) == {}
    resting.end("x")
    resting.rest("x", now)
    assert resting.ends(now)["x"] <= now + 0.1


def test_what_rested_long_ago_is_forgotten() -> None:
    resting = Resting()
    for number in range(1_000):
        resting.rest(f"x{number}", 0.0)
    assert len(resting.ends(0.0)) == 1_000
    assert resting.ends(10.0) == {}
    assert resting._rests == {}
