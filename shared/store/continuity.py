"""Whether the store of a tenant is still the one whose writes this process saw acknowledged, or an older copy
of it (DASP-CORE-012g).

A copy put back in the place of the store holds the same authority, so nothing in it says that it is old. But
``meta`` holds numbers that only rise, and whoever saw a higher one knows. They are ordered here and nowhere
else, to tell an older copy from a newer one; everybody else only echoes revisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from shared.store.replies import StoreRefusal

STANDING_FIELDS: Final = (
    "authority",
    "replid",
    "boundary",
    "epoch",
    "clocks",
    "policy_rev",
    "dir_rev",
    "last_ms",
    "since",
    "lost",
)
LOST: Final = "lost:"
"""Begins the ``authority`` of a condemned ``meta``: no process holds such a one, so everybody is refused."""


class Progress(msgspec.Struct, frozen=True):
    """How far a tenant's store has come: acceptances of its clock, revisions, and its last commit (store ms).

    The instant falls only where an operator accepts another clock, which is counted.
    """

    clocks: int
    policy: int
    directory: int
    last_ms: int

    def is_behind(self, other: Progress) -> bool:
        """Whether a store that stands here lacks something that ``other`` holds."""
        return (
            self.clocks < other.clocks
            or self.policy < other.policy
            or self.directory < other.directory
            or (self.clocks == other.clocks and self.last_ms < other.last_ms)
        )


class Standing(msgspec.Struct, frozen=True):
    """What ``meta`` says of the store it is in. ``since`` is how far it had come when its epoch began, None
    for the first; ``replid`` is the server that the epoch was given to and ``boundary`` what that one
    survived.
    """

    authority: str
    replid: str
    boundary: str
    epoch: int
    progress: Progress
    since: Progress | None = None


def condemned(authority: str, note: str) -> str | None:
    """Why this ``meta`` may not be served, as it was noted; None where it may be."""
    if not authority.startswith(LOST):
        return None
    return note.partition(" ")[2] or "an operator gave it up"


def read_standing(row: Sequence[bytes | None]) -> Standing | None:
    """The standing in a row of :data:`STANDING_FIELDS`; None where there is no authority to serve.

    Raises StoreRefusal where the numbers cannot be read: that is not absence (KEYX-24).
    """
    text = [value.decode(errors="replace") if value is not None else "" for value in row]
    authority, replid, boundary, epoch, clocks, policy, directory, last, since, note = text
    if not authority or condemned(authority, note) is not None:
        return None
    try:
        words = [int(word) for word in since.split()]
        return Standing(
            authority=authority,
            replid=replid,
            boundary=boundary,
            epoch=int(epoch),
            progress=Progress(int(clocks or 0), int(policy), int(directory), int(last)),
            since=Progress(*words) if words else None,
        )
    except (ValueError, TypeError) as error:
        raise StoreRefusal("the tenant's record in the store cannot be read") from error


class Continuity:
    """What one process knows of one tenant's store, from what it read and what it saw committed.

    Both are told in the order in which the store did them, over one connection: a commit is only ever
    compared with what was read after it.
    """

    def __init__(self) -> None:
        self._known: Standing | None = None
        self._last_ms = 0

    def committed(self, at_ms: int, epoch: int | None = None) -> None:
        """A write was acknowledged at the store's ``at_ms``, in ``epoch`` where its reply told."""
        known = self._known
        if known is None:
            return
        self._last_ms = max(self._last_ms, at_ms)
        if epoch is not None and epoch >= known.epoch and at_ms > known.progress.last_ms:
            progress = msgspec.structs.replace(known.progress, last_ms=at_ms)
            self._known = msgspec.structs.replace(known, epoch=epoch, progress=progress)

    def is_older(self, found: Standing) -> bool:
        """Whether ``found`` is a copy from before something this process knows of the same authority.

        A later epoch may have been given to an older copy by a process that knew nothing; then it began
        behind.
        """
        known = self._known
        if known is None or known.authority != found.authority:
            return False
        newest = msgspec.structs.replace(known.progress, last_ms=self._last_ms)
        if found.epoch < known.epoch or found.progress.is_behind(newest):
            return True
        # What an epoch began with is held against nothing but what is known to be from before it.
        if found.epoch == known.epoch or found.since is None:
            return False
        return found.since.is_behind(known.progress)

    def overdue_ms(self, found: Standing) -> int | None:
        """The commit (store ms) that ``found`` lacks, None where it is not older or lacks more than that."""
        caught_up = msgspec.structs.replace(found.progress, last_ms=self._last_ms)
        lacks_more = self.is_older(msgspec.structs.replace(found, progress=caught_up))
        return self._last_ms if self.is_older(found) and not lacks_more else None

    def saw(self, found: Standing) -> None:
        """``found`` was read and is not older."""
        # It is as far as anything known, or its clock is another one since.
        self._known, self._last_ms = found, found.progress.last_ms
