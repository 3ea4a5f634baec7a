"""The demonstration as a newcomer runs it: it holds, it says so last, and it leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from settlement_svc.examples.demo import __main__ as demo
from settlement_svc.examples.demo.promises import Broken
from shared.children import ChildError
from tests.support.belongings import belongings
from tests.support.polling import wait_until_blocking
from tests.support.processes import Process, Processes

WITHIN_S = 240.0


@pytest.fixture
def place() -> Iterator[Path]:
    """The demonstration's temporary directory: short, because a socket's path has to fit."""
    folder = Path(tempfile.mkdtemp(prefix="lgd-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start(processes: Processes, place: Path) -> Process:
    environment = {"TMPDIR": str(place), "PYTHONIOENCODING": "utf-8", "LOCKGATE_PEER": "left-out"}
    return processes.python("-m", "settlement_svc.examples.demo", env=environment)


@pytest.mark.timeout(300)
@pytest.mark.requirement(
    "RT-OWN-06",
    "RT-OWN-08",
    "DASP-CORE-002a",
    "DASP-CORE-004d",
    "DASP-CORE-005a",
    "DASP-CORE-005b",
    "DASP-CORE-006b",
    "DASP-CORE-007b",
    "DASP-CORE-009a",
    "DASP-CORE-012c",
)
def test_every_promise_of_the_demonstration_holds(processes: Processes, place: Path) -> None:
    run = start(processes, place)
    status = run.wait(WITHIN_S)
    lines = run.output.splitlines()
    assert (status, lines[-1]) == (0, "demo: ok"), run.output
    steps = [line for line in lines if line[:3].strip().isdigit()]
    held = [line for line in lines if line.strip().startswith("✓")]
    assert len(steps) == len(held) == 10, run.output
    assert belongings(place) == {}
    assert list(place.iterdir()) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_a_demonstration_that_is_stopped_takes_everything_with_it(
    processes: Processes, place: Path, number: signal.Signals, status: int
) -> None:
    run = start(processes, place)
    run.wait_for("accepted at sequence", 60)
    assert len(belongings(place)) > 6
    os.kill(run.pid, number)
    assert run.wait(60) == status
    assert run.output.splitlines()[-1] == "demo: stopped"
    assert belongings(place) == {}
    assert list(place.iterdir()) == []


@pytest.mark.timeout(300)
def test_nothing_outlives_a_demonstration_that_is_killed(processes: Processes, place: Path) -> None:
    run = start(processes, place)
    run.wait_for("accepted at sequence", 60)
    run.kill()
    wait_until_blocking(lambda: not belongings(place), timeout=40)


class _Stage:
    base, token = "http://127.0.0.1:1", "token"

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def log_tails(self) -> str:
        return "the logs"


def _telling(error: Exception) -> Callable[..., object]:
    class Told:
        def __init__(self, *_: object) -> None:
            pass

        def tell(self) -> None:
            raise error

    return Told


@pytest.mark.parametrize("error", [Broken("an unsafe effect is never repeated"), ChildError("door ended")])
def test_a_broken_promise_ends_it_with_status_1_and_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    monkeypatch.setattr(demo, "Stage", _Stage)
    monkeypatch.setattr(demo, "Story", _telling(error))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert demo.main() == 1
    out, err = capsys.readouterr()
    assert str(error) in out.splitlines()[-1]
    assert out.splitlines()[-1].startswith("demo: failed")
    assert "the logs" in err
    assert "demo: ok" not in out
