"""What one look at a due item can come to, and how long to wait for another after a lost race."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Final

ROUNDS: Final = 12
"""How often a decision that others overtook is made again before the item is left to the next pass."""


class Verdict(StrEnum):
    """What one look at an operation came to."""

    SETTLED = "settled"
    ADVANCED = "advanced"
    NOTHING = "nothing"
    """Nothing is due, or somebody else did it."""
    CONTENDED = "contended"
    """Others were faster every time; the next pass looks again."""


class Undecidable(Exception):
    """What is due cannot be decided and no repetition now will change that; it is parked with this text."""


def back_off_s(round_number: int) -> float:
    """A random pause that grows with every lost race, from 1 ms to 64 ms."""
    return random.uniform(0.5, 1.0) * 0.001 * (2 << min(round_number, 5))  # noqa: S311
