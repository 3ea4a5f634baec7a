"""What an orchestrator asks a settlement process: is it alive, may it work, what did it count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shared import telemetry
from shared.config import SettlementSettings
from shared.serving.bounds import Bounds
from shared.serving.server import GuestServer, Serving, listen

_STOPS_IN_S: Final = 2
BOUNDS: Final = Bounds(connections=256, arrival_s=10.0, unread_s=10.0)
Unready = Callable[[], Awaitable[str | None]]


def health_app(unready: Unready, *, with_metrics: bool) -> Starlette:
    """``/healthz``, ``/readyz`` and, where they have no port of their own, ``/metrics``."""

    async def alive(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        reason = await unready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        body = {"kind": "unavailable", "description": reason}
        return JSONResponse(body, status_code=503, headers={"Retry-After": "1"})

    async def metrics(_: Request) -> Response:
        return Response(telemetry.metrics_page(), media_type=telemetry.METRICS_CONTENT_TYPE)

    routes = [Route("/healthz", alive), Route("/readyz", ready)]
    return Starlette(routes=[*routes, Route("/metrics", metrics)] if with_metrics else routes)


@contextlib.asynccontextmanager
async def serve_health(settings: SettlementSettings, unready: Unready) -> AsyncIterator[int]:
    """Serve health for as long as the block runs; gives the port. Raises OSError where the port is taken."""
    listener = listen(settings.host, settings.port)
    app = health_app(unready, with_metrics=settings.metrics_port == settings.port != 0)
    config = Serving(app, BOUNDS, "settlement", lifespan="off", timeout_graceful_shutdown=_STOPS_IN_S)
    server = GuestServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving
