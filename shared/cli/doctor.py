"""``doctor``: what the store promises, what it costs, and whether new work would be taken, in words."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec

from shared.cli.base import (
    REFUSED,
    instant,
    json_option,
    opened,
    print_facts,
    print_json,
    redis_url_option,
    run,
)
from shared.cli.limits import kept_facts
from shared.store.clock import SMALL_ROLLBACK_MS
from shared.store.connection import Connection, ReplyError
from shared.store.footprint import Footprint, measure_footprint
from shared.store.health import TenantHealth, look_after
from shared.store.inspection import Boundary, Durability, inspect, number, read_info, refusal
from shared.store.registry import store_now_ms, tenant_names, unregistered_tenants

_SAMPLE_ENTRIES: Final = 300
_SAMPLE_OPERATIONS: Final = 100
_LATE_MS: Final = 30_000
_DECLARABLE: Final = [b.value for b in Boundary if b is not Boundary.UNKNOWN]
_OLDEST: Final = {"valkey": (7, 2), "redis": (7, 0)}


class Finding(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Something to act on. ``refuses_work``: new work is refused until it is."""

    problem: str
    advice: str
    refuses_work: bool = True
    tenant: str | None = None


class Report(msgspec.Struct, frozen=True, rename="camel"):
    """Everything doctor found; instants in store ms, sizes in bytes."""

    version: str | None
    role: str | None
    eviction: str | None
    durability: dict[str, Any]
    used_memory: int | None
    maxmemory: int | None
    store_time_ms: int
    local_ahead_ms: int
    tenants: tuple[TenantHealth, ...]
    footprint: Footprint | None
    accepts_new_work: bool
    findings: tuple[Finding, ...]


@click.command()
@click.option(
    "--declared-durability",
    envvar="LOCKGATE_DECLARED_DURABILITY",
    show_envvar=True,
    type=click.Choice(_DECLARABLE),
    help="What acknowledged writes survive by your word, as the services are told.",
)
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Write samples under keys of their own, ask what they take, and remove them.",
)
@json_option
@redis_url_option
def doctor(declared_durability: str | None, measure: bool, as_json: bool, redis_url: str | None) -> None:
    """Say how the store is.

    What it promises and costs, and whether new work would be accepted. Ends with status 1 where new work
    would be refused, and says what to do about it; with 3 where the store cannot be reached.

    Example: lockgate doctor --redis-url redis://127.0.0.1:6379
    """
    declared = Boundary(declared_durability) if declared_durability else None

    async def work() -> Report:
        async with opened(redis_url) as connection:
            return await examine(connection, declared, measure)

    report = run(work())
    if as_json:
        print_json(report)
    else:
        _print(report)
    if not report.accepts_new_work:
        raise SystemExit(REFUSED)


async def examine(connection: Connection, declared: Boundary | None, measure: bool) -> Report:
    """Look at everything once."""
    durability = await inspect(connection, declared)
    info = await read_info(connection, "memory", "persistence", "server")
    now, local = await store_now_ms(connection), time.time_ns() // 1_000_000
    names = [*await tenant_names(connection), *await unregistered_tenants(connection)]
    tenants = tuple([await look_after(connection, name, _SAMPLE_OPERATIONS) for name in names])
    findings = [*_of_store(durability, info)]
    for tenant in tenants:
        findings += _of_tenant(tenant)
    footprint = None
    if measure:
        footprint, note = await _measured(connection)
        findings += note
    return Report(
        version=durability.version,
        role=durability.role,
        eviction=durability.maxmemory_policy,
        durability=durability.published(),
        used_memory=number(info.get("used_memory")),
        maxmemory=durability.maxmemory,
        store_time_ms=now,
        local_ahead_ms=local - now,
        tenants=tenants,
        footprint=footprint,
        accepts_new_work=not any(finding.refuses_work for finding in findings),
        findings=tuple(findings),
    )


def _of_store(durability: Durability, info: dict[str, str]) -> Iterator[Finding]:
    why = refusal(durability)
    if why is not None:
        yield Finding(why, _advice(durability))
    product = "valkey" if "valkey_version" in info else "redis"
    version = re.match(r"(\d+)\.(\d+)", durability.version or "")
    if version and (int(version[1]), int(version[2])) < _OLDEST[product]:
        oldest = ".".join(map(str, _OLDEST[product]))
        yield Finding(f"the store is {product} {durability.version}", f"use {product} {oldest} or newer")
    used, limit = number(info.get("used_memory")), durability.maxmemory
    if used and limit and used >= limit:
        yield Finding(
            f"the store uses {used} of {limit} bytes: it is out of memory",
            "raise maxmemory, or delete tenants or sessions that are not needed",
        )
    if durability.boundary is Boundary.VOLATILE and why is None:
        yield Finding(
            "the store is volatile: a restart of it can lose what was acknowledged",
            "set appendonly yes and appendfsync always, or keep it for trying things out",
            refuses_work=False,
        )


