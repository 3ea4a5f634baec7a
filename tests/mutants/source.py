"""The mutants of a script: each drops or bends one check, or leaves out one write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

import lua
from tests.mutants.lexer import COMPARISONS, Token, closing, split, tokens, unwrapped

FOLDER: Final = Path(lua.__file__).parent
PARTS: Final = (
    *(f"{name}.lua" for name in lua.NAMES),
    *sorted(f"include/{path.name}" for path in (FOLDER / "include").glob("*.lua") if path.stem != "time"),
)
"""Every file but the clock, which the tests replace."""
SOURCES: Final = {part: (FOLDER / part).read_text() for part in PARTS}
"""Read once: a file that is edited meanwhile does not move the places of its mutants."""
_INSTANTS: Final = {
    "now",
    "until_ms",
    "UNTIL",
    "deadline",
    "last",
    "not_before",
    "not_after",
    "MAX_SAFE",
    "wake_at",
}
_NEIGHBOUR: Final = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_EFFECTS: Final = {"wake", "committed", "store", "put"}
_WRITES: Final = {"HSET", "HDEL", "ZADD", "ZREM", "XADD", "XACK", "XDEL", "DEL"}
_READS: Final = {"XLEN", "ZCARD", "XREAD"}


class Mutant(msgspec.Struct, frozen=True):
    """One change of one file: the text from ``start`` to ``end`` becomes ``instead``. ``section`` is the verb
    that the line belongs to.
    """

    part: str
    line: int
    kind: str
    text: str
    start: int
    end: int
    instead: str
    section: str

    @property
    def name(self) -> str:
        return f"{self.part}:{self.line} {self.kind}: {' '.join(self.text.split())}"

    def applied(self, source: str) -> str:
        return source[: self.start] + self.instead + source[self.end :]


def mutants(part: str, source: str | None = None) -> list[Mutant]:
    """Every mutant of one file, in the order of its lines, none twice."""
    text = SOURCES[part] if source is None else source
    found = tokens(text)
    every = [*_conditions(found), *_values(found), *_boundaries(found), *_effects(found)]
    named = {
        (where[0].start, where[-1].end, instead): Mutant(
            part,
            where[0].line,
            kind,
            text[where[0].start : where[-1].end],
            where[0].start,
            where[-1].end,
            instead,
            _section(text, where[0].start),
        )
        for kind, where, instead in every
    }
    return sorted(named.values(), key=lambda mutant: (mutant.line, mutant.start, mutant.end))


Change = tuple[str, Sequence[Token], str]


def _conditions(found: Sequence[Token]) -> Iterator[Change]:
    """if and elseif: the whole check dropped, and each of its operands."""
    for n, token in enumerate(found):
        if token.text in ("if", "elseif"):
            end = next(i for i in range(n, len(found)) if found[i].text == "then")
            condition = found[n + 1 : end]
            yield "dropped", condition, "false"
            yield from _operands(condition)


def _operands(condition: Sequence[Token]) -> Iterator[Change]:
    condition = unwrapped(condition)
    for word, neutral in (("or", "false"), ("and", "true")):
        operands = split(condition, word)
        if len(operands) > 1:
            for operand in operands:
                yield f"without one operand of {word}", operand, neutral
                yield from _operands(operand)
            return


def _values(found: Sequence[Token]) -> Iterator[Change]:
    """What is computed with and/or outside of conditions: each comparison always true, and always false."""
    for n, token in enumerate(found):
        if token.text not in ("=", "return") or n + 1 >= len(found):
            continue
        for operand in _leaves(_expression(found, n + 1)):
            if any(t.text in COMPARISONS for t in operand) or operand[0].text == "not":
                yield "always true", operand, "true"
                yield "always false", operand, "false"


_STATEMENTS: Final = {
    "local",
    "if",
    "for",
    "while",
    "return",
    "end",
    "else",
    "elseif",
    "function",
    "then",
    "do",
}


def _expression(found: Sequence[Token], start: int) -> Sequence[Token]:
    """The tokens from ``start`` to the end of the statement: the next line that does not go on with it."""
    n = start
    while n < len(found) and found[n].text not in _STATEMENTS:
        if found[n].text in ("(", "{", "["):
            n = closing(found, n)
        n += 1
        if n < len(found) and found[n].line > found[n - 1].line and found[n].text not in ("and", "or"):
            break
    return found[start:n]


def _leaves(part: Sequence[Token]) -> Iterator[Sequence[Token]]:
    for value in split(part, ","):
        inner = unwrapped(value)
        for word in ("or", "and"):
            operands = split(inner, word)
            if len(operands) > 1:
                for operand in operands:
                    yield from _one(operand)
                break


def _one(operand: Sequence[Token]) -> Iterator[Sequence[Token]]:
    inner = unwrapped(operand)
    if any(len(split(inner, word)) > 1 for word in ("or", "and")):
        yield from _leaves(inner)
    elif operand:
        yield operand


def _boundaries(found: Sequence[Token]) -> Iterator[Change]:
    """Comparisons of instants, off by one."""
    for n, token in enumerate(found):
        near = found[max(0, n - 6) : n + 7]
        instant = any(t.text in _INSTANTS and t.line == token.line for t in near)
        if token.text in _NEIGHBOUR and instant:
            yield "off by one", [token], _NEIGHBOUR[token.text]


def _effects(found: Sequence[Token]) -> Iterator[Change]:
    """Statements that write, wake, or read a key for its type: left out."""
    for n, token in enumerate(found):
        starts_line = n > 0 and found[n - 1].line < token.line
        if not starts_line:
            continue
        if token.text == "redis" and found[n + 4].text.strip("'") in _WRITES | _READS:
            yield "left out", found[n : closing(found, n + 3) + 1], ""
        elif token.text in _EFFECTS and found[n + 1].text == "(":
            yield "left out", found[n : closing(found, n + 1) + 1], ""


def _section(text: str, at: int) -> str:
    verbs = re.findall(r"^if verb == '(\w+)'", text[:at], re.MULTILINE)
    return verbs[-1] if verbs else ""
