"""Tenants, and the word on a store's clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from shared.cli.acl import acl_option, print_tenant_acl, tenant_acl
from shared.cli.base import (
    Refused,
    chosen_tenant,
    instant,
    json_option,
    no_tenant,
    opened,
    print_facts,
    print_json,
    print_table,
    redis_url_option,
    run,
    tenant_option,
    who,
)
from shared.cli.limits import kept_facts, tenant_limits
from shared.domain.limits import TenantLimits, TenantUsage
from shared.store import registry
from shared.store.connection import Connection
from shared.store.health import lost_reason
from shared.store.keys import Keys
from shared.store.registry import TenantSummary

yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


@click.group()
def tenant() -> None:
    """Create, look at, adopt and delete tenants."""


tenant.add_command(tenant_limits)
tenant.add_command(tenant_acl)


@tenant.command("create")
@click.argument("name")
@click.option(
    "--new-authority",
    is_flag=True,
    help="Also where the name was used here before: what is left of that tenant is removed, its authority "
    "retired.",
)
@click.option(
    "--retire",
    "retired",
    multiple=True,
    metavar="AUTHORITY",
    help="An authority of this tenant that the store no longer knows of: its tokens and cursors are then "
    "refused as such. May be repeated.",
)
@acl_option
@redis_url_option
def tenant_create(
    name: str, new_authority: bool, retired: tuple[str, ...], acl: bool, redis_url: str | None
) -> None:
    """Create tenant NAME with a fresh authority.

    A tenant that the store knows is never made anew by accident: where its store was lost, adopt it.

    Example: lockgate tenant create acme
    """

    async def work() -> str:
        async with opened(redis_url) as connection:
            return await registry.create_tenant(
                connection, name, new_authority=new_authority, retired=retired
            )

    click.echo(f"tenant {name} created, authority {run(work())}")
    click.echo(f"next: lockgate token create alice --tenant {name}", err=True)
    if acl:
        print_tenant_acl(name, redis_url)


@tenant.command("list")
@json_option
@redis_url_option
def tenant_list(as_json: bool, redis_url: str | None) -> None:
    """List all tenants.

    Example: lockgate tenant list --json
    """

    async def work() -> list[dict[str, Any]]:
        async with opened(redis_url) as connection:
            names = await registry.tenant_names(connection)
            # Without a registry the store tells who there was; with one that is doctor's to look for.
            names = names or await registry.unregistered_tenants(connection)
            return [await _summary(connection, name) for name in names]

    found = run(work())
    if as_json:
        print_json(found)
        return
    rows = [
        (t["tenant"], t["authority"], "LOST" if t["lost"] else "ok", t["epoch"], t["usage"]["operations"])
        for t in found
    ]
    print_table(
        ("TENANT", "AUTHORITY", "STORE", "EPOCH", "OPERATIONS"),
        rows,
        "no tenant yet: create one with `lockgate tenant create NAME`",
    )


@tenant.command("show")
@click.argument("name")
@json_option
@redis_url_option
def tenant_show(name: str, as_json: bool, redis_url: str | None) -> None:
    """Show tenant NAME: authority, epoch, revisions, use, and whether its store was lost.

    Example: lockgate tenant show acme
    """

    async def work() -> dict[str, Any]:
        async with opened(redis_url) as connection:
            return await _summary(connection, await _known(connection, name))

    found = run(work())
    if as_json:
        print_json(found)
        return
    usage = msgspec.convert(found["usage"], TenantUsage)
    limits = msgspec.convert(found["limits"], TenantLimits | None)
    print_facts(
        [
            ("tenant", found["tenant"]),
            ("authority", found["authority"]),
            ("store", "lost: " + found["reason"] if found["lost"] else "ok"),
            ("epoch", found["epoch"]),
            ("policy revision", found["policyRevision"]),
            ("directory revision", found["directoryRevision"]),
            ("retired authorities", found["retired"]),
            *kept_facts(usage, limits),
            ("clock accepted", found["clockAccepted"]),
        ]
    )


async def _known(connection: Connection, name: str) -> str:
    """The tenant that was named, if its registration or anything it stored is there."""
    if not await registry.is_known(connection, name):
        raise no_tenant(name)
    return name


async def _summary(connection: Connection, name: str) -> dict[str, Any]:
    found: TenantSummary = await registry.show_tenant(connection, name)
    reason = await lost_reason(connection, name)
    accepted = None
    if reason is None:
        accepted = await connection.call("HGET", Keys(name).meta, "clock_accepted")
    at, _, who = accepted.decode(errors="replace").partition(" ") if accepted else ("", "", "")
    return {
        "tenant": found.tenant,
        "authority": found.authority,
        "lost": reason is not None,
        "reason": reason,
        "epoch": found.epoch,
        "policyRevision": found.policy_revision,
        "directoryRevision": found.directory_revision,
        "retired": list(found.retired),
        "usage": msgspec.to_builtins(found.usage),
        "limits": msgspec.to_builtins(found.limits),
        "clockAccepted": f"{instant(int(at))} by {who}" if at.isdigit() else None,
    }


@tenant.command("adopt")
@click.argument("name")
@click.option("--even-if-served", is_flag=True, help="Also where nothing shows that the store was lost.")
@yes_option
@redis_url_option
def tenant_adopt(name: str, even_if_served: bool, yes: bool, redis_url: str | None) -> None:
    """Serve a lost tenant again, as a new authority.

    What was promised under the old authority is given up: operations, sessions and tokens are removed, its
    tokens are refused from then on. Contracts, peers, policy and limits stay. Bring back the store as it was
    first if you can.

    Also the way on after a store was restored from a backup while nothing ran: nobody saw that it is older,
    so it needs --even-if-served.

    Example: lockgate tenant adopt acme
    """

    async def work() -> str:
        async with opened(redis_url) as connection:
            reason = await lost_reason(connection, await _known(connection, name))
            if reason is None and not even_if_served:
                raise Refused(
                    f"tenant {name} is not lost: adopting it would remove all it stores; "
                    "pass --even-if-served if that is what you want"
                )
            _ask(
                yes,
                f"Give up everything stored for {name} ({reason or 'not lost'}) and start a new authority?",
            )
            return await registry.adopt_tenant(connection, name)

    click.echo(f"tenant {name} adopted, new authority {run(work())}")
    click.echo(f"its tokens are void; next: lockgate token create alice --tenant {name}", err=True)


@tenant.command("delete")
@click.argument("name")
@yes_option
@redis_url_option
def tenant_delete(name: str, yes: bool, redis_url: str | None) -> None:
    """Delete tenant NAME and everything it stored, for good.

    Example: lockgate tenant delete acme --yes
    """

    async def work() -> None:
        async with opened(redis_url) as connection:
            await _known(connection, name)
            _ask(yes, f"Delete tenant {name} with everything it stored?")
            await registry.delete_tenant(connection, name)

    run(work())
    click.echo(f"tenant {name} deleted")


@click.group()
def clock() -> None:
    """Judge the store's clock."""


