"""Every body route, driven from the route table: nothing is read before the caller is known, nothing that is
read takes long, and whatever it is, it gets an answer of the table and stores nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from admission_svc.openapi import Operation
from shared.domain.canonical import MAX_MESSAGE_BYTES
from tests.admission.house import NOTES, Client, House
from tests.admission.looking import everything
from tests.hostile.door import HOST, connected
from tests.hostile.feed import fed, harmful

SLOWEST_S = 5.0
KNOWN = {400, 403, 404, 409, 413, 415, 422}
VALID: dict[str, Any] = {
    "SessionOpen": {"actor_id": "a1", "profile": NOTES},
    "CommandSubmit": {"command_id": "c1", "name": "note.write", "input": {"a": [1, {"é": None}]}},
    "BatchSubmit": {"commands": [{"command_id": "c1", "name": "note.write", "input": {"a": 1}}]},
    "CursorPut": {"cursor": 0},
}
"""One good body of each kind; of another kind any object."""


def path_of(operation: Operation) -> str:
    """The path with ids in it; its session is there."""
    path = operation.path
    for name in ("session_id", "command_id", "client"):
        path = path.replace(f"{{{name}}}", "s1")
    assert "{" not in path, f"give {path} its ids"
    return path


def with_body(house: House) -> list[Operation]:
    """The rows of the route table that take a body."""
    found = [operation for operation in house.door.operations if operation.body is not None]
    assert {operation.method for operation in found} == {"PUT", "POST"}
    return found


def good(operation: Operation) -> bytes:
    body = operation.body
    assert body is not None
    return json.dumps(VALID.get(body.__name__, {"rules": []})).encode()


@pytest.fixture
async def alice(arranged: House) -> Client:
    """A caller who is an operator too, so that every route gets as far as its body, with a session."""
    made = await arranged.client("alice", "caller", "operator")
    assert (await made.open("s1")).status_code == 201
    return made


async def test_no_body_is_read_before_the_caller_is_known(arranged: House, alice: Client) -> None:
    """The answer is there while the body is not, and no more of it is wanted."""
    stranger = alice.token[:-4] + "AAAA"
    for operation in with_body(arranged):
        for token in ("", stranger):
            auth = f"authorization: Bearer {token}\r\n".encode() if token else b""
            head = f"{operation.method} {path_of(operation)} HTTP/1.1\r\n".encode() + HOST + auth
            async with connected(arranged.port) as held:
                await held.send(
                    head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % MAX_MESSAGE_BYTES
                )
                status, headers, _ = await held.reply()
                assert (status, headers["connection"]) == (401, "close"), operation.path
                assert await held.rest() == b""


@pytest.mark.requirement("RT-HTTP-09", "RT-HTTP-14")
@pytest.mark.case(81, 82, 85)
@pytest.mark.parametrize("name", harmful())
async def test_a_harmful_body_is_refused_at_once_by_every_route(
    arranged: House, alice: Client, raw: redis.Redis, name: str
) -> None:
    body = harmful()[name]
    before = everything(raw)
    for operation in with_body(arranged):
        started = time.process_time()
        response = await alice.http.request(
            operation.method,
            path_of(operation),
            content=body,
            headers={"content-type": "application/json"},
        )
        told = (operation.path, response.status_code, response.text[:500])
        assert response.status_code in KNOWN, told
        assert time.process_time() - started < SLOWEST_S, told
        assert set(response.json()) == {"kind", "description"}, told
        assert len(response.content) < 2_000, told
        assert all(byte >= 32 for byte in response.content), told
        assert response.text.isprintable(), told
    assert everything(raw) == before


async def test_reading_a_costly_body_holds_up_nobody(arranged: House, alice: Client) -> None:
    """Names whose order differs between encodings are the slowest to read."""
    members = b'{"\xf0\x9f\x98\x80":1,"\xee\x80\x80":2},' * 40_000
    body = b'{"command_id":"c1","name":"note.write","input":{"a":[' + members + b"0]}}"
    assert len(body) < MAX_MESSAGE_BYTES
    costly = asyncio.create_task(alice.raw("s1", body))
    served = 0
    while not costly.done():
        assert (await alice.http.get("/healthz")).status_code == 200
        served += 1
    assert (await costly).status_code == 413
    assert served > 5


@settings(
    max_examples=120,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def _bodies(seen: list[bytes], base: bytes, data: st.DataObject) -> None:
    seen.append(data.draw(fed(base)))


@pytest.mark.timeout(180)
async def test_whatever_the_body_the_answer_is_one_of_the_table(arranged: House, alice: Client) -> None:
    """Each route gets the same bodies in every run: bytes, good bodies that were damaged, and other JSON."""
    for operation in with_body(arranged):
        bodies: list[bytes] = []
        _bodies(bodies, good(operation))
        declared = {int(status) for status in described(arranged, operation)}
        for body in bodies:
            started = time.process_time()
            response = await alice.http.request(
                operation.method,
                path_of(operation),
                content=body,
                headers={"content-type": "application/json"},
            )
            told = (operation.path, body, response.status_code, response.text)
            assert response.status_code in declared - {503}, told
            assert time.process_time() - started < SLOWEST_S, told
            assert response.status_code < 300 or {"kind", "disposition"} & response.json().keys(), told


def described(house: House, operation: Operation) -> dict[str, Any]:
    """The answers that the description gives an operation."""
    document = json.loads(house.door._description)
    found: dict[str, Any] = document["paths"][operation.path][operation.method.lower()]["responses"]
    return found
