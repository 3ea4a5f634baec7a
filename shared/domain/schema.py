"""Schemas and predicates of contracts: JSON Schema 2020-12, and typed equality behind a JSON Pointer.

A schema is compiled once, when its bundle is read. It can reach nothing: references outside of it do not
compile, and patterns run in linear time, so that no input can make one slow (look-around and back-references
do not compile either). ``format`` is an annotation, as the draft has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import jsonschema_rs

from shared.domain.errors import InvalidInput
from shared.domain.shape import at, members, obj
from shared.domain.strict import Json, shown

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_POINTER: Final = re.compile(r"(/([^~/]|~[01])*)*")
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_RULE_LENGTH: Final = 200
_VALUE: Final = "the value"


class Validator:
    """One compiled schema; immutable and safe to share."""

    __slots__ = ("_compiled", "schema")

    def __init__(self, schema: Json, path: str) -> None:
        """Compile ``schema``, found at ``path`` of a bundle. Raises InvalidInput if that is not possible."""
        accepted = schema if isinstance(schema, bool) else obj(schema, path)
        if isinstance(accepted, dict) and accepted.get("$schema", DIALECT) != DIALECT:
            raise InvalidInput(at(path, "$schema"), f"must be {DIALECT}")
        self.schema = accepted
        try:
            self._compiled = jsonschema_rs.Draft202012Validator(
                accepted,
                offline=True,
                validate_formats=False,
                pattern_options=jsonschema_rs.RegexOptions(),
                mask=_VALUE,
            )
        except jsonschema_rs.ValidationError as bad:
            raise InvalidInput(at(path, *bad.instance_path), _uncompilable(bad)) from None
        except (ValueError, jsonschema_rs.ReferencingError) as bad:
            raise InvalidInput(path, f"is not a schema: {shown(str(bad), _RULE_LENGTH)}") from None

    def check(self, value: Json, path: str) -> None:
        """Raise InvalidInput with the place and the keyword of the first fault; the value itself is never
        quoted.
        """
        if self._compiled.is_valid(value):
            return
        fault = next(iter(self._compiled.iter_errors(value)))
        rule = (
            "is not allowed by the schema"
            if fault.kind.name == "falseSchema"
            else shown(fault.message, _RULE_LENGTH)
        )
        raise InvalidInput(at(path, *fault.instance_path), rule)

    def allows(self, value: Json) -> bool:
        """Whether ``value`` satisfies the schema."""
        return self._compiled.is_valid(value)


def _uncompilable(bad: jsonschema_rs.ValidationError) -> str:
    if "not present in a registry" in bad.message:
        return "refers to something outside of itself; references must stay inside the schema"
    return f"is not a schema: {shown(bad.message, _RULE_LENGTH)}"


def check_pointer(value: object, path: str) -> str:
    """Give ``value`` back if it is a JSON Pointer (RFC 6901) of at most 1,024 characters."""
    if not isinstance(value, str) or len(value) > 1024 or _POINTER.fullmatch(value) is None:
        raise InvalidInput(path, "must be a JSON Pointer such as /verdict")
    return value


ABSENT: Final = object()


def resolve(value: Json, pointer: str) -> object:
    """What a JSON Pointer finds in ``value``, or ``ABSENT``."""
    found: object = value
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name, ABSENT)
        elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return ABSENT
    return found


def same(left: object, right: object) -> bool:
    """Typed equality of JSON values: ``"1"``, ``1`` and ``true`` all differ, ``1`` and ``1.0`` do not (RT-
    BR-04).
    """
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left is not ABSENT and right is not ABSENT and left == right


@dataclass(frozen=True, slots=True)
class Predicate:
    """Holds where the pointer finds a value equal to ``equals``; an absent one equals nothing, nor null."""

    pointer: str
    equals: Json

    @classmethod
    def read(cls, value: Json, path: str) -> Predicate:
        """The predicate in ``{pointer, equals}``."""
        found = members(value, path, ("pointer", "equals"))
        return cls(check_pointer(found["pointer"], at(path, "pointer")), found["equals"])

    def holds(self, value: Json) -> bool:
        """Whether it holds of a result."""
        return same(resolve(value, self.pointer), self.equals)
