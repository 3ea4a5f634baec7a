"""The one table of refusals (RT-ERR-01) and their exceptions.

Every refusal is one of seven kinds. HTTP statuses, receipts and failures are derived from the kind and from
the hints below, never from the text of a description (RT-ERR-02). A description names a place and a rule,
never stored content, so that it may be shown to whoever sent the request.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class ErrorKind(StrEnum):
    """What a caller may conclude: repeat it, correct it, or give up (RT-ERR-01)."""

    INVALID_INPUT = "invalid-input"
    DENIED = "denied"
    UNAVAILABLE = "unavailable"
    CONFLICT = "conflict"
    EXPIRED = "expired"
    UNSUPPORTED = "unsupported"
    PROTOCOL_CONFLICT = "protocol-conflict"


class InputFault(StrEnum):
    """Why an input is invalid, as far as a carrier answers it differently (status, DASP code)."""

    MALFORMED = "malformed"
    TOO_LARGE = "too-large"
    MEDIA_TYPE = "media-type"
    CURSOR = "cursor"


class LockgateError(Exception):
    """A refusal: its kind, a description fit for the caller, and when to try again (seconds, or ``None``)."""

    kind: ErrorKind
    description: str | None
    retry_after_s: int | None

    def __init__(
        self, kind: ErrorKind, description: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(description or kind.value)
        self.kind = kind
        self.description = description
        self.retry_after_s = retry_after_s


class InvalidInput(LockgateError):
    """Malformed or unsafe input; nothing was stored. ``path`` is a JSON Pointer, a header or a parameter
    name.

    ``code`` tells a carrier which of its answers fits: 413 for *too large*, 415 for *media type*,
    ``invalid_cursor`` for *cursor*, else 400.
    """

    path: str
    rule: str
    code: InputFault

    def __init__(self, path: str, rule: str, *, code: InputFault = InputFault.MALFORMED) -> None:
        super().__init__(ErrorKind.INVALID_INPUT, f"{path}: {rule}")
        self.path = path
        self.rule = rule
        self.code = code

    @property
    def too_large(self) -> bool:
        """Whether a size or count limit was exceeded (HTTP 413, DASP ``limit_exceeded``)."""
        return self.code is InputFault.TOO_LARGE


class Denied(LockgateError):
    """Not allowed: HTTP 403, or 401 where ``unauthenticated`` (no token, or one that is garbled, expired,
    revoked).
    """

    unauthenticated: bool

    def __init__(self, description: str | None = None, *, unauthenticated: bool = False) -> None:
        super().__init__(ErrorKind.DENIED, description)
        self.unauthenticated = unauthenticated


NOT_FOUND: Final = "not found"


class NotFound(LockgateError):
    """Missing or hidden, told with the same bytes for both (RT-HTTP-08).

    A store code rather than an error kind (RT-STORE-15): over HTTP it is kind ``denied`` with status 404. It
    takes no description, so that no caller can make the two cases distinguishable.
    """

    def __init__(self) -> None:
        super().__init__(ErrorKind.DENIED, NOT_FOUND)


class Unavailable(LockgateError):
    """Cannot be served now; the same request may be repeated after ``retry_after_s`` seconds (HTTP 503).

    ``rate_limited`` asks for 429 instead: the caller is over its own budget, the service is well.
    """

    rate_limited: bool

    def __init__(
        self, description: str | None = None, *, retry_after_s: int = 1, rate_limited: bool = False
    ) -> None:
        super().__init__(ErrorKind.UNAVAILABLE, description, retry_after_s)
        self.rate_limited = rate_limited


class Conflict(LockgateError):
    """The same identity already stands for other content (HTTP 409); tells nothing of what is stored."""

    def __init__(self, description: str | None = None) -> None:
        super().__init__(ErrorKind.CONFLICT, description)


class Expired(LockgateError):
    """The result is gone for good and its key is never usable again (HTTP 410)."""

    def __init__(self, description: str | None = None) -> None:
        super().__init__(ErrorKind.EXPIRED, description)


class Unsupported(LockgateError):
    """A capability, profile, command or form that this host does not offer (HTTP 422)."""

    def __init__(self, description: str | None = None) -> None:
        super().__init__(ErrorKind.UNSUPPORTED, description)


class ProtocolConflict(LockgateError):
    """One message identity came with two contents (HTTP 409)."""

    def __init__(self, description: str | None = None) -> None:
        super().__init__(ErrorKind.PROTOCOL_CONFLICT, description)
