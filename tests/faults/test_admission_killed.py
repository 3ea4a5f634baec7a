"""The door killed, cut off and raced while it admits. Nobody works, so the store holds admissions alone."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import Counter

import pytest

from tests.faults.client import Client, Command
from tests.faults.contracts import CONCURRENT, SERIAL
from tests.faults.system import System, free_port
from tests.faults.worker import Worker
from tests.support.breakpoints import BreakpointProxy
from tests.support.polling import wait_until


def nothing_of(system: System, command: Command) -> bool:
    """Whether the store holds nothing that an admission would leave."""
    operation = system.operation_id(command.id)
    due = system.raw.zscore(system.keys.due, operation)
    facts = system.raw.xlen(system.keys.updates(command.session))
    session = system.session(command.session)
    return (
        system.record(command.id) == {}
        and due is None
        and facts == 0
        and (session["head"], session["busy"], session["pending"], session["commands"]) == ("0", "", "0", "0")
        and all(entry["o"] != operation for entry in system.outbox())
    )


async def only_fact(client: Client, command: Command) -> None:
    """The session holds the command's admission as its first and only fact."""
    (update,) = await client.updates(command.session)
    assert (update["kind"], update["command_id"]) == ("command.accepted", command.id)
    assert update["sequence"] == 1


@pytest.mark.requirement(
    "DASP-CORE-004a", "DASP-CORE-004d", "DASP-CORE-005a", "DASP-CORE-005b", "DASPX-08", "RT-STORE-16"
)
@pytest.mark.case(11, 24)
async def test_killed_between_script_and_reply_the_retry_gets_the_original(system: System) -> None:
    command, other = Command("c1", "s1", "pay", 3), Command("c1", "s2", "pay", 3)
    async with BreakpointProxy(system.store.url) as proxy, system.client() as client:
        door = await system.door(proxy.url)
        await client.open("s1", SERIAL)
        await client.open("s2", SERIAL)
        stop = proxy.stop_after("admit", system.operation_id("c1").encode())
        first = asyncio.create_task(client.once(command))
        await stop.reached()
        door.kill()
        assert (await first).status == 0
        await system.door()
        retry = await client.once(command)
        assert (retry.status, retry.disposition, retry.sequence) == (200, "duplicate", 1)
        for changed in (await client.once(command, amount=4), await client.once(other, amount=3)):
            assert (changed.status, changed.error, changed.sequence) == (409, "conflict", None)
        await only_fact(client, command)
        assert await client.updates("s2") == []
        assert [entry["o"] for entry in system.outbox()] == [system.operation_id("c1")]
        async with Worker(system.ledger) as worker:
            await system.sidecar(worker.url)
            assert (await client.settled(command)).status == "completed"
        assert len(system.ledger.of("effect")) == 1


@pytest.mark.requirement("DASP-CORE-004a", "DASP-CORE-004c", "DASPX-08", "RT-ADM-30")
async def test_killed_before_the_script_nothing_was_recorded_or_sent(system: System) -> None:
    command = Command("c1", "s1", "pay", 3)
    async with BreakpointProxy(system.store.url) as proxy, system.client() as client:
        door = await system.door(proxy.url)
        await client.open("s1", SERIAL)
        stop = proxy.stop_before("admit", system.operation_id("c1").encode())
        first = asyncio.create_task(client.once(command))
        await stop.reached()
        assert nothing_of(system, command)
        door.kill()
        assert (await first).status == 0
        await system.door()
        assert await client.status("/v1/sessions/s1/commands/c1") == 404
        assert nothing_of(system, command)
        retry = await client.once(command)
        assert (retry.status, retry.disposition, retry.sequence) == (201, "accepted", 1)
        await only_fact(client, command)


