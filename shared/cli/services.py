"""``admission`` and ``settlement``: one service in this process's place, its flags made from its settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import click

from shared import config
from shared.cli.base import store_url, told


def service(
    name: str, module: str, kind: type[config.StoreSettings], short: str, about: str
) -> click.Command:
    """A command that becomes ``python -m module``; a flag wins over the variable of the same setting."""
    rows = config.table(kind)

    def become(**flags: str | None) -> NoReturn:
        given = {row.name: value for row in rows if (value := flags[row.name]) is not None}
        environ = environment(kind, given)
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", module], environ)  # noqa: S606

    options: list[click.Parameter] = [_option(row) for row in rows]
    return click.Command(name, params=options, callback=become, help=f"{short}\n\n{about}")


def environment(kind: type[config.StoreSettings], flags: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with the flags laid over it, checked as the service itself will check it."""
    rows = {row.name: row for row in config.table(kind)}
    flags = dict(flags)
    if not flags.get("redis_url") and not os.environ.get(rows["redis_url"].variable):
        flags["redis_url"] = store_url(None)
    try:
        with told():
            config.read(kind, os.environ, flags)
    except click.ClickException as error:
        raise click.UsageError(f"{error.message} (see --help)") from error
    return {**os.environ, **{rows[name].variable: value for name, value in flags.items()}}


def _option(row: config.Setting) -> click.Option:
    default = (
        f"default: {row.default}" if row.default else "required" if row.doc.required else "default: none"
    )
    extra: dict[str, Any] = {}
    if row.choices:
        extra["type"] = click.Choice(row.choices)
    else:
        extra["metavar"] = "PORT" if row.doc.port else "NUMBER" if row.integer else "TEXT"
    return click.Option(
        [row.flag, row.name], default=None, help=f"{row.doc.help}  [{row.variable}; {default}]", **extra
    )


ADMISSION = service(
    "admission",
    "admission_svc",
    config.AdmissionSettings,
    "Run the tenants' door.",
    "It serves sessions and commands over HTTP, in this process.\n\n"
    "Every setting may be a flag or a variable; the flag wins.\n\n"
    "Example: lockgate admission --redis-url redis://127.0.0.1:6379 --port 8080",
)
SETTLEMENT = service(
    "settlement",
    "settlement_svc",
    config.SettlementSettings,
    "Run a sidecar, or the central recovery.",
    "A sidecar where --peer is given, which hands a peer's work to its handler and settles it; "
    "without a peer the recovery for all tenants.\n\n"
    "Every setting may be a flag or a variable; the flag wins.\n\n"
    "Example: lockgate settlement --tenant acme --peer counter --handler-url http://127.0.0.1:9000",
)
