"""Refusals as HTTP answers: one table from error kinds to statuses (API.md, "Errors").

What is said is the description an error was made with, a place and a rule; what was stored, and what went
wrong inside, is never part of it.
"""

from __future__ import annotations

from typing import Final

from admission_svc.http import Header, Reply
from admission_svc.messages import Problem, encode
from shared.domain.errors import (
    Denied,
    ErrorKind,
    InputFault,
    InvalidInput,
    LockgateError,
    NotFound,
    Unavailable,
)
from shared.domain.limits import Exceeded
from shared.store.replies import Reply as StoreReply
from shared.telemetry import LIMITED

_STATUS: Final = {
    ErrorKind.INVALID_INPUT: 400,
    ErrorKind.DENIED: 403,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.CONFLICT: 409,
    ErrorKind.EXPIRED: 410,
    ErrorKind.UNSUPPORTED: 422,
    ErrorKind.PROTOCOL_CONFLICT: 409,
}
_INPUT_STATUS: Final = {InputFault.TOO_LARGE: 413, InputFault.MEDIA_TYPE: 415}
_CHALLENGE: Final[Header] = (b"www-authenticate", b'Bearer realm="lockgate"')


def status_of(error: LockgateError) -> int:
    """The HTTP status of a refusal."""
    if isinstance(error, InvalidInput):
        return _INPUT_STATUS.get(error.code, 400)
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, Denied) and error.unauthenticated:
        return 401
    if isinstance(error, Unavailable) and error.rate_limited:
        return 429
    return _STATUS[error.kind]


def problem(kind: ErrorKind, description: str | None) -> bytes:
    """The body ``{kind, description?}``."""
    return encode(Problem(kind.value, description) if description else Problem(kind.value))


def reply_to(error: LockgateError) -> Reply:
    """The whole answer to a refusal."""
    status = status_of(error)
    headers: tuple[Header, ...] = ()
    if status == 401:
        headers = (_CHALLENGE,)
    elif status in (429, 503):
        headers = retry_after(error.retry_after_s or 1)
    return Reply(status, problem(error.kind, error.description), headers)


def exceeded(reply: StoreReply) -> Exceeded:
    """Which limit a script refused new work by, counted."""
    found = Exceeded.of(reply.text(0), reply.number(1))
    LIMITED.labels(found.limit).inc()
    return found


def retry_after(seconds: int) -> tuple[Header, ...]:
    """When the same request may be repeated."""
    return ((b"retry-after", b"%d" % seconds),)


NOT_FOUND: Final = reply_to(NotFound())
"""For a path that no route has: the same bytes as for what is missing or hidden."""

UNEXPECTED: Final = reply_to(Unavailable("the request could not be served; repeat it unchanged"))
"""For what should not have happened: it is logged, and the caller learns only that it may ask again."""


def method_not_allowed(allowed: str) -> Reply:
    """405 with the methods that the path has."""
    body = problem(ErrorKind.INVALID_INPUT, f"method: this path takes {allowed}")
    return Reply(405, body, ((b"allow", allowed.encode()),))
