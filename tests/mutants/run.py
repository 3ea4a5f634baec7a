"""Runs the script tests against each mutant: forked from a process that has everything imported, so that most
of a run is the tests themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import redis

from shared.store.embedded import EmbeddedStore
from tests.mutants.source import SOURCES, Mutant
from tests.support.raw import raw_client
from tests.support.world import OVERLAY

ROOT: Final = Path(__file__).parent.parent.parent
LIMIT_S: Final = 120.0
_SCRIPTS: Final = "tests/scripts"
_EVERY: Final = (
    *("entry", "admit", "claim", "lease", "answer", "assertions", "replace", "effects", "turn", "session"),
    *("quotas", "registry", "epoch", "provider", "races"),
)
_FIRST: Final[dict[str, tuple[str, ...]]] = {
    "admit.lua": ("admit", "quotas", "entry"),
    "lookup.lua": ("admit", "session", "entry"),
    "epoch.lua": ("epoch", "condemned", "entry"),
    "registry.lua": ("registry",),
    "session_open.lua": ("session", "quotas", "entry"),
    "lease.lua": ("lease", "claim", "answer", "entry"),
    "lease.lua claim": ("claim", "entry"),
    "lease.lua answer": ("answer", "lease", "entry"),
    "replace.lua": ("replace", "assertions", "effects", "entry"),
    "session.lua": ("session", "turn", "entry"),
    "session.lua turn": ("turn", "session", "entry"),
    "include/enter.lua": ("entry", "admit", "replace"),
    "include/window.lua": ("entry", "admit", "replace"),
    "include/recorded.lua": ("admit", "session"),
    "include/server.lua": ("epoch", "entry"),
    "include/charge.lua": ("quotas",),
    "include/branch.lua": ("assertions",),
}


class Verdict(msgspec.Struct, frozen=True):
    """What became of one mutant: ``killed`` by a failing test, or it survived, or it is no script at all."""

    mutant: Mutant
    killed: bool
    by: str
    seconds: float


def stages(mutant: Mutant) -> list[list[str]]:
    """The test files that most likely find it, then all others."""
    keys = (f"{mutant.part} {mutant.section}", mutant.part)
    first = list(dict.fromkeys(name for key in keys for name in _FIRST.get(key, ())))
    rest = [name for name in _EVERY if name not in first]
    return [[f"{_SCRIPTS}/test_{name}.py" for name in names] for names in (first, rest) if names]


@contextlib.contextmanager
def overlay(mutant: Mutant | None) -> Iterator[Path]:
    """A folder with the mutated file alone, as the tests' script loader looks for it."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        if mutant is not None:
            target = Path(folder) / mutant.part
            target.parent.mkdir(exist_ok=True)
            target.write_text(mutant.applied(SOURCES[mutant.part]))
        yield Path(folder)


def uncompiled(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Those that the server refuses to compile: they prove nothing and must not count as killed."""
    from tests.support.world import moved_scripts

    folder = Path(tempfile.mkdtemp(prefix="mutants-store-"))
    try:
        with EmbeddedStore(folder / "store") as store, raw_client(store.url) as client:
            return [mutant for mutant in mutants if not _compiles(client, mutant, moved_scripts)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compiles(client: redis.Redis, mutant: Mutant, scripts: object) -> bool:
    assert callable(scripts)
    with overlay(mutant) as folder:
        os.environ[OVERLAY] = str(folder)
        try:
            for script in scripts().values():
                client.script_load(script.source)
        except redis.ResponseError:
            return False
        finally:
            del os.environ[OVERLAY]
    return True


def run(mutants: Iterable[Mutant | None], jobs: int) -> Iterator[Verdict]:
    """Verdicts as they come. ``None`` stands for the scripts as they are, which must survive."""
    _preload()
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, maxtasksperchild=None) as pool:
        yield from pool.imap_unordered(_judge, mutants)


def _preload() -> None:
    """Import what every run imports, once."""
    import hypothesis  # noqa: F401
    import pytest_asyncio.plugin  # noqa: F401

    import shared.store.runtime  # noqa: F401
    import tests.scripts.scenes  # noqa: F401


_UNCHANGED: Final = Mutant("nothing", 0, "unchanged", "", 0, 0, "", "")


def _judge(mutant: Mutant | None) -> Verdict:
    started = time.monotonic()
    by = ""
    with overlay(mutant) as folder:
        for stage, files in enumerate(stages(mutant or _UNCHANGED)):
            by = by or _failure(folder, folder / f"output-{stage}", files)
    return Verdict(mutant or _UNCHANGED, bool(by), by, time.monotonic() - started)


def _failure(folder: Path, output: Path, files: list[str]) -> str:
    """The first failing test of a run, "" when all pass. Raises RuntimeError when it did not run."""
    pid = os.fork()
    if pid == 0:
        _child(folder, output, files)
    status = _wait(pid)
    text = output.read_text(errors="replace") if output.exists() else ""
    failed = [line.split(" ")[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if status == 0:
        return ""
    if status == 1 and failed:
        return failed[0].removeprefix(f"{_SCRIPTS}/")
    raise RuntimeError(f"the test run ended with {status}:\n{text[-3000:]}")


def _child(folder: Path, output: Path, files: list[str]) -> None:
    """In the forked process: one test run, its output in a file, never back into the parent's code."""
    import pytest

    code = 70
    try:
        os.setsid()
        os.environ[OVERLAY] = str(folder)
        os.environ["COLUMNS"] = "1000"
        os.chdir(ROOT)
        target = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(target, 1)
        os.dup2(target, 2)
        options = [
            "-n",
            "0",
            "-x",
            "-q",
            "--no-header",
            "--tb=no",
            "--assert=plain",
            "-p",
            "no:cacheprovider",
        ]
        basetemp = ["--basetemp", str(folder / "tmp"), "-p", "tests.mutants.plugin"]
        code = int(pytest.main([*options, *basetemp, "--timeout", str(LIMIT_S), *files]))
    except BaseException:
        traceback.print_exc()
    finally:
        # What pytest printed is in buffers of this process still.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> int:
    deadline = time.monotonic() + 3 * LIMIT_S
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pid, 9)
            os.waitpid(pid, 0)
            raise RuntimeError("a test run did not end in time")
        time.sleep(0.02)