async def _post_raw(system: System, command: Command, *headers: str) -> socket.socket:
    """Send a command over a socket of our own, whose reply nobody reads yet."""
    body = json.dumps(command.body()).encode()
    head = [
        f"POST /v1/sessions/{command.session}/commands HTTP/1.1",
        "Host: door",
        f"Authorization: Bearer {system.token}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    sock = socket.create_connection(("127.0.0.1", int(system.door_url.rpartition(":")[2])))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(sock, "\r\n".join(head).encode() + b"\r\n\r\n" + body)
    return sock


def _reset(sock: socket.socket) -> None:
    """End a connection with RST instead of an orderly close."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.requirement("DASP-CORE-005a", "DASP-CORE-005b", "DASPX-08")
@pytest.mark.case(11)
async def test_a_client_that_is_cut_off_changes_nothing_about_its_command(system: System) -> None:
    before, during, waiting = (Command(f"c{i}", f"s{i}", "pay") for i in range(3))
    async with BreakpointProxy(system.store.url) as proxy, system.client() as client:
        door = await system.door(proxy.url)
        for command in (before, during, waiting):
            await client.open(command.session, CONCURRENT)
        # Cut off before there is a reply, in the middle of it, and while it waits for the outcome.
        stop = proxy.stop_after("admit", system.operation_id(before.id).encode())
        sock = await _post_raw(system, before)
        await stop.reached()
        _reset(sock)
        stop.release()
        sock = await _post_raw(system, during)
        assert await asyncio.get_running_loop().sock_recv(sock, 12) == b"HTTP/1.1 201"
        _reset(sock)
        sock = await _post_raw(system, waiting, "Prefer: wait=20")
        await wait_until(lambda: system.record(waiting.id))
        _reset(sock)
        for command in (before, during, waiting):
            retry = await client.once(command)
            assert (retry.status, retry.disposition, retry.sequence) == (200, "duplicate", 1)
            await only_fact(client, command)
        async with Worker(system.ledger) as worker:
            await system.sidecar(worker.url)
            for command in (before, during, waiting):
                assert (await client.settled(command)).status == "completed"
        assert len(system.ledger.of("effect")) == 3
        assert door.running


class Hop:
    """A forwarding hop that passes each request on and loses the reply: its caller gets 504."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        door_reader, door_writer = await asyncio.open_connection("127.0.0.1", self._port)
        door_writer.write(head + await reader.readexactly(length))
        await door_reader.readuntil(b"\r\n\r\n")
        door_writer.transport.abort()
        writer.write(b"HTTP/1.1 504 Gateway Timeout\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@pytest.mark.requirement("DASP-CORE-005b")
@pytest.mark.case(26)
async def test_a_lost_reply_of_one_door_is_a_duplicate_at_another(system: System) -> None:
    command, trace = Command("c1", "s1", "pay"), f"00-{'ab' * 16}-{'cd' * 8}-01"
    ports = free_port(), free_port()
    await asyncio.gather(*(system.door(port=port) for port in ports))
    hop = await asyncio.start_server(Hop(ports[0]).serve, "127.0.0.1", 0)
    urls = [f"http://127.0.0.1:{port}" for port in (hop.sockets[0].getsockname()[1], ports[1])]
    async with hop, system.client([urls[1]]) as direct, system.client([urls[0]]) as through:
        await direct.open("s1", CONCURRENT)
        keyed = {"idempotency-key": '"c1"', "traceparent": trace}
        assert (await through.once(command, headers=keyed)).status == 504
        retry = await direct.once(command, headers=keyed)
        assert (retry.status, retry.disposition, retry.sequence) == (200, "duplicate", 1)
        await only_fact(direct, command)
    admission = json.loads(system.record("c1")["admission"])
    assert (admission["command_id"], admission["traceparent"]) == ("c1", trace)
    assert [entry["o"] for entry in system.outbox()] == [system.operation_id("c1")]


@pytest.mark.requirement("DASP-CORE-004d")
@pytest.mark.case(7)
async def test_two_hundred_equal_commands_at_four_doors_are_admitted_once(system: System) -> None:
    command, ports = Command("c1", "s1", "pay"), [free_port() for _ in range(4)]
    await asyncio.gather(*(system.door(port=port) for port in ports))
    async with system.client([f"http://127.0.0.1:{port}" for port in ports]) as client:
        await client.open("s1", CONCURRENT)
        replies = await asyncio.gather(*(client.once(command) for _ in range(200)))
        assert Counter(reply.status for reply in replies) == {201: 1, 200: 199}
        assert {reply.sequence for reply in replies} == {1}
        await only_fact(client, command)
    assert [entry["o"] for entry in system.outbox()] == [system.operation_id("c1")]


@pytest.mark.requirement("RT-STORE-15", "DASP-CORE-005b")
@pytest.mark.case(16)
async def test_an_absent_store_is_unavailable_and_nothing_else(system: System) -> None:
    known, new = Command("c1", "s1", "pay"), Command("c2", "s1", "pay")
    await system.door()
    async with system.client() as client:
        await client.open("s1", CONCURRENT)
        assert (await client.once(known)).status == 201
        system.store.kill()
        replies = await asyncio.gather(client.once(known), client.once(new), client.once(known, amount=9))
        for reply in replies:
            assert (reply.status, reply.error) == (503, "unavailable")
            assert int(reply.retry_after) >= 1
        paths = (
            "/v1/sessions/s1",
            "/v1/sessions/missing",
            "/v1/sessions/s1/commands/c1",
            "/v1/sessions/s1/commands/missing",
            "/v1/sessions/s1/updates?after=0",
        )
        assert set(await asyncio.gather(*map(client.status, paths))) == {503}
        system.store.start()
        admitted = await client.submit(new)
        assert (admitted.disposition, admitted.sequence) == ("accepted", 2)
        duplicate = await client.once(known)
        assert (duplicate.disposition, duplicate.sequence) == ("duplicate", 1)
        assert (await client.once(known, amount=9)).status == 409
        assert await client.status("/v1/sessions/missing") == 404
