"""decide.apply(): what becomes of an operation, from evidence alone. Pure: no I/O, no clock, no randomness.

The instant it is given is a hint for choosing; the guard and assertions of the returned change are the
authority.
"""

from __future__ import annotations

from shared.domain.decide.change import Assertion, BranchChange, Change
from shared.domain.decide.command import Event, Rights, Terms, apply, right_to_assign

__all__ = ["Assertion", "BranchChange", "Change", "Event", "Rights", "Terms", "apply", "right_to_assign"]
