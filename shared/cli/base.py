"""What every command shares: the way to the store, exit statuses, and refusals that say what to do.

Exit statuses: 0 done, 1 refused, 2 wrong usage, 3 the store cannot be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import click
import msgspec

from shared.config import SettingError
from shared.domain.errors import Conflict, Expired, InvalidInput, LockgateError, NotFound
from shared.domain.ids import IdKind, check
from shared.store.address import Address
from shared.store.connection import Connection, Limits, ReplyError, ReplyLost, StoreUnavailable
from shared.store.embedded import EmbeddedStore, EmbeddedStoreError
from shared.store.registry import tenant_names
from shared.store.replies import TenantLost

REFUSED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
DATA_DIRECTORY: Final = Path(".lockgate")
_LIMITS: Final = Limits(timeout_s=15.0)

T = TypeVar("T")


class Refused(click.ClickException):
    """Something cannot be done now or as it was asked; the text says what to do instead."""

    exit_code = REFUSED

    def show(self, file: Any = None) -> None:
        click.echo(f"lockgate: {self.message}", file=file or sys.stderr)


class Unreachable(Refused):
    """The store does not answer."""

    exit_code = UNREACHABLE


redis_url_option = click.option(
    "--redis-url",
    envvar="LOCKGATE_REDIS_URL",
    show_envvar=True,
    metavar="URL",
    help="The store: redis://, rediss:// or unix://; without it that of `lockgate up` in ./.lockgate.",
)
tenant_option = click.option(
    "--tenant",
    envvar="LOCKGATE_TENANT",
    show_envvar=True,
    metavar="NAME",
    help="The tenant; may be left out while the store has just one.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def store_url(given: str | None) -> str:
    """The URL to use. Raises a usage error that says how to name a store where there is none to guess."""
    if given:
        with usage("--redis-url"):
            Address.parse(given)
        return given
    embedded = EmbeddedStore(DATA_DIRECTORY)
    if not embedded.socket_path.exists():
        raise click.UsageError(
            "no store is named: pass --redis-url or set LOCKGATE_REDIS_URL, "
            "or start one here with `lockgate up`"
        )
    return embedded.url


@contextlib.asynccontextmanager
async def opened(redis_url: str | None) -> AsyncIterator[Connection]:
    """A connection to the store that answered once."""
    url = store_url(redis_url)
    async with Connection(url, _LIMITS) as connection:
        try:
            await connection.call("TIME")
        except (StoreUnavailable, ReplyLost) as error:
            raise Unreachable(
                f"{error.description} ({_place(url)}): is it running, is --redis-url right, "
                "and may this user connect?"
            ) from error
        yield connection


async def chosen_tenant(connection: Connection, given: str | None) -> str:
    """The tenant that was named and is registered, or the only one."""
    names = await tenant_names(connection)
    if given:
        check(IdKind.TENANT, given, "--tenant")
        if given not in names:
            raise no_tenant(given)
        return given
    if len(names) == 1:
        return names[0]
    if not names:
        raise Refused("the store has no tenant yet: create one with `lockgate tenant create NAME`")
    raise click.UsageError(f"name a tenant with --tenant: the store has {_some(names)}")


def has_form(kind: IdKind, text: str) -> bool:
    """Whether ``text`` is a well-formed id of this kind."""
    try:
        check(kind, text)
    except InvalidInput:
        return False
    return True


def no_tenant(name: str) -> Refused:
    """The refusal for a tenant that is not registered."""
    return Refused(f"tenant {name} does not exist: see `lockgate tenant list`, or create it")


def run(work: Awaitable[T]) -> T:
    """Run a command's work to its end, with every failure it may meet told in one line."""

    async def awaited() -> T:
        return await work

    with told():
        return asyncio.run(awaited())


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turn failures of the store, the domain and the system into refusals with an exit status."""
    try:
        yield
    except (StoreUnavailable, ReplyLost) as error:
        lost = " (a change that was under way may have been made: look before you repeat it)"
        raise Unreachable(f"{error.description}{lost if isinstance(error, ReplyLost) else ''}") from error
    except ReplyError as error:
        raise Refused(_refused_by_store(error)) from error
    except TenantLost as error:
        raise Refused(
            f"{error.description}: restore the store, or give the tenant a new authority with "
            "`lockgate tenant adopt NAME`"
        ) from error
    except LockgateError as error:
        refuse(error)
    except (SettingError, EmbeddedStoreError) as error:
        raise Refused(str(error)) from error
    except OSError as error:
        raise Refused(
            f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        ) from error


def refuse(error: LockgateError) -> NoReturn:
    """The domain's refusal as the command line tells it; bad input is wrong usage."""
    if isinstance(error, InvalidInput):
        raise click.UsageError(error.description or "the input is not valid") from error
    if isinstance(error, NotFound):
        raise Refused("there is no such thing: look with the matching list command") from error
    advice = {
        Conflict: "or use another name or version",
        Expired: "use a new key",
    }.get(type(error), "try again, or ask `lockgate doctor` what is wrong")
    raise Refused(f"{error.description or error.kind.value}; {advice}") from error


@contextlib.contextmanager
def usage(place: str) -> Iterator[None]:
    """A malformed argument is wrong usage and names its place."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(f"{place}: {error}") from error


@contextlib.contextmanager
def missing(what: str, advice: str) -> Iterator[None]:
    """Name what was not found and where to look."""
    try:
        yield
    except NotFound as error:
        raise Refused(f"{what} does not exist: {advice}") from error


def print_json(value: Any) -> None:
    """One JSON document, indented, on standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]], nothing: str) -> None:
    """Aligned columns; ``nothing`` is said where there are no rows."""
    if not rows:
        click.echo(nothing)
        return
    cells = [list(titles), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for row in cells:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def print_facts(facts: Sequence[tuple[str, object]], indent: str = "") -> None:
    """Aligned ``name  value`` lines; a name that repeats the one before it is left out."""
    width = max((len(name) for name, _ in facts), default=0)
    last = None
    for name, value in facts:
        click.echo(f"{indent}{'' if name == last else name:<{width}}  {_cell(value)}".rstrip())
        last = name


def instant(ms: int | None) -> str:
    """A store instant (ms) as UTC time; "" for none."""
    if not ms:
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _place(url: str) -> str:
    address = Address.parse(url)
    return address.path or f"{address.host}:{address.port}"


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    return str(value)


def _some(names: Sequence[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _refused_by_store(error: ReplyError) -> str:
    advice = {
        "OOM": "it is out of memory; raise maxmemory or free some, then repeat",
        "NOPERM": "this store user may not do that; use one with the needed permissions",
        "READONLY": "it is a replica; name its primary",
        "WRONGTYPE": "a key holds another type of value; is this the right store and database?",
        "MISCONF": "it cannot write to its disk; see its log",
    }.get(error.code, error.message[:200] or "see its log")
    return f"the store refused a command ({error.code}): {advice}"


def who() -> str:
    """Who runs this command, as one printable word for the audit note."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return re.sub(r"[^A-Za-z0-9._@-]", "_", user)[:64]
