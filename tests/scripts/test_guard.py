"""The time guard as a value: exactly two bounds, in order, within the safe integers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.domain.decide import Change
from shared.domain.errors import InvalidInput
from shared.domain.guard import MAX_SAFE_INTEGER, TimeGuard
from shared.store.codes import Code
from tests.scripts.scenes import RESULT, Ended, code_of, held, offered
from tests.support.world import World


@pytest.mark.requirement("RT-GUARD-01")
@pytest.mark.parametrize(
    "members",
    [
        {},
        {"notBeforeMs": 1},
        {"notAfterMs": 1},
        {"notBeforeMs": 1, "notAfterMs": 2, "notLongAfterMs": 3},
        {"notBeforeMs": 1, "notAfterMs": 2, "leaseMs": 3},
        {"not_before_ms": 1, "not_after_ms": 2},
        {"notBeforeMs": "1", "notAfterMs": 2},
        {"notBeforeMs": 1.5, "notAfterMs": 2},
        {"notBeforeMs": None, "notAfterMs": 2},
        [1, 2],
        None,
    ],
)
def test_a_guard_has_exactly_its_two_bounds(members: Any) -> None:
    with pytest.raises(InvalidInput):
        TimeGuard.parse(members)


@pytest.mark.requirement("RT-GUARD-01")
def test_a_guard_is_read_as_it_is() -> None:
    assert TimeGuard.parse({"notBeforeMs": 1, "notAfterMs": 2}) == TimeGuard(1, 2)


@pytest.mark.requirement("RT-GUARD-06", "RT-GUARD-07", "RT-GUARD-09")
@pytest.mark.parametrize(
    ("low", "high", "fine"),
    [
        (0, 1, True),
        (0, MAX_SAFE_INTEGER, True),
        (MAX_SAFE_INTEGER - 1, MAX_SAFE_INTEGER, True),
        (5, 5, False),
        (6, 5, False),
        (-1, 5, False),
        (0, MAX_SAFE_INTEGER + 1, False),
        (0, 2**63, False),
    ],
)
def test_the_interval_is_neither_empty_nor_reversed_nor_beyond(low: int, high: int, fine: bool) -> None:
    if fine:
        assert TimeGuard(low, high).not_after_ms == high
        return
    with pytest.raises(InvalidInput):
        TimeGuard(low, high)
    with pytest.raises(InvalidInput):
        TimeGuard.parse({"notBeforeMs": low, "notAfterMs": high})


@pytest.mark.requirement("RT-GUARD-01")
def test_every_replacement_carries_a_guard() -> None:
    """A change without bounds of its own is bounded by the store layer (tests of the clock)."""
    assert {"not_before_ms", "not_after_ms"} <= set(Change.__struct_fields__)
    with pytest.raises(TypeError):
        Change(not_long_after_ms=5)  # type: ignore[call-arg]


@pytest.mark.requirement("RT-GUARD-11", "RT-GUARD-18", "RT-STORE-11")
async def test_no_caller_supplies_the_instants_of_a_lease(world: World) -> None:
    """Neither its end nor a lease from outside: a claim has a duration and a holder's name, no more."""
    _, grant = await held(world)
    fields = set(grant.lease.__struct_fields__)
    assert fields == {"operation_id", "branch", "peer", "epoch", "fence", "holder"}
    made_up = msgspec.structs.replace(grant.lease, fence="2", holder="outsider")
    outcome: Ended = await world.answer(made_up, RESULT)
    assert code_of(outcome) is Code.STALE_FENCE


@pytest.mark.case(43)
@pytest.mark.requirement("DASP-CORE-004d")
async def test_admitting_again_while_the_work_runs_is_a_replay(world: World) -> None:
    """Case 43: at every step of the work, the same answer and no second request."""
    now = await world.start()
    new = await offered(world)

    async def replayed() -> None:
        again = await world.admit(new)
        assert (again.code, again.text(0).split(" ")[2]) == (Code.DUPLICATE, "1")
        assert await world.connection.call("XLEN", world.keys.updates("s1")) == facts

    facts = 1
    await replayed()
    grant = await world.granted(new, open_gate=False)
    await replayed()
    await world.store.open_gate(grant.lease, world.revisions)
    await replayed()
    await world.answer(grant.lease, RESULT)
    await replayed()
    await world.decide(new, now)
    facts = 2
    await replayed()
