"""Headers by their documented forms: the key of a command, preferences, what may be sent once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from admission_svc.http import LONGEST_WAIT_S
from shared.domain.ids import command_operation_id
from tests.admission.house import Client, House
from tests.admission.looking import assert_refused, everything, plain, read_reply

COMMANDS = "/v1/sessions/s1/commands"
BARE = {"name": "note.write", "input": {"a": 1}}


@pytest.fixture
async def ready(alice: Client) -> Client:
    """A caller with a session."""
    assert (await alice.open("s1")).status_code == 201
    return alice


async def send(door: House, client: Client, *headers: bytes, **body: Any) -> tuple[int, dict[str, Any]]:
    """POST a command without an id of its own, header lines as they are."""
    content = json.dumps({**BARE, **body}).encode()
    lines = (
        f"authorization: Bearer {client.token}".encode(),
        b"content-type: application/json",
        b"content-length: %d" % len(content),
        *headers,
    )
    status, _, answer = read_reply(await door.raw_http(plain("POST", COMMANDS, *lines, body=content)))
    return status, json.loads(answer)


@pytest.mark.case(12)
@pytest.mark.parametrize("value", [b"", b'""', b" ", b"\t", b"   \t ", b'" "', b'"\t"'], ids=ascii)
async def test_an_empty_key_is_refused_and_stores_nothing(
    door: House, ready: Client, raw: redis.Redis, value: bytes
) -> None:
    before = everything(raw)
    status, body = await send(door, ready, b"Idempotency-Key: " + value)
    assert (status, body["kind"]) == (400, "invalid-input")
    assert body["description"].startswith("Idempotency-Key: must be a command id")
    assert everything(raw) == before


@pytest.mark.case(12)
@pytest.mark.parametrize("value", [b"", b'""'], ids=ascii)
async def test_an_empty_key_is_refused_also_beside_an_id_in_the_body(
    door: House, ready: Client, raw: redis.Redis, value: bytes
) -> None:
    before = everything(raw)
    status, _ = await send(door, ready, b"Idempotency-Key: " + value, command_id="c1")
    assert status == 400
    assert everything(raw) == before


@pytest.mark.case(14)
async def test_bare_and_quoted_are_one_key_whichever_comes_first(door: House, ready: Client) -> None:
    for first, second in ((b"abc", b'"abc"'), (b'"def"', b"def"), (b"ghi", b'  "ghi"\t')):
        status, accepted = await send(door, ready, b"Idempotency-Key: " + first)
        assert (status, accepted["disposition"]) == (201, "accepted")
        assert accepted["command_id"] == first.decode().strip('"')
        status, replayed = await send(door, ready, b"Idempotency-Key: " + second)
        assert (status, replayed) == (200, {**accepted, "disposition": "duplicate"})
    status, replayed = await send(door, ready, command_id="abc")
    assert (status, replayed["disposition"]) == (200, "duplicate")


@pytest.mark.case(14)
@pytest.mark.parametrize(
    "headers",
    [
        (rb'Idempotency-Key: "a\"b"',),
        (rb'Idempotency-Key: "a\\b"',),
        (rb'Idempotency-Key: "a\bc"',),
        (b"Idempotency-Key: abc;x=1",),
        (b'Idempotency-Key: "abc";x=1',),
        (b"Idempotency-Key: abc, def",),
        (b'Idempotency-Key: "abc", "def"',),
        (b'Idempotency-Key: "abc',),
        (b'Idempotency-Key: abc"',),
        (b"Idempotency-Key: 'abc'",),
        (b"Idempotency-Key: a b",),
        ("Idempotency-Key: é".encode(),),
        (b"Idempotency-Key: \xe9",),
        (b"Idempotency-Key: " + b"k" * 129,),
        (b"Idempotency-Key: " + b"k" * 9_000,),
        (b"Idempotency-Key: abc", b"Idempotency-Key: abc"),
        (b"Idempotency-Key: abc", b'idempotency-key: "abc"'),
        (b"Idempotency-Key: abc", b"Idempotency-Key: def"),
    ],
    ids=[str(i) for i in range(18)],
)
async def test_every_other_form_of_a_key_is_refused(
    door: House, ready: Client, raw: redis.Redis, headers: tuple[bytes, ...]
) -> None:
    before = everything(raw)
    status, body = await send(door, ready, *headers)
    assert (status, body["kind"]) == (400, "invalid-input")
    assert body["description"].startswith("Idempotency-Key:")
    assert everything(raw) == before


@pytest.mark.case(14)
async def test_a_key_and_an_id_in_the_body_must_be_the_same(
    door: House, ready: Client, raw: redis.Redis
) -> None:
    before = everything(raw)
    status, body = await send(door, ready, b"Idempotency-Key: abc", command_id="abd")
    assert (status, body["description"]) == (
        400,
        "Idempotency-Key: must equal the command_id of the body",
    )
    assert everything(raw) == before
    assert (await send(door, ready, b'Idempotency-Key: "abc"', command_id="abc"))[0] == 201


@pytest.mark.case(15)
async def test_header_names_ignore_case_and_key_values_do_not(door: House, ready: Client) -> None:
    """HTTP/2 lowers every name on its way through a proxy: the lower form is the one that arrives from it."""
    status, accepted = await send(door, ready, b"IDEMPOTENCY-KEY: AbC")
    assert status == 201
    for name in (b"idempotency-key", b"Idempotency-Key", b"iDEMPOTENCY-kEY"):
        status, replayed = await send(door, ready, name + b": AbC")
        assert (status, replayed) == (200, {**accepted, "disposition": "duplicate"})
    status, other = await send(door, ready, b"idempotency-key: abc")
    assert (status, other["admission_sequence"]) == (201, 2)


@pytest.mark.case(15)
async def test_other_header_names_ignore_case_too(door: House, ready: Client) -> None:
    content = json.dumps({**BARE, "command_id": "c1"}).encode()
    lines = (
        f"AUTHORIZATION: bearer {ready.token}".encode(),
        b"CONTENT-TYPE: Application/JSON",
        b"CONTENT-LENGTH: %d" % len(content),
    )
    status, headers, _ = read_reply(await door.raw_http(plain("POST", COMMANDS, *lines, body=content)))
    assert (status, headers["location"]) == (201, COMMANDS + "/c1")


@pytest.mark.parametrize("name", ["Authorization", "Idempotency-Key", "Last-Event-ID"])
async def test_a_header_that_counts_is_sent_once(
    door: House, ready: Client, raw: redis.Redis, name: str
) -> None:
    before = everything(raw)
    auth = f"authorization: Bearer {ready.token}".encode()
    if name == "Idempotency-Key":
        status, body = await send(door, ready, b"idempotency-key: a", b"Idempotency-Key: b")
    else:
        again = auth if name == "Authorization" else b"last-event-id: 0"
        more = () if name == "Authorization" else (b"last-event-id: 0",)
        request = plain("GET", "/v1/sessions/s1/updates", auth, again, *more, b"accept: text/event-stream")
        status, _, answer = read_reply(await door.raw_http(request))
        body = json.loads(answer)
    assert (status, body["description"]) == (400, f"{name}: must be sent once")
    assert everything(raw) == before


@pytest.mark.parametrize(
    ("asked", "applied"),
    [
        ("wait=0", "wait=0"),
        ("wait=1", "wait=1"),
        ('wait="1"', "wait=1"),
        ("respond-async, wait=2; x=1", "wait=2"),
        ("WAIT=1", "wait=1"),
        ("wait=999999999", f"wait={LONGEST_WAIT_S}"),
        ("wait=-1", None),
        ("wait=1.5", None),
        ("wait", None),
        ("wait=" + "9" * 5_000, None),
        ("", None),
    ],
)
async def test_a_preference_is_a_wish_and_says_what_was_kept(
    door: House, ready: Client, asked: str, applied: str | None
) -> None:
    """Asked about something that is there already, so that no wait is ever waited out."""
    await ready.submit("s1", "c1")
    await door.work("c1", session_id="s1")
    page = await ready.http.get("/v1/sessions/s1/updates", headers={"prefer": asked})
    outcome = await ready.http.get(COMMANDS + "/c1", headers={"prefer": asked})
    for response in (page, outcome):
        assert response.status_code == 200
        assert response.headers.get("preference-applied") == applied
    assert outcome.json()["state"] == "settled"


@pytest.mark.parametrize(
    "value",
    ["not-a-trace", "00-" + "0" * 200, "00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01", ""],
)
async def test_a_bad_trace_context_is_ignored(ready: Client, value: str) -> None:
    assert (await ready.submit("s1", "c1", headers={"traceparent": value})).status_code == 201


async def test_a_trace_context_is_kept_and_is_no_part_of_the_command(door: House, ready: Client) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert (await ready.submit("s1", "c1", headers={"traceparent": trace})).status_code == 201
    other = trace.replace("b7ad", "b7ae")
    assert (await ready.submit("s1", "c1", headers={"traceparent": other})).status_code == 200
    handle = await door.worker.tenant("acme")
    authority = (await handle.snapshots.get()).revisions.authority
    operation = await handle.reads.operation(command_operation_id(authority, "c1"), "s1")
    assert operation is not None
    assert operation.admission.traceparent == trace


@pytest.mark.parametrize(
    ("accept", "streams"),
    [
        ("text/event-stream", True),
        ("TEXT/EVENT-STREAM", True),
        ("application/json, text/event-stream", True),
        ("text/event-stream; q=0.5", True),
        ("text/event-stream;q=0", False),
        ("*/*", False),
        ("text/*", False),
        ("text/event-streams", False),
        ("application/json", False),
    ],
)
async def test_a_stream_is_given_to_who_names_it(ready: Client, accept: str, streams: bool) -> None:
    """HEAD tells which it would be, and streams nothing."""
    response = await ready.http.head("/v1/sessions/s1/updates", headers={"accept": accept})
    assert response.status_code == 200
    kind = response.headers["content-type"]
    assert kind == ("text/event-stream" if streams else "application/json")
    if streams:
        assert response.headers["cache-control"] == "no-store"


async def test_a_preference_does_not_hold_a_refusal(ready: Client) -> None:
    response = await ready.outcome("s1", "missing", wait=30)
    assert_refused(response, 404, kind="denied")
    response = await ready.page("s1", wait=30, after=1)
    assert_refused(response, 400, "after:")
