"""What tenants of one process or store share, and what tells none of them of another: what the host says of
itself, its metrics and logs, hints, waits and streams, and the removal of a tenant with a similar name.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
import redis

from shared.store import registry
from shared.store.wake import EVERYTHING, operation_topic, session_topic
from tests.admission.house import COUNTER, NOTES, Client, House, house
from tests.admission.looking import streaming
from tests.isolation.listening import Listening
from tests.isolation.stage import CANARY, OWNER, contents, furnish, named, stage
from tests.support.polling import wait_until
from tests.support.processes import Processes

THEIRS = named("theirs", "", 0, "")


async def more_work(door: House, alice: Client, count: int = 3) -> None:
    """Let alice's session go on: commands, outcomes, a cursor, another session."""
    for number in range(count):
        assert (await alice.open(f"more-{number}")).status_code == 201
        assert (await alice.submit(f"more-{number}", f"m-{number}", {CANARY: number})).status_code == 201
        await door.work(f"m-{number}", {CANARY: number}, session_id=f"more-{number}")


# What the host says of itself


@pytest.mark.parametrize("role", ["caller", "operator", "both"])
async def test_what_the_host_says_to_one_tenant_does_not_move_with_another(
    redis_url: str, raw: redis.Redis, role: str
) -> None:
    """Limits, use, profiles and readiness: equal bytes before and after the other one worked."""
    async with stage(redis_url, raw) as scene:
        client = scene.pairs[role][0].client
        paths = ("/v1/authority", "/openapi.json", "/healthz", "/readyz", "/v1/policy", "/v1/sessions/s-own")
        before = [(await client.http.get(path)).content for path in paths]
        await more_work(scene.door, scene.alice)
        token = await scene.door.token("carol")
        await registry.revoke_token(scene.door.admin, OWNER, token.split(".")[3])
        await registry.remove_peer(scene.door.admin, OWNER, "bravo")
        assert [(await client.http.get(path)).content for path in paths] == before


async def test_a_head_counts_one_sessions_facts_whatever_others_are_called_alike(
    redis_url: str, raw: redis.Redis
) -> None:
    async with stage(redis_url, raw) as scene:
        stranger = scene.pairs["caller"][0].client
        assert (await stranger.open(THEIRS.session, COUNTER, THEIRS.actor)).json()["cursor"] == 0
        await more_work(scene.door, scene.alice)
        page = (await stranger.page(THEIRS.session)).json()
        assert (page["head"], page["events"]) == (0, [])
        sent = await stranger.submit(THEIRS.session, THEIRS.command, {"amount": 1}, name="counter.add")
        receipt = sent.json()
        assert (receipt["disposition"], receipt["admission_sequence"]) == ("accepted", 1)
        view = (await stranger.http.get(f"/v1/sessions/{THEIRS.session}")).json()
        assert (view["cursor"], view["state"]) == (1, {"value": 0})


async def test_metrics_and_logs_name_no_ones_things(
    redis_url: str, raw: redis.Redis, processes: Processes
) -> None:
    """A door of its own process, so that nothing else counts there; it serves all of them."""
    async with stage(redis_url, raw) as scene:
        env = {"LOCKGATE_REDIS_URL": redis_url, "LOCKGATE_PORT": "0", "LOCKGATE_METRICS_PORT": "0"}
        process = processes.python("-m", "admission_svc", env=env)
        line = await asyncio.to_thread(process.wait_for, r'^.*"event": "listening".*$')
        said = json.loads(line.group())
        alice = Client(f"http://127.0.0.1:{said['port']}", scene.alice.token)
        stranger = Client(f"http://127.0.0.1:{said['port']}", scene.pairs["caller"][0].client.token)
        try:
            for amount, status in ((1, 201), (2, 409)):
                sent = await alice.submit(THEIRS.session, "c-more", {"amount": amount}, name="counter.add")
                assert sent.status_code == status
            assert (await stranger.http.get(f"/v1/sessions/{THEIRS.session}")).status_code == 404
            assert (await stranger.submit("s-own", THEIRS.command)).status_code == 201
            async with httpx.AsyncClient() as anyone:
                page = (await anyone.get(f"http://127.0.0.1:{said['metrics_port']}/metrics")).text
        finally:
            await alice.http.aclose()
            await stranger.http.aclose()
        assert "/v1/sessions/{session_id}" in page
        values = set(re.findall(r'="([^"]*)"', page))
        names = {THEIRS.session, THEIRS.command, "c-more", "alice", OWNER, "beta", "gama", "s-own", CANARY}
        assert not [value for value in values for name in names if name in value]
        for secret in scene.secrets:
            assert secret.decode() not in page + process.output


# Hints, waits and streams


async def test_hints_of_one_tenant_wake_nobody_of_another(redis_url: str, raw: redis.Redis) -> None:
    """In one process, for a session and an operation of the same name, and for whoever hears everything."""
    async with stage(redis_url, raw) as scene:
        door, wake = scene.door, scene.door.runtime.wake
        topics = (EVERYTHING, session_topic(THEIRS.session), session_topic("more-0"), operation_topic("x"))
        async with wake.watch(OWNER, topics) as hers, wake.watch("beta", topics) as mine:
            for watcher in (hers, mine):
                assert await watcher.wait(20), "woken when the subscription is made"
            with Listening(raw) as heard:
                await more_work(door, scene.alice)
                channels = {channel for channel, _ in heard.messages()}
            assert channels == {b"lg:{acme}:wake"}
            assert await hers.wait(20)
            assert not mine._event.is_set()
            assert (await scene.pairs["caller"][0].client.submit("s-own", "c-own")).status_code == 201
            assert await mine.wait(20)


