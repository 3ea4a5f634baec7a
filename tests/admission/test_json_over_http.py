"""JSON as raw bytes over HTTP: what is one value, what is refused, and what comes back byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from shared.domain.ids import command_operation_id
from shared.store.keys import Keys
from tests.admission.house import COUNTER, Client, House
from tests.admission.looking import assert_refused, everything, streaming

MIB = 1_048_576
LONGEST = 65_536


@pytest.fixture
async def ready(alice: Client) -> Client:
    """A caller with a session."""
    assert (await alice.open("s1")).status_code == 201
    return alice


def of_input(text: bytes, command_id: str = "c1") -> bytes:
    return b'{"command_id":"%b","name":"note.write","input":%b}' % (command_id.encode(), text)


async def stored_input(door: House, command_id: str = "c1") -> bytes | None:
    """The input as the store keeps it."""
    handle = await door.handle()
    authority = (await handle.snapshots.get()).revisions.authority
    key = Keys("acme").op(command_operation_id(authority, command_id))
    found: bytes | None = await door.admin.call("HGET", key, "input")
    return found


async def assert_nothing_stored(ready: Client, raw: redis.Redis, body: bytes, said: str = "") -> None:
    before = everything(raw)
    assert_refused(await ready.raw("s1", body), 400, said)
    assert everything(raw) == before


@pytest.mark.case(81)
@pytest.mark.requirement("RT-CAN-05", "DASPX-05")
@pytest.mark.parametrize(
    "text",
    [
        rb'{"k":"\ud800"}',
        rb'{"k":"\ude00\ud83d"}',
        rb'{"\ud800":1}',
        rb'{"k":["\udfff"]}',
        rb'{"k":"\ud800\ud800"}',
        rb'{"k":"\uD83Dx"}',
        rb'{"k":{"\udc00":{}}}',
    ],
)
async def test_surrogates_without_a_partner_are_refused(ready: Client, raw: redis.Redis, text: bytes) -> None:
    await assert_nothing_stored(ready, raw, of_input(text), "without lone surrogates")


@pytest.mark.case(81)
async def test_surrogates_in_pairs_are_their_character(door: House, ready: Client) -> None:
    assert (await ready.raw("s1", of_input(rb'{"k":"\ud83d\ude00"}'))).status_code == 201
    assert (await ready.raw("s1", of_input('{"k":"\U0001f600"}'.encode()))).status_code == 200
    assert await stored_input(door) == '{"k":"\U0001f600"}'.encode()


@pytest.mark.case(82)
@pytest.mark.requirement("RT-CAN-05", "DASPX-05")
@pytest.mark.parametrize(
    "body",
    [
        bytes.fromhex("7b226b223a22ff227d"),
        of_input(bytes.fromhex("7b226b223a22ff227d")),
        of_input(b'{"\xfe":1}'),
        of_input(b'{"k":"\xf4\x90\x80\x80"}'),
        of_input(b'{"k":"\xe2\x82"}'),
        of_input(b'{"k":1}').decode().encode("utf-16"),
        of_input(b'{"k":1}').decode().encode("utf-16-le"),
        of_input(b'{"k":1}').decode().encode("utf-16-be"),
        of_input(b'{"k":1}').decode().encode("utf-32"),
        of_input(b'{"k":1}').decode().encode("utf-8-sig"),
    ],
)
async def test_what_is_not_plain_utf_8_is_refused(ready: Client, raw: redis.Redis, body: bytes) -> None:
    await assert_nothing_stored(ready, raw, body, "body")


@pytest.mark.case(84)
@pytest.mark.requirement("RT-CAN-04", "DASPX-05")
@pytest.mark.parametrize(
    "number",
    [
        "9007199254740992",
        "9007199254740993",
        "9007199254740992.0",
        "9007199254740993.0",
        "-9007199254740992",
        "9.007199254740992e15",
        "90071992547409920e-1",
        "1e16",
        "123456789012345678901234567890",
        "1" + "0" * 5_000,
    ],
)
async def test_an_integer_beyond_the_safe_range_is_refused_in_every_spelling(
    ready: Client, raw: redis.Redis, number: str
) -> None:
    text = b'{"n":[%b]}' % number.encode()
    await assert_nothing_stored(ready, raw, of_input(text), "/input/n/0: must be an integer from")


@pytest.mark.case(84)
@pytest.mark.parametrize("number", ["9007199254740991", "9007199254740991.0", "9.007199254740991e15"])
async def test_the_largest_safe_integer_is_one_value_in_every_spelling(
    door: House, ready: Client, number: str
) -> None:
    assert (await ready.raw("s1", of_input(b'{"n":9007199254740991}'))).status_code == 201
    again = await ready.raw("s1", of_input(b'{"n":%b}' % number.encode()))
    assert (again.status_code, again.json()["disposition"]) == (200, "duplicate")
    assert await stored_input(door) == b'{"n":9007199254740991}'
    near = await ready.raw("s1", of_input(b'{"n":9007199254740990}'))
    assert near.status_code == 409


@pytest.mark.case(85)
@pytest.mark.requirement("RT-CAN-02", "RT-CAN-03", "DASPX-05")
@pytest.mark.parametrize(
    "text",
    [
        b'{"v":1E400}',
        b'{"v":-1e400}',
        b'{"v":1e308}',
        b'{"v":NaN}',
        b'{"v":Infinity}',
        b'{"v":-Infinity}',
        b'{"v":0.5}',
        b'{"v":1.00000000000000001}',
        b'{"v":5e-324}',
        b'{"v":1e99999999999999999999}',
        b'{"v":1,"v":1}',
        b'{"v":1,"v":2}',
        rb'{"v":1,"\u0076":2}',
        b'{"v":{"w":1,"w":1}}',
        b'[{"v":1,"v":1}]',
    ],
)
async def test_numbers_out_of_range_and_repeated_keys_are_refused(
    ready: Client, raw: redis.Redis, text: bytes
) -> None:
    """A session's payload holds safe integers only, so 1e308, which is fine elsewhere, is refused too."""
    await assert_nothing_stored(ready, raw, of_input(text))


