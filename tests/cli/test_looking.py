"""Records looked at whole, and lists of what is there and what needs a person."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import redis

from shared.domain.ids import command_operation_id, reservation_id
from shared.domain.records import Answer
from shared.store.inspecting import Inspector, OperationRow, Window
from shared.store.parked import Parked
from shared.store.replies import NewOperation
from tests.cli.conftest import Lockgate, LockgateJson
from tests.support.world import World

Seed = Callable[[Callable[[World], Awaitable[Any]]], Any]


async def settled(world: World) -> NewOperation:
    """A command that was worked and completed."""
    await world.open()
    command = world.command("c1")
    await world.admit(command)
    grant = await world.granted(command, "holder1")
    answer = Answer(result=msgspec.Raw(b'{"value":3}'), state=msgspec.Raw(b'{"value":3}'), state_revision="0")
    await world.answer(grant.lease, answer)
    await world.decide(command, grant.granted_ms)
    return command


async def lost_unsafe(world: World) -> NewOperation:
    """A command whose worker was lost behind an open gate."""
    await world.open("s2")
    command = world.command("c2", session_id="s2")
    await world.admit(command)
    now = await world.start()
    await world.granted(command, "holder2")
    await world.at(now + 1001)
    await world.decide(command, now + 1001, effects="unsafe")
    return command


def test_a_settled_command_is_shown_whole_by_any_of_its_names(
    lockgate: Lockgate, lockgate_json: LockgateJson, seed: Seed
) -> None:
    operation = seed(settled).operation_id
    shown = lockgate_json("inspect", "operation", "c1")
    assert shown == lockgate_json("inspect", "operation", operation)
    assert shown["summary"]["phase"] == "settled"
    assert shown["summary"]["decision"]["outcome"] == "success"
    assert shown["input"] == {"amount": 3}
    assert shown["outcome"] == {"status": "completed", "output": {"value": 3}, "error": None}
    assert (shown["sequence"], shown["outcomeSequence"]) == (1, 2)
    (branch,) = shown["branches"]
    assert (branch["holder"], branch["fence"], branch["gate"]) == ("holder1", 1, "answered")
    text = lockgate("inspect", "operation", "c1").stdout
    for part in (operation, "success (accepted)", '{"amount":3}', "held by holder1", "fence 1"):
        assert part in text


def test_a_reservation_is_found_by_its_own_id(
    lockgate: Lockgate, lockgate_json: LockgateJson, seed: Seed
) -> None:
    operation = seed(settled).operation_id
    wanted = str(reservation_id(operation))
    shown = lockgate_json("inspect", "reservation", wanted)
    assert shown["reservationId"] == wanted
    assert shown["state"] == "replayable"
    assert shown["replayUntilMs"] - shown["settledAtMs"] == 86_400_000
    assert shown["operation"]["operationId"] == operation
    assert shown == lockgate_json("inspect", "reservation", "c1")
    assert "replayable since" in lockgate("inspect", "reservation", operation).stdout
    other = str(reservation_id("op" + "0" * 64))
    assert "does not exist" in lockgate("inspect", "reservation", other, status=1).stderr


def test_a_session_is_shown_with_what_waits_in_it(
    lockgate: Lockgate, lockgate_json: LockgateJson, seed: Seed
) -> None:
    async def work(world: World) -> list[str]:
        await world.open()
        commands = [world.command(f"c{i}") for i in range(3)]
        for command in commands:
            await world.admit(command)
        await world.store.put_cursor("s1", "alice/web", 2, world.revisions)
        return [command.operation_id for command in commands]

    busy, *waiting = seed(work)
    shown = lockgate_json("inspect", "session", "s1")
    assert shown["session"]["busy"] == busy
    assert shown["queue"] == waiting
    assert shown["cursors"] == {"alice/web": 2}
    assert shown["session"]["state"] == {"value": 0}
    text = lockgate("inspect", "session", "s1").stdout
    for part in (*waiting, "alice/web at 2", "3, 3 pending", '{"value":0}'):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("session", "nope"), 1),
        (("operation", "nope"), 1),
        (("reservation", "nope"), 1),
        (("session", "a b"), 2),
        (("operation", "a/b"), 2),
        (("reservation", ".."), 2),
    ],
)
def test_what_is_not_there_is_told_with_what_to_do(
    lockgate: Lockgate, arguments: tuple[str, ...], status: int
) -> None:
    lockgate("tenant", "create", "acme")
    said = lockgate("inspect", *arguments, status=status).stderr
    assert "lockgate list" in said if status == 1 else "must be a" in said


def test_only_what_may_have_happened_is_uncertain(
    lockgate: Lockgate, lockgate_json: LockgateJson, seed: Seed
) -> None:
    async def work(world: World) -> str:
        await settled(world)
        return (await lost_unsafe(world)).operation_id

    operation = seed(work)
    found = lockgate_json("list", "uncertain")
    assert [row["operationId"] for row in found["operations"]] == [operation]
    assert found["operations"][0]["decision"]["reason"] == "worker-lost"
    assert "c2" in lockgate("list", "uncertain").stdout


def test_lists_show_phases_and_sessions(lockgate_json: LockgateJson, lockgate: Lockgate, seed: Seed) -> None:
    async def work(world: World) -> tuple[str, str]:
        done = await settled(world)
        await world.open("s3")
        waiting = world.command("c3", session_id="s3")
        await world.admit(waiting)
        return done.operation_id, waiting.operation_id

    done, waiting = seed(work)

    def ids(*options: str) -> list[str]:
        return [row["operationId"] for row in lockgate_json("list", "operations", *options)["operations"]]

    assert sorted(ids()) == sorted([done, waiting])
    assert ids("--phase", "settled") == [done]
    assert ids("--session", "s3") == [waiting]
    assert ids("--phase", "tombstone") == []
    sessions = lockgate_json("list", "sessions")["sessions"]
    assert [(row["session_id"], row["cursor"], row["pending"]) for row in sessions] == [
        ("s1", 2, 0),
        ("s3", 1, 1),
    ]
    assert "urn:x:p 1" in lockgate("list", "sessions").stdout


@pytest.mark.requirement("DASP-CORE-012f")
def test_a_deleted_session_leaves_unusable_ids_that_are_shown_as_such(
    lockgate: Lockgate, lockgate_json: LockgateJson, seed: Seed
) -> None:
    async def work(world: World) -> tuple[str, str]:
        command = await settled(world)
        await world.store.close_session("s1", world.revisions)
        await world.store.purge("s1", [command.operation_id], last=True, revisions=world.revisions)
        again = await world.open()
        await world.open("s9")
        elsewhere = await world.admit(world.command("c1", session_id="s9"))
        return again.code.value, elsewhere.code.value

    assert seed(work) == ("NOT_FOUND", "CONFLICT")
    shown = lockgate_json("inspect", "operation", "c1")
    assert shown["summary"]["phase"] == "tombstone"
    assert shown["summary"]["sessionId"] == "s1"
    assert "stays unusable" in lockgate("inspect", "operation", "c1").stdout
    assert "stays unusable" in lockgate("inspect", "reservation", "c1").stdout
    assert "stay unusable" in lockgate("inspect", "session", "s1").stdout
    assert lockgate_json("list", "uncertain")["operations"] == []


def test_work_past_its_deadline_is_overdue_until_it_is_settled(
    lockgate_json: LockgateJson, lockgate: Lockgate, seed: Seed
) -> None:
    async def work(world: World) -> str:
        await world.open()
        past = int(time.time() * 1000) - 60_000
        await world.connection.call("HSET", world.keys.meta, "last_ms", past)
        await world.at(past)
        late, fine = world.command("c1", timeout_ms=1000), world.command("c2", timeout_ms=600_000)
        for command in (late, fine):
            await world.admit(command)
        return late.operation_id

    operation = seed(work)
    assert [row["operationId"] for row in lockgate_json("list", "overdue")["operations"]] == [operation]
    rows = lockgate_json("list", "due")["due"]
    assert rows[0]["member"] == operation
    assert rows[0]["inMs"] < 0
    assert operation in lockgate("list", "due", "--limit", "1").stdout


def test_parked_items_are_listed_with_their_reason(
    lockgate: Lockgate, lockgate_json: LockgateJson, seed: Seed
) -> None:
    async def work(world: World) -> str:
        await world.open()
        command = world.command("c1")
        await world.admit(command)
        await Parked(world.connection, "acme").park(command.operation_id, "ValueError: broken", 1_000)
        return command.operation_id

    operation = seed(work)
    (row,) = lockgate_json("list", "parked")["parked"]
    assert (row["member"], row["reason"], row["tries"]) == (operation, "ValueError: broken", 1)
    assert "ValueError: broken" in lockgate("list", "parked").stdout
    assert lockgate_json("inspect", "operation", operation)["parked"]["tries"] == 1
    assert "ValueError: broken" in lockgate("inspect", "operation", operation).stdout
    assert "parked items" not in lockgate("doctor", "--no-measure").stdout.split("NOTE")[0]
    assert "lockgate list parked" in lockgate("doctor", "--no-measure").stdout


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw, key: raw.hset(key, "admission", b"\xff{"),
        lambda raw, key: raw.hset(key, "at", "yesterday"),
        lambda raw, key: raw.hset(key, "decision", "1 {}"),
        lambda raw, key: raw.hdel(key, "admission"),
        lambda raw, key: raw.delete(key) and raw.set(key, "x"),
    ],
)
def test_a_damaged_record_is_shown_and_stops_no_list(
    lockgate: Lockgate,
    lockgate_json: LockgateJson,
    seed: Seed,
    raw: redis.Redis,
    damage: Callable[[redis.Redis, str], object],
) -> None:
    async def work(world: World) -> tuple[str, str]:
        command = await settled(world)
        other = world.command("c2")
        await world.admit(other)
        return command.operation_id, other.operation_id

    damaged, healthy = seed(work)
    damage(raw, f"lg:{{acme}}:op:{damaged}")
    rows = {row["operationId"]: row for row in lockgate_json("list", "operations")["operations"]}
    assert rows[damaged]["unreadable"]
    assert rows[healthy]["unreadable"] is None
    assert "UNREADABLE" in lockgate("list", "operations").stdout
    assert "unreadable" in lockgate("inspect", "operation", damaged).stdout
    assert damaged in [row["operationId"] for row in lockgate_json("list", "overdue")["operations"]]


def test_a_damaged_session_is_shown_too(
    lockgate: Lockgate, lockgate_json: LockgateJson, seed: Seed, raw: redis.Redis
) -> None:
    seed(settled)
    raw.hset("lg:{acme}:session:s1", "head", "many")
    raw.set("lg:{acme}:session:s2", "x")
    rows = lockgate_json("list", "sessions")["sessions"]
    assert all(row["unreadable"] for row in rows)
    assert len(rows) == 2
    for name in ("s1", "s2"):
        assert "unreadable" in lockgate("inspect", "session", name).stdout
    assert lockgate("list", "sessions").stdout.count("UNREADABLE") == 2


def test_a_list_stops_at_its_bounds_and_goes_on_without_loss(
    lockgate: Lockgate, lockgate_json: LockgateJson, seed: Seed
) -> None:
    async def work(world: World) -> set[str]:
        names = {f"s{i:04}" for i in range(1500)}
        for name in names:
            await world.open(name)
        return names

    names = seed(work)
    seen: list[str] = []
    cursor: str | None = "0"
    pages = 0
    while cursor is not None:
        page = lockgate_json("list", "sessions", "--limit", "10", "--cursor", cursor)
        seen += [row["session_id"] for row in page["sessions"]]
        cursor, pages = page["cursor"], pages + 1
    assert set(seen) == names
    assert pages > 1
    bounded = lockgate("list", "sessions", "--scan", "1")
    assert "--cursor" in bounded.stderr
    assert bounded.stdout.count("\n") < 1400


@pytest.mark.parametrize("cursor", ["$", "-1", "1-", "x", "9" * 21, "٣"])
def test_a_malformed_cursor_is_wrong_usage(lockgate: Lockgate, cursor: str) -> None:
    lockgate("tenant", "create", "acme")
    assert "--cursor" in lockgate("list", "sessions", "--cursor", cursor, status=2).stderr


def test_a_look_at_one_tenant_shows_nothing_of_another(
    lockgate: Lockgate, lockgate_json: LockgateJson, seed: Seed
) -> None:
    seed(settled)
    lockgate("tenant", "create", "acme-2")
    for what in ("sessions", "operations"):
        assert lockgate_json("list", what, "--tenant", "acme-2")[what] == []
    assert "does not exist" in lockgate("inspect", "session", "s1", "--tenant", "acme-2", status=1).stderr


def test_the_operation_of_a_command_is_the_one_its_authority_gives(seed: Seed) -> None:
    async def work(world: World) -> tuple[str, str, tuple[OperationRow, ...]]:
        inspector = Inspector(world.connection, "acme")
        found = await inspector.operations(Window())
        expected = command_operation_id(world.revisions.authority, "c1")
        return await inspector.command_operation("c1"), expected, found.rows

    operation, expected, rows = seed(work)
    assert operation == expected
    assert rows == ()
