"""Reads, waits and retries after a permission was taken away: all are answered as if nothing were there.

Also those that were under way, and those whose answers wait behind others on a connection (DASPX-09).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import httpx
import pytest
import redis

from admission_svc import live
from shared.store.connection import Arg, Connection
from shared.store.wake import Wake
from tests.admission.house import Client, House
from tests.admission.looking import everything, read_reply, told
from tests.admission.slow import slow_connection
from tests.admission.taking_away import WAYS, WHOLLY, apply, rule
from tests.support.polling import wait_until

NEVER_S: Final = 10_000.0
ENOUGH_S: Final = 20
Ask = Callable[[Client, str], Coroutine[Any, Any, httpx.Response]]


def getting(path: str, **headers: str) -> Ask:
    return lambda client, session: client.http.get(f"/v1/sessions/{session}{path}", headers=headers)


def submitting(command_id: str, value: Any = None, **headers: str) -> Ask:
    return lambda client, session: client.submit(session, command_id, value, headers=headers)


def batching(*command_ids: str) -> Ask:
    commands = [{"command_id": c, "name": "note.write", "input": {}} for c in command_ids]
    return lambda client, session: client.http.post(
        f"/v1/sessions/{session}/commands:batch", json={"commands": commands}
    )


READS: Final[dict[str, Ask]] = {
    "view": getting(""),
    "page": getting("/updates"),
    "page after": getting("/updates?after=1&limit=1"),
    "page beyond": getting("/updates?after=99"),
    "page of a client": getting("/updates?client=x"),
    "waiting page": getting("/updates?after=3", prefer="wait=30"),
    "stream": getting("/updates", accept="text/event-stream"),
    "resumed stream": getting("/updates", **{"accept": "text/event-stream", "last-event-id": "1"}),
    "outcome": getting("/commands/settled"),
    "pending": getting("/commands/pending"),
    "waited outcome": getting("/commands/pending", prefer="wait=30"),
    "unknown outcome": getting("/commands/never"),
    "cursor": getting("/cursors/x"),
    "moved cursor": lambda client, session: client.http.put(
        f"/v1/sessions/{session}/cursors/x", json={"cursor": 1}
    ),
}
WRITES: Final[dict[str, Ask]] = {
    "retry": submitting("settled"),
    "pending retry": submitting("pending"),
    "changed retry": submitting("settled", {"other": 1}),
    "first": submitting("new"),
    "waiting retry": submitting("pending", prefer="wait=30"),
    "batch": batching("settled", "new"),
    "close": lambda client, session: client.close(session),
}


async def fill(door: House, client: Client) -> None:
    """A session with a settled command, a pending one and a held cursor; its head is 3."""
    assert (await client.open("s1")).status_code == 201
    for command_id in ("settled", "pending"):
        assert (await client.submit("s1", command_id)).status_code == 201
    await door.work("settled", {"secret": 1}, session_id="s1")
    put = await client.http.put("/v1/sessions/s1/cursors/x", json={"cursor": 2})
    assert put.status_code == 200


@pytest.mark.requirement("DASPX-09", "DASP-CORE-003d")
@pytest.mark.parametrize("way", WHOLLY)
async def test_after_a_revocation_every_request_is_answered_as_for_nothing(
    door: House, alice: Client, raw: redis.Redis, way: str
) -> None:
    await apply(door, rule("alice"))
    await fill(door, alice)
    at_once = {name: ask for name, ask in READS.items() if "wait" not in name and "stream" not in name}
    before = {(await ask(alice, "s1")).status_code for ask in at_once.values()}
    assert before == {200, 400, 404}, "each was answered on its own merits while it was permitted"
    await WHOLLY[way](door, alice)
    stored = everything(raw)
    for name, ask in (READS | WRITES).items():
        there, missing = await ask(alice, "s1"), await ask(alice, "missing")
        assert there.status_code == (401 if way == "revoke" else 404), (name, there.text)
        assert told(there) == told(missing), name
    reopened = await alice.open("s1")
    assert reopened.status_code == (401 if way == "revoke" else 403)
    assert told(reopened) == told(await alice.open("missing"))
    assert everything(raw) == stored


@pytest.mark.requirement("DASPX-09")
@pytest.mark.parametrize("way", ["remove_rule", "deny"])
async def test_reading_alone_can_be_taken_away(door: House, alice: Client, way: str) -> None:
    """What the policy still allows goes on; of what it does not, nothing is there."""
    await apply(door, rule("alice"))
    await fill(door, alice)
    await WAYS[way](door, alice)
    for name, ask in READS.items():
        there, missing = await ask(alice, "s1"), await ask(alice, "missing")
        assert there.status_code == 404, (name, there.text)
        assert told(there) == told(missing), name
    assert (await alice.submit("s1", "new")).status_code == 201


@pytest.mark.requirement("DASP-CORE-003d", "DASPX-09")
async def test_a_caller_that_may_not_submit_any_more_learns_nothing_from_a_retry(
    door: House, alice: Client, raw: redis.Redis
) -> None:
    """It may still read; whether a command was admitted is not what a submission tells it."""
    await apply(door, rule("alice"))
    await fill(door, alice)
    await apply(door, rule("alice", "session.read"))
    stored = everything(raw)
    answers = {name: told(await ask(alice, "s1")) for name, ask in WRITES.items()}
    first = answers["first"]
    assert first[0] == 403
    assert {name: answer == first for name, answer in answers.items()} == dict.fromkeys(WRITES, True)
    assert everything(raw) == stored
    assert (await alice.outcome("s1", "settled")).status_code == 200


WAITS: Final = {
    "page": READS["waiting page"],
    "outcome": READS["waited outcome"],
    "submission": WRITES["waiting retry"],
}


@pytest.mark.requirement("DASPX-09")
@pytest.mark.parametrize("way", WHOLLY)
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("hints", [True, False], ids=["hinted", "unhinted"])
async def test_a_wait_under_way_ends_as_for_nothing(
    door: House, alice: Client, monkeypatch: pytest.MonkeyPatch, hints: bool, wait: str, way: str
) -> None:
    """At once by the hint of the change itself, and without one at the next look."""
    monkeypatch.setattr(live, "RECHECK_S", NEVER_S if hints else 0.05)
    if not hints:
        monkeypatch.setattr(Wake, "_hint", lambda *_: None)
    await apply(door, rule("alice"))
    await fill(door, alice)
    held = asyncio.create_task(WAITS[wait](alice, "s1"))
    await wait_until(lambda: len(door.listening.state.tasks) == 1)
    await wait_until(lambda: door.runtime.wake.subscribed("acme"))
    await WHOLLY[way](door, alice)
    answer = await asyncio.wait_for(held, ENOUGH_S)
    assert answer.status_code == (401 if way == "revoke" else 404)
    assert told(answer) == told(await WAITS[wait](alice, "missing"))


@pytest.mark.requirement("DASPX-09")
async def test_an_answer_that_waits_behind_others_is_made_when_its_turn_comes(
    door: House, alice: Client
) -> None:
    """Requests behind one another on a connection that is not read: what was asked before the revocation is
    answered after it, and so not told.
    """
    await alice.open("s1")
    for i in range(40):
        await alice.submit("s1", f"c{i}")
        await door.work(f"c{i}", {"v": "x" * 30_000}, session_id="s1")
    auth = f"Authorization: Bearer {alice.token}\r\n"
    page = f"GET /v1/sessions/s1/updates HTTP/1.1\r\nHost: door\r\n{auth}"
    requests = f"{page}\r\n{page}Connection: close\r\n\r\n".encode()
    async with slow_connection(door, requests) as client:
        await client.stuck()
        await WHOLLY["revoke"](door, alice)
        first, second = replies(await client.everything())
    assert first[0] == 200
    assert len(first[1]) > 1_000_000, "far more than the connection takes"
    assert second[0] == 401
    assert second[1] == (await alice.page("s1")).content


def replies(raw: bytes) -> list[tuple[int, bytes]]:
    """Status and body of responses that follow each other."""
    found: list[tuple[int, bytes]] = []
    while raw:
        status, headers, rest = read_reply(raw)
        length = int(headers["content-length"])
        found.append((status, rest[:length]))
        raw = rest[length:]
    return found


class Torn:
    """A connection between the commands of whose pipelines other things happen."""

    def __init__(self, inner: Connection, after: int, happens: Callable[[], Awaitable[None]]) -> None:
        self._inner = inner
        self._after = after
        self._happens = happens
        self.torn = False

    async def call(self, *args: Arg) -> Any:
        return await self._inner.call(*args)

    async def pipeline(self, *commands: Sequence[Arg]) -> list[Any]:
        if self.torn or len(commands) <= self._after:
            return await self._inner.pipeline(*commands)
        self.torn = True
        found = await self._inner.pipeline(*commands[: self._after])
        await self._happens()
        return found + await self._inner.pipeline(*commands[self._after :])


@pytest.mark.requirement("DASPX-09")
@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("read", ["page", "outcome"])
async def test_a_revocation_in_the_middle_of_a_reading_hides_what_is_committed_behind_it(
    door: House, alice: Client, monkeypatch: pytest.MonkeyPatch, read: str, after: int
) -> None:
    """The commands of one reading are not one step at the store."""
    await fill(door, alice)
    other = await door.client("alice")

    async def revoke_and_commit() -> None:
        await WHOLLY["revoke"](door, alice)
        assert (await other.submit("s1", "later")).status_code == 201
        await door.work("pending", {"late": 1}, session_id="s1")

    reads = (await door.handle()).reads
    torn = Torn(reads._bulk, after, revoke_and_commit)
    monkeypatch.setattr(reads, "_bulk" if read == "page" else "_connection", torn)
    answer = await READS["page" if read == "page" else "pending"](alice, "s1")
    assert torn.torn
    assert answer.status_code == 401
    assert b"late" not in answer.content


@pytest.mark.requirement("DASPX-09")
async def test_a_cursor_that_moves_on_behind_a_revocation_is_not_told(
    door: House, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two commands of its reading comes first."""
    await fill(door, alice)
    other = await door.client("alice")
    reads = (await door.handle()).reads
    view, cursor = reads.session, reads.cursor

    async def revoke_and_move() -> None:
        await WHOLLY["revoke"](door, alice)
        put = await other.http.put("/v1/sessions/s1/cursors/x", json={"cursor": 3})
        assert put.status_code == 200

    def then_move(read: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def reading(*args: Any) -> Any:
            monkeypatch.setattr(reads, "session", view)
            monkeypatch.setattr(reads, "cursor", cursor)
            found = await read(*args)
            await revoke_and_move()
            return found

        return reading

    monkeypatch.setattr(reads, "session", then_move(view))
    monkeypatch.setattr(reads, "cursor", then_move(cursor))
    answer = await READS["cursor"](alice, "s1")
    assert answer.status_code == 401 or answer.json()["cursor"] == 2
