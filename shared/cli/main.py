"""The ``lockgate`` command: one group of subcommands, and no traceback whatever happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from shared.cli.base import REFUSED
from shared.cli.catalog import contract, peer
from shared.cli.doctor import doctor
from shared.cli.looking import inspect_group, list_group
from shared.cli.policy import policy
from shared.cli.services import ADMISSION, SETTLEMENT
from shared.cli.tenants import clock, tenant
from shared.cli.tokens import token
from shared.cli.up import up

_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="lockgate", prog_name="lockgate")
def cli() -> None:
    """Lockgate admits work once, keeps what it promised, and says honestly how it ended.

    \b
    Try it:      lockgate up
    Is it well?  lockgate doctor
    Set it up:   lockgate tenant create acme
                 lockgate contract apply counter.yaml
                 lockgate peer register counter
                 lockgate token create alice
    Run it:      lockgate admission, and lockgate settlement beside it

    Commands that look or change talk straight to the store (--redis-url or LOCKGATE_REDIS_URL).
    They end with 0 done, 1 refused, 2 wrong usage, 3 the store cannot be reached.
    """


for command in (
    up,
    ADMISSION,
    SETTLEMENT,
    tenant,
    token,
    contract,
    peer,
    policy,
    clock,
    doctor,
    inspect_group,
    list_group,
):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command line and end the process with its status."""
    try:
        status = cli.main(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("lockgate: stopped", err=True)
        status = _INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe went away, as in `lockgate list due | head`; nothing more can be told to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = REFUSED
    except Exception as error:  # noqa: BLE001
        click.echo(f"lockgate: this is a fault of lockgate itself, please report it: {error!r}", err=True)
        status = REFUSED
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
