"""Bad input over HTTP: a refusal that names place and rule, nothing stored, nothing told, never a 500."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
import redis

from shared.serving.bounds import MAX_HEAD_BYTES
from tests.admission.house import COUNTER, NOTES, Client, House
from tests.admission.looking import assert_refused, chunked, everything, plain, read_reply

SECRET = "zq-secret-zq"
COMMANDS = "/v1/sessions/s1/commands"
BATCH = COMMANDS + ":batch"
MIB = 1_048_576
JSON_TYPE = {"content-type": "application/json"}


@pytest.fixture
async def ready(alice: Client) -> Client:
    """A caller with a session in which a secret was said."""
    assert (await alice.open("s1")).status_code == 201
    assert (await alice.submit("s1", "c1", {"said": SECRET})).status_code == 201
    return alice


def deep(levels: int) -> bytes:
    """A command whose input is nested ``levels`` deep, the input itself counted."""
    inner = b"[" * (levels - 1) + b"]" * (levels - 1)
    return b'{"command_id":"c2","name":"note.write","input":{"a":%b}}' % (inner or b"1")


def command(**changes: Any) -> bytes:
    """A good command with changes; a member set to Ellipsis is left out."""
    body = {"command_id": "c2", "name": "note.write", "input": {"said": SECRET}, **changes}
    return json.dumps({name: value for name, value in body.items() if value is not ...}).encode()


def of_input(text: bytes) -> bytes:
    return b'{"command_id":"c2","name":"note.write","input":%b}' % text


NOT_A_COMMAND: list[tuple[bytes, int, str, str]] = [
    (b"", 400, "body", "is not JSON"),
    (b"  ", 400, "body", "is not JSON"),
    (SECRET.encode(), 400, "body", "is not JSON"),
    (b'{"command_id":"c2",', 400, "body", "is not JSON"),
    (command() + b"x", 400, "body", "is not JSON"),
    (command() + command(), 400, "body", "is not JSON"),
    (b"null", 400, "body", "must be an object"),
    (b"[]", 400, "body", "must be an object"),
    (b"17", 400, "body", "must be an object"),
    (json.dumps(SECRET).encode(), 400, "body", "must be an object"),
    (b"{}", 400, "body", 'lacks the member "command_id"'),
    (command(command_id=...), 400, "body", 'lacks the member "command_id"'),
    (command(name=...), 400, "body", 'lacks the member "name"'),
    (command(input=...), 400, "body", 'lacks the member "input"'),
    (command(extra=1), 400, "/extra", "is not known here"),
    (command(principal="bob"), 400, "/principal", "is not known here"),
    (command(command_id=""), 400, "/command_id", "1 to 128 characters"),
    (command(command_id="a b"), 400, "/command_id", "letters, digits"),
    (command(command_id="a/b"), 400, "/command_id", "letters, digits"),
    (command(command_id="é"), 400, "/command_id", "letters, digits"),
    (command(command_id="a\n"), 400, "/command_id", "letters, digits"),
    (command(command_id="a\x00"), 400, "/command_id", "letters, digits"),
    (command(command_id="c" * 129), 400, "/command_id", "1 to 128 characters"),
    (command(command_id=".."), 400, "/command_id", "must be a command id"),
    (command(command_id=7), 400, "/command_id", "must be a command id"),
    (command(command_id=None), 400, "/command_id", "must be a command id"),
    (command(command_id=["c2"]), 400, "/command_id", "must be a command id"),
    (command(name=""), 400, "/name", "must be a name id"),
    (command(name="Note.write"), 400, "/name", "a lower-case letter"),
    (command(name="n" * 129), 400, "/name", "1 to 128 characters"),
    (command(name=None), 400, "/name", "must be a name id"),
    (command(input=None), 400, "/input", "must be an object"),
    (command(input=[]), 400, "/input", "must be an object"),
    (command(input="x"), 400, "/input", "must be an object"),
    (b'{"command_id":"c2","name":"note.write","input":{},"name":"note.write"}', 400, "body", "twice"),
    (of_input(b'{"a":1,"a":1}'), 400, "/input", 'the member "a" twice'),
    (of_input(b'{"b":[{"a":1,"\\u0061":2}]}'), 400, "/input/b/0", 'the member "a" twice'),
    (of_input(b'{"a":"\xff"}'), 400, "body", "must be UTF-8; byte 53"),
    (of_input(b'{"a":"\xc3\x28"}'), 400, "body", "must be UTF-8"),
    (of_input(b'{"a":"\xed\xa0\x80"}'), 400, "body", "must be UTF-8"),
    (of_input(b'{"a":"\xc0\xaf"}'), 400, "body", "must be UTF-8"),
    (of_input(b'{"a":"\\ud800"}'), 400, "/input/a", "lone surrogates"),
    (of_input(b'{"a":9007199254740992}'), 400, "/input/a", "must be an integer from"),
    (of_input(b'{"a":-9007199254740992}'), 400, "/input/a", "must be an integer from"),
    (of_input(b'{"a":0.5}'), 400, "/input/a", "send fractions as text"),
    (of_input(b'{"a":1e400}'), 400, "/input/a", "must be an integer"),
    (of_input(b'{"a":NaN}'), 400, "/input/a", "not JSON"),
    (of_input(b'{"a":-Infinity}'), 400, "/input/a", "not JSON"),
    (of_input(b'{"a":01}'), 400, "body", "is not JSON"),
    (of_input(b'{"a":"\x01"}'), 400, "body", "is not JSON"),
    (of_input(b"{'a':1}"), 400, "body", "is not JSON"),
    (of_input(b'{"a":1,}'), 400, "body", "is not JSON"),
    (deep(17), 413, "/input/a" + "/0" * 15, "nested deeper than 16"),
    (deep(33), 413, "body", "nested deeper than 32"),
    (b"[" * 100_000, 413, "body", "nested deeper than 32"),
    (b'{"a":' * 100_000, 413, "body", "nested deeper than 32"),
    (b" " * MIB + b"{", 413, "body", "must not exceed 1048576 bytes"),
]


@pytest.mark.requirement("DASP-CORE-001b", "RT-HTTP-09", "RT-HTTP-14")
@pytest.mark.parametrize(
    ("body", "status", "place", "rule"), NOT_A_COMMAND, ids=[str(i) for i in range(len(NOT_A_COMMAND))]
)
async def test_a_bad_command_is_refused_with_its_place_and_stores_nothing(
    ready: Client, raw: redis.Redis, body: bytes, status: int, place: str, rule: str
) -> None:
    before = everything(raw)
    assert_refused(await ready.raw("s1", body), status, place + ":", rule, hidden=SECRET)
    assert everything(raw) == before
    # The id of what was refused is as free as it was (DASP-CORE-003e).
    assert (await ready.outcome("s1", "c2")).status_code == 404


async def test_what_the_profile_forbids_is_refused_before_it_is_admitted(
    alice: Client, raw: redis.Redis
) -> None:
    await alice.open("n1", COUNTER)
    before = everything(raw)
    for value, place in (
        ({}, "/input"),
        ({"amount": "3"}, "/input/amount"),
        ({"amount": 1_000_001}, "/input/amount"),
        ({"amount": 3, "other": 1}, "/input"),
    ):
        response = await alice.submit("n1", "c9", value, name="counter.add")
        assert_refused(response, 400, place)
    assert everything(raw) == before
    assert (await alice.submit("n1", "c9", {"amount": 3}, name="counter.add")).status_code == 201


BAD_BATCHES: list[tuple[Any, int, str, str]] = [
    ([], 400, "body", "must be an object"),
    ({}, 400, "body", 'lacks the member "commands"'),
    ({"commands": []}, 400, "/commands", "1 to 100 items"),
    ({"commands": {}}, 400, "/commands", "1 to 100 items"),
    ({"commands": [7]}, 400, "/commands/0", "must be an object"),
    ({"commands": [{}]}, 400, "/commands/0", 'lacks the member "command_id"'),
    ({"commands": [{"command_id": "c2", "name": "note.write", "input": 1}]}, 400, "/commands/0/input", "obj"),
    (
        {"commands": [json.loads(command()), json.loads(command(command_id="a b"))]},
        400,
        "/commands/1/command_id",
        "letters, digits",
    ),
    ({"commands": [json.loads(command(extra=1))]}, 400, "/commands/0/extra", "is not known here"),
    (
        {"commands": [json.loads(command(command_id=f"b{i}")) for i in range(101)]},
        400,
        "/commands",
        "1 to 100",
    ),
    ({"commands": [json.loads(command())], "more": 1}, 400, "/more", "is not known here"),
]


@pytest.mark.parametrize(
    ("body", "status", "place", "rule"), BAD_BATCHES, ids=[str(i) for i in range(len(BAD_BATCHES))]
)
async def test_a_bad_batch_is_refused_whole(
    ready: Client, raw: redis.Redis, body: Any, status: int, place: str, rule: str
) -> None:
    before = everything(raw)
    response = await ready.http.post(BATCH, json=body)
    assert_refused(response, status, place + ":", rule, hidden=SECRET)
    assert everything(raw) == before


async def test_a_batch_takes_no_key_of_its_own(ready: Client, raw: redis.Redis) -> None:
    before = everything(raw)
    response = await ready.http.post(
        BATCH, json={"commands": [json.loads(command())]}, headers={"idempotency-key": "c2"}
    )
    assert_refused(response, 400, "Idempotency-Key:")
    assert everything(raw) == before


GOOD_OPEN = {"actor_id": "a1", "profile": NOTES}
BAD_OPENS: list[tuple[Any, str, str]] = [
    (None, "body", "must be an object"),
    ({}, "body", 'lacks the member "actor_id"'),
    ({"actor_id": "a1"}, "body", 'lacks the member "profile"'),
    ({**GOOD_OPEN, "owner": "bob"}, "/owner", "is not known here"),
    ({**GOOD_OPEN, "session_id": "s9"}, "/session_id", "is not known here"),
    ({**GOOD_OPEN, "actor_id": "a 1"}, "/actor_id", "actor id: 1 to 128"),
    ({**GOOD_OPEN, "actor_id": 1}, "/actor_id", "actor id: 1 to 128"),
    ({**GOOD_OPEN, "profile": "urn:example:notes"}, "/profile", "must be an object"),
    ({**GOOD_OPEN, "profile": {"id": NOTES["id"]}}, "/profile", 'lacks the member "version"'),
    ({**GOOD_OPEN, "profile": {**NOTES, "x": 1}}, "/profile/x", "is not known here"),
    ({**GOOD_OPEN, "profile": {**NOTES, "id": "notes"}}, "/profile/id", "must be an absolute URI"),
    ({**GOOD_OPEN, "profile": {**NOTES, "id": "urn:a\x00b"}}, "/profile/id", "must be an absolute URI"),
    ({**GOOD_OPEN, "profile": {**NOTES, "version": ""}}, "/profile/version", "1 to 64 characters"),
    ({**GOOD_OPEN, "profile": {**NOTES, "version": 1}}, "/profile/version", "1 to 64 characters"),
]


@pytest.mark.parametrize(("body", "place", "rule"), BAD_OPENS, ids=[str(i) for i in range(len(BAD_OPENS))])
async def test_a_bad_opening_makes_no_session(
    ready: Client, raw: redis.Redis, body: Any, place: str, rule: str
) -> None:
    before = everything(raw)
    response = await ready.http.put("/v1/sessions/s9", content=json.dumps(body), headers=JSON_TYPE)
    assert_refused(response, 400, place + ":", rule)
    assert everything(raw) == before
    assert (await ready.http.get("/v1/sessions/s9")).status_code == 404


BAD_SEGMENTS = ["a%20b", "%C3%A9", "%00", "a%0Ab", "c" * 129, "a%7Bb", "%FF", "a*"]


@pytest.mark.parametrize("segment", BAD_SEGMENTS, ids=[str(i) for i in range(len(BAD_SEGMENTS))])
async def test_a_malformed_id_in_a_path_is_refused_as_such(
    ready: Client, raw: redis.Redis, segment: str
) -> None:
    before = everything(raw)
    good = {"json": json.loads(command())}
    for method, path, place, body in (
        ("PUT", f"/v1/sessions/{segment}", "session_id", {"json": GOOD_OPEN}),
        ("GET", f"/v1/sessions/{segment}", "session_id", {}),
        ("DELETE", f"/v1/sessions/{segment}", "session_id", {}),
        ("POST", f"/v1/sessions/{segment}/commands", "session_id", good),
        ("POST", f"/v1/sessions/{segment}/commands:batch", "session_id", good),
        ("GET", f"/v1/sessions/{segment}/updates", "session_id", {}),
        ("GET", f"/v1/sessions/s1/commands/{segment}", "command_id", {}),
        ("GET", f"/v1/sessions/s1/cursors/{segment}", "client", {}),
        ("PUT", f"/v1/sessions/s1/cursors/{segment}", "client", {"json": {"cursor": 1}}),
    ):
        response = await ready.http.request(method, path, **body)
        assert_refused(response, 400, place + ":")
    assert everything(raw) == before


BAD_TYPES: list[Mapping[str, str]] = [
    {},
    {"content-type": "text/plain"},
    {"content-type": "application/jsonx"},
    {"content-type": "application/json; charset=latin-1"},
    {"content-type": "application/json; charset=utf-16"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=x"},
    {**JSON_TYPE, "content-encoding": "gzip"},
]


@pytest.mark.parametrize("headers", BAD_TYPES, ids=[str(i) for i in range(len(BAD_TYPES))])
async def test_another_content_type_is_415(
    ready: Client, raw: redis.Redis, headers: Mapping[str, str]
) -> None:
    before = everything(raw)
    place = "Content-Encoding:" if "content-encoding" in headers else "Content-Type:"
    for method, path in (("POST", COMMANDS), ("POST", BATCH), ("PUT", "/v1/sessions/s9")):
        response = await ready.http.request(method, path, content=command(), headers=headers)
        assert_refused(response, 415, place, "must be")
    assert everything(raw) == before


@pytest.mark.parametrize("charset", ["; charset=utf-8", ";charset=UTF-8", '; charset="utf-8"'])
async def test_json_said_to_be_utf_8_is_taken(ready: Client, charset: str) -> None:
    response = await ready.raw("s1", command(), {"content-type": "application/json" + charset})
    assert response.status_code == 201


async def test_a_wrong_method_is_405_with_the_right_ones(ready: Client, raw: redis.Redis) -> None:
    before = everything(raw)
    for path, wrong, allowed in (
        ("/v1/sessions/s1", "POST", {"GET", "PUT", "DELETE", "HEAD"}),
        (COMMANDS, "GET", {"POST"}),
        (COMMANDS, "DELETE", {"POST"}),
        (BATCH, "PUT", {"POST"}),
        (COMMANDS + "/c1", "DELETE", {"GET", "HEAD"}),
        ("/v1/sessions/s1/updates", "POST", {"GET", "HEAD"}),
        ("/v1/sessions/s1/cursors/x", "DELETE", {"GET", "PUT", "HEAD"}),
        ("/v1/authority", "PUT", {"GET", "HEAD"}),
        ("/healthz", "POST", {"GET", "HEAD"}),
        ("/openapi.json", "BREW", {"GET", "HEAD"}),
    ):
        response = await ready.http.request(wrong, path)
        if response.status_code == 400:
            assert "is not HTTP/1.1" in response.text, "an unknown verb may be refused by the parser"
            continue
        assert_refused(response, 405, "method:")
        assert set(response.headers["allow"].split(", ")) == allowed
    assert everything(raw) == before


UNKNOWN = [
    "/",
    "/v1",
    "/v1/",
    "/v1/sessions",
    "/v1/sessions/",
    "/v1/sessions/s1/",
    "/v1/sessions/s1/commands/",
    "/v1/sessions/s1/commands/c1/x",
    "/v1/sessions/a%2Fb",
    "/v2/sessions/s1",
    "/V1/sessions/s1",
    "//v1/sessions/s1",
    "/v1/sessions/s1/cursors",
    "/docs",
]


@pytest.mark.parametrize("path", UNKNOWN)
async def test_an_unknown_route_looks_like_a_missing_thing(
    ready: Client, raw: redis.Redis, path: str
) -> None:
    before = everything(raw)
    missing = await ready.http.get("/v1/sessions/missing")
    for method in ("GET", "POST", "PUT"):
        response = await ready.http.request(method, path, content=command(), headers=JSON_TYPE)
        assert (response.status_code, response.content) == (404, missing.content)
    assert missing.json() == {"kind": "denied", "description": "not found"}
    assert everything(raw) == before


CURSORS = ["$", "-1", "1-", "18446744073709551616", "9007199254740992", "", "+1", " 1", "1.0", "1e1", "0x1"]
CURSORS += ["\u0661", "*", "0-0", "1" * 5_000, "null", "2"]


@pytest.mark.parametrize("cursor", CURSORS, ids=[ascii(cursor)[:24] for cursor in CURSORS])
async def test_a_bad_or_too_far_cursor_is_refused(ready: Client, raw: redis.Redis, cursor: str) -> None:
    before = everything(raw)
    for headers in ({}, {"accept": "text/event-stream"}):
        response = await ready.http.get("/v1/sessions/s1/updates", params={"after": cursor}, headers=headers)
        assert_refused(response, 400, "after:", "must", hidden=SECRET)
    assert everything(raw) == before


@pytest.mark.parametrize("limit", ["0", "101", "-1", "", "$", "1.5", "1" * 40])
async def test_a_bad_limit_is_refused(ready: Client, limit: str) -> None:
    response = await ready.http.get("/v1/sessions/s1/updates", params={"limit": limit})
    assert_refused(response, 400, "limit:", "1 to 100")


@pytest.mark.parametrize(
    "query",
    ["before=1", "after=0&after=1", "after=%ff", "after=0&client=x", "client=", "client=a%20b", "a&" * 9],
)
async def test_a_bad_query_is_refused(ready: Client, raw: redis.Redis, query: str) -> None:
    before = everything(raw)
    response = await ready.http.get("/v1/sessions/s1/updates?" + query)
    assert_refused(response, 400)
    assert everything(raw) == before


async def test_other_routes_take_no_query(ready: Client, raw: redis.Redis) -> None:
    before = everything(raw)
    good = json.loads(command())
    for method, path, body in (
        ("PUT", "/v1/sessions/s9", GOOD_OPEN),
        ("GET", "/v1/sessions/s1", None),
        ("DELETE", "/v1/sessions/s1", None),
        ("POST", COMMANDS, good),
        ("POST", BATCH, {"commands": [good]}),
        ("GET", COMMANDS + "/c1", None),
        ("GET", "/v1/sessions/s1/cursors/x", None),
        ("PUT", "/v1/sessions/s1/cursors/x", {"cursor": 1}),
        ("GET", "/v1/authority", None),
    ):
        response = await ready.http.request(method, path + "?dry_run=true", json=body)
        assert_refused(response, 400, "query:", "unknown parameter")
    assert everything(raw) == before


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "body"),
        ({"cursor": -1}, "/cursor"),
        ({"cursor": "1"}, "/cursor"),
        ({"cursor": None}, "/cursor"),
        ({"cursor": True}, "/cursor"),
        ({"cursor": 2}, "/cursor"),
        ({"cursor": 2**53 - 1}, "/cursor"),
        ({"cursor": 1, "client": "x"}, "/client"),
    ],
)
async def test_a_bad_cursor_is_not_held(ready: Client, raw: redis.Redis, body: Any, place: str) -> None:
    before = everything(raw)
    response = await ready.http.put("/v1/sessions/s1/cursors/x", json=body)
    assert_refused(response, 400, place + ":")
    assert everything(raw) == before


async def test_a_body_without_a_length_is_bounded_too(door: House, ready: Client, raw: redis.Redis) -> None:
    before = everything(raw)
    auth = f"authorization: Bearer {ready.token}".encode()
    head = (auth, b"content-type: application/json", b"transfer-encoding: chunked")
    # It never ends: whoever wanted to have it whole would wait for ever.
    body = chunked(*[b" " * 65_536] * 17).removesuffix(b"0\r\n\r\n")
    status, _, said = read_reply(await door.raw_http(plain("POST", COMMANDS, *head, body=body)))
    assert (status, json.loads(said)["kind"]) == (413, "invalid-input")
    assert everything(raw) == before
    body = chunked(command()[:20], command()[20:21], command()[21:])
    status, _, _ = read_reply(await door.raw_http(plain("POST", COMMANDS, *head, body=body)))
    assert status == 201


@pytest.mark.parametrize("length", [MIB + 1, 10**14, 10**17])
async def test_a_length_beyond_the_limit_is_refused_before_the_body_comes(
    door: House, ready: Client, length: int
) -> None:
    auth = f"authorization: Bearer {ready.token}".encode()
    head = (auth, b"content-type: application/json", b"content-length: %d" % length)
    status, _, said = read_reply(await door.raw_http(plain("POST", COMMANDS, *head)))
    assert status == 413
    assert "must not exceed 1048576 bytes" in json.loads(said)["description"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost door\r\n\r\n",
        b"POST /v1/sessions/s1/commands HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/sessions/s1/commands HTTP/1.1\r\ncontent-length: 1x\r\n\r\n",
        b"POST /x HTTP/1.1\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcde",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    ],
)
async def test_what_is_not_http_gets_a_body_like_all(door: House, request_bytes: bytes) -> None:
    status, headers, body = read_reply(await door.raw_http(request_bytes, end=True))
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {"kind": "invalid-input", "description": "request: is not HTTP/1.1"}


async def test_a_head_without_end_is_431(door: House) -> None:
    endless = b"GET /healthz HTTP/1.1\r\nhost: door\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1)
    status, _, body = read_reply(await door.raw_http(endless))
    assert status == 431
    assert str(MAX_HEAD_BYTES) in json.loads(body)["description"]


async def test_who_may_not_use_the_door_learns_nothing_from_its_bad_input(
    door: House, bob: Client, ready: Client
) -> None:
    """Authentication and permission come first: a stranger's malformed and well-formed command look alike."""
    nobody = httpx.AsyncClient(base_url=f"http://127.0.0.1:{door.port}")
    async with nobody:
        for body in (b"", command(), b"[" * 1_000):
            response = await nobody.post(COMMANDS, content=body, headers=JSON_TYPE)
            assert_refused(response, 401, kind="denied")
    there = await bob.raw("s1", command(input={"unknown": 1}))
    missing = await bob.raw("missing", command(input={"unknown": 1}))
    assert (there.status_code, there.content) == (missing.status_code, missing.content)
    assert there.status_code == 404


@pytest.mark.requirement("RT-HTTP-09")
async def test_broken_documents_never_break_the_door(ready: Client, raw: redis.Redis) -> None:
    """Random damage to good requests: only answers of the table, and no admission but of what is well
    formed.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    whole = command(input={"a": [1, {"é": "x"}, "\U0001f600", None, True], "n": -3})
    pieces = [
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b":",
        b"\\",
        b"\\u",
        b"\xff",
        b"\x00",
        b"e",
        b"-",
        b"9" * 30,
    ]
    for _ in range(400):
        body = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(body))
            body[at : at + dice.choice((0, 1, 1, 3))] = dice.choice(pieces)
        before = everything(raw)
        response = await ready.raw("s1", bytes(body))
        assert response.status_code in (200, 201, 400, 409, 413, 422), (bytes(body), response.text)
        if response.status_code != 201:
            assert everything(raw) == before, bytes(body)
