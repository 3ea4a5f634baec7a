"""The one table of what a script can answer; every code a script returns is here and nothing else is."""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """First element of every script reply."""

    OK = "OK"
    RENEWED = "RENEWED"
    DUPLICATE = "DUPLICATE"
    ABSENT = "ABSENT"
    NOT_FOUND = "NOT_FOUND"
    CONFLICT = "CONFLICT"
    EXPIRED = "EXPIRED"
    CORRUPT = "CORRUPT"
    INVALID = "INVALID"
    # The tenant's store as a whole.
    AUTHORITY_LOST = "AUTHORITY_LOST"
    EPOCH_MOVED = "EPOCH_MOVED"
    STALE_SNAPSHOT = "STALE_SNAPSHOT"
    CLOCK_ROLLBACK = "CLOCK_ROLLBACK"
    OUTSIDE_WINDOW = "OUTSIDE_WINDOW"
    CAPACITY = "CAPACITY"
    # Sessions.
    SESSION_CLOSING = "SESSION_CLOSING"
    HALTED = "HALTED"
    SEQUENCE_EXHAUSTED = "SEQUENCE_EXHAUSTED"
    # Leases and replacements.
    TERMINAL = "TERMINAL"
    ANSWERED = "ANSWERED"
    NOT_OFFERED = "NOT_OFFERED"
    HELD = "HELD"
    NOT_OWNER = "NOT_OWNER"
    STALE_FENCE = "STALE_FENCE"
    EXHAUSTED = "EXHAUSTED"
    GATE_OPEN = "GATE_OPEN"
    GATE_CLOSED = "GATE_CLOSED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    PROTOCOL_CONFLICT = "PROTOCOL_CONFLICT"
    ASSERTION = "ASSERTION"
