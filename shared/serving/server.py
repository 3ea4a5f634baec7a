"""A server of bounded connections, alone in a process or beside other work."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from shared.serving.bounds import SPARE, Bounds, Guard
from shared.serving.protocol import BoundedProtocol
from shared.telemetry import CONNECTIONS

_SWEEP_EVERY_S: Final = 1.0
_OTHER_FILES: Final = 256
_BACKLOG: Final = 2048


class Serving(uvicorn.Config):
    """How an application is served within bounds; ``service`` names it in metrics. Other settings are
    uvicorn's own.
    """

    def __init__(self, app: Any, bounds: Bounds, service: str, **settings: Any) -> None:
        super().__init__(
            app,
            http=BoundedProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            **settings,
        )
        self.guard = Guard(bounds, service)
        self.service = service


class BoundedServer(uvicorn.Server):
    """Looks after its connections from its start to its end."""

    def __init__(self, config: Serving) -> None:
        super().__init__(config)
        self._guard = config.guard
        self._service = config.service
        self._sweeping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        connections = self.server_state.connections
        CONNECTIONS.labels(self._service).set_function(lambda: len(connections))
        await super().startup(sockets)
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().shutdown(sockets)
        finally:
            if self._sweeping is not None:
                self._sweeping.cancel()
                await asyncio.gather(self._sweeping, return_exceptions=True)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            self._guard.sweep(self.server_state.connections, loop.time())


class GuestServer(BoundedServer):
    """A server that leaves signals to the process it is part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ThreadServer:
    """A server in a thread and an event loop of its own, so that it answers whatever the process is busy
    with. Listens from the start; raises OSError where the port is taken.
    """

    def __init__(self, app: Any, bounds: Bounds, service: str, host: str, port: int) -> None:
        self._listener = listen(host, port)
        self.port = int(self._listener.getsockname()[1])
        config = Serving(app, bounds, service, lifespan="off", timeout_graceful_shutdown=1)
        self._server = GuestServer(config)
        self._thread = threading.Thread(target=self._run, name=f"serving {service}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        """Return when it has ended."""
        self._server.should_exit = True
        self._thread.join()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; OSError where that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def open_files_for(connections: int) -> int:
    """Let the process have as many files as these connections and its other work need, and give the number
    of connections that it can have: a store that cannot be reached again for want of a file would stop
    everybody.
    """
    needed = connections + SPARE + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    possible = needed if soft == resource.RLIM_INFINITY else soft
    return max(1, min(connections, possible - SPARE - _OTHER_FILES))
