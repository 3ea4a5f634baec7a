"""What several tests of the domain share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.domain.canonical import INVOCATION, SESSION, Document, Rules, parse
from shared.domain.errors import InvalidInput

DATA = Path(__file__).parent / "data"
BUNDLES = Path(__file__).parents[2] / "settlement_svc" / "examples" / "bundles"
VECTORS: dict[str, Any] = json.loads((DATA / "vectors.json").read_text())

BOTH = pytest.mark.parametrize("rules", [SESSION, INVOCATION], ids=["session", "invocation"])


def written(text: str, rules: Rules = INVOCATION) -> bytes:
    """The canonical form of a body."""
    return parse(text.encode(), rules).canonical()


def refusal(body: bytes, rules: Rules = SESSION, **options: Any) -> InvalidInput:
    """The refusal of a body; fails where it is accepted or something else is raised."""
    with pytest.raises(InvalidInput) as caught:
        parse(body, rules, **options)
    return caught.value


def document(text: str, rules: Rules = SESSION) -> Document:
    return parse(text.encode(), rules)


def alike(left: object, right: object) -> bool:
    """Equality that tells 1 from 1.0 and True."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(alike(left[name], right[name]) for name in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(alike, left, right))
    return left == right
