"""The process between an owner and its embedded server: no server outlives the owner.

Run as a plain file (``python -I -S embedded_guard.py``) so it starts fast and needs none of our packages. A
signal tied to the parent's death alone would not do: the kernel sends it when the *thread* that forked
ends, and other systems do not have it. Here the owner holds a pipe; its end means the owner is gone,
however it went. The guard itself has one thread, so for the case that the guard is killed the kernel's
signal is right.

Argument 1 is JSON: ``argv``, ``env`` (added to the inherited environment, which may hold secrets and so
never shows in an argument list), ``log`` (descriptor), ``graceSeconds``. Standard output gets one line, the
server's pid; it closes when the server is gone. Standard input takes single bytes: ``T`` or end of file
stops the server (SIGTERM, after the grace SIGKILL), ``K`` kills it at once. The exit status is the
server's, signals as 128 + number.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1


def follow_parent_to_death(parent: int) -> None:
    """Ask the kernel to kill this process with the guard; where it cannot, the pipe alone has to do."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)


def start_server(order: dict) -> int:  # type: ignore[type-arg]
    """Fork and execute the server; returns its pid.

    A failing exec shows as exit status 127 with a line in the log.
    """
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for name in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(name, signal.SIG_DFL)
        follow_parent_to_death(guard)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(order["log"], 1)
        os.dup2(order["log"], 2)
        os.execve(order["argv"][0], order["argv"], {**os.environ, **order["env"]})  # noqa: S606
    except OSError as error:
        os.write(order["log"], f"cannot execute {order['argv'][0]}: {error}\n".encode())
    finally:
        os._exit(127)


def watch(pid: int, wake: int, grace_seconds: float) -> int:
    """Serve the owner's pipe until the server is gone; returns the server's wait status."""
    inputs, kill_at = [0, wake], None
    while True:
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            return status
        left = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select(inputs, [], [], left)
        if wake in ready:
            os.read(wake, 512)
        if 0 in ready:
            word = os.read(0, 1)
            if not word:
                inputs = [wake]
            if word == b"K":
                os.kill(pid, signal.SIGKILL)
            elif kill_at is None:
                os.kill(pid, signal.SIGTERM)
                kill_at = time.monotonic() + grace_seconds
        if kill_at is not None and time.monotonic() >= kill_at:
            os.kill(pid, signal.SIGKILL)
            kill_at = float("inf")


def main() -> int:
    order = json.loads(sys.argv[1])
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = start_server(order)
    os.write(1, f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(watch(pid, wake_read, order["graceSeconds"]))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
