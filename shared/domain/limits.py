"""What one tenant may use: limits that the store's scripts hold exactly, and two that each process holds.

Limits are an operator's, per tenant, and live beside the counts that they bound; a limit below what is kept
already refuses new work and touches nothing that is there (DASP-CORE-012b).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from shared.domain.canonical import MAX_MESSAGE_BYTES
from shared.domain.errors import Unavailable
from shared.domain.ids import MAX_SAFE

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SAFE)]
_Rate = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Per tenant; sizes in bytes, the rate in admissions per second. The order is that of the stored form.

    ``bytes``: of admissions, inputs, facts and view states, and of what open outcomes may need.
    ``open_operations``: admitted and not settled. ``record_bytes``: one admission with its input.
    ``outbox_depth``: offers to one peer that nobody took. ``burst``: admissions above the rate at once.
    ``streams`` and ``waiters``: live ones in each admission process.
    """

    operations: _Count = 10_000_000
    bytes: _Count = 16 * 1024**3
    open_operations: _Count = 200_000
    sessions: _Count = 1_000_000
    record_bytes: _Count = 2 * MAX_MESSAGE_BYTES
    outbox_depth: _Count = 200_000
    admissions_per_second: _Rate = 5_000
    burst: _Rate = 10_000
    streams: _Count = 2_000
    waiters: _Count = 2_000

    def words(self) -> str:
        """The stored form that the scripts read (lua/include/usage.lua)."""
        return " ".join(str(value) for value in msgspec.structs.astuple(self))

    @classmethod
    def parse(cls, words: str) -> TenantLimits | None:
        """Read the stored form; None where it is missing or damaged, which refuses new work."""
        found = words.split(" ")
        if len(found) != len(cls.__struct_fields__) or not all(map(str.isdecimal, found)):
            return None
        return cls(*map(int, found))


class TenantUsage(msgspec.Struct, frozen=True, rename="camel"):
    """What is kept and counted; bounded by the limits of the same names."""

    operations: int = 0
    bytes: int = 0
    open_operations: int = 0
    sessions: int = 0

    @classmethod
    def parse(cls, words: str) -> TenantUsage:
        """Read the stored form; zeros where there is none."""
        found = words.split(" ")
        return cls(*map(int, found[:4])) if len(found) == _USAGE_WORDS else cls()


_USAGE_WORDS: Final = 5
NO_USAGE: Final = "0 0 0 0 0"
"""The stored form of a tenant that keeps nothing."""


class Exceeded(msgspec.Struct, frozen=True):
    """Which limit refused new work, and when the same request may be repeated (s); 0 means never."""

    limit: str
    retry_after_s: int

    @classmethod
    def of(cls, limit: str, wait_ms: int) -> Exceeded:
        """From a script's answer. Time alone frees the rate; for the rest something has to end."""
        if limit == "record":
            return cls(limit, 0)
        return cls(limit, max(1, -(-wait_ms // 1000)) if limit == "rate" else _LOOK_AGAIN_S)

    @property
    def rate(self) -> bool:
        """Whether the caller is only too fast."""
        return self.limit == "rate"

    @property
    def message(self) -> str:
        """For the caller: the limit that is reached, not how much anybody keeps."""
        return f"the tenant's limit of {_NAMES[self.limit]} is reached"

    def unavailable(self) -> Unavailable:
        """As a refusal."""
        return Unavailable(self.message, retry_after_s=self.retry_after_s, rate_limited=self.rate)


_LOOK_AGAIN_S: Final = 5
_NAMES: Final = {
    "operations": "stored operations",
    "bytes": "stored bytes",
    "open": "open operations",
    "sessions": "sessions",
    "record": "the size of one record",
    "outbox": "work waiting for one peer",
    "rate": "admissions per second",
    "streams": "live streams",
}
