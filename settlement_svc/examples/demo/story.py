"""The story itself: what is done, step by step, and which promise each step rests on."""

from __future__ import annotations

import contextlib
import signal
import uuid
from collections.abc import Iterator, Sequence
from typing import Final

from settlement_svc.examples.demo import promises
from settlement_svc.examples.demo.client import Client, until
from settlement_svc.examples.demo.promises import Event, Grip
from settlement_svc.examples.demo.replica import Replica
from settlement_svc.examples.demo.stage import BANK, COUNTER, Stage, events, holder_of
from settlement_svc.examples.demo.telling import Teller
from shared.children import Child

COUNTER_PROFILE: Final = "urn:example:dasp:counter"
LEDGER_PROFILE: Final = "urn:example:dasp:ledger"


class Story:
    """Told once, in order: each step builds on the ones before it."""

    def __init__(self, stage: Stage, client: Client, tell: Teller) -> None:
        self._stage = stage
        self._client = client
        self._tell = tell
        self._sidecars: list[Child] = []
        self._value = 0
        self._first = str(uuid.uuid4())
        self._first_at = 0

    def tell(self) -> None:
        """Every step. Raises Broken with the first promise that does not hold."""
        self._sidecars = self._stage.start_sidecars(COUNTER, 2)
        for step in (
            self._open,
            self._admit,
            self._repeat,
            self._contradict,
            self._drop,
            self._kill_worker,
            self._stop_worker,
            self._kill_store,
            self._replay,
            self._unsafe,
        ):
            step()
            self._stage.check()

    def _open(self) -> None:
        self._tell.does("open a session, and open it again")
        first = self._client.open("clicks", "counter", COUNTER_PROFILE)
        promises.opened_once(first, self._client.open("clicks", "counter", COUNTER_PROFILE))
        self._tell.saw("201, then 200 with the same cursor 0: an equal open adds nothing")

    def _admit(self) -> None:
        self._tell.does(f"admit counter.add 3 as command {self._first[:8]}")
        self._first_at = promises.accepted(self._add(self._first, 3))
        self._settle(self._first, 3)
        self._tell.saw(f"accepted at sequence {self._first_at}; outcome completed, value {self._value}")

    def _repeat(self) -> None:
        self._tell.does("send the same command again")
        promises.duplicate(self._add(self._first, 3), self._first_at)
        self._tell.saw(f"duplicate with the original sequence {self._first_at}; nothing was done again")

    def _contradict(self) -> None:
        self._tell.does("send the same id with 4 instead of 3, also from another session")
        promises.conflict(self._add(self._first, 4))
        self._client.open("other", "counter", COUNTER_PROFILE)
        before = self._client.view("other")
        promises.conflict(self._add(self._first, 4, "other"))
        promises.conflict(self._add(self._first, 3, "other"))
        promises.unchanged(before, self._client.view("other"), "the other session")
        self._tell.saw("409 conflict each time: one id stands for one content, whatever the session")

    def _drop(self) -> None:
        command = str(uuid.uuid4())
        self._tell.does("send counter.add 5 and drop the reply on the floor, then retry")
        wire = self._client.submit_unread("clicks", command, "counter.add", {"amount": 5})
        try:
            sequence = until(lambda: self._accepted_at(command), "the command is admitted")
        finally:
            wire.close()
        promises.duplicate(self._add(command, 5), sequence)
        self._settle(command, 5)
        self._tell.saw(f"the retry is a duplicate of sequence {sequence}; added once, value {self._value}")

    def _kill_worker(self) -> None:
        command = str(uuid.uuid4())
        self._tell.does("SIGKILL the sidecar that works on counter.add 7")
        with self._at_work(command, 7) as (grip, victim):
            self._stage.murder(victim)
        self._sidecars.remove(victim)
        self._sidecars += self._stage.start_sidecars(COUNTER, 1)
        self._settle(command, 7)
        after = self._stage.grip(command)
        promises.taken_over(grip, after)
        self._tell.saw(
            f"process {victim.pid} died holding {grip}; another sidecar took over with {after}; "
            f"added once, value {self._value}"
        )

    def _stop_worker(self) -> None:
        command = str(uuid.uuid4())
        self._tell.does("SIGSTOP the sidecar that works on counter.add 11, SIGCONT it after its lease")
        with self._at_work(command, 11) as (grip, sleeper):
            sleeper.signal(signal.SIGSTOP)
        self._settle(command, 11)
        after = self._stage.grip(command)
        promises.taken_over(grip, after)
        settled, view = self._client.outcome("clicks", command), self._client.view("clicks")
        sleeper.signal(signal.SIGCONT)
        lines = until(
            lambda: list(events(sleeper, "answer refused")) or None,
            "the late answer of a stopped worker is refused",
        )
        reason = promises.answer_refused(lines, self._stage.operation_of(command), grip)
        promises.unchanged(settled, self._client.outcome("clicks", command), "a settled outcome")
        promises.unchanged(view, self._client.view("clicks"), "the view")
        self._tell.saw(
            f"another sidecar finished it with {after}; the late answer with {grip} was refused, {reason}; "
            f"value still {self._value}"
        )

    def _kill_store(self) -> None:
        command = str(uuid.uuid4())
        self._tell.does("SIGKILL the store right after it admitted counter.add 13, and start it again")
        before = self._stage.epoch()
        history, first = self._client.replay("clicks", 0), self._client.outcome("clicks", self._first)
        sequence = promises.accepted(self._add(command, 13))
        self._stage.store.kill()
        self._stage.store.start()
        promises.duplicate(self._add(command, 13), sequence)
        self._settle(command, 13)
        promises.unchanged(first, self._client.outcome("clicks", self._first), "the first outcome")
        kept = self._client.replay("clicks", 0)[: len(history)]
        promises.expect(kept == history, "every update is there again, unchanged", len(kept))
        after = self._stage.epoch()
        promises.epoch_raised(before, after)
        self._tell.saw(
            f"all {len(history)} updates are there, the admitted command was worked: value {self._value}; "
            f"epoch {before} became {after}"
        )

    def _replay(self) -> None:
        self._tell.does("let two clients replay, one from cursor 0 and one from cursor 1")
        ends = {}
        for after in (0, 1):
            found = self._client.replay("clicks", after)
            promises.history(found, after)
            copy = Replica("clicks", self._client.source(), cursor=after)
            for event in found:
                copy.apply(event)
            ends[f"the client from {after}"] = copy.state
        view = self._client.view("clicks")
        promises.same_state(ends, view)
        promises.same_state({"adding up": {"value": self._value}}, view)
        self._tell.saw(
            f"both reach value {self._value} at sequence {view.body.get('cursor')}, as the view does"
        )

    def _unsafe(self) -> None:
        command, note, stage = str(uuid.uuid4()), str(uuid.uuid4()), self._stage
        self._tell.does("SIGKILL the worker of an unsafe transfer after it acted, before it answered")
        sidecars = stage.start_sidecars(BANK, 2)
        self._client.open("account", "bank", LEDGER_PROFILE)
        data = {"to": "bob", "cents": 2500}
        sequence = promises.accepted(self._client.submit("account", command, "transfer.send", data))
        with stage.working(BANK, command) as grip:
            stage.murder(_held_by(sidecars, grip))
        outcome = self._client.outcome("account", command)
        promises.uncertain(outcome)
        promises.duplicate(self._client.submit("account", command, "transfer.send", data), sequence)
        promises.accepted(self._client.submit("account", note, "transfer.note", {"text": "check it"}))
        promises.went_on(self._client.outcome("account", note))
        promises.unchanged(outcome, self._client.outcome("account", command), "an uncertain outcome")
        promises.one_effect(stage.ledger(BANK), stage.operation_of(command))
        self._tell.saw(
            "the outcome is uncertain and nobody repeats it, though another sidecar is there: one line in "
            "the bank's own ledger; the session went on with its next command"
        )

    # What the steps share

    def _add(self, command: str, amount: int, session: str = "clicks") -> promises.Answer:
        return self._client.submit(session, command, "counter.add", {"amount": amount})

    def _settle(self, command: str, amount: int) -> None:
        self._value += amount
        promises.completed(self._client.outcome("clicks", command), self._value)

    def _accepted_at(self, command: str) -> int | None:
        found: list[Event] = self._client.replay("clicks", 0, limit=100)
        for event in found:
            if event["data"]["command_id"] == command:
                return int(event["data"]["sequence"])
        return None

    @contextlib.contextmanager
    def _at_work(self, command: str, amount: int) -> Iterator[tuple[Grip, Child]]:
        """Submit a command; while the block runs it is at work: its grant, and the sidecar that has it."""
        promises.accepted(self._add(command, amount))
        with self._stage.working(COUNTER, command) as grip:
            yield grip, _held_by(self._sidecars, grip)


def _held_by(sidecars: Sequence[Child], grip: Grip) -> Child:
    """The sidecar that has the grant."""
    found = [child for child in sidecars if holder_of(child) == grip.holder]
    promises.expect(len(found) == 1, "work is held by exactly one of the peer's sidecars", grip)
    return found[0]
