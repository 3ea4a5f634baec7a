"""Numbers by their exact tokens: which literals mean an integer, which are refused, and what value is kept.

A float reader cannot decide this: ``1.00000000000000001`` and ``9007199254740993.0`` are already rounded when
it has read them. So a token is taken apart as decimal digits and an exponent, and only then made a value.

- Session payloads hold safe integers only, in any spelling: ``3.0`` and ``30e-1`` are 3, ``0.5`` is refused.
- Invocation input also holds fractions, as IEEE doubles. An integer literal outside ±(2^53 - 1) is refused.
  So is a literal with fraction or exponent whose value is integral, unless RFC 8785 writes exactly that value
  (``9007199254740993.0`` is refused, ``1e21`` is kept), and one beyond the range of a double.
"""

from __future__ import annotations

import math
import re
from typing import Final

from shared.domain.ids import MAX_SAFE

_TOKEN: Final = re.compile(r"(-?)([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?)([0-9]+))?")
_SAFE_DIGITS: Final = len(str(MAX_SAFE))
_ENDLESS: Final = 10**9

FRACTION: Final = "must be an integer; send fractions as text"
UNSAFE: Final = f"must be an integer from -{MAX_SAFE} to {MAX_SAFE}"
INEXACT: Final = "cannot be kept exactly; send it as text"
INFINITE: Final = "exceeds the range of a double"
NOT_FINITE: Final = "NaN and Infinity are not JSON"


class BadNumber(Exception):
    """A number token that breaks a rule; ``rule`` says which."""

    rule: str

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule


def _decompose(token: str) -> tuple[bool, str, int]:
    """The token's value as sign, digits without outer zeros, and power of ten; zero has no digits."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise BadNumber("is not a JSON number")
    sign, whole, fraction, exponent_sign, exponent = match.groups(default="")
    digits = (whole + fraction).lstrip("0")
    kept = digits.rstrip("0")
    if not kept:
        return False, "", 0
    power = _exponent(exponent)
    if exponent_sign == "-":
        power = -power
    return sign == "-", kept, power - len(fraction) + len(digits) - len(kept)


def _exponent(digits: str) -> int:
    significant = digits.lstrip("0")
    # No body is long enough for its digits to outweigh a longer exponent, so its true size does not matter.
    return int(significant or "0") if len(significant) < 10 else _ENDLESS


def _literal(token: str) -> int:
    """The value of an integer literal; its length is looked at first, since reading a long one is slow."""
    if len(token.lstrip("-")) > _SAFE_DIGITS or abs(value := int(token)) > MAX_SAFE:
        raise BadNumber(UNSAFE)
    return value


def session_number(token: str) -> int:
    """The safe integer a token of a session payload means; raises BadNumber for all others (DASPX-05)."""
    if token.lstrip("-").isdigit():
        return _literal(token)
    rounded = float(token)
    if not rounded.is_integer() and not math.isinf(rounded):
        raise BadNumber(FRACTION)
    if abs(rounded) > MAX_SAFE:
        raise BadNumber(UNSAFE)
    # Only a value this close to an integer can be one; whether it is, its rounded form no longer tells.
    if _decompose(token)[2] < 0:
        raise BadNumber(FRACTION)
    return int(rounded)


def invocation_number(token: str) -> int | float:
    """The value a token of invocation input means: an ``int`` where it is a safe integer, else a finite
    ``float``.

    Raises BadNumber (RT-CAN-03, RT-CAN-04). Minus zero is 0, as RFC 8785 writes it.
    """
    if token.lstrip("-").isdigit():
        return _literal(token)
    rounded = float(token)
    if math.isinf(rounded):
        raise BadNumber(INFINITE)
    if not rounded.is_integer():
        return rounded
    if abs(rounded) <= MAX_SAFE:
        return int(rounded)
    # Python's repr and RFC 8785 both write the shortest digits that read back as the same double.
    exact = _decompose(token)
    if exact[2] >= 0 and exact != _decompose(repr(rounded)):
        raise BadNumber(INEXACT)
    return rounded
