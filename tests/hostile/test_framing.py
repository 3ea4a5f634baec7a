"""Requests whose end two readers could see at two places, and other shapes that only an attacker sends."""

from __future__ import annotations

import json

import pytest
import redis

from tests.admission.house import Client, House
from tests.admission.looking import chunked, everything, read_reply
from tests.hostile.door import HOST, connected

COMMANDS = "/v1/sessions/s1/commands"
BODY = b'{"command_id":"c1","name":"note.write","input":{}}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
OTHER_LENGTH = b"content-length: 5\r\n"
SIZE = b"%x" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"


@pytest.fixture
async def alice(arranged: House) -> Client:
    """A caller with a session."""
    made = await arranged.client("alice")
    assert (await made.open("s1")).status_code == 201
    return made


def post(client: Client, framing: bytes, body: bytes, version: bytes = b"1.1") -> bytes:
    """A command with these framing headers, and bytes behind its head."""
    line = b"POST " + COMMANDS.encode() + b" HTTP/" + version + b"\r\n"
    auth = f"authorization: Bearer {client.token}\r\n".encode()
    return line + HOST + b"content-type: application/json\r\n" + auth + framing + b"\r\n" + body


AMBIGUOUS: dict[str, tuple[bytes, bytes, bytes]] = {
    "two lengths": (LENGTH + OTHER_LENGTH, BODY, b"1.1"),
    "one length twice": (LENGTH + LENGTH, BODY, b"1.1"),
    "lengths in a list": (b"content-length: 50, 50\r\n", BODY, b"1.1"),
    "length and chunks": (LENGTH + CHUNKED, chunked(BODY), b"1.1"),
    "chunks and length": (CHUNKED + LENGTH, chunked(BODY), b"1.1"),
    "signed length": (b"content-length: +50\r\n", BODY, b"1.1"),
    "negative length": (b"content-length: -50\r\n", BODY, b"1.1"),
    "hexadecimal length": (b"content-length: 0x32\r\n", BODY, b"1.1"),
    "length with a gap": (b"content-length: 5 0\r\n", BODY, b"1.1"),
    "empty length": (b"content-length:\r\n", BODY, b"1.1"),
    "endless length": (b"content-length: " + b"9" * 40 + b"\r\n", BODY, b"1.1"),
    "space before the colon": (b"content-length : 50\r\n", BODY, b"1.1"),
    "unknown coding": (b"transfer-encoding: xchunked\r\n", chunked(BODY), b"1.1"),
    "identity": (b"transfer-encoding: identity\r\n", BODY, b"1.1"),
    "chunked is not last": (b"transfer-encoding: chunked, identity\r\n", chunked(BODY), b"1.1"),
    "another coding before": (b"transfer-encoding: gzip, chunked\r\n", chunked(BODY), b"1.1"),
    "coding twice": (CHUNKED + CHUNKED, chunked(BODY), b"1.1"),
    "coding with a parameter": (b"transfer-encoding: chunked;q=1\r\n", chunked(BODY), b"1.1"),
    "chunks in the older version": (CHUNKED, chunked(BODY), b"1.0"),
    "folded header": (b"transfer-encoding:\r\n chunked\r\n", chunked(BODY), b"1.1"),
    "folded length": (b"content-length: 5\r\n 0\r\n", BODY, b"1.1"),
    "bare line feed": (b"x: y\n" + LENGTH, BODY, b"1.1"),
    "bare carriage return": (b"x: y\r" + LENGTH, BODY, b"1.1"),
    "zero byte in a value": (b"x: a\x00b\r\n" + LENGTH, BODY, b"1.1"),
    "zero byte in a name": (b"x\x00: b\r\n" + LENGTH, BODY, b"1.1"),
    "escape in a value": (b"x: \x1b[2J\r\n" + LENGTH, BODY, b"1.1"),
    "no name": (b": b\r\n" + LENGTH, BODY, b"1.1"),
    "signed chunk": (CHUNKED, b"-" + SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n", b"1.1"),
    "prefixed chunk": (CHUNKED, b"0x" + SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n", b"1.1"),
    "chunk with a space": (CHUNKED, SIZE + b" \r\n" + BODY + b"\r\n0\r\n\r\n", b"1.1"),
    "chunk of another size": (CHUNKED, b"%x\r\n" % (len(BODY) + 1) + BODY + b"\r\n0\r\n\r\n", b"1.1"),
    "chunk past all numbers": (CHUNKED, b"f" * 17 + b"\r\n" + BODY, b"1.1"),
    "chunk line feed": (CHUNKED, SIZE + b"\n" + BODY + b"\n0\n\n", b"1.1"),
    "broken trailer": (CHUNKED, chunked(BODY)[:-2] + b"no trailer\r\n\r\n", b"1.1"),
    "two hosts": (b"host: door\r\n" + LENGTH, BODY, b"1.1"),
    "later version": (LENGTH, BODY, b"1.2"),
    "version two": (LENGTH, BODY, b"2.0"),
    "version nine": (LENGTH, BODY, b"0.9"),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_an_ambiguous_request_is_refused_and_ends_its_connection(
    arranged: House, alice: Client, raw: redis.Redis, name: str
) -> None:
    """Whatever comes behind it is not taken for a request."""
    framing, body, version = AMBIGUOUS[name]
    before = everything(raw)
    smuggled = post(alice, LENGTH, BODY)
    async with connected(arranged.port) as held:
        await held.send(post(alice, framing, body, version) + smuggled)
        reply = await held.rest()
    assert reply.count(b"HTTP/1.1 ") == 1, reply
    status, headers, said = read_reply(reply)
    assert (status, json.loads(said)["kind"]) == (400, "invalid-input")
    assert headers["connection"] == "close"
    assert everything(raw) == before


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\nhost: door\n\n",
        b"GET /healthz\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n host: door\r\n\r\n",
        b"GET /health z HTTP/1.1\r\nhost: door\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\nhost: door\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: door\r\n\r\n",
        b"GET healthz HTTP/1.1\r\nhost: door\r\n\r\n",
        b"get /healthz HTTP/1.1\r\nhost: door\r\n\r\n",
        b"CONNECT door:443 HTTP/1.1\r\nhost: door\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\nGET /healthz HTTP/1.1\r\nhost: door\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    ],
    ids=range(13),
)
async def test_what_is_no_request_is_refused(arranged: House, head: bytes) -> None:
    async with connected(arranged.port) as held:
        await held.send(head)
        status, _, said = read_reply(await held.rest())
    assert (status, json.loads(said)["kind"]) == (400, "invalid-input")


async def test_unusual_requests_that_mean_one_thing_are_served(arranged: House, alice: Client) -> None:
    """Chunk extensions and a coding in capitals, the absolute form, empty lines before a request."""
    absolute = b"http://door" + COMMANDS.encode()
    for number, request in enumerate(
        (
            post(alice, CHUNKED, SIZE + b";name=value\r\n" + BODY + b"\r\n0\r\n\r\n"),
            post(alice, b"Transfer-Encoding:\tChunked \r\n", chunked(BODY)),
            post(alice, LENGTH, BODY).replace(COMMANDS.encode(), absolute, 1),
            b"\r\n\r\n" + post(alice, LENGTH, BODY),
            post(alice, LENGTH, BODY, b"1.0"),
        )
    ):
        async with connected(arranged.port) as held:
            await held.send(request)
            status, _, said = await held.reply()
        assert status == (201 if number == 0 else 200), (number, said)


ENCODED = ["%2F", "%2f", "%5C", "%5c", "%252F/..%2F"]


@pytest.mark.parametrize("slash", ENCODED)
async def test_an_encoded_slash_is_no_separator(
    arranged: House, alice: Client, raw: redis.Redis, slash: str
) -> None:
    """It would lead to a route that whoever filters paths in front of the door did not see."""
    before = everything(raw)
    missing = (await alice.http.get("/missing")).content
    for method, path in (
        ("POST", f"/v1/sessions{slash}s1/commands"),
        ("POST", f"/v1/sessions/s1{slash}commands"),
        ("GET", f"/v1{slash}sessions/s1"),
        ("GET", f"/v1/sessions/s1{slash}updates"),
        ("DELETE", f"/v1{slash}sessions/s1"),
        ("GET", f"{slash}healthz"),
    ):
        response = await alice.http.request(method, path, content=BODY)
        assert (response.status_code, response.content) == (404, missing), path
    assert everything(raw) == before


PATHS = ["/v1/sessions/" + "s" * 8_192, "/" + "a/" * 4_000, "/v1/sessions/%ff%fe", "/v1/sessions/%00", "/%"]
PATHS += ["/v1/sessions/..", "/v1/sessions/../sessions/s1", "/v1/sessions/s1;x=1", "/v1/sessions/%u0073"]
PATHS += ["/v1/sessions/%E2%80%AE", "/v1/sessions/%F0%9F%98%80", "/v1/sessions/s1?" + "a=b&" * 2_000]
PATHS += [
    "/v1/sessions/s1/updates?after=" + "9" * 8_000,
    "/v1/sessions/s1/updates?%00=%00",
    "/v1/sessions/s1?%",
]


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
async def test_an_odd_path_or_query_is_refused_in_few_words(
    arranged: House, alice: Client, raw: redis.Redis, path: str
) -> None:
    before = everything(raw)
    auth = f"authorization: Bearer {alice.token}\r\n".encode()
    for method in (b"GET", b"DELETE", b"PUT", b"POST"):
        line = method + b" " + path.encode() + b" HTTP/1.1\r\n"
        async with connected(arranged.port) as held:
            await held.send(line + HOST + auth + b"content-length: 0\r\nconnection: close\r\n\r\n")
            status, _, said = read_reply(await held.rest())
        assert status in (400, 404, 405), (method, said)
        assert len(said) < 400
        assert b"\x00" not in said
    assert everything(raw) == before
