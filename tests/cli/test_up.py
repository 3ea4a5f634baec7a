"""``lockgate up``: one command to a working host, that ends in order and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.belongings import belongings
from tests.support.polling import wait_until_blocking
from tests.support.processes import Process, Processes

READY_S = 60.0


def start(processes: Processes, data: Path, *options: str) -> Process:
    up = processes.python("-m", "shared.cli.main", "up", "--data-dir", str(data), "--port", "0", *options)
    up.wait_for(r"^Ctrl-C drains", READY_S)
    return up


def said(up: Process) -> tuple[str, str, str]:
    """Base URL, caller token and operator token, as printed."""
    patterns = (r"lockgate is up: (\S+)", r"^caller token +(\S+)", r"^operator token +(\S+)")
    base, caller, operator = (up.wait_for(pattern)[1] for pattern in patterns)
    return base, caller, operator


@pytest.mark.timeout(240)
def test_up_serves_what_it_prints_drains_and_keeps_everything(processes: Processes, tmp_path: Path) -> None:
    data = tmp_path / "data"
    up = start(processes, data)
    base, caller, operator = said(up)
    script = "\n".join(line for line in up.output.splitlines() if line.startswith(("export ", "curl ")))
    done = subprocess.run(
        ["/bin/sh", "-euc", script.replace("curl ", "curl -sS --noproxy '*' -w '\\n' ")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    opened, receipt, updates = map(json.loads, done.stdout.splitlines())
    assert opened["cursor"] == 0
    assert receipt["outcome"] == {"status": "completed", "output": {"value": 3}, "error": None}
    assert [event["data"]["sequence"] for event in updates["events"]] == [1, 2, 3]
    with httpx.Client(base_url=base, trust_env=False) as client:
        closed = client.get("/v1/sessions/first", headers={"Authorization": f"Bearer {operator}"})
        assert closed.status_code == 200
        assert client.get("/metrics").status_code == 200
    os.kill(up.pid, signal.SIGINT)
    assert up.wait(60) == 0
    assert belongings(data) == {}

    again = start(processes, data)
    base, same_caller, same_operator = said(again)
    assert (same_caller, same_operator) == (caller, operator)
    assert (data / "tokens.json").stat().st_mode & 0o077 == 0
    with httpx.Client(base_url=base, trust_env=False) as client:
        view = client.get("/v1/sessions/first", headers={"Authorization": f"Bearer {caller}"})
        assert view.json()["state"] == {"value": 3}
    again.terminate()
    assert again.wait(60) == 0
    assert belongings(data) == {}


@pytest.mark.timeout(240)
def test_nothing_outlives_up_when_it_is_killed(processes: Processes, tmp_path: Path) -> None:
    data = tmp_path / "data"
    up = start(processes, data, "--no-examples")
    assert len(belongings(data)) > 3
    up.kill()
    wait_until_blocking(lambda: not belongings(data), timeout=40)


@pytest.mark.timeout(240)
def test_up_ends_with_the_log_of_a_service_that_ended_by_itself(processes: Processes, tmp_path: Path) -> None:
    data = tmp_path / "data"
    up = start(processes, data, "--no-examples")
    (victim,) = [
        pid for pid, arguments in belongings(data).items() if arguments.endswith("-m settlement_svc")
    ]
    os.kill(victim, signal.SIGKILL)
    assert up.wait(60) == 1
    assert "settlement ended by itself" in up.output
    assert belongings(data) == {}


def test_a_taken_port_and_a_used_directory_are_refused_with_advice(
    processes: Processes, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        up = processes.python(
            "-m", "shared.cli.main", "up", "--data-dir", str(tmp_path / "d"), "--port", port
        )
        assert up.wait(30) == 1
    assert "--port" in up.output
    assert not (tmp_path / "d").exists()
    (tmp_path / "file").write_text("x")
    wrong = processes.python(
        "-m", "shared.cli.main", "up", "--data-dir", str(tmp_path / "file"), "--port", "0"
    )
    assert wrong.wait(30) == 2
    named = processes.python(
        "-m", "shared.cli.main", "up", "--data-dir", str(tmp_path / "e"), "--port", "0", "--tenant", "NO"
    )
    assert named.wait(30) == 2
    assert belongings(tmp_path / "e") == {}


@pytest.mark.timeout(240)
def test_a_second_up_on_the_same_directory_is_refused(processes: Processes, tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = start(processes, data, "--no-examples")
    second = processes.python("-m", "shared.cli.main", "up", "--data-dir", str(data), "--port", "0")
    assert second.wait(30) == 1
    assert "in use" in second.output
    assert first.running
    first.terminate()
    assert first.wait(60) == 0
