"""Every key of the store, spelled here and nowhere else.

A tenant's keys carry its id as their hash tag, so that whatever one script touches lies in one slot. The kind
comes before the id and holds no colon, the id comes last: two different (kind, id) never spell one key. Ids
are checked where they enter (``shared.domain.ids``); the tenant's is checked again here, because the tag
decides who owns a key.
"""

from __future__ import annotations

from typing import Final

from shared.domain.ids import IdKind, check

TENANTS: Final = b"lg:tenants"
"""Hash tenant → authority id: what central processes serve. Under no tag: no tenant's script touches it."""
RETIRED: Final = b"lg:retired"
"""Hash tenant → authority ids it had before, apart by spaces; kept also when the tenant is deleted."""
SETTLERS: Final = b"lg:settlers"
"""Sorted set central process → store time (ms) of its last beat: who divides the tenants. Under no tag."""


class Keys:
    """The keys of one tenant. Raises InvalidInput for a tenant id that could leave its own tag."""

    def __init__(self, tenant: str) -> None:
        prefix = b"lg:{%b}:" % check(IdKind.TENANT, tenant).encode()
        self.tenant: Final = tenant
        self.meta: Final = prefix + b"meta"
        """Hash: authority, epoch, revisions, last committed time, usage."""
        self.due: Final = prefix + b"due"
        """Sorted set: one member per operation or :func:`turn_member`, scored by its wake-up (store ms)."""
        self.contracts: Final = prefix + b"contracts"
        self.peers: Final = prefix + b"peers"
        self.policy: Final = prefix + b"policy"
        self.tokens: Final = prefix + b"tokens"
        self.ledger: Final = prefix + b"ledger"
        self.parked: Final = prefix + b"parked"
        """What settling could not decide, for a person to look at."""
        self.wake: Final = prefix + b"wake"
        """The pub/sub channel of hints; no key."""
        self._op: Final = prefix + b"op:"
        self._session: Final = prefix + b"session:"
        self._updates: Final = prefix + b"updates:"
        self._queue: Final = prefix + b"queue:"
        self._cursors: Final = prefix + b"cursors:"
        self._outbox: Final = prefix + b"outbox:"
        self._effects: Final = prefix + b"effects:"
        self._attempts: Final = prefix + b"attempts:"
        self._reservations: Final = prefix + b"reservations:"

    def op(self, operation_id: str) -> bytes:
        """Hash: one operation, whole (RT-ADM-32: found by its identity, without an index)."""
        return self._op + operation_id.encode("ascii")

    def session(self, session_id: str) -> bytes:
        """Hash: a session's tuple, head, phase, view state and busy command."""
        return self._session + session_id.encode("ascii")

    def updates(self, session_id: str) -> bytes:
        """Stream: a session's facts; an entry's id is its sequence."""
        return self._updates + session_id.encode("ascii")

    def queue(self, session_id: str) -> bytes:
        """Sorted set: serial commands that wait, by admission sequence."""
        return self._queue + session_id.encode("ascii")

    def cursors(self, session_id: str) -> bytes:
        """Hash :func:`cursor_field` → cursor: how far each client has read."""
        return self._cursors + session_id.encode("ascii")

    def outbox(self, peer: str) -> bytes:
        """Stream: requests and cancellations for one peer, by reference."""
        return self._outbox + peer.encode("ascii")

    def effects(self, sink: str) -> bytes:
        """Hash: the fenced effects of one sink."""
        return self._effects + sink.encode("ascii")

    def attempts(self, attempt_id: str) -> bytes:
        """Hash: one attempt of the ledger."""
        return self._attempts + attempt_id.encode("ascii")

    def reservations(self, reservation_id: str) -> bytes:
        """Hash: one reservation of the ledger."""
        return self._reservations + reservation_id.encode("ascii")


def turn_member(session_id: str) -> str:
    """The member of ``due`` that wakes a session's next serial command; no operation id has a colon."""
    return "turn:" + session_id


def cursor_field(principal: str, client: str) -> str:
    """The field of one client's cursor. The slash is in neither id's pattern, a colon would be in both."""
    return f"{principal}/{client}"
