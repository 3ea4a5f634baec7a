"""Strict I-JSON in, RFC 8785 out: the reading of bodies and the bytes that digests are taken over
(RT-CAN-01..06).

``parse`` takes one of three ways and gives the same answer on each:

1. orjson reads and writes the document; guards over the bytes prove that it lost nothing and that its output
is the canonical form. They look for what it is known to get wrong: repeated keys, numbers other than safe
integers, keys that sort differently as UTF-8 and as UTF-16. 2. Where the output may hold a float, msgspec
reads once more and hands every such token to the exact rules. 3. Where any guard fires, ``strict`` decides,
and the reference library writes.

The adapter-v1 form of RESERVATIONS (sorted keys, no whitespace) is this same form: for a document accepted
here RFC 8785 only adds how numbers and escapes are written and that keys sort by UTF-16 units, on which the
older text is silent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from json import JSONDecoder
from typing import Any, Final, NoReturn

import msgspec
import orjson

from shared.domain import strict
from shared.domain.errors import InputFault, InvalidInput
from shared.domain.numbers import BadNumber, invocation_number, session_number
from shared.domain.strict import Json, pointer

MAX_MESSAGE_BYTES: Final = 1_048_576
MAX_FACT_BYTES: Final = 65_536
"""What one saved update may take as a compact CloudEvent."""

ADAPTER_V1: Final = "adapter-v1-canonical-json"

_WRITE: Final = orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER
_WRITE_PLAIN: Final = (
    _WRITE
    | orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)
# How orjson ends the floats it writes: a fraction, or an exponent. Each pattern begins with one literal byte,
# which the search jumps to; what stands before an exponent's sign is looked at afterwards. Text inside a
# string may look alike, which only costs a second reading.
_FRACTION: Final = re.compile(rb"\.[0-9]+(?:e[+-]?[0-9]+)?(?:[,\]}]|\Z)")
_GROWING: Final = re.compile(rb"\+(?<=e\+)[0-9]+(?:[,\]}]|\Z)")
_SHRINKING: Final = re.compile(rb"-(?<=e-)[0-9]+(?:[,\]}]|\Z)")
_WHOLE: Final = object()


class _NeedsExact(Exception):
    """A number that orjson would write differently, or that breaks a rule."""


@dataclass(frozen=True, slots=True)
class PayloadLimits:
    """Bounds of one application payload: containers on a path (root = 1), entries per container, UTF-8 bytes
    of a string or key (DASPX-06)."""

    nesting: int
    entries: int
    string_bytes: int


@dataclass(frozen=True, slots=True)
class Rules:
    """What a body may hold. ``max_depth`` bounds the whole body, ``payload`` what ``Document.check_payload``
    accepts.
    """

    max_depth: int
    number: Callable[[str], int | float]
    payload: PayloadLimits | None
    exact: JSONDecoder = field(init=False, repr=False, compare=False)
    by_token: msgspec.json.Decoder[Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact", strict.decoder(self.number))
        object.__setattr__(self, "by_token", msgspec.json.Decoder(float_hook=_float_hook(self.number)))


def _float_hook(read: Callable[[str], int | float]) -> Callable[[str], int | float]:
    def hook(token: str) -> int | float:
        try:
            value = read(token)
        except BadNumber:
            raise _NeedsExact from None
        if isinstance(value, float) and not _written_alike(abs(value)):
            raise _NeedsExact
        return value

    return hook


def _written_alike(size: float) -> bool:
    """Whether orjson writes a non-integral or large float of this magnitude as RFC 8785 does."""
    if size.is_integer():
        return size >= 1e21
    return not 1e-6 <= size < 1e-5


INVOCATION: Final = Rules(max_depth=64, number=invocation_number, payload=None)
SESSION: Final = Rules(
    max_depth=32,
    number=session_number,
    payload=PayloadLimits(nesting=16, entries=1024, string_bytes=65_536),
)


class Document:
    """A parsed body: its ``value`` and the canonical bytes of it and of the values inside it.

    ``value`` must not be changed: the proofs that make ``canonical`` cheap hold for what was read.
    """

    __slots__ = ("_alike", "_whole", "rules", "value")

    def __init__(self, value: Json, rules: Rules, whole: bytes, *, alike: bool) -> None:
        self.value = value
        self.rules = rules
        self._whole = whole
        self._alike = alike

    def canonical(self, sub: object = _WHOLE) -> bytes:
        """The RFC 8785 bytes of the document, or of ``sub``, a value inside it (``None`` is JSON null)."""
        if sub is _WHOLE:
            return self._whole
        if self._alike:
            return orjson.dumps(sub, option=_WRITE)
        return strict.canonical_form(sub)  # type: ignore[arg-type]  # part of self.value

    def check_payload(self, sub: object, path: str, written: bytes | None = None) -> bytes:
        """Give the canonical bytes of ``sub``, found at ``path``, if it is a payload under the rules of this
        document.

        Under ``SESSION`` it must be an object within the limits of a payload, counted from itself. Raises
        InvalidInput. ``written`` saves writing it where the caller has cut it out of the whole.
        """
        if written is None:
            written = self.canonical(sub)
        limits = self.rules.payload
        if limits is not None:
            if not isinstance(sub, dict):
                raise InvalidInput(path, "must be an object")
            if not _within(written, limits) and not _fits(sub, written, limits):
                _explain(sub, path, limits)
        return written


def _within(written: bytes, limits: PayloadLimits) -> bool:
    """A proof by counting: what canonical bytes cannot hold, the payload does not hold. A failed proof says
    nothing.
    """
    return (
        len(written) <= limits.string_bytes
        and written.count(b",") < limits.entries
        and written.count(b"{") + written.count(b"[") <= limits.nesting
    )


def _fits(payload: dict[str, Json], written: bytes, limits: PayloadLimits) -> bool:
    """The same by walking, level by level; strings only where one could be long enough to matter."""
    level: list[dict[str, Json] | list[Json]] = [payload]
    for _ in range(limits.nesting):
        if max(map(len, level)) > limits.entries:
            return False
        if len(written) > limits.string_bytes and any(
            _longer(text, limits.string_bytes) for container in level for text in _texts(container)
        ):
            return False
        level = _containers_in(level)
        if not level:
            return True
    return False


def _containers_in(level: list[dict[str, Json] | list[Json]]) -> list[dict[str, Json] | list[Json]]:
    return [
        child
        for container in level
        for child in (container.values() if isinstance(container, dict) else container)
        if isinstance(child, (dict, list))
    ]


def _texts(container: dict[str, Json] | list[Json]) -> Iterator[str]:
    if isinstance(container, dict):
        yield from container
    for child in container.values() if isinstance(container, dict) else container:
        if isinstance(child, str):
            yield child


def _explain(payload: dict[str, Json], path: str, limits: PayloadLimits) -> NoReturn:
    """Name the first place that breaks a limit; called for payloads that do not fit."""
    level: list[tuple[Json, tuple[str | int, ...]]] = [(payload, ())]
    for _ in range(limits.nesting):
        below: list[tuple[Json, tuple[str | int, ...]]] = []
        for value, parts in level:
            children = _entries(value, parts, path, limits)
            below.extend(
                (child, (*parts, step)) for step, child in children if isinstance(child, (dict, list))
            )
        level = below
    raise _over(level[0][1], path, f"must not be nested deeper than {limits.nesting}")


def _entries(
    value: Json, parts: tuple[str | int, ...], path: str, limits: PayloadLimits
) -> list[tuple[str | int, Json]]:
    """The entries of a container whose own count, keys and strings are within the limits."""
    entries: list[tuple[str | int, Json]]
    if isinstance(value, dict):
        entries = list(value.items())
        if any(_longer(key, limits.string_bytes) for key in value):
            raise _over(parts, path, f"has a member name of more than {limits.string_bytes} bytes")
    elif isinstance(value, list):
        entries = list(enumerate(value))
    else:
        raise AssertionError("only containers are walked")
    if len(entries) > limits.entries:
        raise _over(parts, path, f"must not have more than {limits.entries} entries")
    for step, child in entries:
        if isinstance(child, str) and _longer(child, limits.string_bytes):
            raise _over((*parts, step), path, f"must not exceed {limits.string_bytes} bytes")
    return entries


def _over(parts: tuple[str | int, ...], path: str, rule: str) -> InvalidInput:
    return InvalidInput(pointer(parts, path), rule, code=InputFault.TOO_LARGE)


def _longer(text: str, limit: int) -> bool:
    return len(text) * 4 > limit and len(text.encode()) > limit


def parse(body: bytes, rules: Rules, *, max_bytes: int = MAX_MESSAGE_BYTES, root: str = "body") -> Document:
    """Read one body. ``root`` names it in refusals, with JSON Pointers below it.

    Raises InvalidInput and nothing else: too large (``too_large`` is set), not UTF-8, not JSON, repeated
    keys, lone surrogates, numbers outside the rules, nested too deeply.
    """
    if len(body) > max_bytes:
        raise InvalidInput(root, f"must not exceed {max_bytes} bytes", code=InputFault.TOO_LARGE)
    document = quick(body, rules)
    if document is not None:
        return document
    value = strict.read(body, rules.exact, rules.max_depth, root)
    return Document(value, rules, strict.canonical_form(value, root), alike=False)


def quick(body: bytes, rules: Rules) -> Document | None:
    """The document where its bytes prove that nothing was lost; ``None`` where that is not sure.

    ``parse`` is the way in; this stands alone for the tests that compare the two ways.
    """
    try:
        value = orjson.loads(body)
        whole = orjson.dumps(value, option=_WRITE)
        if _may_hold_float(whole):
            value = rules.by_token.decode(body)
            whole = orjson.dumps(value, option=_WRITE)
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError, _NeedsExact):
        return None
    # Every member writes one colon and a string keeps its own: a document that lost a repeated key has fewer
    # colons than the body, unless an escape made one.
    if whole.count(b":") != body.count(b":") or (b"\\" in body and b"\\u003" in body):
        return None
    if not whole.isascii() and _may_sort_apart(whole):
        return None
    if whole.count(b"{") + whole.count(b"[") > rules.max_depth and _deeper(value, rules.max_depth):
        return None
    return Document(value, rules, whole, alike=True)


def _may_hold_float(written: bytes) -> bool:
    return (
        _FRACTION.search(written) is not None
        or _SHRINKING.search(written) is not None
        or _GROWING.search(written) is not None
    )


def _may_sort_apart(written: bytes) -> bool:
    """UTF-8 and UTF-16 order differ only between characters beyond the BMP (F0..F4) and U+E000..U+FFFF (EE,
    EF).
    """
    return (b"\xee" in written or b"\xef" in written) and any(
        lead in written for lead in (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")
    )


def _deeper(value: Json, depth: int) -> bool:
    level: list[dict[str, Json] | list[Json]] = [value] if isinstance(value, (dict, list)) else []
    for _ in range(depth):
        level = _containers_in(level)
    return bool(level)


def canonical(value: Json, root: str = "value") -> bytes:
    """The RFC 8785 bytes of a plain JSON value that we made: dict, list, str, int, float, bool and None only.

    Raises InvalidInput where it has none (unsafe integers, NaN, lone surrogates, other types).
    """
    try:
        written = orjson.dumps(value, option=_WRITE_PLAIN)
    except TypeError:
        return strict.canonical_form(value, root)
    # orjson writes NaN and infinity as null.
    if _may_hold_float(written) or _may_sort_apart(written) or (b"null" in written and _holds_float(value)):
        return strict.canonical_form(value, root)
    return written


def _holds_float(value: Json) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_float, value.values()))
    if isinstance(value, list):
        return any(map(_holds_float, value))
    return isinstance(value, float)


def input_digest(canonical_input: bytes) -> str:
    """The adapter-v1 input digest: 64 hex digits of SHA-256 over the canonical input (KEYX-50)."""
    return hashlib.sha256(canonical_input).hexdigest()
