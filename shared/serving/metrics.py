"""``/metrics`` on a port of its own."""

from __future__ import annotations

from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.serving.bounds import Bounds
from shared.serving.server import ThreadServer
from shared.telemetry import METRICS_CONTENT_TYPE, metrics_page

METRICS_BOUNDS: Final = Bounds(connections=64, arrival_s=10.0, idle_s=75.0, unread_s=10.0)
"""Those who scrape, and those who only try to: a few."""


async def _page(_: Request) -> Response:
    return Response(metrics_page(), media_type=METRICS_CONTENT_TYPE)


def serve_metrics(host: str, port: int) -> ThreadServer:
    """Serve them until the server is stopped. Raises OSError where the port is taken."""
    app = Starlette(routes=[Route("/metrics", _page)])
    return ThreadServer(app, METRICS_BOUNDS, "metrics", host, port)
