"""Child processes of a test: watched by their output, ended by their id, never outliving the test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
TRACEBACK: Final = "Traceback (most recent call last)"


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody reaped yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    except NotADirectoryError:  # no /proc on this system
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    return state not in "ZX"


class Process:
    """One child in a session of its own; everything it prints goes to one file."""

    def __init__(self, argv: Sequence[str], output: Path, env: Mapping[str, str] | None, cwd: Path) -> None:
        self._output = output
        with output.open("wb") as file:
            self._child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self._output.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def wait(self, timeout: float = 20.0) -> int:
        """The exit status, negative for a signal; AssertionError when it does not end in time."""
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"process {self.pid} did not end within {timeout} s:\n{self.output}"
            ) from None

    def wait_for(self, pattern: str, timeout: float = 20.0) -> re.Match[str]:
        """The first match in the output; AssertionError when the process ends or the time is up before."""
        deadline = time.monotonic() + timeout
        while True:
            ended, late = not self.running, time.monotonic() >= deadline
            found = re.search(pattern, self.output, re.MULTILINE)
            if found:
                return found
            if ended or late:
                why = "it ended" if ended else f"{timeout} s are over"
                raise AssertionError(f"{pattern!r} was not printed, {why}:\n{self.output}")
            time.sleep(0.01)

    def pause(self) -> None:
        """SIGSTOP."""
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._child.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM; the process may drain, ``wait`` tells when it is done."""
        self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to this process alone, and wait."""
        self._child.kill()
        self._child.wait()

    def sweep(self) -> None:
        """End this process and all it started in its session."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._child.kill()
        self._child.wait()


class Processes:
    """The children of one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[tuple[Process, bool]] = []

    def start(
        self,
        *argv: str,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        may_print_traceback: bool = False,
    ) -> Process:
        """Run a program; a printed traceback fails the test unless it is expected."""
        output = self._folder / f"process-{len(self._started)}.log"
        process = Process(argv, output, env, cwd)
        self._started.append((process, may_print_traceback))
        return process

    def python(
        self, *argv: str, env: Mapping[str, str] | None = None, may_print_traceback: bool = False
    ) -> Process:
        """Run this interpreter, e.g. ``python("-m", "admission_svc")``."""
        return self.start(sys.executable, *argv, env=env, may_print_traceback=may_print_traceback)

    def end(self) -> list[str]:
        """End all children; returns the output of those that printed a traceback without leave."""
        for process, _ in self._started:
            process.sweep()
        return [
            process.output
            for process, allowed in self._started
            if not allowed and TRACEBACK in process.output
        ]
