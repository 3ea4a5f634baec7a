"""What the example handlers share: one POST route, an address printed at the start, and a ledger of
effects.

A handler takes the JSON document of an assignment and answers ``{"result": …}``, with ``updates`` and
``state`` where its profile has them, or ``{"refused": {"code": …, "message": …}}`` for a definitive no. It
may be called again for the same ``effectKey`` when an answer was lost, unless its contract says that its
effects are unsafe.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Document = dict[str, Any]
Answer = dict[str, Any]


class Ledger:
    """The world outside: one line per effect, on disk before the call returns. Without a path nothing is
    written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def record(self, document: Document, **effect: Any) -> None:
        """Let an effect happen for an assignment."""
        if self._path is None:
            return
        identity = {name: document[name] for name in ("operationId", "effectKey", "attempt", "lease")}
        line = json.dumps({**identity, **effect}).encode() + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # One write of one line: appended whole, whoever else appends at the same time.
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def refused(code: str, message: str) -> Answer:
    """A definitive no, with a code that a program can tell and a message for people."""
    return {"refused": {"code": code, "message": message}}


def application(handle: Callable[[Document], Awaitable[Answer]]) -> Starlette:
    """The HTTP side of a handler."""

    async def endpoint(request: Request) -> Response:
        return JSONResponse(await handle(await request.json()))

    return Starlette(routes=[Route("/", endpoint, methods=["POST"])])


def serve(handle: Callable[[Document], Awaitable[Answer]], port: int) -> None:
    """Serve a handler on loopback until SIGTERM; prints its URL once it takes requests. Port 0 takes a free
    one.
    """
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    click.echo(f"listening on http://127.0.0.1:{listener.getsockname()[1]}/")
    config = uvicorn.Config(
        application(handle),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    uvicorn.Server(config).run(sockets=[listener])


def options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every example has: ``port``, ``delay_ms`` and ``ledger``."""
    for option in (
        click.option(
            "--ledger",
            type=click.Path(dir_okay=False, path_type=Path),
            help="A file that gets one JSON line for every effect.",
        ),
        click.option(
            "--delay-ms",
            type=click.IntRange(0, 600_000),
            default=0,
            show_default=True,
            help="How long to work after the effect, before the answer.",
        ),
        click.option(
            "--port",
            type=click.IntRange(0, 65_535),
            default=0,
            show_default=True,
            help="The port on loopback; 0 takes a free one.",
        ),
    ):
        command = option(command)
    return command
