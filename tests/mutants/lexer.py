"""Just enough of Lua to find its conditions: tokens with their places, strings and comments kept apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

_TOKEN: Final = re.compile(
    r"""(?P<comment>--[^\n]*)
      | (?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")
      | (?P<number>\d+(?:\.\d+)?)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<operator>==|~=|<=|>=|\.\.\.|\.\.|[-+*/%^\#<>=(){}\[\];:,.])
      | (?P<space>\s+)""",
    re.VERBOSE,
)
OPENING: Final = {"(", "{", "["}
CLOSING: Final = {")", "}", "]"}
COMPARISONS: Final = {"==", "~=", "<", ">", "<=", ">="}


class Token(msgspec.Struct, frozen=True):
    """One token of a script and where it stands."""

    text: str
    start: int
    end: int
    line: int


def tokens(source: str) -> list[Token]:
    """The tokens of a script without comments and space. Raises ValueError for what is none."""
    found: list[Token] = []
    at, line = (source.index("\n") + 1, 2) if source.startswith("#!") else (0, 1)
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            raise ValueError(f"line {line}: no token: {source[at : at + 20]!r}")
        if match.lastgroup not in ("comment", "space"):
            found.append(Token(match.group(), match.start(), match.end(), line))
        line += match.group().count("\n")
        at = match.end()
    return found


def split(part: Sequence[Token], word: str) -> list[Sequence[Token]]:
    """The operands between ``word`` outside of brackets and function bodies."""
    operands, depth, start = [], 0, 0
    for n, token in enumerate(part):
        depth += (token.text in OPENING) - (token.text in CLOSING)
        if depth == 0 and token.text == word:
            operands.append(part[start:n])
            start = n + 1
    operands.append(part[start:])
    return operands


def closing(part: Sequence[Token], start: int) -> int:
    """Index of the bracket that closes the one at ``start``."""
    depth = 0
    for n in range(start, len(part)):
        depth += (part[n].text in OPENING) - (part[n].text in CLOSING)
        if depth == 0:
            return n
    raise ValueError(f"line {part[start].line}: a bracket is never closed")


def unwrapped(part: Sequence[Token]) -> Sequence[Token]:
    """Without brackets, or ``not`` and brackets, around the whole."""
    while part:
        start = 1 if part[0].text == "not" else 0
        if start >= len(part) or part[start].text != "(" or closing(part, start) != len(part) - 1:
            break
        part = part[start + 1 : -1]
    return part
