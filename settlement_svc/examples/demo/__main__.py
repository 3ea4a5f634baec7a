"""``python -m settlement_svc.examples.demo``: tells the story once; status 0 only if every promise held."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Final

import click

from settlement_svc.examples.demo.client import Client
from settlement_svc.examples.demo.promises import Broken
from settlement_svc.examples.demo.stage import Stage
from settlement_svc.examples.demo.story import Story
from settlement_svc.examples.demo.telling import Teller
from shared.children import ChildError
from shared.domain.errors import LockgateError
from shared.store.embedded import EmbeddedStoreError

_STOPPED = 130


_asked_to_stop: Final = threading.Event()


def _stop(number: int, _frame: FrameType | None) -> None:
    # What is raised where nothing may raise (a finalizer, a callback) is lost; that it was asked for is not.
    _asked_to_stop.set()
    raise KeyboardInterrupt(number)


def perform(tell: Teller) -> str | None:
    """Set the stage, tell the story, clear the stage; what broke, None where every promise held."""
    tell.title(
        "Lockgate: store, door, recovery, two sidecars for each of two peers and their handlers, "
        "all separate processes"
    )
    with Stage() as stage:
        try:
            with Client(stage.base, stage.token) as client:
                Story(stage, client, tell).tell()
        except Broken as broken:
            tell.broke(f"broken promise: {broken}")
            click.echo(stage.log_tails(), err=True)
            return str(broken)
        except (ChildError, LockgateError) as error:
            tell.broke(f"the demonstration could not go on: {error}")
            click.echo(stage.log_tails(), err=True)
            return str(error)
    return None


def main() -> int:
    """The exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    began, broken = time.monotonic(), None
    try:
        broken = perform(Teller())
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # Nobody reads on, as in `make demo | head`; what runs was ended all the same.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Broken, ChildError, EmbeddedStoreError, OSError) as error:
        click.echo(f"demo: could not be set up: {error}")
        return 1
    if _asked_to_stop.is_set():
        click.echo("demo: stopped")
        return _STOPPED
    if broken is not None:
        click.echo(f"demo: failed: {broken}")
        return 1
    click.echo(f"\nevery promise held, in {time.monotonic() - began:.0f} s; nothing is left running")
    click.echo("demo: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
