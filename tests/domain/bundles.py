"""Bundles for tests: the least that is complete, with whatever a test wants otherwise."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from shared.domain.contract import Contract, parse_bundle
from shared.domain.errors import InvalidInput

LEAST: dict[str, Any] = {
    "input": {"type": "object"},
    "result": {"type": "object"},
    "audience": {"peers": ["alfa", "bravo", "charlie"]},
    "delivery": "one-eligible",
    "completion": {"mode": "first-success"},
    "effects": "none",
}
OBJECT = {"type": "object"}
SESSION: dict[str, Any] = {
    "id": "urn:example:dasp:demo",
    "profileVersion": "1",
    "execution": "serial",
    "commands": {"demo.work": "work"},
    "updates": {"demo.done": OBJECT},
    "state": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    "initial": {"n": 0},
}
MISSING = object()


def bundle(**interaction: Any) -> dict[str, Any]:
    return {
        "contract": "demo.work",
        "version": "1.0.0",
        "interactions": {"work": {**copy.deepcopy(LEAST), **interaction}},
    }


def with_session(**section: Any) -> dict[str, Any]:
    made = {**copy.deepcopy(SESSION), **section}
    return {**bundle(), "session": {k: v for k, v in made.items() if v is not MISSING}}


def read(value: Any) -> Contract:
    return parse_bundle(json.dumps(value).encode())


def refused(value: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        read(value)
    assert len(str(caught.value)) < 1500
    return caught.value
