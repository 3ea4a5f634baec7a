"""The Redis scripts: one file per atomic change, shared parts under ``include/``, expanded and pinned at
import.

A script is the unit of atomicity; nothing outside this folder decides what belongs together in one change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

INCLUDE = "--@include "
NAMES = ("admit", "epoch", "lease", "lookup", "registry", "replace", "session", "session_open")


@dataclass(frozen=True)
class Script:
    """One expanded script: its source bytes and the SHA-1 (hex) by which the server knows it."""

    name: str
    source: bytes
    sha: str


def _read(path: str) -> str:
    return resources.files(__name__).joinpath(path).read_text(encoding="utf-8")


def expand(name: str, replacements: Mapping[str, str] | None = None) -> str:
    """Expand the includes of ``name``, each once, in the order of their first mention.

    ``replacements`` puts other text in the place of named includes; tests use it to move the store's clock at
    its source. Raises ValueError for an include that includes itself.
    """
    done: set[str] = set()

    def include(part: str, open_parts: tuple[str, ...]) -> str:
        if part in open_parts:
            raise ValueError(f"include cycle: {' -> '.join((*open_parts, part))}")
        if part in done:
            return ""
        done.add(part)
        text = (replacements or {}).get(part) or _read(f"include/{part}.lua")
        return resolve(text, (*open_parts, part))

    def resolve(text: str, open_parts: tuple[str, ...]) -> str:
        lines = []
        for line in text.splitlines():
            if line.startswith(INCLUDE):
                lines.append(include(line.removeprefix(INCLUDE).strip(), open_parts).rstrip("\n"))
            else:
                lines.append(line)
        return "\n".join(lines) + "\n"

    return resolve(_read(f"{name}.lua"), ())


def pin(name: str, source: str) -> Script:
    """Give expanded text its name and SHA-1."""
    raw = source.encode()
    return Script(name, raw, hashlib.sha1(raw, usedforsecurity=False).hexdigest())


@cache
def load(name: str) -> Script:
    """The expanded script ``name`` as shipped."""
    return pin(name, expand(name))
