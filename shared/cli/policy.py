"""Who may do what: the policy document of a tenant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from shared.cli.base import (
    Refused,
    chosen_tenant,
    instant,
    json_option,
    opened,
    print_json,
    redis_url_option,
    run,
    tenant_option,
    who,
)
from shared.domain.errors import InvalidInput
from shared.domain.policy import PolicyDocument, read_policy
from shared.store.policies import Applied, AppliedPolicy, apply_policy, show_policy


@click.group()
def policy() -> None:
    """Apply and show the policy document of a tenant."""


@policy.command("apply")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--if-revision",
    metavar="N",
    default="",
    help="Refuse if the revision is another one by now, see `lockgate policy show`.",
)
@tenant_option
@redis_url_option
def policy_apply(file: Path, if_revision: str, tenant: str | None, redis_url: str | None) -> None:
    """Make the document in FILE (YAML or JSON, - for standard input) the policy of a tenant.

    It replaces the one before as a whole and holds from the next decision on, also for work that is under
    way. The first rule that covers a question decides; where none does it is denied.

    \b
    rules:
      - {principals: [alice, "svc.*"], actions: ["session.*", command.submit], effect: allow}
      - {principals: ["*"], actions: [invoke], peers: [alfa, bravo], effect: allow, ttlMs: 60000}

    Example: lockgate policy apply policy.yaml --tenant acme
    """
    document = _read(file)

    async def work() -> tuple[str, Applied]:
        async with opened(redis_url) as connection:
            name = await chosen_tenant(connection, tenant)
            return name, await apply_policy(connection, name, document, who(), expected=if_revision)

    name, applied = run(work())
    state = "is in force" if applied.changed else "was in force already"
    click.echo(f"policy of {name} {state}, revision {applied.revision}, {len(document.rules)} rules")


def _read(file: Path) -> PolicyDocument:
    try:
        source = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return read_policy(source)
    except InvalidInput as error:
        place = "standard input" if str(file) == "-" else file
        raise Refused(f"{place}: {error.description}; correct it and apply it again") from error


@policy.command("show")
@json_option
@tenant_option
@redis_url_option
def policy_show(as_json: bool, tenant: str | None, redis_url: str | None) -> None:
    """Show the policy of a tenant as it can be applied again; what is known about it goes to standard error.

    Example: lockgate policy show --tenant acme > policy.json
    """

    async def work() -> tuple[str, AppliedPolicy]:
        async with opened(redis_url) as connection:
            name = await chosen_tenant(connection, tenant)
            return name, await show_policy(connection, name)

    name, shown = run(work())
    document: Any = None if shown.document is None else msgspec.json.decode(shown.document)
    if as_json:
        print_json(
            {
                "revision": shown.revision,
                "document": document,
                "appliedAtMs": shown.applied_ms or None,
                "appliedBy": shown.applied_by or None,
            }
        )
        return
    if document is None:
        click.echo(
            f"{name} has no policy (revision {shown.revision}): callers use their own sessions, operators "
            "read and close all",
            err=True,
        )
        return
    print_json(document)
    applied = f"applied {instant(shown.applied_ms)} by {shown.applied_by}"
    click.echo(f"policy of {name}, revision {shown.revision}, {applied}", err=True)
