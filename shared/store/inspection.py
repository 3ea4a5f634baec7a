"""What a store can be trusted with, read from the store itself.

The boundary is the weakest event that acknowledged writes survive. It is inspected and published, never
assumed (DASP-CORE-012d): no append-only file, or one fsynced every second, is *volatile*, because even a
killed server loses what it acknowledged; ``appendfsync always`` is *process-restart*; *power-loss* depends
on a volume nobody can inspect from here, so the operator has to declare it. A store that refuses inspection
is *unknown*.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec

from shared.store.connection import ReplyError


class Caller(Protocol):
    """The part of a connection used here: raw RESP2 replies, ReplyError for an error reply."""

    async def call(self, *args: bytes | str | int) -> Any: ...


class Boundary(enum.StrEnum):
    """The strongest event that acknowledged writes survive, from nothing known to the power failing."""

    UNKNOWN = "unknown"
    VOLATILE = "volatile"
    PROCESS_RESTART = "process-restart"
    POWER_LOSS = "power-loss"

    @property
    def strength(self) -> int:
        return list(Boundary).index(self)


_SURVIVABLE: Final[tuple[tuple[Boundary, str], ...]] = (
    (Boundary.VOLATILE, "restart or kill of Lockgate's own processes"),
    (Boundary.PROCESS_RESTART, "restart or kill of the store's process"),
    (Boundary.POWER_LOSS, "power loss and operating system crash, on the operator's word about the volume"),
)
_SETTINGS: Final = (
    "appendonly",
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "maxmemory-policy",
    "save",
    "stop-writes-on-bgsave-error",
)
_NEVER_SURVIVED: Final = (
    "failure of the storage itself",
    "failover to a replica that had not received the write",
)


class Durability(msgspec.Struct, frozen=True, kw_only=True):
    """One inspection. ``None`` stands for what the store refused to tell.

    ``maxmemory`` is in bytes, 0 means no limit. ``disk_failed``: it cannot write and refuses every change
    until it can. ``replid`` changes on every restart and promotion of the
    store.
    """

    boundary: Boundary
    declared: Boundary | None
    appendfsync: str | None
    aof: bool | None
    replicas: int | None
    role: str | None
    maxmemory_policy: str | None
    maxmemory: int | None
    replid: str | None
    replid2: str | None
    version: str | None
    safe_eviction: bool | None
    covers: tuple[str, ...]
    does_not_cover: tuple[str, ...]
    disk_failed: bool = False

    def published(self) -> dict[str, Any]:
        """The ``durability`` member of ``/v1/authority``."""
        return {
            "boundary": self.boundary.value,
            "appendfsync": self.appendfsync,
            "replicas": self.replicas,
            "covers": list(self.covers),
            "doesNotCover": list(self.does_not_cover),
        }


async def inspect(client: Caller, declared: Boundary | None = None) -> Durability:
    """Read the store's settings. ``declared`` is the operator's word about the boundary, if there is one.

    A refused INFO or CONFIG GET (access rules, renamed or unknown command) becomes ``None`` members; any
    other error reply, for instance LOADING, and a lost connection are raised: they say nothing about
    durability.
    """
    info = await read_info(client, "server", "memory", "persistence", "replication")
    config = await read_config(client, *_SETTINGS)
    aof = _aof(info, config)
    appendfsync = config.get("appendfsync")
    boundary = _boundary(aof, appendfsync, config.get("no-appendfsync-on-rewrite"), declared)
    policy = info.get("maxmemory_policy") or config.get("maxmemory-policy")
    return Durability(
        boundary=boundary,
        declared=declared,
        appendfsync=appendfsync,
        aof=aof,
        replicas=number(info.get("connected_slaves")),
        role=info.get("role"),
        maxmemory_policy=policy,
        maxmemory=number(info.get("maxmemory")),
        replid=info.get("master_replid"),
        replid2=info.get("master_replid2"),
        version=info.get("valkey_version") or info.get("redis_version"),
        safe_eviction=None if policy is None else policy == "noeviction",
        covers=tuple(_covered(boundary, declared)),
        does_not_cover=tuple(_uncovered(boundary, declared, appendfsync)),
        disk_failed=_disk_failed(info, config),
    )


def is_below_declared(durability: Durability) -> bool:
    """Whether the store proves less than the operator declared; a refused inspection proves nothing against
    it."""
    declared, boundary = durability.declared, durability.boundary
    if declared is None or boundary is Boundary.UNKNOWN:
        return False
    return boundary.strength < declared.strength


def refusal(durability: Durability) -> str | None:
    """Why this store may not admit new work, in words for an operator, or ``None``.

    Reads, duplicates and work already admitted go on regardless: only new promises are refused.
    """
    if durability.role not in (None, "master"):
        return f"the store is a {durability.role}: transitions are decided on a primary only"
    if durability.disk_failed:
        return "the store cannot write to its disk and refuses every change"
    if durability.safe_eviction is False:
        return (
            f"maxmemory-policy is {durability.maxmemory_policy}: under memory pressure the store would drop "
            "promises; set it to noeviction"
        )
    if durability.boundary is Boundary.UNKNOWN and durability.declared in (None, Boundary.UNKNOWN):
        return "the store refuses INFO or CONFIG GET, its durability is unknown: allow them or declare it"
    if is_below_declared(durability):
        return f"the store's durability is {durability.boundary}, below the declared {durability.declared}"
    return None


async def read_info(client: Caller, *sections: str) -> dict[str, str]:
    """The fields of INFO; empty where the store refuses it."""
    raw = await _unless_refused(client, "INFO", *sections)
    lines = (raw or b"").decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


async def read_config(client: Caller, *names: str) -> dict[str, str]:
    """The named settings; empty where the store refuses CONFIG GET."""
    raw = await _unless_refused(client, "CONFIG", "GET", *names) or []
    words = [word.decode(errors="replace") for word in raw]
    return dict(zip(words[::2], words[1::2], strict=True))


def number(text: str | None) -> int | None:
    """A count or size as the store prints it, ``None`` where it printed none."""
    return int(text) if text is not None and text.isdigit() else None


def _boundary(
    aof: bool | None, fsync: str | None, lazy_rewrite: str | None, declared: Boundary | None
) -> Boundary:
    if aof is False or fsync in ("everysec", "no"):
        return Boundary.VOLATILE
    if aof is None or fsync != "always":
        return Boundary.UNKNOWN
    # With `yes` the file is written but not fsynced while it is rewritten: enough for the death of the
    # server, not for that of the machine.
    if declared is Boundary.POWER_LOSS and lazy_rewrite == "no":
        return Boundary.POWER_LOSS
    return Boundary.PROCESS_RESTART


def _disk_failed(info: Mapping[str, str], config: Mapping[str, str]) -> bool:
    snapshots = config.get("save") != "" and config.get("stop-writes-on-bgsave-error") == "yes"
    no_snapshot = snapshots and info.get("rdb_last_bgsave_status") == "err"
    return no_snapshot or info.get("aof_last_write_status") == "err"


def _covered(boundary: Boundary, declared: Boundary | None) -> Iterator[str]:
    word_only = boundary is Boundary.UNKNOWN
    held = _held(boundary, declared)
    for needed, event in _SURVIVABLE:
        if needed.strength <= held.strength:
            yield f"{event} (declared by the operator, not inspected)" if word_only else event


def _uncovered(boundary: Boundary, declared: Boundary | None, fsync: str | None) -> Iterator[str]:
    held = _held(boundary, declared)
    for needed, event in _SURVIVABLE:
        if needed.strength <= held.strength:
            continue
        late = boundary is Boundary.VOLATILE and fsync == "everysec" and needed is Boundary.PROCESS_RESTART
        yield f"{event}: about one second of acknowledged writes can be lost" if late else event
    yield from _NEVER_SURVIVED


def _held(boundary: Boundary, declared: Boundary | None) -> Boundary:
    return declared if boundary is Boundary.UNKNOWN and declared is not None else boundary


def _aof(info: Mapping[str, str], config: Mapping[str, str]) -> bool | None:
    enabled = info.get("aof_enabled")
    if enabled is not None:
        return enabled == "1"
    appendonly = config.get("appendonly")
    return None if appendonly is None else appendonly == "yes"


async def _unless_refused(client: Caller, *args: str) -> Any:
    try:
        return await client.call(*args)
    except ReplyError as error:
        if error.code in ("NOPERM", "ERR"):
            return None
        raise
