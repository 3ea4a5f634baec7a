"""The command as a whole: help, exit statuses, and no traceback whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

import shared.cli.main as command_line
from shared.cli.main import cli, main
from shared.config import AdmissionSettings, SettlementSettings, table
from tests.cli.conftest import run_cli
from tests.support.processes import ROOT, TRACEBACK


def commands(group: click.Group, *path: str) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name, command in group.commands.items():
        found.append(((*path, name), command))
        if isinstance(command, click.Group):
            found += commands(command, *path, name)
    return found


EVERY = commands(cli)


def test_every_promised_command_is_there_and_nothing_else_is_promised() -> None:
    leaves = {" ".join(path) for path, command in EVERY if not isinstance(command, click.Group)}
    assert leaves == {
        "up",
        "admission",
        "settlement",
        "doctor",
        *(f"tenant {verb}" for verb in ("create", "list", "show", "limits", "acl", "adopt", "delete")),
        *(f"token {verb}" for verb in ("create", "list", "revoke")),
        *(f"contract {verb}" for verb in ("apply", "list")),
        *(f"peer {verb}" for verb in ("register", "list", "remove")),
        *(f"policy {verb}" for verb in ("apply", "show")),
        "clock accept",
        *(f"inspect {what}" for what in ("session", "operation", "reservation")),
        *(f"list {what}" for what in ("sessions", "operations", "uncertain", "parked", "overdue", "due")),
    }


@pytest.mark.parametrize(("path", "command"), EVERY, ids=[" ".join(path) for path, _ in EVERY])
def test_every_command_explains_itself(path: tuple[str, ...], command: click.Command) -> None:
    text = run_cli(None, *path, "--help").stdout
    assert "Usage:" in text
    if isinstance(command, click.Group):
        return
    assert f"Example: lockgate {' '.join(path)}" in text or f"$(lockgate {' '.join(path)}" in text
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{parameter.name} has no help"
    names = [option for parameter in command.params for option in parameter.opts]
    if path[0] not in ("up",):
        assert "--redis-url" in names
    if path[-1] in ("list", "show") or path[0] in ("list", "inspect", "doctor"):
        assert "--json" in names


@pytest.mark.parametrize(
    ("name", "kind"), [("admission", AdmissionSettings), ("settlement", SettlementSettings)]
)
def test_help_lists_every_setting_with_its_variable_and_default(
    name: str, kind: type[AdmissionSettings | SettlementSettings]
) -> None:
    text = " ".join(run_cli(None, name, "--help").stdout.split())
    for row in table(kind):
        assert row.flag in text
        assert row.variable in text
        if row.default:
            assert f"{row.variable}; default: {row.default}" in text


def run(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as a process, in a directory without a store."""
    return subprocess.run(
        [sys.executable, "-m", "shared.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("LOCKGATE_")},
            "PYTHONPATH": str(ROOT),
            **env,
        },
    )


def test_exit_statuses_of_the_process(redis_url: str, tmp_path: Path) -> None:
    made = run("tenant", "create", "acme", "--redis-url", redis_url, cwd=tmp_path)
    assert (made.returncode, made.stderr.count("\n")) == (0, 1)
    refused = run("tenant", "create", "acme", cwd=tmp_path, LOCKGATE_REDIS_URL=redis_url)
    assert refused.returncode == 1
    nowhere = run("tenant", "list", cwd=tmp_path)
    assert nowhere.returncode == 2
    assert "lockgate up" in nowhere.stderr
    unreachable = run("tenant", "list", "--redis-url", "redis://127.0.0.1:1", cwd=tmp_path)
    assert unreachable.returncode == 3
    for done in (made, refused, nowhere, unreachable):
        assert TRACEBACK not in done.stderr
    listed = run("tenant", "list", "--json", "--redis-url", redis_url, cwd=tmp_path)
    assert json.loads(listed.stdout)[0]["tenant"] == "acme"


@pytest.mark.parametrize(
    "arguments",
    [
        ("admission", "--port", "70000"),
        ("settlement", "--peer", "counter"),
        ("admission", "--log-level", "loud"),
    ],
)
def test_settings_that_do_not_hold_are_wrong_usage(
    redis_url: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = run(*arguments, "--redis-url", redis_url, cwd=tmp_path)
    assert done.returncode == 2
    assert TRACEBACK not in done.stderr
    assert done.stderr.strip()


def test_a_misspelt_setting_is_wrong_usage(redis_url: str, tmp_path: Path) -> None:
    done = run("admission", "--redis-url", redis_url, cwd=tmp_path, LOCKGATE_PROT="1")
    assert done.returncode == 2
    assert "LOCKGATE_PROT" in done.stderr


@pytest.mark.parametrize(
    "url",
    ["http://secretname", "redis://:secretname@host:port", "unix://", "redis://:secretname@host/?what=1"],
)
def test_a_malformed_store_url_is_wrong_usage_and_not_repeated(url: str) -> None:
    said = run_cli(url, "doctor", status=2).stderr
    assert "--redis-url" in said
    assert "secretname" not in said


def test_a_fault_of_our_own_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(command_line.cli, "main", broken)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "boom" in said
    assert TRACEBACK not in said
