"""Identities: their patterns, the digests they are derived by, and safe integer arithmetic.

An id is checked before it touches a key, a path or a log line. Derived identities hash length-prefixed
fields, so no two different tuples of fields meet in one digest input (RT-ADM-03, RT-ADM-04).
"""

from __future__ import annotations

import hashlib
import re
import uuid
from enum import IntEnum, StrEnum
from typing import Final

from shared.domain.errors import InvalidInput

MAX_SAFE: Final = 2**53 - 1
"""The largest integer every JSON reader keeps exactly; sequences, fences and instants (ms) stay within it."""

SESSION_PRINCIPAL: Final = "dasp"
"""Stands for *any principal* in the identity of a session command, hence refused as a principal's name."""


class IdKind(StrEnum):
    """What an id names; each kind has one pattern, whatever route or record it appears in."""

    TENANT = "tenant"
    PEER = "peer"
    ROLE = "role"
    SINK = "sink"
    SESSION = "session"
    COMMAND = "command"
    ACTOR = "actor"
    REQUEST = "request"
    PRINCIPAL = "principal"
    CLIENT = "client"
    CONTRACT = "contract"
    INTERACTION = "interaction"
    NAME = "name"
    VERSION = "version"
    BRANCH = "branch"
    INVOCATION_KEY = "invocation-key"
    OPERATION = "operation"
    DIGEST = "digest"
    AUTHORITY = "authority"
    UUID = "uuid"


_LABEL: Final = (r"[a-z0-9](-?[a-z0-9])*", 63, "lower-case letters and digits, single inner dashes")
_TOKEN: Final = (r"[A-Za-z0-9._:-]+", 128, "letters, digits and . _ : -")
_NAME: Final = (r"[a-z][a-z0-9_.-]*", 128, "a lower-case letter, then lower-case letters, digits and _ . -")
_HEX_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"

_FORMS: Final[dict[IdKind, tuple[str, int, str]]] = {
    IdKind.TENANT: _LABEL,
    IdKind.PEER: _LABEL,
    IdKind.ROLE: _LABEL,
    IdKind.SINK: _LABEL,
    IdKind.SESSION: _TOKEN,
    IdKind.COMMAND: _TOKEN,
    IdKind.ACTOR: _TOKEN,
    IdKind.REQUEST: _TOKEN,
    IdKind.PRINCIPAL: _TOKEN,
    IdKind.CLIENT: _TOKEN,
    IdKind.CONTRACT: _NAME,
    IdKind.INTERACTION: _NAME,
    IdKind.NAME: _NAME,
    IdKind.VERSION: (r"[A-Za-z0-9._+-]+", 64, "letters, digits and . _ + -"),
    IdKind.BRANCH: (r"[A-Za-z0-9._-]+", 64, "letters, digits and . _ -"),
    IdKind.INVOCATION_KEY: (r"[ -~]*[!-~][ -~]*", 255, "printable ASCII, not only spaces"),
    IdKind.OPERATION: (r"op[0-9a-f]{64}", 66, "op and 64 lower-case hex digits"),
    IdKind.DIGEST: (r"sha256:[0-9a-f]{64}", 71, "sha256: and 64 lower-case hex digits"),
    IdKind.AUTHORITY: (r"[0-9a-f]{32}", 32, "32 lower-case hex digits"),
    IdKind.UUID: (_HEX_UUID, 36, "a UUID in lower case"),
}
_PATTERNS: Final = {kind: re.compile(form[0]) for kind, form in _FORMS.items()}


def check(kind: IdKind, value: object, path: str | None = None) -> str:
    """Give ``value`` back if it is a well-formed id of ``kind``; ``path`` names its place in a refusal.

    ``.`` and ``..`` are refused wherever an id may become a path segment, which is everywhere but in an
    invocation key. Raises InvalidInput, never echoing the value.
    """
    _, longest, rule = _FORMS[kind]
    # The length is looked at first: a pattern never runs over a megabyte of hostile text.
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= longest
        or _PATTERNS[kind].fullmatch(value) is None
        or (value in (".", "..") and kind is not IdKind.INVOCATION_KEY)
    ):
        raise InvalidInput(
            path or kind.value, f"must be a {kind.value} id: 1 to {longest} characters, {rule}"
        )
    if kind is IdKind.PRINCIPAL and value == SESSION_PRINCIPAL:
        raise InvalidInput(path or kind.value, f"must not be {SESSION_PRINCIPAL}, which is reserved")
    return value


