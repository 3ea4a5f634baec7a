"""Streams, waits and sidecars that have nothing to do for longer than any timeout towards the store.

Timeouts are made short in place of waiting long: what matters is that blocking and idling are not taken for
a store that does not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import pytest
import redis
from structlog.testing import capture_logs

from admission_svc import live
from settlement_svc import sidecar
from shared.store import outbox, runtime
from shared.store.link import Limits
from shared.store.runtime import Runtime
from shared.store.wake import Wake
from tests.admission.house import house
from tests.admission.looking import streaming
from tests.settlement.host import Host
from tests.settlement.scripted import Document, ScriptedHandler, answer
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy

TIMEOUT_S: Final = 0.3
BLOCK_MS: Final = 900
IDLE_READS: Final = 4
"""Blocking reads without a result that pass, each of them longer than the timeout of a reply."""
QUIET_S: Final = 10_000.0


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies are late after ``TIMEOUT_S``, also pages; a sidecar's reads block for longer than that; no
    stream looks by itself and no silent subscription is tried, so that nothing keeps a socket busy.
    """
    _, calls, size = Limits.__init__.__defaults__ or ()
    monkeypatch.setattr(Limits.__init__, "__defaults__", (TIMEOUT_S, calls, size))
    limits, _, *others = Wake.__init__.__defaults__ or ()
    monkeypatch.setattr(Wake.__init__, "__defaults__", (limits, QUIET_S, *others))
    monkeypatch.setattr(runtime, "_BULK_LIMITS", Limits())
    monkeypatch.setattr(runtime, "_INSPECT_EVERY_S", QUIET_S)
    monkeypatch.setattr(outbox, "_REPLY_S", TIMEOUT_S)
    monkeypatch.setattr(sidecar, "BLOCK_MS", BLOCK_MS)
    monkeypatch.setattr(live, "RECHECK_S", QUIET_S)
    assert Limits().timeout_s == TIMEOUT_S < BLOCK_MS / 1000


async def succeed(_: Document) -> bytes:
    return answer(result={"ok": True})


def idle_reads(raw: redis.Redis) -> Callable[[], bool]:
    """Whether the outbox was read so often since now."""

    def calls() -> int:
        stats: Any = raw.info("commandstats")
        return int(stats.get("cmdstat_xreadgroup", {}).get("calls", 0))

    enough = calls() + IDLE_READS
    return lambda: calls() >= enough


@pytest.mark.case(93)
async def test_idle_streams_and_sidecars_live_on_and_get_the_next_event(
    redis_url: str, raw: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with FaultProxy(redis_url) as proxy, house(redis_url) as near, ScriptedHandler(succeed) as handler:
        alice = await near.client("alice")
        await alice.open("s1")
        async with house(proxy.url, tenants=()) as door, Runtime(proxy.url) as working:
            reader = door.client_with(alice.token)
            handle, terms = await working.tenant("acme"), near.contracts["demo.notes"]
            host = Host(proxy.url, working, handle, terms, near.admin)
            with caplog.at_level(logging.WARNING), capture_logs() as told:
                async with host.sidecar(handler.url, peer="alfa"), streaming(reader, "s1") as feed:
                    # With this one every connection that there will be is made.
                    assert (await alice.submit("s1", "c1")).status_code == 201
                    assert [frame.sequence for frame in await feed.updates(2)] == [1, 2]
                    connections = proxy.connections
                    waiting = asyncio.create_task(reader.page("s1", wait=30, after=2))
                    await wait_until(idle_reads(raw), 30.0)
                    assert (await alice.submit("s1", "c2")).status_code == 201
                    assert [frame.sequence for frame in await feed.updates(2)] == [3, 4]
                    assert (await waiting).json()["after"] == 2
                    assert proxy.connections == connections, "a connection was given up and made anew"
            assert len(handler.calls) == 2
            assert [line for line in told if line["log_level"] in ("warning", "error")] == []
            assert caplog.records == []
