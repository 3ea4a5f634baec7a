"""What a handler may do wrong, and what becomes of the work then."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import h11
import pytest

from settlement_svc.handler import Endpoint, Handler, NoAnswer
from tests.settlement.host import LEASE, PEER, TENANT, Host, contract
from tests.settlement.scripted import Document, ScriptedHandler, answer, done, response
from tests.support.polling import wait_until

LARGE = {"ok": True, "padding": "x" * 2_000}
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
OK_BODY = b'{"result":{"ok":true}}'

BAD: dict[str, bytes | None] = {
    "dropped": None,
    "nothing": b"",
    "junk": b"\x00\xffnot http at all\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + OK_BODY,
    "an endless head": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    "only news": b"HTTP/1.1 102 Processing\r\n\r\n",
    "500": response(OK_BODY, "500 Internal Server Error"),
    "503": response(OK_BODY, "503 Service Unavailable"),
    "404": response(OK_BODY, "404 Not Found"),
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "302": b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
    "202 and no answer": response(b"{}", "202 Accepted"),
    "not json": response(b"all done"),
    "not utf-8": response(b'{"result":{"ok":"\xff"}}'),
    "no object": response(b"[]"),
    "no result": response(b"{}"),
    "unknown member": answer(result={"ok": True}, verdict="good"),
    "result and refusal": answer(result={"ok": True}, refused={"code": "a.b", "message": "c"}),
    "result of another schema": answer(result={"ok": "yes"}),
    "repeated member": response(b'{"result":{"ok":false,"ok":true}}'),
    "unsafe number": response(b'{"result":{"ok":true,"n":9007199254740993}}'),
    "fraction": response(b'{"result":{"ok":true,"n":0.5}}'),
    "result too large": answer(result=LARGE),
    "body too large": response(b'{"result":{"ok":true}}' + b" " * 1_100_000),
    "chunks without end": CHUNKED + b"10000\r\n" + b" " * 65_536 + b"\r\n",
    "unknown update": answer(result={"ok": True}, updates=[{"name": "work.secret", "data": {}}]),
    "update of another schema": answer(result={"ok": True}, updates=[{"name": "work.done", "data": 1}]),
    "state of another schema": answer(result={"ok": True}, state={}),
    "refusal without message": answer(refused={"code": "test.no"}),
    "refusal with a bad code": answer(refused={"code": "No Such Code", "message": "m"}),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@pytest.mark.requirement("DASP-CORE-008a")
async def test_a_bad_answer_proves_nothing_and_harmless_work_is_done_again(
    redis_url: str, bad: bytes | None
) -> None:
    async def script(document: Document) -> bytes | None:
        return bad if document["attempt"] == 1 else done(document)

    async with Host.create(redis_url, contract()) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url):
            await host.submit("c1")
            assert (await host.outcome("c1"))["status"] == "completed"
        assert [call["attempt"] for call in handler.calls] == [1, 2]
        first, second = (int(call["lease"].split("-")[1]) for call in handler.calls)
        assert first < second
        assert [fact.kind for fact in await host.facts()] == ["accepted", "application", "outcome"]


@pytest.mark.parametrize("kind", ["dropped", "500", "202 and no answer", "result too large", "not json"])
@pytest.mark.requirement("DASP-CORE-007b", "DASP-CORE-008a")
@pytest.mark.case(61)
async def test_a_bad_answer_to_unsafe_work_is_uncertain_and_never_repeated(redis_url: str, kind: str) -> None:
    async def script(_: Document) -> bytes | None:
        return BAD[kind]

    terms = contract(effects="unsafe")
    async with Host.create(redis_url, terms) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url), host.sidecar(handler.url):
            await host.submit("c1")
            outcome = await host.outcome("c1")
            assert (outcome["status"], outcome["output"], outcome["error"]["retryable"]) == (
                "uncertain",
                None,
                False,
            )
            # Another command goes through both sidecars' hands after it: nobody took the first one up again.
            handler.script = _done
            await host.submit("c2")
            assert (await host.outcome("c2"))["status"] == "completed"
        operations = [call["operationId"] for call in handler.calls]
        assert operations == [host.operation_id("c1"), host.operation_id("c2")]
        assert (await host.operation("c1")).reservation == "quarantined"


async def _done(document: Document) -> bytes:
    return done(document)


async def test_attempts_are_counted_and_end_as_the_contract_says(redis_url: str) -> None:
    async def script(_: Document) -> bytes:
        return BAD["500"] or b""

    async with (
        Host.create(redis_url, contract(effects="idempotent")) as host,
        ScriptedHandler(script) as handler,
    ):
        await host.open()
        async with host.sidecar(handler.url):
            await host.submit("c1")
            outcome = await host.outcome("c1")
        assert (outcome["status"], outcome["error"]["code"]) == ("uncertain", "attempts-exhausted")
        assert [call["attempt"] for call in handler.calls] == [1, 2, 3]
        assert len({call["effectKey"] for call in handler.calls}) == 1
        assert len({call["lease"] for call in handler.calls}) == 3


@pytest.mark.case(63)
async def test_work_lost_between_effect_and_answer_is_recovered_by_its_own_key_without_a_second_effect(
    redis_url: str,
) -> None:
    effects: dict[str, dict[str, Any]] = {}

    async def script(document: Document) -> bytes | None:
        first = document["effectKey"] not in effects
        sent = effects.setdefault(document["effectKey"], {"by": document["attempt"]})
        return None if first else done(document, **sent)

    async with (
        Host.create(redis_url, contract(effects="idempotent")) as host,
        ScriptedHandler(script) as handler,
    ):
        await host.open()
        async with host.sidecar(handler.url):
            for command in ("c1", "c2"):
                await host.submit(command)
                outcome = await host.outcome(command)
                assert (outcome["status"], outcome["output"]["by"]) == ("completed", 1)
        assert len(handler.calls) == 4
        assert len(effects) == 2


async def test_a_handler_that_never_answers_is_left_at_the_deadline(redis_url: str) -> None:
    left = asyncio.Event()

    async def script(_: Document) -> bytes | None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return None

    lease = {"leaseMs": 800, "renewMs": 100}
    terms = contract(effects="unsafe", timeout_ms=1_600, lease=lease)
    async with Host.create(redis_url, terms) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url):
            await host.submit("c1")
            await wait_until(lambda: handler.calls)
            # Renewed for as long as the operation is open: much longer than one lease lasts.
            outcome = await host.outcome("c1")
            assert (outcome["status"], outcome["error"]["code"]) == ("uncertain", "timeout")
            assert len(handler.calls) == 1
            await wait_until(lambda: not handler.open_connections)
        op = await host.operation("c1")
        assert op.branches[0].until_ms - op.admitted_ms > 1_200


@pytest.mark.parametrize(
    ("members", "status", "code", "output"),
    [
        ({"refused": {"code": "test.no", "message": "why not"}}, "failed", "test.no", None),
        ({"result": {"ok": False, "why": "no"}}, "failed", "unsuccessful", {"ok": False, "why": "no"}),
        ({"result": {}}, "failed", "unsuccessful", {}),
    ],
)
async def test_a_definitive_no_is_failed_and_changes_no_state(
    redis_url: str, members: dict[str, Any], status: str, code: str, output: object
) -> None:
    async def script(_: Document) -> bytes:
        return answer(**members)

    async with Host.create(redis_url, contract(effects="unsafe")) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url):
            await host.submit("c1")
            outcome = await host.outcome("c1")
        assert (outcome["status"], outcome["error"]["code"], outcome["output"]) == (status, code, output)
        assert len(handler.calls) == 1
        assert [fact.kind for fact in await host.facts()] == ["accepted", "outcome"]
        assert json.loads((await host.session()).state) == {"n": 0}


async def test_a_result_that_asks_for_another_attempt_gets_it(redis_url: str) -> None:
    async def script(document: Document) -> bytes:
        if document["attempt"] < 3:
            return answer(result={"again": True})
        return done(document)

    async with Host.create(redis_url, contract(effects="unsafe")) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url):
            await host.submit("c1")
            assert (await host.outcome("c1"))["status"] == "completed"
        assert [call["attempt"] for call in handler.calls] == [1, 2, 3]


@pytest.mark.requirement("DASP-CORE-007d")
async def test_an_unreachable_handler_costs_no_claim_and_no_attempt(redis_url: str, raw: Any) -> None:
    """Unsafe work too: it is known that nobody was called."""
    terms = contract(effects="unsafe", lease={"claimTimeoutMs": 300})
    async with Host.create(redis_url, terms) as host, ScriptedHandler() as handler:
        await host.open()
        await handler.stop()
        async with host.sidecar(handler.url) as sidecar:
            await host.submit("c1")
            await wait_until(lambda: not sidecar.handler.reachable)
            assert await sidecar.unready() == "the handler cannot be reached"
            # Longer than the claim time: the offer is sent again, and still nothing is claimed.
            first = (await host.operation("c1")).branches[0].outbox
            await wait_until(lambda: _reoffered(host, first))
            branch = (await host.operation("c1")).branches[0]
            assert (branch.attempt, branch.claims, branch.gate, branch.holder) == (1, 0, "closed", None)
            assert raw.xpending(host.handle.keys.outbox(PEER), "work")["pending"] <= 1
            await handler.start()
            assert (await host.outcome("c1"))["status"] == "completed"
            assert await sidecar.unready() is None
        assert [call["attempt"] for call in handler.calls] == [1]


async def _reoffered(host: Host, first: str | None) -> bool:
    return (await host.operation("c1")).branches[0].outbox != first


async def test_a_handler_that_comes_back_within_the_claim_time_gets_the_same_offer(
    redis_url: str, raw: Any
) -> None:
    terms = contract(effects="unsafe", lease={"claimTimeoutMs": 5_000})
    async with Host.create(redis_url, terms) as host, ScriptedHandler() as handler:
        await host.open()
        async with host.sidecar(handler.url) as sidecar:
            await wait_until(lambda: sidecar.handler.reachable)
            await handler.stop()
            await host.submit("c1")
            entry = (await host.operation("c1")).branches[0].outbox
            # It was read and is kept: the handler was found away, nothing was claimed.
            await wait_until(lambda: not sidecar.handler.reachable)
            stream = host.handle.keys.outbox(PEER)
            assert raw.xpending(stream, "work")["pending"] == 1
            assert (await host.operation("c1")).branches[0].outbox == entry
            await handler.start()
            assert (await host.outcome("c1"))["status"] == "completed"
        assert handler.calls[0]["lease"].split("-")[1] == "1"


async def test_the_document_says_what_the_handler_needs(redis_url: str) -> None:
    async with Host.create(redis_url, contract(timeout_ms=7_000)) as host, ScriptedHandler() as handler:
        await host.open()
        async with host.sidecar(handler.url) as sidecar:
            await host.submit("c1", {"amount": 3, "who": "é"})
            await host.outcome("c1")
            await host.submit("c2")
            await host.outcome("c2")
        first, second = handler.calls
        op = await host.operation("c1")
        assert first == {
            "operationId": op.id,
            "branchId": PEER,
            "peer": PEER,
            "attempt": 1,
            "lease": f"1-1-{sidecar.holder}",
            "leaseMs": LEASE["leaseMs"],
            "deadlineMs": op.admitted_ms + 7_000,
            "effectKey": f"{op.id}.{PEER}",
            "contract": {"id": "test.work", "version": "1", "digest": host.contract.digest},
            "interaction": "do",
            "input": {"amount": 3, "who": "é"},
            "session": {"id": "s1", "cursor": 1, "state": {"n": 0}, "stateRevision": "0"},
        }
        assert second["session"] == {"id": "s1", "cursor": 4, "state": {"n": 1}, "stateRevision": "1"}
        assert TENANT not in json.dumps(first)


async def test_an_answer_made_from_another_state_is_not_taken(redis_url: str, raw: Any) -> None:
    async def script(document: Document) -> bytes:
        raw.hincrby(host.handle.keys.session("s1"), "state_rev", 1)
        return done(document)

    async with Host.create(redis_url, contract()) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url):
            await host.submit("c1")
            outcome = await host.outcome("c1")
        assert (outcome["status"], outcome["error"]["code"]) == ("failed", "state-moved")
        assert json.loads((await host.session()).state) == {"n": 0}


# The carrier's HTTP


@pytest.mark.parametrize(
    ("url", "host", "port", "socket", "target", "authority"),
    [
        ("http://127.0.0.1:9000", "127.0.0.1", 9000, "", "/", "127.0.0.1:9000"),
        ("http://localhost/work?kind=a", "localhost", 80, "", "/work?kind=a", "localhost"),
        ("https://handler.example/x", "handler.example", 443, "", "/x", "handler.example"),
        ("http://[::1]:9000/", "::1", 9000, "", "/", "[::1]:9000"),
        ("unix:///run/a%20b.sock", "localhost", 0, "/run/a b.sock", "/", "localhost"),
    ],
)
def test_handler_urls(url: str, host: str, port: int, socket: str, target: str, authority: str) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.host, endpoint.port, endpoint.socket, endpoint.target) == (host, port, socket, target)
    assert endpoint.authority == authority
    assert endpoint.tls == url.startswith("https")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:9000",
        "ftp://h/",
        "http://",
        "http://h:port/",
        "http://u:secret@h/",
        "unix://run/x",
        "redis://h",
    ],
)
def test_bad_handler_urls_are_refused_without_quoting_them(url: str) -> None:
    with pytest.raises(ValueError, match="handler URL") as refusal:
        Endpoint.parse(url)
    assert "secret" not in str(refusal.value)


async def test_a_handler_on_a_unix_socket_is_called_with_plain_http(tmp_path: Path) -> None:
    requests: list[h11.Request] = []
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(our_role=h11.SERVER)
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(4096))
            elif isinstance(event, h11.Request):
                requests.append(event)
            elif isinstance(event, h11.Data):
                bodies.append(bytes(event.data))
            else:
                break
        writer.write(CHUNKED + b"5\r\nhello\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()

    path = tmp_path / "handler.sock"
    server = await asyncio.start_unix_server(serve, path)
    try:
        call = await Handler(Endpoint.parse(f"unix://{path}")).connect(1.0)
        assert call is not None
        try:
            assert await call.post(b'{"a":1}', {"traceparent": "00-ab-cd-01"}) == b"hello"
        finally:
            call.close()
    finally:
        server.close()
        await server.wait_closed()
    (request,) = requests
    headers = dict(request.headers)
    assert (request.method, request.target, b"".join(bodies)) == (b"POST", b"/", b'{"a":1}')
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"traceparent"] == b"00-ab-cd-01"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("dropped", "lost"), ("junk", "malformed"), ("500", "status"), ("body too large", "too-large")],
)
async def test_what_went_wrong_is_one_of_few_words(kind: str, reason: str) -> None:
    async def script(_: Document) -> bytes | None:
        return BAD[kind]

    async with ScriptedHandler(script) as server:
        call = await Handler(Endpoint.parse(server.url)).connect(1.0)
        assert call is not None
        with contextlib.closing(call), pytest.raises(NoAnswer) as none:
            await call.post(b"{}")
        assert none.value.reason == reason
