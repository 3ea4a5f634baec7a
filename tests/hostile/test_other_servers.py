"""Health and metrics listen too: they are bounded as the door is, and go on under a flood."""

from __future__ import annotations

import contextlib
import resource

import httpx
import pytest

from settlement_svc.health import BOUNDS
from shared.serving.bounds import MAX_HEAD_BYTES
from shared.serving.metrics import METRICS_BOUNDS
from shared.serving.server import open_files_for
from tests.hostile.door import HOST, Served, connected, description, gone, serve, status_of
from tests.support.polling import wait_until
from tests.support.processes import Processes


async def assert_bounded(served: Served, port: int, path: str, service: str, connections: int) -> None:
    """Silent connections make room for one that asks; what is no request, or too large a one, is refused."""
    counted = f'lockgate_http_connections{{service="{service}"}}'
    async with contextlib.AsyncExitStack() as open_ones:
        for _ in range(connections + 20):
            await open_ones.enter_async_context(connected(port))
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"http://127.0.0.1:{port}{path}")).status_code == 200

        async def bounded() -> bool:
            return (await served.metrics())[counted] <= connections

        await wait_until(bounded)
    for request, status in (
        (f"GET {path} HTTP/1.1\r\n\r\n".encode(), 400),
        (f"GET {path} HTTP/1.1\r\n".encode() + HOST + b"x: " + b"y" * MAX_HEAD_BYTES, 431),
        (b"nonsense\r\n\r\n", 400),
    ):
        async with connected(port) as held:
            await held.send(request)
            reply = await held.rest()
        assert status_of(reply) == status
        assert description(reply)
    async with connected(port) as held:
        await held.send(f"POST {path} HTTP/1.1\r\ncontent-length: 1000000\r\n".encode() + HOST + b"\r\n")
        assert status_of(await held.rest()) == 405


async def test_the_health_of_a_settlement_process_is_bounded(redis_url: str, processes: Processes) -> None:
    central = await serve(processes, redis_url, "settlement_svc")
    await assert_bounded(central, central.port, "/healthz", "settlement", BOUNDS.connections)


@pytest.mark.parametrize("module", ["admission_svc", "settlement_svc"])
async def test_a_metrics_port_is_bounded(redis_url: str, processes: Processes, module: str) -> None:
    served = await serve(processes, redis_url, module)
    await assert_bounded(served, served.metrics_port, "/metrics", "metrics", METRICS_BOUNDS.connections)
    served.process.terminate()
    assert served.process.wait() == 0


async def test_a_slow_scraper_is_cut_off(redis_url: str, processes: Processes) -> None:
    served = await serve(processes, redis_url)
    async with connected(served.metrics_port) as slow:
        await slow.send(b"GET /metrics HTTP/1.1\r\n")
        assert status_of(await slow.rest()) == 408
    await gone(served)


def test_there_are_files_left_for_the_store() -> None:
    """More connections than a process may have files are not promised."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, before[1]))
        assert open_files_for(100) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 100 + 512
        possible = open_files_for(10**9)
        assert possible == resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
