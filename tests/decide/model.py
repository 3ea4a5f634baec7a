"""What the requirement text says of commands, kept apart from every line of the code under test.

The model knows what it asked for and what it was told: who was granted what, which gates were opened, which
answers were stored. From that alone it says which end of a command would be honest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from shared.store.replies import Lease, NewOperation

Kind = Literal["ok", "again", "refused"]


class Granted(msgspec.Struct):
    """One lease that was granted: how long, whether its gate was opened, which answer was stored under it."""

    lease: Lease
    attempt: int
    until_ms: int
    opened: bool = False
    answer: Kind | None = None


class Command(msgspec.Struct):
    """One admitted command and all that is known of its work."""

    new: NewOperation
    sequence: int
    deadline_ms: int
    effects: str
    grants: list[Granted] = msgspec.field(default_factory=list)
    outcome: bytes | None = None
    fence: int = 0
    purged: bool = False

    @property
    def settled(self) -> bool:
        return self.outcome is not None

    @property
    def current(self) -> Granted | None:
        return self.grants[-1] if self.grants else None

    @property
    def may_have_acted(self) -> bool:
        """A gate was opened and nobody answered behind it."""
        return any(grant.opened and grant.answer is None for grant in self.grants)

    def open_until(self, now: int) -> bool:
        """Whether somebody may be acting for it now."""
        return any(g.opened and g.answer is None and g.until_ms > now for g in self.grants)


class Session(msgspec.Struct):
    """One session: its commands in the order of admission."""

    session_id: str
    serial: bool
    commands: list[Command] = msgspec.field(default_factory=list)
    phase: Literal["open", "closing", "closed"] = "open"

    def first_unsettled(self) -> Command | None:
        return next((command for command in self.commands if not command.settled), None)


def dishonest(command: Command, status: str, code: str | None, now: int) -> Iterator[str]:
    """What is wrong with a command ending so at ``now``: nothing, when the requirement text allows it."""
    last = command.current
    # An answer under an older fence was judged already: it asked for the next attempt.
    unjudged = last is not None and int(last.lease.fence) == command.fence
    answer = last.answer if last is not None and unjudged else None
    late = now >= command.deadline_ms
    if status == "completed" and (answer != "ok" or late):
        yield "completed without an accepted answer in time"
    if answer == "ok" and not late and status != "completed":
        yield "an accepted answer in time is success"
    if status == "failed" and command.effects != "none" and code != "refused-it":
        if command.may_have_acted:
            yield "failed, although somebody may have acted"
        if late and answer is not None:
            yield "failed, although an answer was there and came too late"
    if status == "uncertain":
        if command.effects == "none":
            yield "uncertain without effects"
        if not command.may_have_acted and not (late and answer is not None):
            yield "uncertain, although nobody can have acted unheard"
    if code == "timeout" and not late:
        yield "timed out before its deadline"
    if late and code not in ("timeout", "session-closed") and status != "completed":
        yield f"ended {code} after its deadline"
    if code == "worker-lost" and command.effects != "unsafe":
        yield "given up after one lost worker although it may be repeated"
