"""What the requirement text says of commands, kept apart from every line of the code under test.

The model knows what it asked for and what it was told: who was granted what, which gates were opened, which
answers were stored, which peers may not go on. From that alone it says which end of a command would be
honest.
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


def dishonest(command: Command, status: str, code: str | None, now: int, *, denied: bool) -> Iterator[str]:
    """What is wrong with a command ending so at ``now``: nothing, when the requirement text allows it.

    ``denied``: the peer of its branch may not go on.
    """
    last = command.current
    # An answer under an older fence was judged already: it asked for the next attempt.
    unjudged = last is not None and int(last.lease.fence) == command.fence
    answer = last.answer if last is not None and unjudged else None
    late = now >= command.deadline_ms
    if status == "completed" and (answer != "ok" or late):
        yield "completed without an accepted answer in time"
    if answer == "ok" and not late and not denied and status != "completed":
        yield "an accepted answer in time is success"
    unjudged_effects = answer is not None and command.effects != "none"
    yield from _dishonest_about_rights(status, code, late, denied, unjudged_effects)
    if status == "failed" and command.effects != "none" and code != "refused-it":
        if command.may_have_acted:
            yield "failed, although somebody may have acted"
        if late and answer is not None:
            yield "failed, although an answer was there and came too late"
    if status == "uncertain":
        if command.effects == "none":
            yield "uncertain without effects"
        unjudgeable = answer is not None and (late or code == "revoked")
        if not command.may_have_acted and not unjudgeable:
            yield "uncertain, although nobody can have acted unheard"
    if code == "timeout" and not late:
        yield "timed out before its deadline"
    if late and code not in ("timeout", "session-closed") and status != "completed":
        yield f"ended {code} after its deadline"
    if code == "worker-lost" and command.effects != "unsafe":
        yield "given up after one lost worker although it may be repeated"


def _dishonest_about_rights(
    status: str, code: str | None, late: bool, denied: bool, unjudged_effects: bool
) -> Iterator[str]:
    if denied and not late and code not in ("revoked", "session-closed"):
        yield f"ended {code or status}, although its permission was taken back"
    if code == "revoked" and (late or not denied):
        yield "revoked, although nobody took its permission back in time"
    if code == "revoked" and status == "failed" and unjudged_effects:
        yield "failed, although an answer was there that nobody may judge"
