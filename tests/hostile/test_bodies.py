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
from tests.admission.house import COUNTER, NOTES, Client, House
from tests.admission.looking import everything
from tests.hostile.door import HOST, connected

SLOWEST_S = 1.0
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


DEEP = 100_000
MANY = 100_000


def harmful() -> dict[str, bytes]:
    """Bodies that cost much where nobody looks first; none is one of ours."""
    return {
        "nested arrays": b"[" * DEEP,
        "nested arrays closed": b"[" * DEEP + b"]" * DEEP,
        "nested objects": b'{"a":' * DEEP,
        "nested inside": b'{"input":' + b"[" * DEEP + b"]" * DEEP + b"}",
        "many members": json.dumps({f"m{i}": 0 for i in range(MANY // 2)}).encode(),
        "many equal members": b"{" + b",".join([b'"a":1'] * MANY) + b"}",
        "many members inside": b'{"input":{' + b",".join(b'"m%d":0' % i for i in range(MANY // 2)) + b"}}",
        "many items": b"[" + b"0," * (MANY * 5) + b"0]",
        "many empty objects": b"[" + b"{}," * (MANY * 3) + b"{}]",
        "long number": b'{"cursor":' + b"9" * 5_000 + b"}",
        "longest number": b'{"cursor":' + b"9" * 1_000_000 + b"}",
        "long fraction": b'{"cursor":0.' + b"9" * 1_000_000 + b"}",
        "long exponent": b'{"cursor":1e' + b"9" * 1_000_000 + b"}",
        "many long numbers": b"[" + b",".join([b"9" * 5_000] * 200) + b"]",
        "many floats": b"[" + b"1e-7," * 200_000 + b"0]",
        "repeated name": b'{"cursor":0,"cursor":0}',
        "lone surrogate": b'{"cursor":"\\ud800"}',
        "lone surrogate name": b'{"\\udfff":0}',
        "many surrogates": b'["' + b"\\ud800" * 170_000 + b'"]',
        "many escapes": b'["' + b"\\u0000" * 170_000 + b'"]',
        "byte order mark": b'\xef\xbb\xbf{"cursor":0}',
        "utf-16": '{"cursor":0}'.encode("utf-16"),
        "utf-32": '{"cursor":0}'.encode("utf-32"),
        "broken utf-8": b'{"cursor":"\xff\xfe"}',
        "overlong utf-8": b'{"cursor":"\xc0\x80"}',
        "zero bytes": b"\x00" * 1_000_000,
        "blanks": b" " * 1_000_000,
        "open text": b'"' + b"a" * 1_000_000,
        "backslashes": b'"' + b"\\" * 1_000_001,
        "long name": b'{"' + b"a" * 1_000_000 + b'":0}',
        "infinity": b'{"cursor":Infinity}',
        "nan": b'{"cursor":NaN}',
        "bidi name": '{"\u202ecursor":0}'.encode(),
        "terminal name": b'{"\\u001b[2J":0}',
        "too large": b"[" + b"0," * MAX_MESSAGE_BYTES,
        "yaml aliases": b"a: &a [x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b]\n",
        "yaml object": b"!!python/object/apply:os.system ['true']\n",
        "nothing": b"",
    }


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


# Mutations of what is good, and bytes that never were

_pieces = st.sampled_from(
    [
        *(
            b"{",
            b"}",
            b"[",
            b"]",
            b'"',
            b",",
            b":",
            b"\\",
            b"\\u",
            b"\\ud800",
            b"\xff",
            b"\x00",
            b"\xef\xbb\xbf",
        ),
        *(
            b"1e400",
            b"-0",
            b"0.5",
            b"9" * 40,
            b"null",
            b"true",
            b'{"a":1}',
            b"[[[[",
            b'"a":1,"a":2',
            b" ",
            b"\n",
        ),
    ]
)
_damage = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 6), st.one_of(_pieces, st.binary(max_size=4))),
    min_size=1,
    max_size=4,
)
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["s1", "c1", "note.write", "counter.add", NOTES["id"], COUNTER["id"], "1"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["command_id", "name", "input", "commands", "actor_id", "profile", "id", "version"]
            )
            | st.sampled_from(["cursor", "rules", "principals", "actions", "effect", "ttlMs", "é", ""])
            | st.text(max_size=5),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


def damaged(body: bytes, damage: list[tuple[int, int, bytes]]) -> bytes:
    """``body`` with pieces put in the place of some of its bytes."""
    changed = bytearray(body)
    for at, length, piece in damage:
        place = at % (len(changed) + 1)
        changed[place : place + length] = piece
    return bytes(changed)


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
    seen.append(
        data.draw(
            st.one_of(
                st.binary(max_size=64),
                _damage.map(lambda damage: damaged(base, damage)),
                _json.map(lambda value: json.dumps(value, allow_nan=True).encode()),
            )
        )
    )


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
            assert response.status_code < 300 or response.json()["kind"], told


def described(house: House, operation: Operation) -> dict[str, Any]:
    """The answers that the description gives an operation."""
    document = json.loads(house.door._description)
    found: dict[str, Any] = document["paths"][operation.path][operation.method.lower()]["responses"]
    return found
