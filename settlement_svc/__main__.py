"""``python -m settlement_svc``: one settlement process, configured by ``LOCKGATE_*`` and flags."""

from __future__ import annotations

import os
from typing import Any

import click
import uvloop

from settlement_svc.app import check_settings, serve
from shared.config import SettingError, SettlementSettings, read, table
from shared.telemetry import configure_logs

ROLES = ("central", "sidecar")


def _options() -> list[click.Parameter]:
    role = click.Option(
        ["--role"],
        type=click.Choice(ROLES),
        help="What this process has to be; without it a peer makes it a sidecar.",
    )
    rows = [
        click.Option(
            [row.flag, row.name],
            metavar="TEXT",
            help=f"{row.doc.help} [{row.variable}; {row.default or 'none'}]",
        )
        for row in table(SettlementSettings)
    ]
    return [role, *rows]


def _run(role: str | None, **flags: Any) -> None:
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        settings = read(SettlementSettings, os.environ, given)
        check_settings(settings)
        actual = "sidecar" if settings.peer else "central"
        if role not in (None, actual):
            raise SettingError(
                f"the settings are those of a {actual}: a sidecar needs a peer, a central process has none"
            )
    except SettingError as error:
        raise click.UsageError(str(error)) from None
    configure_logs(settings, "settlement")
    try:
        uvloop.run(serve(settings))
    except OSError as error:
        raise click.ClickException(f"cannot listen on {settings.host}: {error.strerror}") from None


main = click.Command(
    "settlement",
    params=_options(),
    callback=_run,
    help="Settle admitted work, and carry it to a peer's handler.",
)

if __name__ == "__main__":
    main(prog_name="python -m settlement_svc")
