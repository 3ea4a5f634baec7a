"""Saved facts as the CloudEvents that clients see (DASP.md section 1).

A fact is stored without its envelope. The envelope is derived from where the fact stands, so every replay,
from any process and after any restart, gives the same identity and the same bytes (DASP-CORE-009c). Stored
payloads are compact JSON and go in as they are: decoding them again could only change them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from shared.domain.ids import MAX_SAFE
from shared.domain.records import FactKind

MEDIA_TYPE: Final = "application/cloudevents+json"
UPDATE_TYPE: Final = "dasp.v1.update"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS: Final[dict[FactKind, str]] = {
    "accepted": "command.accepted",
    "application": "application",
    "outcome": "command.outcome",
}


def source(tenant: str, authority: str) -> str:
    """The one ``source`` of everything an authority says, whichever of its processes says it."""
    return f"urn:lockgate:{tenant}:{authority}"


def rfc3339(at_ms: int) -> str:
    """An instant in epoch ms as RFC 3339 in UTC, with milliseconds."""
    return (_EPOCH + timedelta(milliseconds=at_ms)).strftime("%Y-%m-%dT%H:%M:%S.") + f"{at_ms % 1000:03d}Z"


class Renderer:
    """Writes the updates of one session. Ids were checked when they were admitted and need no escaping."""

    def __init__(self, tenant: str, authority: str, session_id: str) -> None:
        self._head = f'{{"specversion":"1.0","id":"{session_id}/'
        self._middle = (
            f'","source":"{source(tenant, authority)}","type":"{UPDATE_TYPE}",'
            '"datacontenttype":"application/json","time":"'
        )
        self._data = f'","data":{{"session_id":"{session_id}","sequence":'

    def update(self, sequence: int, kind: FactKind, command_id: str, payload: bytes, at_ms: int) -> bytes:
        """One ``dasp.v1.update`` event as compact JSON. ``command_id`` "" stands for none (null)."""
        command = f'"{command_id}"' if command_id else "null"
        head = (
            f"{self._head}{sequence}{self._middle}{rfc3339(at_ms)}{self._data}{sequence},"
            f'"kind":"{_KINDS[kind]}","command_id":{command},"payload":'
        )
        return head.encode() + payload + b"}}"

    def overhead(self, kind: FactKind, command_id: str) -> int:
        """Bytes that an update takes beyond its payload at the largest sequence.

        What a carrier accepts must leave room for it under the limit of a saved update (DASPX-06).
        """
        return len(self.update(MAX_SAFE, kind, command_id, b"", 0))
