"""The exact, slow reading of a JSON body, which decides and explains; ``canonical`` has the fast one.

The standard library's grammar is used with a hook at every place where it is lenient. A hook cannot know
where in the document it is, so it leaves a mark, and one walk over the result finds the first mark together
with its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import rfc8785

from shared.domain.errors import InputFault, InvalidInput
from shared.domain.numbers import NOT_FINITE, BadNumber

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""A parsed JSON value."""

_SHOWN: Final = 64
_BOM: Final = b"\xef\xbb\xbf"
SURROGATE: Final = "must be valid Unicode, without lone surrogates"


class _Mark:
    __slots__ = ("rule",)

    def __init__(self, rule: str) -> None:
        self.rule = rule


def shown(text: str, longest: int = _SHOWN) -> str:
    """``text`` shortened and made printable, for a description that quotes it but must not grow with it."""
    short = text if len(text) <= longest else text[:longest] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def pointer(parts: Iterable[str | int], root: str) -> str:
    """A JSON Pointer (RFC 6901) below ``root``, itself a pointer or the name of the whole document."""
    steps = [shown(str(part)).replace("~", "~0").replace("/", "~1") for part in parts]
    if len(steps) > 20:
        steps[10:-10] = ["…"]
    below = "".join("/" + step for step in steps)
    return (root if root.startswith("/") else "") + below if below else root


def _number(read: Callable[[str], int | float]) -> Callable[[str], object]:
    def hook(token: str) -> object:
        try:
            return read(token)
        except BadNumber as bad:
            return _Mark(bad.rule)

    return hook


def _members(pairs: list[tuple[str, object]]) -> object:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return _Mark(f'has the member "{shown(key)}" twice')
        seen.add(key)
    raise AssertionError("unreachable: fewer members than pairs means a repeated key")


def decoder(read_number: Callable[[str], int | float]) -> json.JSONDecoder:
    """A decoder for ``read``; number tokens go to ``read_number``, which raises BadNumber."""
    return json.JSONDecoder(
        object_pairs_hook=_members,
        parse_int=_number(read_number),
        parse_float=_number(read_number),
        parse_constant=lambda _: _Mark(NOT_FINITE),
    )


def read(body: bytes, exact: json.JSONDecoder, max_depth: int, root: str) -> Json:
    """The value of a body, or InvalidInput with the place and the rule it breaks; never another exception."""
    if body.startswith(_BOM):
        raise InvalidInput(root, "must not begin with a byte order mark")
    try:
        text = body.decode("utf-8", "strict")
    except UnicodeDecodeError as bad:
        raise InvalidInput(root, f"must be UTF-8; byte {bad.start} is not") from None
    try:
        value = exact.decode(text)
    except json.JSONDecodeError as bad:
        raise InvalidInput(root, f"is not JSON at line {bad.lineno} column {bad.colno}: {bad.msg}") from None
    except RecursionError:
        raise _too_deep(root, max_depth) from None
    return verify(value, max_depth, root)


def _too_deep(path: str, max_depth: int) -> InvalidInput:
    return InvalidInput(path, f"must not be nested deeper than {max_depth}", code=InputFault.TOO_LARGE)


def verify(value: object, max_depth: int, root: str) -> Json:
    """Give ``value`` back if it is plain JSON of valid Unicode within the depth; raises InvalidInput at the
    first fault.
    """
    _verify(value, [], max_depth, root)
    return value  # type: ignore[return-value]  # that it is Json is what the walk has just shown


def _verify(value: object, parts: list[str | int], max_depth: int, root: str) -> None:
    if isinstance(value, _Mark):
        raise InvalidInput(pointer(parts, root), value.rule)
    if isinstance(value, str):
        if not _encodable(value):
            raise InvalidInput(pointer(parts, root), SURROGATE)
        return
    children: Iterable[tuple[str | int, object]]
    if isinstance(value, dict):
        children = value.items()
        for key in value:
            if not _encodable(key):
                raise InvalidInput(pointer(parts, root), f"has a member name that {SURROGATE}")
    elif isinstance(value, list):
        children = enumerate(value)
    else:
        return
    if len(parts) >= max_depth:
        raise _too_deep(root, max_depth)
    for step, child in children:
        parts.append(step)
        _verify(child, parts, max_depth, root)
        parts.pop()


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def canonical_form(value: Json, root: str = "value") -> bytes:
    """The RFC 8785 form by the reference library, whose several exceptions become InvalidInput."""
    try:
        return rfc8785.dumps(value)
    except RecursionError:
        raise InvalidInput(root, "is nested too deeply", code=InputFault.TOO_LARGE) from None
    except (ValueError, TypeError) as bad:
        raise InvalidInput(root, f"has no canonical form: {shown(str(bad))}") from None
