"""The door: one route table, one place where every request begins and ends.

Whatever goes wrong inside becomes an answer with a body of the error table; what should not have happened is
logged with its request's route and answered 503, so that a caller repeats it unchanged. The hottest route is
found before the router is asked.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.routing import Route, Router

from admission_svc import openapi
from admission_svc.administration import Administration, administration_operations
from admission_svc.auth import Desk
from admission_svc.commands import Commands
from admission_svc.host import HostRoutes
from admission_svc.http import Call, Disconnected, Receive, Reply, Scope, Send, Stream, send_reply
from admission_svc.live import Live
from admission_svc.messages import (
    Authority,
    BatchSubmit,
    Closing,
    CommandOutcome,
    CommandSubmit,
    CursorHeld,
    CursorPut,
    Health,
    Problem,
    Receipt,
    Receipts,
    SessionOpen,
    SessionOpened,
    Updates,
    View,
    WaitedReceipt,
    encode,
)
from admission_svc.openapi import AFTER, CLIENT, KEY, LAST_EVENT_ID, LIMIT, WAIT, Operation
from admission_svc.problems import NOT_FOUND, UNEXPECTED, method_not_allowed, reply_to
from admission_svc.routes import Handler, SessionRoutes
from admission_svc.sessions import Sessions
from shared.config import AdmissionSettings
from shared.domain.errors import LockgateError, Unavailable
from shared.store.runtime import Runtime
from shared.telemetry import METRICS_CONTENT_TYPE, REQUEST_SECONDS, REQUESTS, UNDER_WAY, logger

_SESSION: Final = "/v1/sessions/{session_id}"
_COMMANDS: Final = _SESSION + "/commands"
_ENCODED_SLASH: Final = re.compile(rb"%(?:2f|5c)", re.IGNORECASE)
_HOT_HEAD: Final = "/v1/sessions/"
_HOT_TAIL: Final = "/commands"
_BUSY: Final = reply_to(Unavailable("too many requests are under way"))
_OTHER: Final = "other"
_LEFT: Final = 499
"""Counted, never sent: the client left before there was an answer."""
_log: Final = logger("lockgate.admission")


class Door:
    """The ASGI application of ``admission_svc`` over an open runtime or one it opens in its lifespan."""

    def __init__(self, runtime: Runtime, settings: AdmissionSettings) -> None:
        self._runtime = runtime
        self._most = settings.max_requests
        self._under_way = 0
        desk = Desk(runtime)
        sessions = Sessions(runtime)
        commands = Commands(runtime)
        live = Live(runtime, desk, sessions)
        self._waits = live.waits
        session_routes = SessionRoutes(desk, sessions, commands, live)
        host_routes = HostRoutes(runtime, desk, self._waits)
        with_metrics = settings.metrics_port == settings.port != 0
        self.operations = [
            *_session_operations(session_routes),
            *administration_operations(Administration(runtime, desk)),
            *_host_operations(host_routes, metrics=with_metrics),
            Operation("GET", "/openapi.json", self._describe, "This description", {200: None}, token=False),
        ]
        self._description = encode(openapi.describe(self.operations))
        self._router = Router(
            [Route(path, _Path(self, path, handlers)) for path, handlers in self._by_path().items()],
            redirect_slashes=False,
            default=self._unknown,
            lifespan=self._lifespan,
        )
        self._hot = _Serving(self, _COMMANDS, "POST", session_routes.submit)
        UNDER_WAY.labels("admission").set_function(lambda: self._under_way)

    def drain(self) -> None:
        """Let waiting requests end now; what is under way goes on."""
        self._waits.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw_path: bytes = scope.get("raw_path") or b""
        if b"%" in raw_path and _ENCODED_SLASH.search(raw_path):
            # No id has one: as a separator it would lead to a route that a filter in front did not see.
            await self._unknown(scope, receive, send)
            return
        if scope["type"] == "http" and scope["method"] == "POST":
            path: str = scope["path"]
            if path.startswith(_HOT_HEAD) and path.endswith(_HOT_TAIL):
                session_id = path[len(_HOT_HEAD) : -len(_HOT_TAIL)]
                if "/" not in session_id:
                    scope["path_params"] = {"session_id": session_id}
                    await self._hot(scope, receive, send)
                    return
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        await self._router(scope, receive, send)

    def begin_request(self) -> bool:
        """Count a request in, unless there are too many."""
        if self._under_way >= self._most:
            return False
        self._under_way += 1
        return True

    def end_request(self) -> None:
        self._under_way -= 1

    def _by_path(self) -> dict[str, dict[str, Handler]]:
        found: dict[str, dict[str, Handler]] = {}
        for operation in self.operations:
            found.setdefault(operation.path, {})[operation.method] = operation.handler
        return found

    @asynccontextmanager
    async def _lifespan(self, _app: Any) -> AsyncIterator[None]:
        async with self._runtime:
            yield

    async def _describe(self, _call: Call) -> Reply:
        return Reply(200, self._description)

    async def _unknown(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        REQUESTS.labels("admission", _OTHER, _OTHER, "404").inc()
        await send_reply(send, NOT_FOUND)


class _Path:
    """One path with its methods."""

    def __init__(self, door: Door, path: str, handlers: dict[str, Handler]) -> None:
        self._serving = {method: _Serving(door, path, method, h) for method, h in handlers.items()}
        if "GET" in handlers:
            self._serving["HEAD"] = _Serving(door, path, "HEAD", handlers["GET"])
        self._refusal = method_not_allowed(", ".join(sorted(self._serving)))
        self._refused = REQUESTS.labels("admission", path, _OTHER, "405")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving = self._serving.get(scope["method"])
        if serving is None:
            self._refused.inc()
            await send_reply(send, self._refusal)
            return
        await serving(scope, receive, send)


class _Serving:
    """One route: counts and times it, and turns what its handler raises into an answer."""

    def __init__(self, door: Door, path: str, method: str, handler: Handler) -> None:
        self._door = door
        self._path = path
        self._method = method
        self._handler = handler
        self._seconds = REQUEST_SECONDS.labels("admission", path)
        self._counters: dict[int, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._door.begin_request():
            self._count(_BUSY.status)
            await send_reply(send, _BUSY)
            return
        started = time.perf_counter()
        try:
            answer = await self._handler(Call(scope, receive))
        except LockgateError as refusal:
            answer = reply_to(refusal)
        except Disconnected:
            self._count(_LEFT)
            return
        except asyncio.CancelledError:
            # A server that must stop now cancels what is under way: its callers are told to repeat it.
            await send_reply(send, UNEXPECTED)
            raise
        except Exception:  # noqa: BLE001 -- the last place that can answer instead of breaking off
            _log.exception("request.failed", route=self._path, method=self._method)
            answer = UNEXPECTED
        finally:
            self._door.end_request()
        if isinstance(answer, Reply):
            self._count(answer.status)
            await send_reply(send, answer)
            self._seconds.observe(time.perf_counter() - started)
        else:
            self._count(200)
            await self._stream(answer, send)

    async def _stream(self, answer: Stream, send: Send) -> None:
        self._door.begin_request()
        try:
            await answer(send)
        finally:
            self._door.end_request()

    def _count(self, status: int) -> None:
        counter = self._counters.get(status)
        if counter is None:
            counter = REQUESTS.labels("admission", self._path, self._method, str(status))
            self._counters[status] = counter
        counter.inc()


def _session_operations(r: SessionRoutes) -> Sequence[Operation]:
    gone, bad = 404, 400
    body = (bad, 413, 415, gone, 503)
    return (
        Operation(
            "PUT",
            _SESSION,
            r.open,
            "Open or reopen a session",
            {200: SessionOpened, 201: SessionOpened},
            body=SessionOpen,
            problems=(*body, 403, 409, 422),
        ),
        Operation(
            "GET", _SESSION, r.view, "A coherent view of a session", {200: View}, problems=(bad, gone, 503)
        ),
        Operation(
            "DELETE",
            _SESSION,
            r.close,
            "Close a session for good",
            {202: Closing, 204: None},
            problems=(bad, 403, gone, 503),
        ),
        Operation(
            "POST",
            _COMMANDS,
            r.submit,
            "Admit a command once; a command that is declined is a receipt with its error",
            {
                201: (Receipt, WaitedReceipt),
                200: (Receipt, WaitedReceipt),
                409: Receipt,
                422: Receipt,
                503: (Receipt, Problem),
            },
            body=CommandSubmit,
            parameters=(KEY, WAIT),
            problems=(*body, 403),
        ),
        Operation(
            "POST",
            _COMMANDS + ":batch",
            r.submit_batch,
            "Admit commands in order, each on its own merits",
            {200: Receipts},
            body=BatchSubmit,
            problems=(*body, 403),
        ),
        Operation(
            "GET",
            _COMMANDS + "/{command_id}",
            r.outcome,
            "What became of a command",
            {200: CommandOutcome},
            parameters=(WAIT,),
            problems=(bad, gone, 503),
        ),
        Operation(
            "GET",
            _SESSION + "/updates",
            r.updates,
            "Saved updates after a cursor, a page or a stream",
            {200: Updates},
            parameters=(AFTER, LIMIT, CLIENT, LAST_EVENT_ID, WAIT),
            problems=(bad, gone, 410, 503),
            stream=True,
        ),
        Operation(
            "PUT",
            _SESSION + "/cursors/{client}",
            r.put_cursor,
            "Move a client's cursor forward",
            {200: CursorHeld},
            body=CursorPut,
            problems=body,
        ),
        Operation(
            "GET",
            _SESSION + "/cursors/{client}",
            r.held_cursor,
            "The cursor held for a client",
            {200: CursorHeld},
            problems=(bad, gone, 503),
        ),
    )


def _host_operations(r: HostRoutes, *, metrics: bool) -> Sequence[Operation]:
    found = [
        Operation(
            "GET",
            "/v1/authority",
            r.authority,
            "The authority, its durability and limits",
            {200: Authority},
            problems=(400, 503),
        ),
        Operation("GET", "/healthz", r.health, "Whether the process lives", {200: Health}, token=False),
        Operation(
            "GET",
            "/readyz",
            r.ready,
            "Whether the process may serve",
            {200: Health, 503: Health},
            token=False,
        ),
    ]
    if metrics:
        found.append(
            Operation(
                "GET",
                "/metrics",
                r.metrics,
                "Metrics in the Prometheus text form",
                {200: None},
                token=False,
                plain=METRICS_CONTENT_TYPE,
            )
        )
    return found