@clock.command("accept")
@click.option("--all-tenants", is_flag=True, help="Accept it for every tenant of the store.")
@yes_option
@tenant_option
@redis_url_option
def clock_accept(all_tenants: bool, yes: bool, tenant: str | None, redis_url: str | None) -> None:
    """Take the store's present time as true.

    The way out after the store's clock stepped back or jumped ahead and stays there: until then everything
    that depends on time is refused. Who accepted what is kept with the tenant.

    Example: lockgate clock accept --tenant acme
    """

    async def work() -> list[tuple[str, int]]:
        async with opened(redis_url) as connection:
            names: Sequence[str] = (
                await registry.tenant_names(connection)
                if all_tenants
                else [await chosen_tenant(connection, tenant)]
            )
            now = await registry.store_now_ms(connection)
            away = now - time.time_ns() // 1_000_000
            _ask(
                yes,
                f"The store says {instant(now)}, {abs(away)} ms {'ahead of' if away > 0 else 'behind'} "
                f"this machine. Accept that for {', '.join(names)}?",
            )
            return [(name, await registry.accept_clock(connection, name, who())) for name in names]

    for name, accepted in run(work()):
        click.echo(f"tenant {name}: the store's time {instant(accepted)} is accepted")


def _ask(yes: bool, question: str) -> None:
    if not yes and not click.confirm(question):
        raise Refused("nothing was done; answer y, or pass --yes")
