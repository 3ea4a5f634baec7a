"""The external ledger: what workers were asked to do and what they did, on disk before anybody hears of it.

It is the judge of every fault test, so it knows nothing of the store: one line per event, written with
O_APPEND and synced before the effect counts as done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["called", "effect"]


class Entry(msgspec.Struct, frozen=True, rename="camel"):
    """One event. ``command`` is the id that the client put into the input, so that nothing derived is
    trusted.
    """

    kind: Kind
    command: str
    interaction: str
    operation_id: str
    attempt: int
    lease: str
    effect_key: str


_decoder = msgspec.json.Decoder(Entry)


class Ledger:
    """One file; any number of writers and readers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(self, entry: Entry) -> None:
        """Returns once the line is on disk."""
        os.write(self._file, msgspec.json.encode(entry) + b"\n")
        os.fdatasync(self._file)

    def read(self) -> list[Entry]:
        """Every event so far, in the order in which they were written."""
        return [_decoder.decode(line) for line in self.path.read_bytes().splitlines()]

    def of(self, kind: Kind, command: str | None = None) -> list[Entry]:
        """The events of one kind, of one command where it is named."""
        return [e for e in self.read() if e.kind == kind and command in (None, e.command)]

    def close(self) -> None:
        os.close(self._file)


def granted_twice(entries: Iterable[Entry]) -> list[str]:
    """Operations that one lease, or one lease's fence, was used for more than once."""
    seen: set[tuple[str, str]] = set()
    twice = []
    for entry in entries:
        if entry.kind == "called":
            pair = entry.operation_id, entry.lease
            if pair in seen:
                twice.append(f"{entry.command} under {entry.lease}")
            seen.add(pair)
    return twice
