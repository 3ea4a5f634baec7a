"""What one look at a due item can come to, and how long to wait for another after one that was in vain."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Final

ROUNDS: Final = 12
"""How often a decision that others overtook is made again before the item is left to the next pass."""
_FIRST_REST_S: Final = 0.1
_LONGEST_REST_S: Final = 2.0


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


class Resting:
    """Items of one tenant whose last look came to nothing: each rests, longer every time that goes on, so
    that one which nobody can help costs next to nothing. Instants are the event loop's time.
    """

    def __init__(self) -> None:
        self._rests: dict[str, tuple[float, float]] = {}

    def rest(self, member: str, now: float) -> None:
        """A look was in vain."""
        _, pause = self._rests.get(member, (0.0, _FIRST_REST_S))
        self._rests[member] = now + pause * random.uniform(0.5, 1.0), min(2 * pause, _LONGEST_REST_S)  # noqa: S311

    def end(self, member: str) -> None:
        """A look was not."""
        self._rests.pop(member, None)

    def ends(self, now: float) -> dict[str, float]:
        """Who rests now, until when. What rested long ago and was not looked at again is forgotten."""
        self._rests = {m: rest for m, rest in self._rests.items() if rest[0] > now - _LONGEST_REST_S}
        return {member: until for member, (until, _) in self._rests.items() if until > now}
