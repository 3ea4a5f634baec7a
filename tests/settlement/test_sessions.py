"""Serial sessions one command at a time, concurrent ones all at once, and the way from closing to closed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from settlement_svc.contention import Undecidable
from shared.store.codes import Code
from shared.store.scripts import TOMBSTONES_PER_CHUNK
from tests.settlement.host import PEER, Host, contract
from tests.settlement.scripted import Document, ScriptedHandler, answer, done
from tests.support.polling import wait_until


async def phase(host: Host, session_id: str = "s1") -> str:
    return (await host.session(session_id)).phase


async def test_commands_run_one_at_a_time_in_admission_order(redis_url: str) -> None:
    """However they end: each begins after the one before has ended, and sees the state that one left."""
    running = 0
    log: list[tuple[int, int]] = []

    async def script(document: Document) -> bytes | None:
        nonlocal running
        running += 1
        assert running == 1
        number = document["input"]["number"]
        log.append((number, document["session"]["state"]["n"]))
        await asyncio.sleep(0)
        running -= 1
        if number % 3 == 1:
            return answer(refused={"code": "test.no", "message": "every third"})
        return done(document)

    async with Host.create(redis_url, contract()) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url, concurrency=8), host.sidecar(handler.url):
            for number in range(12):
                await host.submit(f"c{number}", {"number": number})
            assert (await host.outcome("c11"))["status"] == "completed"
        statuses = [(await host.outcome(f"c{number}"))["status"] for number in range(12)]
        session = await host.session()
        outcomes = [fact.command_id for fact in await host.facts() if fact.kind == "outcome"]
    assert [number for number, _ in log] == list(range(12))
    assert [seen for _, seen in log] == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7]
    assert statuses == ["failed" if number % 3 == 1 else "completed" for number in range(12)]
    assert outcomes == [f"c{number}" for number in range(12)]
    assert (session.busy, session.pending, json.loads(session.state)) == ("", 0, {"n": 8})


async def test_concurrent_commands_run_at_once(redis_url: str) -> None:
    everyone = asyncio.Barrier(3)

    async def script(document: Document) -> bytes:
        await everyone.wait()
        assert document["session"]["state"] is None
        assert document["session"]["stateRevision"] is None
        return answer(result={"ok": True})

    terms = contract(execution="concurrent")
    async with Host.create(redis_url, terms) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url):
            for number in range(3):
                await host.submit(f"c{number}")
            for number in range(3):
                assert (await host.outcome(f"c{number}"))["status"] == "completed"


async def test_a_queued_command_whose_deadline_passes_first_is_never_dispatched(redis_url: str) -> None:
    release = asyncio.Event()

    async def script(document: Document) -> bytes:
        await release.wait()
        return done(document)

    async with Host.create(redis_url, contract()) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url):
            await host.submit("c1")
            await host.submit("c2", timeout_ms=60)
            await host.submit("c3")
            await host.submit("c4", timeout_ms=60)
            await wait_until(lambda: len(handler.calls) == 1)
            # While the first one still runs, the deadlines of those that wait are kept.
            for command in ("c2", "c4"):
                outcome = await host.outcome(command)
                assert (outcome["status"], outcome["error"]["code"]) == ("failed", "timeout")
            assert await host.outcomes("c1") == []
            release.set()
            assert (await host.outcome("c3"))["status"] == "completed"
        called = [document["operationId"] for document in handler.calls]
        assert called == [host.operation_id("c1"), host.operation_id("c3")]


async def test_the_head_of_the_queue_that_is_too_late_is_settled_before_the_next_has_its_turn(
    redis_url: str, raw: Any
) -> None:
    """Nobody settled it when its deadline came: the turn finds it and passes on to the next one."""
    async with Host.create(redis_url, contract(effects="none")) as host:
        await host.open()
        await host.submit("c1", timeout_ms=30)
        await host.submit("c2", timeout_ms=30)
        await host.submit("c3")
        late = (await host.operation("c2")).deadline_ms
        await wait_until(lambda: host.runtime.clock.lower_ms() > late)
        await host.settler.decide(host.operation_id("c1"), "s1")
        assert raw.zcard(host.handle.keys.queue("s1")) == 2
        assert await host.settler.sessions.advance("s1")
        assert (await host.outcome("c2"))["error"]["code"] == "timeout"
        assert (await host.session()).busy == host.operation_id("c3")
        offered = [entry[1][b"o"].decode() for entry in raw.xrange(host.handle.keys.outbox(PEER))]
        assert offered == [host.operation_id("c3")]


@pytest.mark.requirement("DASP-CORE-007b")
async def test_after_an_uncertain_command_a_session_that_continues_waits_for_the_lease_to_run_out(
    redis_url: str, raw: Any
) -> None:
    async with Host.create(redis_url, contract(effects="unsafe", timeout_ms=100)) as host:
        await host.open()
        operation = await host.submit("c1")
        await host.submit("c2", timeout_ms=8_000)
        lease = await host.grant(operation, lease_ms=500)
        async with host.settling():
            assert (await host.outcome("c1"))["status"] == "uncertain"
            # Its worker may still be at it: the seat is not free before its lease has run out.
            await wait_until(lambda: _offered(host, "c2"))
            assert raw.time()[0] * 1000 + raw.time()[1] // 1000 >= lease.until_ms
        assert (await host.session()).busy == host.operation_id("c2")


async def _offered(host: Host, command: str) -> bool:
    return (await host.operation(command)).branches[0].outbox is not None


@pytest.mark.requirement("DASP-CORE-007b")
async def test_after_an_uncertain_command_a_session_that_halts_dispatches_nothing_more(
    redis_url: str,
) -> None:
    async def script(document: Document) -> bytes | None:
        return None

    terms = contract(effects="unsafe", on_uncertain="halt")
    async with Host.create(redis_url, terms) as host, ScriptedHandler(script) as handler:
        await host.open()
        await host.submit("c1")
        await host.submit("c2", timeout_ms=300)
        async with host.sidecar(handler.url):
            assert (await host.outcome("c1"))["status"] == "uncertain"
            assert (await host.session()).halted == host.operation_id("c1")
            # What waits comes to its own end.
            outcome = await host.outcome("c2")
        assert (outcome["status"], outcome["error"]["code"]) == ("failed", "timeout")
        assert len(handler.calls) == 1


async def test_a_session_closed_while_commands_wait_ends_them_and_closes(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        for number in range(3):
            await host.submit(f"c{number}")
        facts: list[bytes] = []
        await host.close()
        # What the facts say is seen before the purge takes them: settled one by one, then closed.
        for number in range(3):
            await host.settler.decide(host.operation_id(f"c{number}"), "s1", event="session-closing")
            facts += [
                f.payload for f in await host.facts() if f.kind == "outcome" and f.command_id == f"c{number}"
            ]
        assert [json.loads(payload)["error"]["code"] for payload in facts] == ["session-closed"] * 3
        async with host.settling():
            await wait_until(lambda: _closed(host))
        keys = host.handle.keys
        assert raw.exists(keys.updates("s1"), keys.queue("s1"), keys.cursors("s1")) == 0
        assert raw.zcard(keys.due) == 0
        assert raw.xlen(keys.outbox(PEER)) == 0
        for number in range(3):
            assert raw.hget(keys.op(host.operation_id(f"c{number}")), "tombstone") == b"s1"


async def _closed(host: Host, session_id: str = "s1") -> bool:
    return await phase(host, session_id) == "closed"


@pytest.mark.requirement("DASP-CORE-012f")
async def test_a_session_closed_while_busy_lets_the_running_command_end(redis_url: str, raw: Any) -> None:
    release = asyncio.Event()

    async def script(document: Document) -> bytes:
        await release.wait()
        return done(document)

    async with Host.create(redis_url, contract()) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url):
            await host.submit("c1")
            await host.submit("c2")
            await wait_until(lambda: len(handler.calls) == 1)
            await host.close()
            outcome = await host.outcome("c2")
            assert outcome["error"]["code"] == "session-closed"
            assert await phase(host) == "closing"
            # With only running work left the session rests: nothing is due for it.
            await wait_until(lambda: raw.zscore(host.handle.keys.due, "turn:s1") is None)
            assert await host.outcomes("c1") == []
            release.set()
            await wait_until(lambda: _closed(host))
        assert len(handler.calls) == 1
        for command in ("c1", "c2"):
            assert raw.hget(host.handle.keys.op(host.operation_id(command)), "tombstone") == b"s1"


async def test_a_concurrent_session_closes_when_its_last_command_ended(redis_url: str) -> None:
    release = asyncio.Event()

    async def script(_: Document) -> bytes:
        await release.wait()
        return answer(result={"ok": True})

    terms = contract(execution="concurrent", lease={"claimTimeoutMs": 60})
    async with Host.create(redis_url, terms) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.sidecar(handler.url, concurrency=2):
            for number in range(3):
                await host.submit(f"c{number}")
            await wait_until(lambda: len(handler.calls) == 2)
            await host.close()
            # The third was never begun: nobody begins it for a session that closes.
            ended = await wait_until(lambda: _ended(host))
            assert [outcome["error"]["code"] for outcome in ended] == ["session-closed"]
            release.set()
            await wait_until(lambda: _closed(host))
        assert len(handler.calls) == 2


async def _ended(host: Host) -> list[dict[str, dict[str, str]]]:
    return [json.loads(fact.payload) for fact in await host.facts() if fact.kind == "outcome"]


async def test_a_long_session_is_purged_in_chunks_by_whoever_goes_on(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, raw: Any
) -> None:
    count = TOMBSTONES_PER_CHUNK + 10
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        for number in range(count):
            await host.submit(f"c{number}")
        await host.close()
        purge = host.handle.store.purge
        chunks: list[Code] = []

        async def dying(*args: object, **more: object) -> object:
            if len(chunks) == 1:
                raise Undecidable("the process died between two chunks")
            reply = await purge(*args, **more)  # type: ignore[arg-type]
            chunks.append(reply.code)
            return reply

        monkeypatch.setattr(host.handle.store, "purge", dying)
        with pytest.raises(Undecidable):
            await host.settler.sessions.advance("s1")
        assert await phase(host) == "closing"
        assert 0 < sum(raw.hexists(key, "tombstone") for key in raw.keys("lg:{acme}:op:*")) < count
        monkeypatch.setattr(host.handle.store, "purge", purge)
        async with host.settling():
            await wait_until(lambda: _closed(host))
        assert sum(raw.hexists(key, "tombstone") for key in raw.keys("lg:{acme}:op:*")) == count


async def test_an_empty_session_closes_at_once(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        await host.close()
        await host.settler.sweep()
        assert await phase(host) == "closed"
        assert raw.zcard(host.handle.keys.due) == 0


async def test_a_session_that_counts_other_commands_than_it_names_is_left_to_a_person(
    redis_url: str, raw: Any
) -> None:
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        raw.hset(host.handle.keys.session("s1"), "commands", 1)
        await host.close()
        with pytest.raises(Undecidable, match="counts other commands"):
            await host.settler.sessions.advance("s1")
