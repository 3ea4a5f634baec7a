"""Closed shapes: the members an object must and may have, and values out of a fixed set.

Every refusal names the place as a JSON Pointer below ``path`` and lists what would have been right.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from shared.domain.errors import InvalidInput
from shared.domain.ids import safe_integer
from shared.domain.strict import Json, pointer, shown

_E = TypeVar("_E", bound=StrEnum)


def at(path: str, *parts: str | int) -> str:
    """The place of a part below ``path``."""
    return pointer(parts, path)


def obj(value: object, path: str) -> dict[str, Json]:
    """Give ``value`` back if it is an object."""
    if not isinstance(value, dict):
        raise InvalidInput(path, "must be an object")
    return value


def members(
    value: object, path: str, required: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, Json]:
    """Give ``value`` back if it is an object with all of ``required`` and nothing beyond ``optional``."""
    found = obj(value, path)
    must, may = tuple(required), tuple(optional)
    for name in must:
        if name not in found:
            raise InvalidInput(path, f'lacks the member "{name}"')
    for name in found:
        if name not in must and name not in may:
            raise InvalidInput(at(path, name), f"is not known here; known are {', '.join((*must, *may))}")
    return found


def choice(value: object, path: str, kind: type[_E]) -> _E:
    """The member of ``kind`` that ``value`` spells."""
    for member in kind:
        if member.value == value:
            return member
    raise InvalidInput(path, f"must be one of {', '.join(kind)}")


def text(value: object, path: str, longest: int, hint: str = "") -> str:
    """Give ``value`` back if it is printable text of 1 to ``longest`` characters."""
    if not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable():
        raise InvalidInput(path, f"must be printable text of 1 to {longest} characters{hint}")
    return value


def integer(found: dict[str, Json], name: str, path: str, bounds: tuple[int, int], default: int) -> int:
    """The optional integer member ``name`` within ``bounds``, both included."""
    if name not in found:
        return default
    return safe_integer(found[name], at(path, name), *bounds)


def array(value: object, path: str, low: int, high: int) -> list[Json]:
    """Give ``value`` back if it is an array of ``low`` to ``high`` items."""
    if not isinstance(value, list) or not low <= len(value) <= high:
        raise InvalidInput(path, f"must be an array of {low} to {high} items")
    return value


def quoted(value: object) -> str:
    """A name that a refusal may repeat."""
    return f'"{shown(str(value))}"'
