"""A client's copy takes the next update that fits in every respect, and no other."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from settlement_svc.examples.demo.promises import Broken
from settlement_svc.examples.demo.replica import Replica

SOURCE = "urn:lockgate:dev:0123"


def update(sequence: int, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": f"s1/{sequence}",
        "source": SOURCE,
        "type": "dasp.v1.update",
        "datacontenttype": "application/json",
        "data": {
            "session_id": "s1",
            "sequence": sequence,
            "kind": kind,
            "command_id": "c1",
            "payload": payload,
        },
    }


HISTORY = [
    update(1, "command.accepted", {"name": "counter.add"}),
    update(2, "application", {"name": "counter.changed", "data": {"value": 3}}),
    update(3, "command.outcome", {"status": "completed", "output": {"value": 3}, "error": None}),
]

WRONG: list[tuple[int, tuple[str, ...], Any]] = [
    (0, ("specversion",), "1.0.2"),
    (0, ("type",), "dasp.update.v1"),
    (0, ("datacontenttype",), "text/plain"),
    (0, ("source",), "urn:lockgate:dev:9999"),
    (0, ("id",), ""),
    (0, ("data", "session_id"), "s2"),
    (0, ("data", "sequence"), 2),
    (0, ("data", "sequence"), 0),
    (0, ("data", "kind"), "command.started"),
    (0, ("data", "payload"), {"name": "counter.reset"}),
    (0, ("data", "extra"), 1),
    (1, ("data", "payload", "name"), "counter.exploded"),
    (1, ("data", "payload", "data", "value"), 2**53),
    (1, ("data", "payload", "data", "value"), True),
    (1, ("data", "payload", "data", "unit"), "cm"),
    (1, ("data", "payload", "more"), 1),
    (1, ("data", "sequence"), 3),
    (2, ("data", "payload", "output"), {"value": 4}),
    (2, ("data", "payload", "error"), {"code": "x"}),
    (2, ("data", "payload", "status"), "running"),
    (2, ("data", "payload", "status"), "uncertain"),
    (2, ("data", "payload", "note"), "n"),
]


def at(applied: int) -> Replica:
    replica = Replica("s1", SOURCE)
    for event in HISTORY[:applied]:
        replica.apply(event)
    return replica


@pytest.mark.requirement("DASP-CORE-011d")
@pytest.mark.parametrize(("applied", "place", "value"), WRONG, ids=[".".join(w[1]) for w in WRONG])
def test_what_does_not_fit_is_not_applied(applied: int, place: tuple[str, ...], value: Any) -> None:
    replica = at(applied)
    before = (replica.cursor, replica.value)
    event: dict[str, Any] = copy.deepcopy(HISTORY[applied])
    inner = event
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(Broken):
        replica.apply(event)
    assert (replica.cursor, replica.value) == before
    replica.apply(HISTORY[applied])
    assert replica.cursor == applied + 1


@pytest.mark.requirement("DASP-CORE-012h")
def test_copies_from_two_cursors_end_alike_and_hold_their_own_place() -> None:
    whole, later = at(3), Replica("s1", SOURCE, cursor=1, value=0)
    assert (later.cursor, whole.cursor) == (1, 3)
    for event in HISTORY[1:]:
        later.apply(event)
    assert (later.cursor, later.state) == (whole.cursor, whole.state) == (3, {"value": 3})
