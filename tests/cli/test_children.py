"""Child processes: they end with their owner, in order where they can, and their ends are told."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from shared.children import LOG_LIMIT_BYTES, Child, ChildError
from tests.support.belongings import belongings
from tests.support.polling import wait_until_blocking
from tests.support.processes import Processes, is_alive

SLEEPER = (
    "import signal, time; signal.signal(signal.SIGTERM, {}); print('ready', flush=True); time.sleep(600)"
)
OWNER = """
import sys, time
from pathlib import Path
from shared.children import Child
child = Child.module("http.server", "0", log=Path(sys.argv[1]) / "child.log", grace_s=5.0).start()
print(f"child {child.pid}", flush=True)
time.sleep(600)
"""


def python(code: str, log: Path, env: dict[str, str] | None = None, grace_s: float = 5.0) -> Child:
    return Child("child", [sys.executable, "-c", code], log, env, grace_s)


def ready(child: Child) -> None:
    wait_until_blocking(lambda: "ready" in child.output())


def test_a_child_ends_in_order(tmp_path: Path) -> None:
    code = SLEEPER.format("lambda *_: exit(7)")
    with python(code, tmp_path / "log") as child:
        ready(child)
        child.ask_to_stop()
        assert child.wait(10.0) == 7
    assert not is_alive(child.pid)


def test_a_child_that_does_not_listen_is_killed_after_its_grace(tmp_path: Path) -> None:
    with python(SLEEPER.format("signal.SIG_IGN"), tmp_path / "log", grace_s=0.2) as child:
        ready(child)
        child.stop()
    assert not is_alive(child.pid)


def test_a_stopped_child_can_be_killed(tmp_path: Path) -> None:
    with python(SLEEPER.format("signal.SIG_DFL"), tmp_path / "log") as child:
        ready(child)
        child.signal(signal.SIGSTOP)
        child.kill()
    assert not is_alive(child.pid)


def test_the_end_of_a_child_shows_with_its_status_and_log(tmp_path: Path) -> None:
    child = python("import sys; print('why'); sys.exit(3)", tmp_path / "log").start()
    wait_until_blocking(lambda: not child.running)
    assert child.log_tail() == "why"
    assert child.wait(5.0) == 3
    with pytest.raises(ProcessLookupError):
        child.signal(signal.SIGTERM)


def test_a_program_that_does_not_exist_is_told(tmp_path: Path) -> None:
    child = Child("none", [str(tmp_path / "none")], tmp_path / "log").start()
    assert child.wait(10.0) == 127
    assert "cannot execute" in (tmp_path / "log").read_text()
    with pytest.raises(FileNotFoundError):
        Child("none", ["/bin/true"], tmp_path / "missing" / "log").start()


def test_the_environment_is_the_given_one_and_never_shows_in_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEFT_OUT", "1")
    environment = {"PATH": os.environ["PATH"], "SECRET": f"hidden-{tmp_path}"}
    code = (
        "import os, time; print(os.environ['SECRET'], 'LEFT_OUT' in os.environ, 'ready', flush=True); "
        "time.sleep(600)"
    )
    with python(code, tmp_path / "log", environment) as child:
        ready(child)
        assert child.output().split() == [environment["SECRET"], "False", "ready"]
        assert not any("hidden" in arguments for arguments in belongings(tmp_path).values())


def test_a_large_log_is_put_aside_at_the_next_start(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    log.write_bytes(b"x" * (LOG_LIMIT_BYTES + 1))
    with python("print('ready', flush=True)", log) as child:
        ready(child)
    assert child.output() == "ready\n"
    assert (tmp_path / "child.log.1").stat().st_size > LOG_LIMIT_BYTES


def test_no_child_outlives_an_owner_that_is_killed(processes: Processes, tmp_path: Path) -> None:
    owner = processes.python("-c", OWNER, str(tmp_path))
    pid = int(owner.wait_for(r"child (\d+)")[1])
    wait_until_blocking(lambda: is_alive(pid))
    owner.kill()
    wait_until_blocking(lambda: not is_alive(pid))


def test_no_child_outlives_its_guard(tmp_path: Path) -> None:
    with python(SLEEPER.format("signal.SIG_IGN"), tmp_path / "log") as child:
        ready(child)
        guard = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(guard, signal.SIGKILL)
        wait_until_blocking(lambda: not is_alive(child.pid))
        assert not child.running


def test_an_unstartable_guard_is_a_child_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.children._guard_file", lambda: str(tmp_path / "no-guard.py"))
    child = python("pass", tmp_path / "log")
    with pytest.raises(ChildError, match="no-guard"):
        child.start()
    child.stop()
