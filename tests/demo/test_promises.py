"""Every check of the demonstration, shown the right evidence and wrong evidence of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from settlement_svc.examples.demo import promises
from settlement_svc.examples.demo.promises import Answer, Broken, Grip

OPENED = {"session_id": "s", "cursor": 0}
ACCEPTED = {"disposition": "accepted", "admission_sequence": 4, "error": None}
DUPLICATE = {"disposition": "duplicate", "admission_sequence": 4, "error": None}
CONFLICT = {
    "disposition": "rejected",
    "admission_sequence": None,
    "error": {"code": "conflict", "message": "m", "retryable": False},
}
DONE = {"state": "settled", "outcome": {"status": "completed", "output": {"value": 3}, "error": None}}
UNCERTAIN = {
    "state": "settled",
    "outcome": {"status": "uncertain", "output": None, "error": {"code": "lost"}},
}
OLD, NEW = Grip("a", 1, 1, 1), Grip("b", 1, 3, 2)
REFUSED = {"event": "answer refused", "operation": "op1", "fence": "1", "code": "STALE_FENCE"}


def event(sequence: int, kind: str, command: str, **payload: Any) -> dict[str, Any]:
    return {"data": {"sequence": sequence, "kind": kind, "command_id": command, "payload": payload}}


HISTORY = [
    event(1, "command.accepted", "c", name="counter.add"),
    event(2, "application", "c", name="counter.changed", data={"value": 3}),
    event(3, "command.outcome", "c", status="completed"),
]

GOOD: list[Callable[[], object]] = [
    lambda: promises.opened_once(Answer(201, OPENED), Answer(200, OPENED)),
    lambda: promises.accepted(Answer(201, ACCEPTED)),
    lambda: promises.duplicate(Answer(200, DUPLICATE, replayed=True), 4),
    lambda: promises.conflict(Answer(409, CONFLICT)),
    lambda: promises.completed(Answer(200, DONE), 3),
    lambda: promises.taken_over(OLD, NEW),
    lambda: promises.taken_over(OLD, Grip("b", 2, 1, 1)),
    lambda: promises.answer_refused([REFUSED], "op1", OLD),
    lambda: promises.unchanged(Answer(200, DONE), Answer(200, DONE), "it"),
    lambda: promises.history(HISTORY, 0),
    lambda: promises.history(HISTORY[1:], 1),
    lambda: promises.same_state({"a": {"value": 3}}, Answer(200, {"state": {"value": 3}})),
    lambda: promises.uncertain(Answer(200, UNCERTAIN)),
    lambda: promises.went_on(Answer(200, DONE)),
    lambda: promises.one_effect([{"operationId": "op1"}, {"operationId": "op2"}], "op1"),
    lambda: promises.epoch_raised(1, 2),
    lambda: promises.page(Answer(200, {"events": [], "next": 0, "head": 0})),
]

WRONG: list[tuple[str, Callable[[], object]]] = [
    ("a session is opened", lambda: promises.opened_once(Answer(409, {}), Answer(200, OPENED))),
    (
        "a new session is empty",
        lambda: promises.opened_once(Answer(201, {**OPENED, "cursor": 1}), Answer(200, OPENED)),
    ),
    ("reopens the same", lambda: promises.opened_once(Answer(201, OPENED), Answer(201, OPENED))),
    (
        "changes nothing",
        lambda: promises.opened_once(Answer(201, OPENED), Answer(200, {**OPENED, "cursor": 1})),
    ),
    ("accepted", lambda: promises.accepted(Answer(200, ACCEPTED))),
    ("accepted", lambda: promises.accepted(Answer(201, DUPLICATE))),
    ("its sequence", lambda: promises.accepted(Answer(201, {**ACCEPTED, "admission_sequence": None}))),
    ("duplicate", lambda: promises.duplicate(Answer(201, DUPLICATE, replayed=True), 4)),
    ("duplicate", lambda: promises.duplicate(Answer(200, ACCEPTED, replayed=True), 4)),
    ("original sequence", lambda: promises.duplicate(Answer(200, DUPLICATE, replayed=True), 5)),
    ("replay", lambda: promises.duplicate(Answer(200, DUPLICATE), 4)),
    ("two contents", lambda: promises.conflict(Answer(200, CONFLICT))),
    ("two contents", lambda: promises.conflict(Answer(409, DUPLICATE))),
    ("tells no sequence", lambda: promises.conflict(Answer(409, {**CONFLICT, "admission_sequence": 4}))),
    ("two contents", lambda: promises.conflict(Answer(409, {**CONFLICT, "error": None}))),
    (
        "not worth repeating",
        lambda: promises.conflict(
            Answer(409, {**CONFLICT, "error": {"code": "conflict", "retryable": True}})
        ),
    ),
    ("settles", lambda: promises.completed(Answer(200, {"state": "pending", "outcome": None}), 3)),
    ("completes", lambda: promises.completed(Answer(200, UNCERTAIN), 3)),
    ("the value is 6", lambda: promises.completed(Answer(200, DONE), 6)),
    ("evidence", lambda: promises.taken_over(OLD, None)),
    ("another sidecar", lambda: promises.taken_over(OLD, Grip("a", 1, 3, 2))),
    ("higher fence", lambda: promises.taken_over(OLD, Grip("b", 1, 1, 2))),
    ("higher fence", lambda: promises.taken_over(Grip("a", 2, 1, 1), Grip("b", 1, 9, 2))),
    ("late answer", lambda: promises.answer_refused([], "op1", OLD)),
    ("late answer", lambda: promises.answer_refused([{**REFUSED, "operation": "op2"}], "op1", OLD)),
    ("late answer", lambda: promises.answer_refused([{**REFUSED, "fence": "3"}], "op1", OLD)),
    ("late answer", lambda: promises.answer_refused([{**REFUSED, "event": "settled"}], "op1", OLD)),
    ("it stays", lambda: promises.unchanged(Answer(200, DONE), Answer(200, UNCERTAIN), "it")),
    ("it stays", lambda: promises.unchanged(Answer(200, DONE), Answer(404, DONE), "it")),
    ("no gap", lambda: promises.history([HISTORY[0], HISTORY[2]], 0)),
    ("no gap", lambda: promises.history(HISTORY, 1)),
    ("no gap", lambda: promises.history([HISTORY[0], HISTORY[0]], 0)),
    ("once", lambda: promises.history([*HISTORY, event(4, "command.accepted", "c")], 0)),
    ("once", lambda: promises.history([*HISTORY, event(4, "command.outcome", "c")], 0)),
    (
        "client b",
        lambda: promises.same_state({"client b": {"value": 4}}, Answer(200, {"state": {"value": 3}})),
    ),
    ("settles", lambda: promises.uncertain(Answer(200, {"state": "pending", "outcome": None}))),
    ("is uncertain", lambda: promises.uncertain(Answer(200, DONE))),
    (
        "says why",
        lambda: promises.uncertain(
            Answer(200, {**UNCERTAIN, "outcome": {"status": "uncertain", "error": None}})
        ),
    ),
    ("goes on", lambda: promises.went_on(Answer(200, UNCERTAIN))),
    ("never repeated", lambda: promises.one_effect([{"operationId": "op1"}] * 2, "op1")),
    ("never repeated", lambda: promises.one_effect([], "op1")),
    ("higher epoch", lambda: promises.epoch_raised(2, 2)),
    ("can be read", lambda: promises.page(Answer(404, {"kind": "denied"}))),
]


@pytest.mark.parametrize("check", GOOD)
def test_right_evidence_passes(check: Callable[[], object]) -> None:
    check()


@pytest.mark.parametrize(("promise", "check"), WRONG)
def test_wrong_evidence_breaks_the_promise_it_is_about(promise: str, check: Callable[[], object]) -> None:
    with pytest.raises(Broken, match=promise):
        check()
