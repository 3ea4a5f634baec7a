"""The time guard of every protected transition: [not_before_ms, not_after_ms)."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.domain.errors import InvalidInput

MAX_SAFE_INTEGER = 2**53 - 1


class TimeGuard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Inclusive lower and exclusive upper bound in store milliseconds (RT-GUARD-01, RT-GUARD-04..07,
    RT-GUARD-09).
    """

    not_before_ms: int
    not_after_ms: int

    def __post_init__(self) -> None:
        if not 0 <= self.not_before_ms <= MAX_SAFE_INTEGER or not 0 <= self.not_after_ms <= MAX_SAFE_INTEGER:
            raise InvalidInput("timeGuard", "bounds are safe non-negative integers of milliseconds")
        if self.not_before_ms >= self.not_after_ms:
            raise InvalidInput("timeGuard", "the interval is empty or reversed")

    @classmethod
    def parse(cls, value: Any) -> TimeGuard:
        """Read a guard from plain data; a missing or extra member is invalid input."""
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise InvalidInput("timeGuard", str(error)) from None
