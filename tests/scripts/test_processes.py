"""Several processes at one barrier: no memory in common, no connection in common, one store."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from shared.store.codes import Code
from tests.scripts.racer import CLAIMED, DISTINCT, EQUALS, OTHERS
from tests.scripts.scenes import outbox_ids, session_of
from tests.support.processes import Processes
from tests.support.world import World

PROCESSES = 4


def race(world: World, url: str, processes: Processes, part: str) -> Counter[str]:
    """Run the part in every process at once and add up what they were told."""
    started = [
        processes.python(
            "-m", "tests.scripts.racer", url, world.revisions.authority, str(n), str(PROCESSES), part
        )
        for n in range(PROCESSES)
    ]
    told: Counter[str] = Counter()
    for process in started:
        told.update(json.loads(process.wait_for(r"^told (.*)$", timeout=40)[1]))
        assert process.wait() == 0, process.output
    return told


@pytest.mark.requirement("RT-ADM-28", "DASP-CORE-003a", "RT-ADM-24")
@pytest.mark.case(7)
async def test_equal_intents_of_many_processes_create_one(
    world: World, redis_url: str, processes: Processes
) -> None:
    """Case 7: 200 equal admissions from four processes: one created, 199 replays, one outbox entry."""
    await world.open()
    told = race(world, redis_url, processes, "equals")
    assert told == {Code.OK: 1, Code.DUPLICATE: PROCESSES * EQUALS - 1}
    assert len(await outbox_ids(world)) == 1
    assert (await session_of(world)).head == 1


@pytest.mark.requirement("RT-ADM-29", "DASP-CORE-003c")
async def test_of_different_intents_of_many_processes_one_wins(
    world: World, redis_url: str, processes: Processes
) -> None:
    await world.open()
    told = race(world, redis_url, processes, "others")
    assert told == {Code.OK: 1, Code.CONFLICT: PROCESSES * OTHERS - 1}
    assert len(await outbox_ids(world)) == 1
    assert (await session_of(world)).commands == 1


@pytest.mark.requirement("DASP-CORE-009a", "RT-STORE-14")
async def test_sequences_are_contiguous_over_many_processes(
    world: World, redis_url: str, processes: Processes
) -> None:
    await world.open()
    told = race(world, redis_url, processes, "distinct")
    count = PROCESSES * DISTINCT
    assert told == {Code.OK: count}
    page = await world.reads.page("s1", 0, 2 * count, world.revisions)
    assert page is not None
    assert [fact.sequence for fact in page.facts] == list(range(1, count + 1))
    assert len({fact.command_id for fact in page.facts}) == count


@pytest.mark.requirement("RT-OWN-10", "RT-OWN-02")
@pytest.mark.case(45)
async def test_each_offer_is_granted_to_one_of_many_processes(
    world: World, redis_url: str, processes: Processes
) -> None:
    await world.open()
    for n in range(CLAIMED):
        await world.admit(world.command(f"offer-{n}", kind="concurrent"))
    told = race(world, redis_url, processes, "claims")
    assert len(told) == CLAIMED
    assert set(told.values()) == {1}
    assert {key.partition("/")[2] for key in told} == {"1"}