@pytest.mark.case(87)
@pytest.mark.requirement("RT-CAN-06", "DASP-CORE-002c")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b'{"v":0}', b'{"v":-0}'),
        (b'{"v":0}', b'{"v":-0.0}'),
        (b'{"v":0}', b'{"v":0e7}'),
        (b'{"v":1}', b'{"v":1.0}'),
        (b'{"v":1}', b'{"v":1e0}'),
        (b'{"v":3}', b'{"v":30e-1}'),
        (b'{"v":100}', b'{"v":1E+2}'),
        (b'{"v":"/"}', rb'{"v":"\/"}'),
        (b'{"v":"a"}', rb'{"v":"\u0061"}'),
        (b'{"v":"a"}', rb'{"\u0076":"a"}'),
        ('{"v":"é"}'.encode(), rb'{"v":"\u00E9"}'),
        (b'{"a":1,"b":{"c":1,"d":[]}}', b'{"b":{"d":[],"c":1},"a":1}'),
        (b'{"a":[1,{}]}', b' {\n"a" : [ 1 ,\t{ } ]\r\n} '),
    ],
)
async def test_one_value_in_other_bytes_is_a_replay(ready: Client, first: bytes, second: bytes) -> None:
    accepted = await ready.raw("s1", of_input(first))
    replayed = await ready.raw("s1", of_input(second))
    assert (accepted.status_code, replayed.status_code) == (201, 200)
    assert replayed.json() == {**accepted.json(), "disposition": "duplicate"}
    assert replayed.headers["idempotent-replayed"] == "true"
    assert (await ready.page("s1")).json()["head"] == 1


@pytest.mark.case(87)
@pytest.mark.requirement("DASP-CORE-002b", "DASP-CORE-002d", "DASP-CORE-002e", "DASP-CORE-002f")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b'{"v":[1,2]}', b'{"v":[2,1]}'),
        (b'{"v":1}', b'{"v":"1"}'),
        (b'{"v":1}', b'{"v":true}'),
        (b"{}", b'{"v":null}'),
        (b'{"v":null}', b'{"v":""}'),
        (b'{"v":[]}', b'{"v":{}}'),
        (b'{"v":"a"}', b'{"v":"a "}'),
        ('{"v":"\u00e9"}'.encode(), '{"v":"e\u0301"}'.encode()),
        (b'{"v":"a"}', b'{"V":"a"}'),
    ],
)
async def test_another_value_conflicts_and_shows_nothing_of_the_first(
    ready: Client, raw: redis.Redis, first: bytes, second: bytes
) -> None:
    await ready.raw("s1", of_input(first))
    before = everything(raw)
    response = await ready.raw("s1", of_input(second))
    assert response.status_code == 409
    body = response.json()
    assert (body["disposition"], body["admission_sequence"]) == ("rejected", None)
    assert body["error"]["code"] == "conflict"
    assert not body["error"]["retryable"]
    assert everything(raw) == before