def _advice(durability: Durability) -> str:
    if durability.disk_failed:
        return "look at its disk and its log"
    if durability.role not in (None, "master"):
        return "name its primary with --redis-url"
    if durability.safe_eviction is False:
        return "CONFIG SET maxmemory-policy noeviction, and keep it in the store's configuration"
    if durability.boundary is Boundary.UNKNOWN:
        return "allow INFO and CONFIG GET to this user, or set LOCKGATE_DECLARED_DURABILITY"
    return "set appendonly yes and appendfsync always, or declare less"


def _of_tenant(tenant: TenantHealth) -> Iterator[Finding]:
    name = tenant.tenant
    if tenant.lost is not None:
        yield Finding(
            f"tenant {name} is lost: {tenant.lost}",
            f"restore the store's data, or give it a new authority: lockgate tenant adopt {name}",
            tenant=name,
        )
        return
    if tenant.behind_ms > SMALL_ROLLBACK_MS:
        yield Finding(
            f"the store's clock is {tenant.behind_ms} ms behind the last commit of tenant {name}",
            f"wait until it has caught up, or: lockgate clock accept --tenant {name}",
            tenant=name,
        )
    if tenant.late_ms > _LATE_MS:
        yield Finding(
            f"wake-ups of tenant {name} are up to {tenant.late_ms // 1000} s late",
            "start a settlement process: lockgate settlement",
            refuses_work=False,
            tenant=name,
        )
    if tenant.parked:
        yield Finding(
            f"tenant {name} has {tenant.parked} items that settling failed on",
            f"lockgate list parked --tenant {name}",
            refuses_work=False,
            tenant=name,
        )


async def _measured(connection: Connection) -> tuple[Footprint | None, list[Finding]]:
    try:
        return await measure_footprint(connection, _SAMPLE_ENTRIES), []
    except ReplyError as error:
        note = Finding(
            f"what records take was not measured: the store refused it ({error.code})",
            "allow MEMORY USAGE and writing to this user, or pass --no-measure",
            refuses_work=False,
        )
        return None, [note]


def _print(report: Report) -> None:
    durability = report.durability
    click.echo("STORE")
    memory = f"{report.used_memory} bytes of {report.maxmemory or 'no limit'}"
    print_facts(
        [
            ("version", report.version),
            ("role", report.role),
            ("eviction", f"{report.eviction or 'not told'}{_verdict(report.eviction)}"),
            ("memory", memory),
            ("time", f"{instant(report.store_time_ms)}, this machine is {report.local_ahead_ms:+d} ms"),
            (
                "durability",
                f"{durability['boundary']}, appendfsync {durability['appendfsync'] or 'not told'}",
            ),
            *(("  survives", line) for line in durability["covers"]),
            *(("  not", line) for line in durability["doesNotCover"]),
        ],
        indent="  ",
    )
    for tenant in report.tenants:
        click.echo(f"TENANT {tenant.tenant}")
        print_facts(_tenant_facts(tenant), indent="  ")
    if not report.tenants:
        click.echo("no tenant yet: create one with `lockgate tenant create NAME`")
    if report.footprint is not None:
        click.echo("FOOTPRINT (bytes, measured now)")
        print_facts(_footprint_facts(report.footprint), indent="  ")
    for finding in report.findings:
        click.echo(
            f"{'REFUSED' if finding.refuses_work else 'NOTE'}: {finding.problem}\n  do: {finding.advice}"
        )
    click.echo(f"new work would be {'accepted' if report.accepts_new_work else 'refused'}")


def _verdict(policy: str | None) -> str:
    return "" if policy is None else ": nothing is dropped" if policy == "noeviction" else ": UNSAFE"


def _tenant_facts(tenant: TenantHealth) -> list[tuple[str, object]]:
    if tenant.lost is not None:
        return [("store", f"LOST: {tenant.lost}")]
    stored = tenant.sampled_bytes // tenant.sampled if tenant.sampled else 0
    moved = " (the server restarted since; the next write raises it)" if tenant.server_moved else ""
    return [
        ("authority", tenant.authority),
        ("epoch", f"{tenant.epoch}{moved}"),
        ("clock", f"{tenant.behind_ms} ms behind the last commit" if tenant.behind_ms > 0 else "agrees"),
        *kept_facts(tenant.usage, tenant.limits),
        ("stored", f"{stored} bytes each, mean of {tenant.sampled}" if tenant.sampled else ""),
        (
            "due",
            f"{tenant.due} wake-ups" + (f", the latest {tenant.late_ms} ms late" if tenant.late_ms else ""),
        ),
        ("parked", tenant.parked),
    ]


def _footprint_facts(found: Footprint) -> list[tuple[str, object]]:
    return [
        ("hash-max-listpack-value", found.hash_max_listpack_value),
        ("stream-node-max-bytes", found.stream_node_max_bytes),
        ("stream-node-max-entries", found.stream_node_max_entries),
        ("settled command, 1 KiB input", found.settled_record),
        ("session of three facts", found.short_session),
        ("small fact in a long stream", found.small_entry),
        ("1 KiB fact in a long stream", found.large_entry),
        ("lone survivor of a stream node", found.survivor),
    ]
