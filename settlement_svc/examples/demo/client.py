"""The demonstration's clients: plain HTTP, and one that never reads its reply."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

import httpx

from settlement_svc.examples.demo.promises import Answer, Broken, Event, page

PATIENCE_S: Final = 30.0
_WAIT_S: Final = 15
_UNAVAILABLE: Final = 503
T = TypeVar("T")


def until(look: Callable[[], T | None], promise: str, within_s: float = PATIENCE_S) -> T:
    """What ``look`` finds, looked for again and again; Broken with the promise where it finds nothing."""
    give_up = time.monotonic() + within_s
    while True:
        late = time.monotonic() >= give_up
        found = look()
        if found is not None:
            return found
        if late:
            raise Broken(f"{promise} (not within {within_s:.0f} s)")
        time.sleep(0.01)


class Client:
    """One caller of the door. What is unavailable for a moment is repeated, the same request as before."""

    def __init__(self, base: str, token: str) -> None:
        self._base = base
        self._token = token
        self._http = httpx.Client(
            base_url=base,
            headers={"Authorization": f"Bearer {token}"},
            timeout=_WAIT_S + 10.0,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def open(self, session: str, actor: str, profile: str) -> Answer:
        """Open or reopen a session."""
        body = {"actor_id": actor, "profile": {"id": profile, "version": "1"}}
        return self._send("PUT", f"/v1/sessions/{session}", body)

    def submit(self, session: str, command_id: str, name: str, data: dict[str, Any]) -> Answer:
        """Submit a command and give its receipt."""
        body = {"command_id": command_id, "name": name, "input": data}
        return self._send("POST", f"/v1/sessions/{session}/commands", body)

    def outcome(self, session: str, command_id: str) -> Answer:
        """A command's outcome, waited for until it has settled."""
        path = f"/v1/sessions/{session}/commands/{command_id}"

        def settled() -> Answer | None:
            answer = self._send("GET", path, headers={"Prefer": f"wait={_WAIT_S}"})
            return answer if answer.body.get("state") != "pending" else None

        return until(settled, f"command {command_id} settles", 2 * PATIENCE_S)

    def view(self, session: str) -> Answer:
        """A session's state."""
        return self._send("GET", f"/v1/sessions/{session}")

    def source(self) -> str:
        """What every update of this host names as its source."""
        return str(self._send("GET", "/v1/authority").body["source"])

    def replay(self, session: str, after: int, limit: int = 4) -> list[Event]:
        """Every update after a cursor, read in small pages."""
        events: list[Event] = []
        while True:
            answer = self._send("GET", f"/v1/sessions/{session}/updates?after={after}&limit={limit}")
            found, after, head = page(answer)
            events += found
            if after >= head:
                return events

    def submit_unread(self, session: str, command_id: str, name: str, data: dict[str, Any]) -> socket.socket:
        """Send a command on a socket of its own and hand the socket over, with the reply unread in it."""
        body = json.dumps({"command_id": command_id, "name": name, "input": data}).encode()
        place = urlsplit(self._base)
        head = (
            f"POST /v1/sessions/{session}/commands HTTP/1.1\r\nHost: {place.netloc}\r\n"
            f"Authorization: Bearer {self._token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        wire = socket.create_connection((place.hostname or "", place.port or 80), timeout=PATIENCE_S)
        # Closing resets the connection: whatever has arrived is thrown away unread.
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wire.sendall(head.encode() + body)
        return wire

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        def answered() -> Answer | None:
            try:
                reply = self._http.request(method, path, json=body, headers=headers)
            except httpx.TransportError:
                return None
            if reply.status_code == _UNAVAILABLE:
                return None
            return Answer(reply.status_code, reply.json(), reply.headers.get("idempotent-replayed") == "true")

        return until(answered, f"{method} {path} is answered")
