"""Child processes that end with their owner, however the owner ends.

Each child runs under the same guard process as the embedded store: the owner holds a pipe, and its end (a
return, an exception, SIGKILL) makes the guard stop the child, first in order and after the grace with
SIGKILL. The child gets a session of its own, so that a terminal's Ctrl-C reaches the owner alone, which then
decides the order of ending.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

LOG_LIMIT_BYTES: Final = 1 << 20
_GUARD: Final = "shared.store.embedded_guard"


class ChildError(Exception):
    """A child that could not be started or ended before it was ready; the text holds the end of its log."""


class Child:
    """One program with its own log file. Not thread-safe.

    ``env`` is its whole environment, this process's by default, and never shows in an argument list.
    ``grace_s`` is how long the child may take to end after SIGTERM before it is killed.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        grace_s: float = 25.0,
    ) -> None:
        self.name = name
        self.log = log
        self._argv = list(argv)
        self._env = dict(os.environ if env is None else env)
        self._grace_s = grace_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._begin = 0
        self.pid = 0

    @classmethod
    def module(
        cls, module: str, *args: str, log: Path, env: Mapping[str, str] | None = None, grace_s: float = 25.0
    ) -> Child:
        """A child that runs ``python -m module`` with this interpreter."""
        return cls(log.stem, [sys.executable, "-m", module, *args], log, env, grace_s)

    def start(self) -> Self:
        """Start the program; ``pid`` is its own, not the guard's. Raises ChildError where it cannot be
        executed.
        """
        if self.log.exists() and self.log.stat().st_size > LOG_LIMIT_BYTES:
            self.log.replace(self.log.with_name(self.log.name + ".1"))
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._begin = os.fstat(descriptor).st_size
        order = {"argv": self._argv, "env": {}, "log": descriptor, "graceSeconds": self._grace_s}
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", _guard_file(), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=descriptor,
                env=self._env,
                pass_fds=(descriptor,),
                bufsize=0,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        assert self._guard.stdout is not None
        said = self._guard.stdout.readline()
        if not said.strip().isdigit():
            raise ChildError(f"{self.name} could not be started; its log ends:\n{self.log_tail()}")
        self.pid = int(said)
        return self

    @property
    def running(self) -> bool:
        """Whether the program, and so its guard, is still there."""
        return self._guard is not None and self._guard.poll() is None

    def output(self) -> str:
        """What the program wrote since this start."""
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")
        return ""

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of this start, for error texts."""
        return "\n".join(self.output().splitlines()[-lines:])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program itself; ProcessLookupError where it is gone."""
        if not self.running:
            raise ProcessLookupError(f"{self.name} is not running")
        os.kill(self.pid, number)

    def ask_to_stop(self) -> None:
        """SIGTERM, without waiting: several children drain at the same time."""
        self._tell(b"T")

    def kill(self) -> None:
        """SIGKILL, also to a stopped program, and wait until it is gone."""
        self._tell(b"K")
        self.wait(10.0)

    def stop(self) -> None:
        """End the program in order and wait for it; harmless when it is not running."""
        self._tell(b"T")
        self.wait(self._grace_s + 5.0)

    def wait(self, within_s: float) -> int:
        """Wait for the end and give the exit status (128 + signal). A guard that outstays it is killed with
        its child.
        """
        guard, self._guard = self._guard, None
        if guard is None:
            return 0
        try:
            status = guard.wait(within_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            guard.kill()
            status = guard.wait()
        for pipe in (guard.stdin, guard.stdout):
            if pipe is not None:
                pipe.close()
        return status

    def _tell(self, word: bytes) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                self._guard.stdin.write(word)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def wait_until_gone(children: Sequence[Child], within_s: float) -> None:
    """Wait for children that were asked to stop, together no longer than ``within_s``; then kill what is
    left.
    """
    give_up = time.monotonic() + within_s
    for child in children:
        child.wait(max(0.1, give_up - time.monotonic()))


def _guard_file() -> str:
    spec = importlib.util.find_spec(_GUARD)
    assert spec is not None
    assert spec.origin is not None, "the guard is a file that runs by itself"
    return spec.origin