async def test_a_stream_tells_what_happened_in_its_own_tenant_and_reads_for_nothing_else(
    redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions and commands of the same names in both tenants, at the same time."""
    async with stage(redis_url, raw) as scene:
        stranger = scene.pairs["caller"][0].client
        assert (await stranger.open("more-0")).status_code == 201
        handle = await scene.door.handle("beta")
        read, pages = handle.reads.page, []

        async def counted(session_id: str, *rest: Any) -> Any:
            pages.append(session_id)
            return await read(session_id, *rest)

        monkeypatch.setattr(handle.reads, "page", counted)
        async with streaming(stranger, "more-0") as feed:
            frame = await feed.frame()
            assert frame is not None
            assert frame.comment
            await wait_until(lambda: len(pages) >= 2)
            with Listening(raw) as heard:
                await more_work(scene.door, scene.alice)
                assert {channel for channel, _ in heard.messages()} == {b"lg:{acme}:wake"}
            assert (await stranger.submit("more-0", "m-0", {"mine": True})).status_code == 201
            (first,) = await feed.updates(1)
            assert first.sequence == 1
            told = json.loads(first.data)
            assert told["source"].startswith("urn:lockgate:beta:")
            assert CANARY not in first.data


async def test_a_wait_is_not_ended_by_the_outcome_of_anothers_command_of_the_same_name(
    redis_url: str, raw: redis.Redis
) -> None:
    async with stage(redis_url, raw) as scene:
        stranger = scene.pairs["caller"][0].client
        assert (await stranger.open("more-0")).status_code == 201
        assert (await stranger.submit("more-0", "m-0")).status_code == 201
        waiting = asyncio.create_task(stranger.outcome("more-0", "m-0", wait=20))
        polling = asyncio.create_task(stranger.page("more-0", after=1, wait=20))
        await wait_until(lambda: scene.door.runtime.wake.subscribed("beta"))
        await more_work(scene.door, scene.alice)
        assert (await scene.alice.outcome("more-0", "m-0")).json()["state"] == "settled"
        assert not waiting.done()
        assert not polling.done()
        await scene.door.work("m-0", {"mine": True}, session_id="more-0", tenant="beta")
        settled = (await waiting).json()
        assert settled["outcome"]["output"] == {"mine": True}
        assert CANARY not in (await polling).text


# Conflicts inside one tenant


@pytest.mark.requirement("DASP-CORE-003d")
async def test_a_command_id_that_a_fellow_used_is_a_conflict_that_tells_nothing_of_it(
    redis_url: str, raw: redis.Redis
) -> None:
    """Ids are one per tenant: the same receipt whether it is open, settled, or of a session long closed."""
    async with stage(redis_url, raw) as scene:
        fellow, _, spent = scene.fellows["caller"]
        told = []
        for names in (fellow.tries, spent.tries):
            for command in (names.command, names.pending):
                receipt = await fellow.client.submit(fellow.own, command)
                assert receipt.status_code == 409
                assert receipt.headers.get("location") is None
                assert receipt.headers.get("idempotent-replayed") is None
                told.append({**receipt.json(), "command_id": ""})
        assert all(receipt == told[0] for receipt in told)
        assert told[0]["admission_sequence"] is None


# Names that resemble each other


@pytest.mark.case(2, 3)
@pytest.mark.parametrize("gone", ["a", "acme", "acme-2"])
async def test_deleting_or_adopting_a_tenant_touches_no_tenant_of_a_similar_name(
    redis_url: str, raw: redis.Redis, gone: str
) -> None:
    names = ("a", "acme", "acme-2")
    async with house(redis_url, tenants=names) as door:
        for name in names:
            client = await door.client("alice", tenant=name)
            assert (await client.open("s1", NOTES)).status_code == 201
            assert (await client.submit("s1", "c1", {"of": name})).status_code == 201
        others = [name for name in names if name != gone]
        before = {name: contents(raw, f"lg:{{{name}}}:*") for name in others}
        assert all(len(keys) > 5 for keys in before.values())
        await registry.adopt_tenant(door.admin, gone)
        assert {name: contents(raw, f"lg:{{{name}}}:*") for name in others} == before
        await registry.delete_tenant(door.admin, gone)
        assert {name: contents(raw, f"lg:{{{name}}}:*") for name in others} == before
        assert await registry.tenant_names(door.admin) == sorted(others)


async def test_a_canary_is_told_to_its_owner(redis_url: str) -> None:
    """What the suite looks for is there to be found."""
    async with house(redis_url) as door:
        alice = await door.client("alice")
        await furnish(door, alice)
        told = [
            (await alice.page(THEIRS.session)).text,
            (await alice.http.get(f"/v1/sessions/{THEIRS.session}")).text,
            (await alice.outcome(THEIRS.session, THEIRS.command)).text,
        ]
        assert all(CANARY in text for text in told)
