"""What must hold, judged from evidence alone: each check passes or names the promise that was broken.

Nothing here talks to a process, so that tests can show every check wrong evidence and see it told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

CREATED: Final = 201
OK: Final = 200
CONFLICT: Final = 409
Event = Mapping[str, Any]


class Broken(Exception):
    """A promise that did not hold; the text names it and what was seen instead."""


class Answer(msgspec.Struct, frozen=True):
    """One HTTP answer; ``replayed`` is whether it says that nothing was done anew."""

    status: int
    body: dict[str, Any]
    replayed: bool = False


class Grip(msgspec.Struct, frozen=True):
    """Who holds a branch, under which grant."""

    holder: str
    epoch: int
    fence: int
    attempt: int

    def __str__(self) -> str:
        return f"attempt {self.attempt}, epoch {self.epoch}, fence {self.fence}"


def expect(holds: bool, promise: str, seen: object) -> None:
    """Raise Broken unless ``holds``."""
    if not holds:
        raise Broken(f"{promise} (seen: {seen})")


def opened_once(first: Answer, again: Answer) -> None:
    """An equal open changes nothing."""
    expect(first.status == CREATED, "a session is opened", first)
    expect(first.body.get("cursor") == 0, "a new session is empty", first)
    expect(again.status == OK, "an equal open reopens the same session", again)
    expect(again.body == first.body, "an equal open changes nothing", again)


def accepted(answer: Answer) -> int:
    """The command was admitted now; gives its sequence."""
    sequence = answer.body.get("admission_sequence")
    expect(answer.status == CREATED, "a new command is accepted", answer)
    expect(answer.body.get("disposition") == "accepted", "a new command is accepted", answer)
    expect(isinstance(sequence, int) and sequence > 0, "an accepted command has its sequence", answer)
    assert isinstance(sequence, int)
    return sequence


def duplicate(answer: Answer, sequence: int) -> None:
    """An equal command was admitted before, at this sequence, and nothing was done anew."""
    promise = "an equal retry is a duplicate with the original sequence"
    expect(answer.status == OK, promise, answer)
    expect(answer.body.get("disposition") == "duplicate", promise, answer)
    expect(answer.body.get("admission_sequence") == sequence, promise, answer)
    expect(answer.replayed, "a duplicate says that it is a replay", answer)


def conflict(answer: Answer) -> None:
    """The id stands for other content: refused, and nothing about that content is told."""
    promise = "one command id never stands for two contents"
    expect(answer.status == CONFLICT, promise, answer)
    expect(answer.body.get("disposition") == "rejected", promise, answer)
    expect(answer.body.get("admission_sequence") is None, "a conflict tells no sequence", answer)
    error = answer.body.get("error") or {}
    expect(error.get("code") == "conflict", promise, answer)
    expect(error.get("retryable") is False, "a conflict is not worth repeating", answer)


def completed(answer: Answer, value: int) -> None:
    """The command settled with this counter value."""
    outcome = answer.body.get("outcome") or {}
    expect(answer.body.get("state") == "settled", "an admitted command settles", answer)
    expect(outcome.get("status") == "completed", "the command completes", answer)
    expect(outcome.get("output") == {"value": value}, f"the value is {value}", answer)


def taken_over(before: Grip, after: Grip | None) -> None:
    """Another holder has the work now, under a higher fence."""
    expect(after is not None, "a settled branch keeps its last grant as evidence", after)
    assert after is not None
    expect(after.holder != before.holder, "another sidecar takes over", after)
    expect(
        (after.epoch, after.fence) > (before.epoch, before.fence),
        "a take-over has a higher fence",
        f"{before} then {after}",
    )


def answer_refused(lines: Sequence[Mapping[str, Any]], operation: str, grip: Grip) -> str:
    """The old holder tried to answer and was refused; gives the store's reason."""
    codes = [
        str(line.get("code"))
        for line in lines
        if line.get("event") == "answer refused"
        and line.get("operation") == operation
        and str(line.get("fence")) == str(grip.fence)
    ]
    expect(bool(codes), "the late answer of a stopped worker is refused", list(lines)[-3:])
    return codes[0]


def unchanged(before: Answer, after: Answer, what: str) -> None:
    """Something that must stay as it was, byte for byte of its content."""
    expect(before.status == after.status and before.body == after.body, f"{what} stays as it was", after)


def history(events: Sequence[Event], after: int) -> None:
    """Sequences are contiguous, and no command was accepted or settled twice."""
    sequences = [event["data"]["sequence"] for event in events]
    expected = list(range(after + 1, after + 1 + len(events)))
    expect(sequences == expected, "a history has no gap and no repetition", sequences)
    counted = Counter((event["data"]["kind"], event["data"]["command_id"]) for event in events)
    twice = [key for key, count in counted.items() if key[0] != "application" and count > 1]
    expect(not twice, "a command is accepted once and settles once", twice)


def page(answer: Answer) -> tuple[list[Event], int, int]:
    """The events of a page, the cursor after it, and the head it was read under."""
    expect(answer.status == OK, "a history can be read", answer)
    return answer.body["events"], answer.body["next"], answer.body["head"]


def same_state(states: Mapping[str, Mapping[str, Any]], view: Answer) -> None:
    """Every client ended where the host's own view is."""
    for client, state in states.items():
        expect(
            state == view.body.get("state"), f"{client} replays to the state of the view", f"{state}, {view}"
        )


def uncertain(answer: Answer) -> None:
    """The command settled as uncertain, which is neither success nor failure."""
    outcome = answer.body.get("outcome") or {}
    expect(answer.body.get("state") == "settled", "a lost unsafe command settles", answer)
    expect(outcome.get("status") == "uncertain", "a lost unsafe command is uncertain", answer)
    expect(outcome.get("error") is not None, "an uncertain outcome says why", answer)


def went_on(answer: Answer) -> None:
    """The next command of the session was worked."""
    outcome = answer.body.get("outcome") or {}
    expect(outcome.get("status") == "completed", "a session goes on after an uncertain command", answer)


def one_effect(ledger: Sequence[Mapping[str, Any]], operation: str) -> None:
    """The world outside saw exactly one effect of the operation."""
    effects = [line for line in ledger if line.get("operationId") == operation]
    expect(len(effects) == 1, "an unsafe effect is never repeated", f"{len(effects)} effects in the ledger")


def epoch_raised(before: int, after: int) -> None:
    """A restarted store is a new epoch: grants from before it compare as older."""
    expect(after > before, "a restarted store is a higher epoch", f"{before} then {after}")