_URI: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+")


def check_uri(value: object, path: str, longest: int = 512) -> str:
    """Give ``value`` back if it is an absolute URI of at most ``longest`` characters. It is never fetched."""
    if not isinstance(value, str) or len(value) > longest or _URI.fullmatch(value) is None:
        raise InvalidInput(path, f"must be an absolute URI of at most {longest} characters")
    return value


def _framed(*parts: bytes) -> bytes:
    return b"".join([len(part).to_bytes(8, "big") + part for part in parts])


def _utf8(text: str, path: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(path, "must be valid Unicode, without lone surrogates") from None


def operation_id(principal_id: str, contract_digest: str, invocation_key: str) -> str:
    """``op`` + 64 hex digits of SHA-256 over the three, each prefixed by its UTF-8 length as unsigned 64-bit
    big-endian (RT-ADM-02, RT-ADM-03). The patterns of the parts are the caller's to check.
    """
    framed = _framed(
        _utf8(principal_id, "principalId"),
        _utf8(contract_digest, "contractDigest"),
        _utf8(invocation_key, "invocationKey"),
    )
    return "op" + hashlib.sha256(framed).hexdigest()


def command_operation_id(authority_id: str, command_id: str) -> str:
    """The operation of a session command: one per authority, whatever its session, profile or sender (DASP-
    CORE-002a).
    """
    return operation_id(SESSION_PRINCIPAL, authority_id, command_id)


class MessageKind(IntEnum):
    """The first byte of a message identity."""

    REQUEST = 1
    CANCEL = 2
    RESULT = 3


def message_id(kind: MessageKind, contract_digest: str, operation: str, branch_id: str, attempt: int) -> str:
    """64 hex digits that name one message of one attempt, equal in every process (RT-OUT-03, RT-OUT-04)."""
    framed = _framed(
        _utf8(contract_digest, "contractDigest"),
        _utf8(operation, "operationId"),
        _utf8(branch_id, "branchId"),
    )
    return hashlib.sha256(bytes([kind]) + framed + attempt.to_bytes(8, "big")).hexdigest()


_DERIVED: Final = uuid.UUID("6d9ff4a1-5c0e-5d3b-9a7c-3f2be1c04e57")


def reservation_id(operation: str) -> uuid.UUID:
    """The id of an operation's key reservation, derived so that no index is needed to find it."""
    return uuid.uuid5(_DERIVED, "reservation:" + operation)


def attempt_id(operation: str) -> uuid.UUID:
    """The attempt id in an operation's fingerprint; one per operation, not per application attempt."""
    return uuid.uuid5(_DERIVED, "attempt:" + operation)


def intent_digest(session_id: str, name: str, canonical_input: bytes) -> bytes:
    """32 raw bytes over all that a retried command must repeat (DASP-CORE-002b)."""
    framed = _framed(b"command", _utf8(session_id, "session_id"), _utf8(name, "name"), canonical_input)
    return hashlib.sha256(framed).digest()


def invocation_digest(interaction_id: str, canonical_input: bytes, canonical_branches: bytes = b"") -> bytes:
    """32 raw bytes over what a retried invocation must repeat beyond its key; ``waitFor`` is no part of it.

    ``canonical_branches`` is the canonical form of an explicit manifest, empty where the audience decides.
    """
    framed = _framed(
        b"invocation", _utf8(interaction_id, "interactionId"), canonical_input, canonical_branches
    )
    return hashlib.sha256(framed).digest()


def safe_integer(value: object, path: str, low: int, high: int = MAX_SAFE) -> int:
    """Give ``value`` back if it is an integer (no boolean) from ``low`` to ``high``, both included."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidInput(path, f"must be an integer from {low} to {high}")
    return value


def safe_add_ms(instant_ms: int, duration_ms: int, path: str = "deadline") -> int:
    """The instant ``duration_ms`` after ``instant_ms``, refused where it leaves the safe range (RT-TIME-08,
    RT-GUARD-09).
    """
    total = instant_ms + duration_ms
    if not 0 <= total <= MAX_SAFE:
        raise InvalidInput(path, "must stay within the safe integer range")
    return total
