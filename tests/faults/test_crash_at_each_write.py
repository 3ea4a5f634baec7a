"""A change cut off at each of its writes: the store starts from a log that ends there.

The log of a store that was killed may end anywhere. So the log of one change is cut after each command of it,
in turn, and each time a store started on the rest holds the whole change or nothing of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from msgspec import Raw

from shared.domain.records import Answer
from shared.store.codes import Code
from shared.store.connection import Connection
from shared.store.embedded import EmbeddedStore
from tests.support.breakpoints import frame_end
from tests.support.raw import raw_client
from tests.support.world import World


def _log(directory: Path) -> Path:
    (found,) = directory.glob("appendonlydir/*.incr.aof")
    return found


def _ends(log: bytes) -> Iterator[int]:
    """Where each command of a log ends. Lines that begin with ``#`` are notes of the server."""
    at = 0
    while at < len(log):
        if log[at : at + 1] == b"#":
            at = log.index(b"\n", at) + 1
            continue
        end = frame_end(log, at)
        assert end is not None
        at = end
        yield at


def _cut_at_each_write(
    store: EmbeddedStore, before: int, traces: Callable[[redis.Redis], list[bool]]
) -> None:
    """Start a store on each beginning of a killed store's log that is at least ``before`` bytes long."""
    log = _log(store.directory).read_bytes()
    cuts = [end for end in _ends(log) if end >= before]
    assert len(cuts) > 6, "the change is several writes"
    held = []
    for number, cut in enumerate(cuts):
        copy = store.directory.with_name(f"cut-{number}")
        shutil.copytree(store.directory, copy, ignore=shutil.ignore_patterns("*.sock"))
        _log(copy).write_bytes(log[:cut])
        with EmbeddedStore(copy) as restarted, raw_client(restarted.url) as raw:
            found = traces(raw)
        assert all(found) or not any(found), f"after write {number} of {len(cuts) - 1}: {found}"
        held.append(all(found))
    assert held == [False] * (len(cuts) - 1) + [True]


@pytest.mark.requirement("DASP-CORE-004a", "DASP-CORE-004b", "RT-ADM-24")
async def test_a_log_that_ends_at_any_write_holds_the_whole_admission_or_nothing(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "store") as store:
        async with Connection(store.url) as connection:
            world = await World.create(connection)
            await world.open()
            await world.admit(world.command("c1"))
            before = _log(store.directory).stat().st_size
            second = world.command("c2")
            assert (await world.admit(second)).text(2) == "queued"
            usage = await connection.call("HGET", world.keys.meta, "usage")
        store.kill()
    keys, operation = world.keys, second.operation_id
    _cut_at_each_write(
        store,
        before,
        lambda raw: [
            bool(raw.exists(keys.op(operation))),
            raw.xlen(keys.updates("s1")) == 2,
            raw.zscore(keys.queue("s1"), operation) is not None,
            raw.zscore(keys.due, operation) is not None,
            raw.hmget(keys.session("s1"), "head", "pending", "commands") == [b"2", b"2", b"2"],
            raw.hmget(keys.meta, "usage") == [usage],
        ],
    )


@pytest.mark.requirement("DASPX-12")
@pytest.mark.case(54)
async def test_a_log_that_ends_at_any_write_holds_the_whole_outcome_or_nothing(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "store") as store:
        async with Connection(store.url) as connection:
            world = await World.create(connection)
            await world.open()
            command = world.command("c1")
            await world.admit(command)
            grant = await world.granted(command)
            answer = Answer(result=Raw(b'{"value":3}'), state=Raw(b'{"value":3}'), state_revision="0")
            stored = await world.answer(grant.lease, answer)
            before = _log(store.directory).stat().st_size
            committed = await world.decide(command, stored.now_ms)
            assert committed is not None
            assert committed.code is Code.OK
        store.kill()
    keys, operation = world.keys, command.operation_id
    _cut_at_each_write(
        store,
        before,
        lambda raw: [
            raw.hget(keys.op(operation), "phase") == b"settled",
            raw.hget(keys.op(operation), "outcome_seq") == b"2",
            raw.hget(keys.op(operation), "r:0") is None,
            raw.xlen(keys.updates("s1")) == 2,
            raw.hmget(keys.session("s1"), "head", "busy", "pending") == [b"2", b"", b"0"],
            raw.hget(keys.session("s1"), "state") == b'{"value":3}',
            raw.zscore(keys.due, operation) is None,
        ],
    )
