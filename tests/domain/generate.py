"""Random JSON bodies for differential tests: mostly valid, rich in what readers and writers get wrong."""

from __future__ import annotations

import struct
from random import Random
from typing import Final

NUMBERS: Final = (
    "0", "-0", "-0.0", "0e5", "0.0e-3", "1", "-1", "1.0", "1e0", "1E+0", "10e-1", "3.0", "30e-1",
    "0.003e3", "0.5", "9007199254740991", "-9007199254740991", "9007199254740992", "9007199254740993",
    "9007199254740991.0", "9007199254740992.0", "9007199254740993.0", "9.0071992547409911e15",
    "9007199254740991.5", "4503599627370496.5", "9223372036854775807", "9223372036854775808",
    "18446744073709551615", "18446744073709551616", "1e15", "1e16", "123456789012345678901234567890",
    "1e20", "1e21", "1E+21", "1e22", "1e23", "123e20", "999999999999999999999e0", "0.000001", "1e-6",
    "0.0000015", "9.999e-6", "0.00001", "1e-5", "1e-7", "1.5e-7", "5e-324", "2e-324", "1e-400",
    "1.7976931348623157e308", "1.7976931348623159e308", "1e308", "1E400", "-1e400", "1e99999", "1e-99999",
    "1.00000000000000001", "0.1", "-2.5", "333333333.33333329", "1.0000000000000002", "1e+2",
    "100000000000000000000",
)  # fmt: skip
ESCAPES: Final = (
    r"\"", r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t", r"\u0000", r"\u000f", r"\u001F", r"\u003a",
    r"\u003A", r"\u003D", r"\u0061", r"\u00e9", r"\u2028", r"\ue000", r"\uFFFD", r"\ud83d\ude00",
    r"\uDBFF\uDFFF", r"\\u003a",
)  # fmt: skip
PIECES: Final = (
    "a", "b", "key", ":", "::", ",", "{", "}", "[", "]", " ", "1.5", "1.5,", "e-7}", "1e-7", "e+21]",
    "-5,", "\u007f", "é", "e\u0301", "\u2028", "\ue000", "\uffff", "\ufb33", "\ufeff", "\U0001f600",
    "\U00010000", "\U0010ffff", "0", "Å",
)  # fmt: skip
BROKEN: Final = (r"\ud800", r"\ude00\ud83d", r"\uD83Dx", "\x01", r"\x", r"\u12g4", "\t")
SPACES: Final = ("", "", "", "", " ", "\n", "\t", "\r\n ")


def number(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.5:
        return str(rng.randrange(-1000, 1000))
    if draw < 0.8:
        return rng.choice(NUMBERS)
    if draw < 0.9:
        value = struct.unpack("<d", rng.getrandbits(64).to_bytes(8, "little"))[0]
        return repr(value) if value - value == 0 else "1"
    return f"{rng.randrange(-99, 99)}.{rng.randrange(1000)}{rng.choice('eE')}{rng.randrange(-25, 25)}"


def text(rng: Random, broken: float) -> str:
    parts = rng.choices(PIECES, k=rng.randrange(4))
    if rng.random() < 0.15:
        parts.append(rng.choice(ESCAPES))
    if rng.random() < broken:
        parts.append(rng.choice(BROKEN))
    return '"' + "".join(parts) + '"'


def value(rng: Random, depth: int, broken: float, scalars: float = 0.5) -> str:
    draw = rng.random()
    if depth == 0 or draw < scalars:
        scalar = rng.random()
        if scalar < 0.4:
            return number(rng)
        return text(rng, broken) if scalar < 0.8 else rng.choice(("true", "false", "null"))
    space = rng.choice(SPACES)
    size = rng.choice((0, 1, 2, 3, 4, 6))
    if rng.random() < 0.4:
        items = ("," + space).join(value(rng, depth - 1, broken) for _ in range(size))
        return "[" + space + items + space + "]"
    members = ("," + space).join(
        f"{text(rng, broken)}{space}:{value(rng, depth - 1, broken)}" for _ in range(size)
    )
    return "{" + members + space + "}"


def body(rng: Random) -> bytes:
    """One body; about one in eight is damaged, in its strings or by a changed, lost or added byte."""
    draw = rng.random()
    made = value(rng, rng.randrange(1, 5), 0.1 if draw < 0.06 else 0.0, scalars=0.05).encode()
    if draw > 0.94 and made:
        at = rng.randrange(len(made))
        cut = rng.choice((0, 1))
        made = (
            made[:at]
            + rng.choice((b"", b'"', b",", b"\xff", b"\xed\xa0\x80", b"0", b"}", b"\\"))
            + made[at + cut :]
        )
    return made
