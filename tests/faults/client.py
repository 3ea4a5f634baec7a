"""The client of the fault tests, which knows nothing but what it sent and what it was told.

Every command and every reply goes to a journal before the next step, so that what was promised to a client
can be held against what is there afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec

from tests.faults.contracts import Profile
from tests.support.polling import wait_until

ACTOR: Final = "actor-1"
_AGAIN_S: Final = 0.05
_PAGE: Final = 100


class Command(msgspec.Struct, frozen=True):
    """One command. ``kind`` is an interaction of the fault contracts."""

    id: str
    session: str
    kind: str
    amount: int = 1
    refuse: bool = False

    def body(self, amount: int | None = None) -> dict[str, Any]:
        """The request body; another ``amount`` makes it a changed retry."""
        given = {"id": self.id, "amount": self.amount if amount is None else amount, "refuse": self.refuse}
        return {"command_id": self.id, "name": f"fault.{self.kind}", "input": given}


class Reply(msgspec.Struct, frozen=True):
    """What came back for one attempt at a command. ``status`` 0 means that nothing did."""

    command: str
    status: int
    disposition: str = ""
    sequence: int | None = None
    error: str = ""
    retry_after: str = ""

    @property
    def acknowledged(self) -> bool:
        """Whether it says that the command is admitted."""
        return self.disposition in ("accepted", "duplicate")


class Outcome(msgspec.Struct, frozen=True):
    """A settled command as its outcome is read: sequence and outcome document."""

    sequence: int
    outcome: dict[str, Any]

    @property
    def status(self) -> str:
        return str(self.outcome.get("status", ""))


class Journal:
    """What was sent and what was answered, in order, also as a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self.commands: dict[str, Command] = {}
        self.replies: list[Reply] = []

    def sent(self, command: Command) -> None:
        self.commands[command.id] = command
        self._write(command)

    def answered(self, reply: Reply) -> None:
        self.replies.append(reply)
        self._write(reply)

    def acknowledgements(self) -> dict[str, set[int | None]]:
        """By command, the sequences that its acknowledgements named."""
        told: dict[str, set[int | None]] = {}
        for reply in self.replies:
            if reply.acknowledged:
                told.setdefault(reply.command, set()).add(reply.sequence)
        return told

    def _write(self, line: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Client:
    """A caller. Several doors are used in turn, as by a load balancer. ``timeout_s`` bounds each request."""

    def __init__(self, token: str, doors: Sequence[str], journal: Journal, timeout_s: float = 15.0) -> None:
        self.doors = list(doors)
        self.journal = journal
        self._next_door = 0
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def _url(self, path: str) -> str:
        self._next_door += 1
        return self.doors[self._next_door % len(self.doors)] + path

    async def open(self, session: str, profile: Profile) -> None:
        """Open a session; an equal one that is there already will do."""
        body = {"actor_id": ACTOR, "profile": {"id": profile.id, "version": profile.version}}
        answer = await self._http.put(self._url(f"/v1/sessions/{session}"), json=body)
        assert answer.status_code in (200, 201), answer.text

    async def once(
        self, command: Command, amount: int | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One attempt; whatever comes back, or nothing, is a reply."""
        if amount is None:
            self.journal.sent(command)
        url = self._url(f"/v1/sessions/{command.session}/commands")
        try:
            answer = await self._http.post(url, json=command.body(amount), headers=headers)
        except httpx.TransportError:
            reply = Reply(command.id, 0)
        else:
            reply = _reply(command, answer)
        if amount is None:
            self.journal.answered(reply)
        return reply

    async def submit(self, command: Command, within_s: float = 40.0) -> Reply:
        """Repeat a command unchanged until it is answered for good."""
        give_up = time.monotonic() + within_s
        while True:
            reply = await self.once(command)
            if reply.status not in (0, 429, 503):
                return reply
            if time.monotonic() >= give_up:
                raise AssertionError(f"{command} was not answered within {within_s} s, lastly {reply}")
            await asyncio.sleep(_AGAIN_S)

    async def outcome(self, command: Command, wait_s: int = 0) -> Outcome | None:
        """A command's outcome; None while it is pending or cannot be read."""
        headers = {"prefer": f"wait={wait_s}"} if wait_s else {}
        url = self._url(f"/v1/sessions/{command.session}/commands/{command.id}")
        try:
            answer = await self._http.get(url, headers=headers)
        except httpx.TransportError:
            return None
        if answer.status_code == 503:
            return None
        assert answer.status_code == 200, f"outcome of {command}: {answer.status_code} {answer.text}"
        found = answer.json()
        return None if found["state"] == "pending" else Outcome(found["sequence"], found["outcome"])

    async def settled(self, command: Command, within_s: float = 40.0) -> Outcome:
        """Wait for a command's outcome."""
        give_up = time.monotonic() + within_s
        while True:
            outcome = await self.outcome(command, wait_s=5)
            if outcome is not None:
                return outcome
            if time.monotonic() >= give_up:
                raise AssertionError(f"{command} has no outcome after {within_s} s")
            await asyncio.sleep(_AGAIN_S)

    async def view(self, session: str) -> dict[str, Any]:
        """A session's view."""
        answer = await self._http.get(self._url(f"/v1/sessions/{session}"))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def updates(self, session: str, after: int = 0) -> list[dict[str, Any]]:
        """The data of every update after a cursor, page by page; asked again while that cannot be served."""
        found: list[dict[str, Any]] = []
        while True:
            url = self._url(f"/v1/sessions/{session}/updates?after={after}&limit={_PAGE}")
            answer = await wait_until(partial(self._served, url))
            assert answer is not None
            assert answer.status_code == 200, answer.text
            page = answer.json()
            found += [event["data"] for event in page["events"]]
            after = page["next"]
            if after >= page["head"]:
                return found

    async def _served(self, url: str) -> httpx.Response | None:
        answer = await self._http.get(url)
        return None if answer.status_code == 503 else answer

    async def status(self, path: str) -> int:
        """The status that a GET of any path answers."""
        return (await self._http.get(self._url(path))).status_code


def _reply(command: Command, answer: httpx.Response) -> Reply:
    body = answer.json()
    error = body.get("error") or {}
    return Reply(
        command.id,
        answer.status_code,
        body.get("disposition", ""),
        body.get("admission_sequence"),
        error.get("code", "") or body.get("kind", ""),
        answer.headers.get("retry-after", ""),
    )
