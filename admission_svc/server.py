"""The HTTP server around the door: bounded as every server of ours, with an orderly end."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from shared.config import AdmissionSettings
from shared.serving.bounds import Bounds
from shared.serving.server import BoundedServer, Serving, open_files_for
from shared.telemetry import logger

_log = logger("lockgate.admission")


class DoorServer(BoundedServer):
    """Serves the door until a signal, then lets what is under way end: waits and streams at once, requests
    within the drain time.
    """

    def __init__(self, config: Serving, drain: Callable[[], None], told: Callable[[int], None]) -> None:
        super().__init__(config)
        self._drain = drain
        self._told = told

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._told(self.servers[0].sockets[0].getsockname()[1])

    async def main_loop(self) -> None:
        await super().main_loop()
        self._drain()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal ends the main loop; it is not raised again afterwards, an orderly end is status 0."""
        super().handle_exit(sig, frame)
        self._captured_signals.clear()


def configuration(app: Any, settings: AdmissionSettings) -> Serving:
    """How the door is served. Fewer connections than were asked for where the process may not have as many
    files: that is logged.
    """
    connections = open_files_for(settings.max_connections)
    if connections < settings.max_connections:
        _log.warning("fewer connections than set", connections=connections, set=settings.max_connections)
    bounds = Bounds(
        connections=connections,
        arrival_s=settings.request_seconds,
        idle_s=settings.idle_seconds,
        unread_s=settings.unread_seconds,
    )
    return Serving(
        app,
        bounds,
        "admission",
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        lifespan="on",
        timeout_graceful_shutdown=settings.drain_seconds,
    )
