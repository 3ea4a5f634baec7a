"""The contracts of the fault tests: one serial profile with a view state, one concurrent one without.

Each has one command per kind of effects. Leases are short, so that what a dead worker left is taken over
within a test; attempts are many, so that faults and not budgets decide how work ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from shared.domain.canonical import canonical
from shared.domain.contract import Contract, parse_bundle

PEER: Final = "fault-worker"
EFFECTS: Final = {"safe": "none", "keyed": "idempotent", "pay": "unsafe"}
"""Interaction, which is also the command's name behind ``fault.``, and its effects."""


@dataclass(frozen=True)
class Profile:
    """A session profile by its identity."""

    id: str
    version: str = "1"


SERIAL: Final = Profile("urn:example:fault:serial")
CONCURRENT: Final = Profile("urn:example:fault:concurrent")


def _closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


def _interaction(effects: str, lease_ms: int, timeout_ms: int) -> dict[str, Any]:
    integer = {"type": "integer"}
    return {
        "input": _closed(id={"type": "string"}, amount=integer, refuse={"type": "boolean"}),
        "result": _closed(amount=integer),
        "audience": {"peers": [PEER]},
        "delivery": "one-eligible",
        "completion": {"mode": "first-success"},
        "timeoutMs": timeout_ms,
        "lease": {
            "leaseMs": lease_ms,
            "renewMs": lease_ms * 3 // 10,
            "claimTimeoutMs": lease_ms,
            "maxClaims": 16,
        },
        "retry": {"maxAttempts": 16, "backoffMs": 20},
        "effects": effects,
    }


def contract(profile: Profile, lease_ms: int, timeout_ms: int) -> Contract:
    """The contract behind one of the profiles. Durations in ms."""
    serial = profile is SERIAL
    session: dict[str, Any] = {
        "id": profile.id,
        "profileVersion": profile.version,
        "execution": "serial" if serial else "concurrent",
        "onUncertain": "continue",
        "commands": {f"fault.{name}": name for name in EFFECTS},
        "updates": {"fault.added": _closed(id={"type": "string"}, value={"type": "integer"})},
    }
    if serial:
        session |= {"state": _closed(value={"type": "integer"}), "initial": {"value": 0}}
    bundle: dict[str, Any] = {
        "contract": "fault.serial" if serial else "fault.concurrent",
        "version": "1.0.0",
        "interactions": {
            name: _interaction(effects, lease_ms, timeout_ms) for name, effects in EFFECTS.items()
        },
        "session": session,
    }
    return parse_bundle(canonical(bundle))
