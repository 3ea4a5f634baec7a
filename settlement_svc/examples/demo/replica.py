"""A client's own copy of a counter: a cursor and a value, moved only by updates that it has checked.

Everything is checked before anything is applied, and what does not fit stops the copy instead of being
skipped: a later update that reads well proves nothing about the one before it (DASP-CORE-011d).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from settlement_svc.examples.demo.promises import Event, expect

_ENVELOPE: Final = {"specversion": "1.0", "type": "dasp.v1.update", "datacontenttype": "application/json"}
_DATA: Final = {"session_id", "sequence", "kind", "command_id", "payload"}
_FAILED: Final = {"failed", "uncertain"}
_MAX_SAFE: Final = 2**53 - 1


class Replica:
    """The counter of ``session`` at the host whose updates name ``source``; starts at a cursor with its
    value.
    """

    def __init__(self, session: str, source: str, cursor: int = 0, value: int = 0) -> None:
        self._session = session
        self._source = source
        self.cursor = cursor
        self.value = value

    @property
    def state(self) -> dict[str, int]:
        """As the host's view has it."""
        return {"value": self.value}

    def apply(self, event: Event) -> None:
        """Take one update, or raise Broken and stay as it was."""
        value = self._checked(event)
        self.cursor += 1
        self.value = value

    def _checked(self, event: Event) -> int:
        """The value after this update."""
        for name, value in _ENVELOPE.items():
            expect(event.get(name) == value, f"an update has {name} {value}", event)
        expect(event.get("source") == self._source, "an update names the authority it is of", event)
        expect(bool(event.get("id")), "an update has an identity", event)
        data = event.get("data")
        expect(isinstance(data, dict) and set(data) == _DATA, "an update has its closed shape", event)
        assert isinstance(data, dict)
        expect(data["session_id"] == self._session, "an update is of the session that was asked for", event)
        expect(data["sequence"] == self.cursor + 1, "the next update follows the last one applied", event)
        return self._payload(data["kind"], data["payload"], event)

    def _payload(self, kind: object, payload: Mapping[str, Any], event: Event) -> int:
        if kind == "command.accepted":
            expect(payload == {"name": "counter.add"}, "only commands of the profile are accepted", event)
            return self.value
        if kind == "application":
            expect(set(payload) == {"name", "data"}, "an application update has its closed shape", event)
            expect(payload["name"] == "counter.changed", "only updates of the profile are made", event)
            value = payload["data"].get("value")
            expect(
                set(payload["data"]) == {"value"} and _counts(value), "a counter's value is an integer", event
            )
            return int(value)
        expect(kind == "command.outcome", "an update is of a known kind", event)
        expect(set(payload) == {"status", "output", "error"}, "an outcome has its closed shape", event)
        status, error = payload["status"], payload["error"]
        if status == "completed":
            expect(
                payload["output"] == self.state and error is None, "an outcome tells the value it left", event
            )
        else:
            expect(
                status in _FAILED and isinstance(error, dict), "an outcome that is no success says why", event
            )
        return self.value


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_SAFE
