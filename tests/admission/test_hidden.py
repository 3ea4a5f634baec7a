"""Ids that mean nothing to a caller: missing, deleted and somebody else's ones are answered with the same
bytes on every route that takes one (DASPX-04). Which routes there are is read from the door's own table.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

import httpx
import pytest
import redis

from tests.admission.house import NOTES, Client, House
from tests.admission.looking import everything, told

_SESSION: Final = "/v1/sessions/{session_id}"
_COMMAND: Final = {"command_id": "c1", "name": "note.write", "input": {}}
_OPEN: Final = {"actor_id": "a1", "profile": NOTES}
_STREAM: Final = {"accept": "text/event-stream"}
_WAIT: Final = {"prefer": "wait=30"}
Ask = Callable[[Client, str], Coroutine[Any, Any, httpx.Response]]


def ask(method: str, path: str, **request: Any) -> Ask:
    async def asking(client: Client, session_id: str) -> httpx.Response:
        return await client.http.request(method, f"/v1/sessions/{session_id}{path}", **request)

    return asking


ASKS: Final[dict[tuple[str, str], list[Ask]]] = {
    ("GET", _SESSION): [ask("GET", ""), ask("HEAD", "")],
    ("DELETE", _SESSION): [ask("DELETE", "")],
    ("POST", _SESSION + "/commands"): [
        ask("POST", "/commands", json=_COMMAND),
        ask("POST", "/commands", json={**_COMMAND, "input": {"changed": True}}),
        ask("POST", "/commands", json={**_COMMAND, "command_id": "new"}),
        ask("POST", "/commands", json={**_COMMAND, "name": "note.none"}),
        ask("POST", "/commands", json=_COMMAND, headers=_WAIT),
        ask("POST", "/commands", json=_COMMAND, headers={"idempotency-key": "c1"}),
    ],
    ("POST", _SESSION + "/commands:batch"): [
        ask("POST", "/commands:batch", json={"commands": [_COMMAND, {**_COMMAND, "command_id": "new"}]}),
    ],
    ("GET", _SESSION + "/commands/{command_id}"): [
        ask("GET", "/commands/c1"),
        ask("GET", "/commands/pending"),
        ask("GET", "/commands/pending", headers=_WAIT),
        ask("GET", "/commands/never"),
    ],
    ("GET", _SESSION + "/updates"): [
        ask("GET", "/updates"),
        ask("GET", "/updates?after=2&limit=1"),
        ask("GET", "/updates?after=3"),
        ask("GET", "/updates?after=3", headers=_WAIT),
        ask("GET", "/updates?after=99"),
        ask("GET", "/updates?client=x"),
        ask("GET", "/updates", headers=_STREAM),
        ask("HEAD", "/updates", headers=_STREAM),
        ask("GET", "/updates", headers={**_STREAM, "last-event-id": "1"}),
        ask("GET", "/updates", headers={**_STREAM, "last-event-id": "99"}),
    ],
    ("PUT", _SESSION + "/cursors/{client}"): [
        ask("PUT", "/cursors/x", json={"cursor": 1}),
        ask("PUT", "/cursors/x", json={"cursor": 99}),
        ask("PUT", "/cursors/new", json={"cursor": 1}),
    ],
    ("GET", _SESSION + "/cursors/{client}"): [ask("GET", "/cursors/x"), ask("GET", "/cursors/new")],
    ("PUT", _SESSION): [
        ask("PUT", "", json=_OPEN),
        ask("PUT", "", json={**_OPEN, "actor_id": "other"}),
    ],
}
OPENINGS: Final = ASKS[("PUT", _SESSION)]


async def settle(door: House, client: Client, session_id: str, settled: str, *pending: str) -> None:
    """A session with a settled command, pending ones and a held cursor."""
    assert (await client.open(session_id)).status_code == 201
    for command_id in (settled, *pending):
        assert (await client.submit(session_id, command_id)).status_code == 201
    await door.work(settled, {"secret": 1}, session_id=session_id)
    assert (
        await client.http.put(f"/v1/sessions/{session_id}/cursors/x", json={"cursor": 1})
    ).status_code == 200


async def delete(door: House, client: Client, session_id: str, command_id: str) -> None:
    """Close a session of one settled command for good."""
    await settle(door, client, session_id, command_id)
    await client.close(session_id)
    await door.purge(session_id, command_id)
    assert (await client.close(session_id)).status_code == 204


async def test_every_route_that_takes_a_session_is_asked_here(door: House) -> None:
    routes = {(route.method, route.path) for route in door.door.operations}
    assert {route for route in routes if "{session_id}" in route[1]} == ASKS.keys()


@pytest.mark.requirement("DASPX-04")
@pytest.mark.parametrize(
    ("principal", "role"), [("bob", "caller"), ("alice", "peer:alfa"), ("bob", "peer:alfa")]
)
async def test_a_session_of_somebody_else_is_as_one_that_is_missing_or_deleted(
    door: House, alice: Client, raw: redis.Redis, principal: str, role: str
) -> None:
    await settle(door, alice, "s1", "c1", "pending")
    await delete(door, alice, "deleted", "d1")
    stranger = await door.client(principal, role)
    before = everything(raw)
    for route, asks in ASKS.items():
        for number, asking in enumerate(asks):
            there = told(await asking(stranger, "s1"))
            assert there[0] == (403 if asking in OPENINGS and role != "caller" else 404), (
                route,
                number,
                there,
            )
            assert there == told(await asking(stranger, "deleted")), (route, number)
            if asking not in OPENINGS or role != "caller":
                assert there == told(await asking(stranger, "missing")), (route, number)
    assert everything(raw) == before


@pytest.mark.requirement("DASPX-04")
async def test_a_deleted_session_is_as_a_missing_one_for_its_owner_too(
    door: House, alice: Client, raw: redis.Redis
) -> None:
    await delete(door, alice, "deleted", "c1")
    before = everything(raw)
    for route, asks in ASKS.items():
        if route == ("DELETE", _SESSION):
            continue
        for number, asking in enumerate(asks):
            there = told(await asking(alice, "deleted"))
            assert there[0] == 404, (route, number, there)
            if asking not in OPENINGS:
                assert there == told(await asking(alice, "missing")), (route, number)
    assert everything(raw) == before


@pytest.mark.requirement("DASPX-04")
async def test_a_command_that_is_not_of_this_session_is_as_one_that_never_was(
    door: House, alice: Client, bob: Client
) -> None:
    """Whether it is pending, settled or deleted, in another session of the caller or in somebody else's."""
    await settle(door, alice, "s1", "c1", "pending")
    await settle(door, alice, "s2", "own-settled", "own-pending")
    await settle(door, bob, "s3", "settled", "theirs")
    await delete(door, alice, "s4", "deleted")
    for headers in ({}, _WAIT):
        never = told(await alice.http.get("/v1/sessions/s1/commands/never", headers=headers))
        assert never[0] == 404
        for command_id in ("own-settled", "own-pending", "settled", "theirs", "deleted"):
            path = f"/v1/sessions/s1/commands/{command_id}"
            assert told(await alice.http.get(path, headers=headers)) == never, command_id
