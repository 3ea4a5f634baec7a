"""``lockgate admission`` and ``lockgate settlement``: the service itself, with flags that win."""

from __future__ import annotations

import socket

import httpx
import pytest

from tests.support.processes import Process, Processes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("name", ["admission", "settlement"])
def test_a_service_takes_the_place_of_the_command_and_flags_win(
    processes: Processes, redis_url: str, name: str
) -> None:
    port = free_port()
    service: Process = processes.python(
        "-m",
        "shared.cli.main",
        name,
        "--port",
        str(port),
        "--metrics-port",
        str(port),
        "--redis-url",
        redis_url,
        env={
            "LOCKGATE_PORT": "1",
            "LOCKGATE_METRICS_PORT": "off",
            "LOCKGATE_REDIS_URL": "redis://127.0.0.1:1",
        },
    )
    service.wait_for("listening", 60)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        assert client.get("/readyz").status_code == 200
        assert client.get("/metrics").status_code == 200
    # The signal reaches the service itself: there is no process in between.
    service.terminate()
    assert service.wait(60) == 0


def test_without_flags_the_variables_hold(processes: Processes, redis_url: str) -> None:
    port = free_port()
    service = processes.python(
        "-m",
        "shared.cli.main",
        "admission",
        env={"LOCKGATE_PORT": str(port), "LOCKGATE_METRICS_PORT": "off", "LOCKGATE_REDIS_URL": redis_url},
    )
    service.wait_for("listening", 60)
    assert httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False).status_code == 200
    service.terminate()
    assert service.wait(60) == 0