@pytest.mark.case(89)
@pytest.mark.requirement("RT-CAN-01")
async def test_characters_are_kept_raw_where_they_may_be(door: House, ready: Client) -> None:
    body = of_input(rb'{"u":"\u2028","d":"\u007f","f":"\u000F","t":"\u0009","q":"\u0022","s":"\u002f"}')
    assert (await ready.raw("s1", body)).status_code == 201
    expected = '{"d":"\x7f","f":"\\u000f","q":"\\"","s":"/","t":"\\t","u":"\u2028"}'.encode()
    assert await stored_input(door) == expected


@pytest.mark.case(91)
async def test_a_value_comes_back_as_it_was_stored(door: House, ready: Client) -> None:
    """Through scripts, hashes and stream: empty containers, big integers and slashes stay what they are."""
    value = b'{"a":[],"b":{},"n":9007199254740991,"s":"a/b","z":null}'
    assert (await ready.raw("s1", of_input(value))).status_code == 201
    assert await stored_input(door) == value
    made: dict[str, Any] = json.loads(value)
    await door.work("c1", made, session_id="s1", updates={"note.written": made})
    outcome = await ready.outcome("s1", "c1")
    assert b'"output":' + value in outcome.content
    page = await ready.page("s1")
    assert b'"data":' + value in page.content
    assert b'"output":' + value in page.content
    async with streaming(ready, "s1") as feed:
        told = [frame.data.encode() for frame in await feed.updates(3)]
    assert b",".join(told) in page.content


@pytest.mark.case(91)
async def test_a_state_comes_back_as_it_was_stored(door: House, alice: Client) -> None:
    await alice.open("n1", COUNTER)
    await alice.submit("n1", "c1", {"amount": 1}, name="counter.add")
    state = {"a": [], "b": {}, "n": 2**53 - 1, "s": "a/b", "z": None}
    await door.work("c1", {"value": 1}, session_id="n1", state=state)
    response = await alice.http.get("/v1/sessions/n1")
    assert b'"state":' + json.dumps(state, separators=(",", ":")).encode() in response.content


def padded(size: int) -> bytes:
    """A good command of exactly ``size`` bytes."""
    bare = of_input(b'{"a":1}')
    return bare + b" " * (size - len(bare))


def nested(levels: int) -> bytes:
    """A payload of ``levels`` containers on one path, the payload itself counted."""
    return b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)


@pytest.mark.requirement("DASPX-06")
@pytest.mark.parametrize(
    ("at_limit", "beyond", "said"),
    [
        (padded(MIB), padded(MIB + 1), "body: must not exceed 1048576 bytes"),
        (
            of_input(b'{"s":"%b"}' % (b"x" * LONGEST)),
            of_input(b'{"s":"%b"}' % (b"x" * (LONGEST + 1))),
            "/input/s: must not exceed 65536 bytes",
        ),
        (
            of_input(b'{"s":"%b"}' % ("é" * (LONGEST // 2)).encode()),
            of_input(b'{"s":"%bx"}' % ("é" * (LONGEST // 2)).encode()),
            "/input/s: must not exceed 65536 bytes",
        ),
        (
            of_input(b'{"%b":1}' % (b"k" * LONGEST)),
            of_input(b'{"%b":1}' % (b"k" * (LONGEST + 1))),
            "/input: has a member name of more than 65536 bytes",
        ),
        (of_input(nested(16)), of_input(nested(17)), "must not be nested deeper than 16"),
        (
            of_input(json.dumps({f"k{i}": i for i in range(1024)}).encode()),
            of_input(json.dumps({f"k{i}": i for i in range(1025)}).encode()),
            "/input: must not have more than 1024 entries",
        ),
        (
            of_input(json.dumps({"v": list(range(1024))}).encode()),
            of_input(json.dumps({"v": list(range(1025))}).encode()),
            "/input/v: must not have more than 1024 entries",
        ),
    ],
    ids=["message", "string", "string-utf8", "key", "nesting", "members", "items"],
)
async def test_each_limit_holds_exactly(
    ready: Client, raw: redis.Redis, at_limit: bytes, beyond: bytes, said: str
) -> None:
    before = everything(raw)
    assert_refused(await ready.raw("s1", beyond), 413, said)
    assert everything(raw) == before
    accepted = await ready.raw("s1", at_limit)
    assert (accepted.status_code, accepted.json()["disposition"]) == (201, "accepted"), accepted.text
