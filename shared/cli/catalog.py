"""What a tenant works with: its contracts and its peers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shared.cli.base import (
    Refused,
    chosen_tenant,
    json_option,
    missing,
    opened,
    print_json,
    print_table,
    redis_url_option,
    run,
    tenant_option,
)
from shared.domain.contract import Contract, parse_bundle
from shared.domain.errors import InvalidInput, Unsupported
from shared.domain.ids import IdKind, check
from shared.store import registry
from shared.store.contracts import Contracts
from shared.store.registry import PeerRecord


@click.group()
def contract() -> None:
    """Register and list contracts."""


@contract.command("apply")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True))
@tenant_option
@redis_url_option
def contract_apply(files: tuple[Path, ...], tenant: str | None, redis_url: str | None) -> None:
    """Register the contract bundles in FILES (YAML or JSON, - for standard input).

    All of them are read before the first is registered. A registered contract never changes: other content
    needs another version.

    Example: lockgate contract apply review.yaml --tenant acme
    """
    contracts = [_read_bundle(file) for file in files]

    async def work() -> list[bool]:
        async with opened(redis_url) as connection:
            kept = Contracts(await chosen_tenant(connection, tenant), connection)
            return [await kept.register(found) for found in contracts]

    for found, new in zip(contracts, run(work()), strict=True):
        click.echo(
            f"{found.id} {found.version} {found.digest} {'registered' if new else 'is registered already'}"
        )


def _read_bundle(file: Path) -> Contract:
    try:
        source = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return parse_bundle(source)
    except (InvalidInput, Unsupported) as error:
        place = "standard input" if str(file) == "-" else file
        raise Refused(f"{place}: {error.description}; correct it and apply it again") from error


@contract.command("list")
@json_option
@tenant_option
@redis_url_option
def contract_list(as_json: bool, tenant: str | None, redis_url: str | None) -> None:
    """List the registered contracts with their digests and session profiles.

    Example: lockgate contract list --json
    """

    async def work() -> list[Contract]:
        async with opened(redis_url) as connection:
            return await Contracts(await chosen_tenant(connection, tenant), connection).every()

    found = run(work())
    if as_json:
        print_json([_contract_json(one) for one in found])
        return
    rows = [
        (
            one.id,
            one.version,
            f"{one.session.id} {one.session.version}" if one.session else "",
            sorted(one.session.commands if one.session else one.interactions),
            one.digest,
        )
        for one in found
    ]
    print_table(
        ("CONTRACT", "VERSION", "PROFILE", "COMMANDS OR INTERACTIONS", "DIGEST"),
        rows,
        "no contract yet: register one with `lockgate contract apply FILE`",
    )


def _contract_json(one: Contract) -> dict[str, Any]:
    profile = None
    if one.session is not None:
        profile = {
            "id": one.session.id,
            "version": one.session.version,
            "execution": one.session.execution.value,
            "commands": dict(one.session.commands),
        }
    return {
        "contract": one.id,
        "version": one.version,
        "digest": one.digest,
        "interactions": sorted(one.interactions),
        "session": profile,
    }


@click.group()
def peer() -> None:
    """Register, list and remove peers."""


@peer.command("register")
@click.argument("name")
@click.option(
    "--capability", "capabilities", multiple=True, metavar="NAME", help="What the peer can do; repeatable."
)
@click.option(
    "--principal", "principals", multiple=True, metavar="NAME", help="Who may act as this peer; repeatable."
)
@tenant_option
@redis_url_option
def peer_register(
    name: str,
    capabilities: tuple[str, ...],
    principals: tuple[str, ...],
    tenant: str | None,
    redis_url: str | None,
) -> None:
    """Add peer NAME, or replace what is registered of it.

    Example: lockgate peer register counter --principal svc.counter
    """

    async def work() -> None:
        for principal in principals:
            check(IdKind.PRINCIPAL, principal, "--principal")
        async with opened(redis_url) as connection:
            record = PeerRecord(name, tuple(sorted(set(capabilities))), tuple(sorted(set(principals))))
            await registry.register_peer(connection, await chosen_tenant(connection, tenant), record)

    run(work())
    click.echo(f"peer {name} registered")


@peer.command("list")
@json_option
@tenant_option
@redis_url_option
def peer_list(as_json: bool, tenant: str | None, redis_url: str | None) -> None:
    """List the peers of a tenant.

    Example: lockgate peer list --tenant acme
    """

    async def work() -> list[PeerRecord]:
        async with opened(redis_url) as connection:
            return await registry.list_peers(connection, await chosen_tenant(connection, tenant))

    found = run(work())
    if as_json:
        print_json(found)
        return
    print_table(
        ("PEER", "CAPABILITIES", "PRINCIPALS"),
        [(one.peer, one.capabilities, one.principals) for one in found],
        "no peer yet: add one with `lockgate peer register NAME`",
    )


@peer.command("remove")
@click.argument("name")
@tenant_option
@redis_url_option
def peer_remove(name: str, tenant: str | None, redis_url: str | None) -> None:
    """Remove peer NAME: it gets no new work; work that already names it stays open until it is settled.

    Example: lockgate peer remove counter --tenant acme
    """

    async def work() -> None:
        async with opened(redis_url) as connection:
            chosen = await chosen_tenant(connection, tenant)
            with missing(f"peer {name}", f"see `lockgate peer list --tenant {chosen}`"):
                await registry.remove_peer(connection, chosen, name)

    run(work())
    click.echo(f"peer {name} removed")
