"""``tenant limits``: what a tenant may use, shown beside what it uses, and changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click
import msgspec

from shared.cli.base import (
    Refused,
    chosen_tenant,
    json_option,
    opened,
    print_facts,
    print_json,
    redis_url_option,
    run,
)
from shared.domain.limits import TenantLimits, TenantUsage
from shared.store import registry

_HELP: Final = {
    "operations": "Operations kept, settled ones included.",
    "bytes": "Bytes of admissions, inputs, facts and states kept, and of what open outcomes may need.",
    "open_operations": "Operations admitted and not settled.",
    "sessions": "Sessions that are not closed.",
    "record_bytes": "Bytes of one admission with its input.",
    "outbox_depth": "Offers to one peer that nobody took.",
    "admissions_per_second": "Commands and sessions admitted per second.",
    "burst": "Admissions above that rate at once.",
    "streams": "Live streams in each admission process.",
    "waiters": "Waiting requests in each admission process.",
}
_COUNTED: Final = TenantUsage.__struct_fields__


def kept_facts(usage: TenantUsage, limits: TenantLimits | None) -> list[tuple[str, object]]:
    """What is kept of what may be, for people."""
    if limits is None:
        return [("kept", "its limits cannot be read: set them with `lockgate tenant limits`")]
    return [
        ("kept", f"{getattr(usage, name)} of {getattr(limits, name)} {name.replace('_', ' ')}")
        for name in _COUNTED
    ]


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for name in reversed(TenantLimits.__struct_fields__):
        most = 1_000_000 if name in ("admissions_per_second", "burst") else 2**53 - 1
        least = 1 if name in ("admissions_per_second", "burst") else 0
        flag = "--" + name.replace("_", "-")
        command = click.option(flag, name, type=click.IntRange(least, most), help=_HELP[name])(command)
    return command


@click.command("limits")
@click.argument("name")
@_options
@json_option
@redis_url_option
def tenant_limits(name: str, as_json: bool, redis_url: str | None, **wanted: int | None) -> None:
    """Show the limits of tenant NAME, or change those that are given.

    They hold at once, in every process. A limit below what is kept refuses new work and touches nothing that
    is there.

    Example: lockgate tenant limits acme --open-operations 5000 --admissions-per-second 100
    """
    changes = {field: value for field, value in wanted.items() if value is not None}

    async def work() -> tuple[TenantUsage, TenantLimits | None]:
        async with opened(redis_url) as connection:
            tenant = await chosen_tenant(connection, name)
            found = await registry.show_tenant(connection, tenant)
            if found.lost:
                raise Refused(f"the store of tenant {tenant} was lost: adopt it first")
            limits = found.limits
            if changes:
                limits = msgspec.structs.replace(limits or TenantLimits(), **changes)
                await registry.set_limits(connection, tenant, limits)
            return found.usage, limits

    usage, limits = run(work())
    if as_json:
        print_json({"limits": msgspec.to_builtins(limits), "usage": msgspec.to_builtins(usage)})
        return
    if limits is None:
        raise Refused("the limits cannot be read: give those that shall hold, the others take their defaults")
    print_facts([_row(field, limits, usage) for field in TenantLimits.__struct_fields__])


def _row(field: str, limits: TenantLimits, usage: TenantUsage) -> tuple[str, Any]:
    limit = getattr(limits, field)
    used = f"{getattr(usage, field)} of " if field in _COUNTED else ""
    return field.replace("_", " "), f"{used}{limit}"
