"""The routes of the session surface: what comes in by HTTP, which function does it, what goes out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from admission_svc.auth import Desk, Visit
from admission_svc.commands import Commands, Verdict, count
from admission_svc.http import (
    Call,
    Header,
    Reply,
    Stream,
    applied,
    integer_parameter,
    key_header,
    traceparent,
    wants_stream,
)
from admission_svc.live import STREAM_HEADERS, Live
from admission_svc.messages import (
    MAX_PAGE,
    Closing,
    CommandOutcome,
    CursorHeld,
    CursorPut,
    ProfileRef,
    Receipt,
    Receipts,
    SessionOpen,
    SessionOpened,
    View,
    WaitedReceipt,
    encode,
    read_batch,
    read_command,
    stored,
)
from admission_svc.problems import retry_after
from admission_svc.sessions import Replay, Sessions, Settled
from shared.domain.errors import InvalidInput
from shared.domain.ids import MAX_SAFE, IdKind, check

Handler = Callable[[Call], Awaitable[Reply | Stream]]
"""Serves one route."""

REPLAYED: Final[Header] = (b"idempotent-replayed", b"true")
_STATUS: Final = {"conflict": 409, "unsupported_command": 422, "limit_exceeded": 503, "invalid_message": 400}


class SessionRoutes:
    """Handlers of the session routes over the session functions."""

    def __init__(self, desk: Desk, sessions: Sessions, commands: Commands, live: Live) -> None:
        self._desk = desk
        self._sessions = sessions
        self._commands = commands
        self._live = live

    async def open(self, call: Call) -> Reply:
        """PUT session."""
        header, session_id = call.header(b"authorization"), call.session_id()
        call.parameters()
        await self._desk.visit(header)
        asked = SessionOpen.read((await call.document()).value)
        opened = await self._desk.serve(header, lambda visit: self._sessions.open(visit, session_id, asked))
        body = SessionOpened(session_id, asked.actor_id, asked.profile, opened.head)
        return Reply(201 if opened.created else 200, encode(body))

    async def view(self, call: Call) -> Reply:
        """GET session."""
        session_id = call.session_id()
        call.parameters()
        record = await self._desk.serve(
            call.header(b"authorization"), lambda visit: self._sessions.view(visit, session_id)
        )
        profile = ProfileRef(record.profile, record.profile_version)
        body = View(session_id, record.actor, profile, record.head, stored(record.state or b"{}"))
        return Reply(200, encode(body))

    async def close(self, call: Call) -> Reply:
        """DELETE session."""
        session_id = call.session_id()
        call.parameters()
        closed = await self._desk.serve(
            call.header(b"authorization"), lambda visit: self._sessions.close(visit, session_id)
        )
        return Reply(204) if closed else Reply(202, encode(Closing(session_id, "closing")))

    async def submit(self, call: Call) -> Reply:
        """POST command. The hottest route: everything here is paid per command."""
        session_id = check(IdKind.SESSION, call.path["session_id"], "session_id")
        header = key = trace = None
        for name, value in call.headers:
            if name == b"authorization":
                header = value if header is None else _twice("Authorization")
            elif name == b"idempotency-key":
                key = value if key is None else _twice("Idempotency-Key")
            elif name == b"traceparent":
                trace = value
        if call.query:
            call.parameters()
        visit = await self._desk.visit(header)
        document = await call.document()
        command = read_command(document, None if key is None else key_header(key), traceparent(trace))

        started_at = self._commands.instant()

        async def judge(current: Visit) -> Verdict:
            return await self._commands.submit(current, session_id, command, started_at)

        try:
            verdict = await self._desk.serve(header, judge, visit)
        except BaseException:
            count(None)
            raise
        count(verdict)
        wait_s = call.wait_s()
        if wait_s is not None and verdict.error is None:
            return await self._waited(call, header, session_id, command.command_id, verdict, wait_s)
        return _receipt_reply(session_id, command.command_id, verdict)

    async def _waited(
        self,
        call: Call,
        header: bytes | None,
        session_id: str,
        command_id: str,
        verdict: Verdict,
        wait_s: int,
    ) -> Reply:
        """A receipt that was held for the outcome, as it stands when the wait is over."""
        waited = await self._live.outcome(header, session_id, command_id, wait_s, call.receive)
        outcome = _outcome(session_id, command_id, waited.found)
        body = WaitedReceipt(
            session_id,
            command_id,
            verdict.disposition,
            verdict.sequence,
            None,
            outcome.state,
            outcome.sequence,
            outcome.outcome,
        )
        reply = _receipt_reply(session_id, command_id, verdict)
        return Reply(reply.status, encode(body), (*reply.headers, *applied(waited.wait_s)))

    async def submit_batch(self, call: Call) -> Reply:
        """POST commands:batch."""
        header, session_id = call.header(b"authorization"), call.session_id()
        call.parameters()
        if call.header(b"idempotency-key") is not None:
            raise InvalidInput("Idempotency-Key", "is refused here: every command of a batch has its own id")
        await self._desk.visit(header)
        commands = list(read_batch(await call.document()))
        started_at = self._commands.instant()
        verdicts = await self._desk.serve(
            header, lambda visit: self._commands.submit_many(visit, session_id, commands, started_at)
        )
        receipts = []
        for command, verdict in zip(commands, verdicts, strict=True):
            count(verdict)
            receipts.append(_receipt(session_id, command.command_id, verdict))
        return Reply(200, encode(Receipts(receipts)))

    async def outcome(self, call: Call) -> Reply:
        """GET command."""
        session_id, command_id, wait_s = call.session_id(), call.command_id(), call.wait_s()
        call.parameters()
        waited = await self._live.outcome(
            call.header(b"authorization"), session_id, command_id, wait_s, call.receive
        )
        return Reply(200, encode(_outcome(session_id, command_id, waited.found)), applied(waited.wait_s))

    async def updates(self, call: Call) -> Reply | Stream:
        """GET updates: a page, or a stream where it is accepted."""
        session_id, header = call.session_id(), call.header(b"authorization")
        given = call.parameters("after", "limit", "client")
        limit = integer_parameter(given.get("limit", str(MAX_PAGE)), "limit", 1, MAX_PAGE)
        after = await self._after(header, session_id, given)
        if not wants_stream(call.headers):
            waited = await self._live.page(header, session_id, after, limit, call.wait_s(), call.receive)
            return Reply(200, _page(session_id, waited.found), applied(waited.wait_s))
        last_event_id = call.header(b"last-event-id")
        if last_event_id:
            after = await self._live.resume_at(header, last_event_id)
        stream = await self._live.stream(header, session_id, after, call.receive)
        return Reply(200, headers=STREAM_HEADERS) if call.method == "HEAD" else stream.run

    async def _after(self, header: bytes | None, session_id: str, given: dict[str, str]) -> int:
        if "client" not in given:
            return integer_parameter(given.get("after", "0"), "after", 0, MAX_SAFE)
        if "after" in given:
            raise InvalidInput("after", "must not come with client, which names a cursor of its own")
        client = check(IdKind.CLIENT, given["client"], "client")
        return await self._desk.serve(
            header, lambda visit: self._sessions.held_cursor(visit, session_id, client)
        )

    async def put_cursor(self, call: Call) -> Reply:
        """PUT cursor."""
        header, session_id, client = call.header(b"authorization"), call.session_id(), call.client()
        call.parameters()
        await self._desk.visit(header)
        cursor = CursorPut.read((await call.document()).value).cursor
        held = await self._desk.serve(
            header, lambda visit: self._sessions.put_cursor(visit, session_id, client, cursor)
        )
        return Reply(200, encode(CursorHeld(held)))

    async def held_cursor(self, call: Call) -> Reply:
        """GET cursor."""
        session_id, client = call.session_id(), call.client()
        call.parameters()
        held = await self._desk.serve(
            call.header(b"authorization"), lambda visit: self._sessions.held_cursor(visit, session_id, client)
        )
        return Reply(200, encode(CursorHeld(held)))


def _twice(name: str) -> bytes:
    raise InvalidInput(name, "must be sent once")


def _receipt(session_id: str, command_id: str, verdict: Verdict) -> Receipt:
    return Receipt(session_id, command_id, verdict.disposition, verdict.sequence, verdict.error)


def _receipt_reply(session_id: str, command_id: str, verdict: Verdict) -> Reply:
    body = encode(_receipt(session_id, command_id, verdict))
    if verdict.error is not None:
        exceeded = verdict.exceeded
        if exceeded is not None:
            status = 429 if exceeded.rate else 503 if exceeded.retry_after_s else 413
            return Reply(status, body, retry_after(exceeded.retry_after_s) if exceeded.retry_after_s else ())
        return Reply(_STATUS[verdict.error.code], body, retry_after(1) if verdict.error.retryable else ())
    location = (b"location", f"/v1/sessions/{session_id}/commands/{command_id}".encode())
    if verdict.disposition == "duplicate":
        return Reply(200, body, (location, REPLAYED))
    return Reply(201, body, (location,))


def _outcome(session_id: str, command_id: str, settled: Settled | None) -> CommandOutcome:
    if settled is None:
        return CommandOutcome(session_id, command_id, "pending", None, None)
    return CommandOutcome(session_id, command_id, "settled", settled.sequence, stored(settled.outcome))


def _page(session_id: str, replay: Replay) -> bytes:
    """The page around events that are rendered already; the id needs no escaping, its pattern has been
    checked.
    """
    head = (
        f'{{"session_id":"{session_id}","after":{replay.after},"next":{replay.next},"head":{replay.head},'
        '"events":['
    )
    return head.encode() + b",".join(replay.events) + b"]}"
