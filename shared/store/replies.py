"""What goes into and comes out of the scripts, as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from shared.domain.errors import Unavailable
from shared.store.codes import Code

NEXT_TURN = "-"
"""``busy`` of a session whose seat is free for the first command in its queue, and for no other."""


class StoreRefusal(Unavailable):
    """The store answers, but may not serve this tenant now; safe to repeat later."""


class TenantLost(StoreRefusal):
    """The authority is missing or another one: everybody is refused until an operator adopts the tenant."""


class ClockRefusal(StoreRefusal):
    """The store's clock stepped back, or forward further than can be believed (RT-GUARD-17)."""


class OutOfMemory(StoreRefusal):
    """The store takes no new work; reads, duplicates and settling go on."""


class Revisions(msgspec.Struct, frozen=True):
    """The snapshot a decision was made under; echoed to scripts, never ordered (RT-STORE-06, RT-ADM-38)."""

    authority: str
    policy: str
    directory: str


_CODES: Final[dict[bytes | int, Code]] = {code.value.encode(): code for code in Code}


class Reply(msgspec.Struct, frozen=True):
    """A script's answer: its code, the store's time when it ran (ms), and its further values."""

    code: Code
    now_ms: int
    values: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, raw: Sequence[bytes | int]) -> Reply:
        """Read ``{code, now, ...}``."""
        values = tuple([v if isinstance(v, bytes) else str(v).encode() for v in raw[2:]])
        return cls(_CODES[raw[0]], int(raw[1]), values)

    def text(self, index: int) -> str:
        """The value at ``index`` as text, "" where there is none."""
        return self.values[index].decode() if index < len(self.values) else ""

    def number(self, index: int) -> int:
        """The value at ``index`` as an integer, 0 where there is none."""
        return int(self.text(index) or 0)


class Lease(msgspec.Struct, frozen=True):
    """Identity of a lease as every later verb needs it: (epoch, fence) and the holder (DESIGN section 6)."""

    operation_id: str
    branch: int
    peer: str
    epoch: str
    fence: str
    holder: str


class Grant(msgspec.Struct, frozen=True):
    """A lease with the work it is for. Instants are store ms (RT-OWN-01)."""

    lease: Lease
    attempt: int
    until_ms: int
    granted_ms: int
    deadline_ms: int
    admission: bytes
    input: bytes
    head: int = 0
    state: bytes = b""
    state_revision: str = ""


class Claim(msgspec.Struct, frozen=True):
    """A request for a lease. ``holder`` is the claimer's random identity; durations in ms."""

    operation_id: str
    branch: int
    peer: str
    attempt: int
    holder: str
    lease_ms: int
    max_claims: int
    open_gate: bool
    session_id: str = ""


class Offer(msgspec.Struct, frozen=True):
    """The first assignment of one branch, in branch order: its peer and the message id of the request."""

    peer: str
    message_id: str


class NewOperation(msgspec.Struct, frozen=True):
    """Everything admission freezes, without the instants that only the store may set (RT-TIME-03).

    ``kind``: invocation, or a command of a serial or concurrent session. ``intent`` is the digest that equal
    retries share. ``admission`` and ``input`` are opaque to the store. ``reserve`` is what the outcome may
    need (bytes).
    """

    kind: str
    operation_id: str
    intent: bytes
    admission: bytes
    input: bytes
    timeout_ms: int
    claim_timeout_ms: int
    offers: tuple[Offer, ...]
    session_id: str = ""
    command_id: str = ""
    accepted: bytes = b""
    reserve: int = 0


class NewSession(msgspec.Struct, frozen=True):
    """The immutable tuple of a session and its initial view state (b"" where the profile has none)."""

    session_id: str
    actor_id: str
    profile_id: str
    profile_version: str
    digest: str
    owner: str
    state: bytes = b""


class SessionRecord(msgspec.Struct, frozen=True):
    """A session as stored. ``contract`` is the digest it was opened with; ``busy`` and ``halted`` name
    operations.
    """

    session_id: str
    phase: str
    actor: str
    profile: str
    profile_version: str
    owner: str
    contract: str = ""
    head: int = 0
    state: bytes = b""
    state_revision: str = "0"
    busy: str = ""
    halted: str = ""
    pending: int = 0
    commands: int = 0
