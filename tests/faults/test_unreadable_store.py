"""A store that cannot be read or written is not an empty one, and a token that nobody can look up is not bad:
everybody is told to come back, and is served again when it is well, without a restart of anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import httpx
import pytest

from shared.store.embedded import EmbeddedStore
from shared.store.keys import TENANTS
from tests.faults.asking import Ask, assert_unavailable, everything
from tests.faults.client import Client, Command
from tests.faults.contracts import CONCURRENT
from tests.faults.system import System, free_port
from tests.support.polling import wait_until
from tests.support.processes import Processes
from tests.support.proxy import FaultProxy

USER: Final = ("ACL", "SETUSER", "services")
SETTINGS: Final = {"save": "3600 1", "user": "services on >first allkeys allchannels allcommands"}
TLS: Final = Path(__file__).parent.parent / "support" / "tls"
_SOON_S: Final = 30.0


class Broken:
    """A store with a user for the services, and the doors that ask it."""

    def __init__(self, system: System, stack: contextlib.AsyncExitStack) -> None:
        self.system = system
        self.store = system.store
        self.raw = system.raw
        self._stack = stack
        self._loading: contextlib.AsyncExitStack | None = None
        self._kept: dict[bytes, bytes] = {}

    @property
    def url(self) -> str:
        return self.store.tcp_url.replace("//", "//services:first@")

    async def door(self, url: str = "") -> Ask:
        """A door of its own, as soon as it answers anything."""
        port = free_port()
        starting = asyncio.create_task(self.system.door(url or self.url, port))
        ask = Ask(f"http://127.0.0.1:{port}")
        self._stack.push_async_callback(ask.close)
        self._stack.push_async_callback(ended, starting)

        async def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return bool((await ask.ready()).status_code)
            return False

        await wait_until(answers, _SOON_S)
        return ask

    async def client(self, ask: Ask) -> Client:
        """A caller of one door."""
        made = Client(self.system.token, [ask.url], self.system.journal)
        return await self._stack.enter_async_context(made)

    def do(self, *command: str) -> None:
        """A command of the store's operator."""
        self.raw.execute_command(*command)  # type: ignore[no-untyped-call]

    # What goes wrong, and what makes it right

    async def killed(self) -> None:
        await asyncio.to_thread(self.store.kill)

    async def started(self) -> None:
        await asyncio.to_thread(self.store.start)

    async def loading(self) -> None:
        """Something else has the address, which says so to everything."""
        await self.killed()
        self._loading = contextlib.AsyncExitStack()
        await self._loading.enter_async_context(
            saying(b"-LOADING the dataset is read\r\n", int(self.store.tcp_url.rpartition(":")[2]))
        )

    async def loaded(self) -> None:
        assert self._loading is not None
        await self._loading.aclose()
        await self.started()

    async def password_changed(self) -> None:
        self.do(*USER, "resetpass", ">second")
        self.do("CLIENT", "KILL", "USER", "services")

    async def password_back(self) -> None:
        self.do(*USER, "resetpass", ">first")

    async def commands_forbidden(self) -> None:
        self.do(*USER, "nocommands")

    async def commands_allowed(self) -> None:
        self.do(*USER, "allcommands")

    async def keys_forbidden(self) -> None:
        self.do(*USER, "resetkeys", "~lg:{-}*", f"~{TENANTS.decode()}")

    async def keys_allowed(self) -> None:
        self.do(*USER, "allkeys")

    async def record_overwritten(self) -> None:
        await self._overwrite(self.system.keys.meta)

    async def registry_overwritten(self) -> None:
        await self._overwrite(TENANTS)

    async def _overwrite(self, name: bytes) -> None:
        kept = self.raw.dump(name)
        assert isinstance(kept, bytes)
        self._kept[name] = kept
        self.raw.delete(name)
        self.raw.set(name, "junk")

    async def as_it_was(self) -> None:
        for name, value in self._kept.items():
            self.raw.restore(name, 0, value, replace=True)


@contextlib.asynccontextmanager
async def saying(reply: bytes, port: int) -> AsyncIterator[None]:
    """A server that answers every command with the same words."""
    writers: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        with contextlib.suppress(ConnectionError):
            while asked := await reader.read(65_536):
                writer.write(reply * asked.count(b"*"))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()


async def ended(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def broken(processes: Processes, tmp_path: Path) -> AsyncIterator[Broken]:
    with EmbeddedStore(tmp_path / "store", port=0, extra=SETTINGS) as store:
        async with System.create(store, processes, tmp_path) as system, contextlib.AsyncExitStack() as stack:
            yield Broken(system, stack)


async def used(broken: Broken, ask: Ask) -> Client:
    """A client that has used a door: it remembers the token, the session and the tenant."""
    client = await broken.client(ask)
    await client.open("s1", CONCURRENT)
    assert (await client.submit(Command("c1", "s1", "keyed"))).acknowledged
    put = await ask.put("/v1/sessions/s1/cursors/k1", broken.system.token, {"cursor": 1})
    assert put.status_code == 200
    return client


Step = Callable[[Broken], Awaitable[None]]


@pytest.mark.requirement("DASP-CORE-012g", "RT-STORE-15", "KEYX-24", "RT-HTTP-13")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("breaks", "repairs", "words", "known"),
    [
        (Broken.killed, Broken.started, "cannot be reached", False),
        (Broken.loading, Broken.loaded, "loading its data", False),
        (Broken.password_changed, Broken.password_back, "WRONGPASS", False),
        (Broken.commands_forbidden, Broken.commands_allowed, "NOPERM", False),
        (Broken.keys_forbidden, Broken.keys_allowed, "", True),
        (Broken.record_overwritten, Broken.as_it_was, "", True),
        (Broken.registry_overwritten, Broken.as_it_was, "", True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_whoever_asks_is_told_to_come_back_and_is_served_when_it_is_well(
    broken: Broken, breaks: Step, repairs: Step, words: str, known: bool
) -> None:
    """``known``: the store is well but for this tenant; who names none is told about its own request."""
    door = await broken.door()
    client = await used(broken, door)
    mine = f"Bearer {broken.system.token}"
    parts = broken.system.token.split(".")
    stranger = "Bearer " + ".".join([*parts[:-2], "0" * 16, "A" * 43])
    before = everything(broken.raw)
    await breaks(broken)
    fresh = await broken.door()
    for ask in (door, fresh):

        async def refused(ask: Ask = ask) -> bool:
            return (await ask.get("/v1/authority", broken.system.token)).status_code == 503

        await wait_until(refused, _SOON_S)
        for authorization in (mine, stranger):
            assert_unavailable(await ask.every(authorization))
        for nameless in (None, "Bearer junk", "Basic YTpi"):
            answers = await ask.every(nameless)
            if known:
                assert {answer.status_code for answer in answers} == {401}
            else:
                assert_unavailable(answers)

        async def told(ask: Ask = ask) -> bool:
            said = await ask.ready()
            return said.status_code == (200 if known else 503) and words in said.text

        await wait_until(told, _SOON_S)
    await repairs(broken)
    for ask in (door, fresh):

        async def served(ask: Ask = ask) -> bool:
            answers = [await ask.get("/v1/sessions/s1", broken.system.token), await ask.ready()]
            nameless = await ask.every(None)
            return [answer.status_code for answer in (*answers, *nameless)] == [
                200,
                200,
                *[401] * len(nameless),
            ]

        await wait_until(served, _SOON_S)
    after = everything(broken.raw)
    # After a restart the epoch is another one, which is noted with the next write or claim.
    assert {name for name in before if before[name] != after.get(name)} <= {broken.system.keys.meta}
    assert before.keys() == after.keys()
    assert (await client.submit(Command("c2", "s1", "keyed"))).acknowledged
    assert (await client.submit(Command("c1", "s1", "keyed"))).disposition == "duplicate"


@pytest.mark.requirement("DASP-CORE-012g", "RT-STORE-15", "RT-HTTP-13")
async def test_a_store_that_cannot_write_keeps_what_it_has_and_takes_nothing(broken: Broken) -> None:
    """Its disk is full, say: what is there can be read, and whatever would change it is refused."""
    door = await broken.door()
    client = await used(broken, door)
    in_the_way = broken.store.directory / "dump.rdb"
    in_the_way.mkdir()
    broken.do("CONFIG", "SET", "stop-writes-on-bgsave-error", "yes")
    broken.do("BGSAVE")
    await wait_until(lambda: broken.raw.info("persistence")["rdb_last_bgsave_status"] == "err")
    before = everything(broken.raw)
    for ask in (door, await broken.door()):
        for answer in await ask.every(f"Bearer {broken.system.token}"):
            method, path = answer.request.method, answer.request.url.path
            # Also the answer to who opens again what is open is there to read.
            reads, policy = method == "GET" or (method, path) == ("PUT", "/v1/sessions/s1"), "/v1/policy"
            expected = 403 if path == policy else 200 if reads else 503
            assert answer.status_code == expected, (method, path, answer.text)
            assert answer.status_code != 503 or answer.headers["retry-after"]
        assert {answer.status_code for answer in await ask.every(None)} == {401}

        async def unready(ask: Ask = ask) -> bool:
            said = await ask.ready()
            return said.status_code == 503 and "cannot write to its disk" in said.text

        await wait_until(unready, _SOON_S)
    assert everything(broken.raw) == before
    in_the_way.rmdir()
    broken.do("BGSAVE")
    assert (await client.submit(Command("c2", "s1", "keyed"))).acknowledged


@pytest.mark.requirement("DASP-CORE-012g", "RT-STORE-15", "RT-STORE-18")
async def test_a_primary_that_became_a_replica_serves_nobody_and_after_its_promotion_neither(
    broken: Broken,
) -> None:
    door = await broken.door()
    await used(broken, door)
    mine = f"Bearer {broken.system.token}"
    before = everything(broken.raw)
    broken.do("REPLICAOF", "127.0.0.1", "1")
    fresh = await broken.door()

    async def refused() -> bool:
        return (await door.get("/v1/authority", broken.system.token)).status_code == 503

    await wait_until(refused, _SOON_S)
    for ask in (door, fresh):
        assert_unavailable(await ask.every(mine))
        ready = await ask.ready()
        assert (ready.status_code, "primary" in ready.text) == (503, True)
    assert everything(broken.raw) == before
    broken.do("REPLICAOF", "NO", "ONE")

    async def noted() -> bool:
        return bool(broken.raw.hexists(broken.system.keys.meta.decode(), "lost"))

    await wait_until(noted, _SOON_S)
    for ask in (door, fresh):
        assert_unavailable(await ask.every(mine))


@pytest.mark.requirement("RT-STORE-15", "RT-HTTP-13")
async def test_a_certificate_that_nobody_trusts_is_told_as_such(broken: Broken) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "loopback.pem", TLS / "loopback.key")
    async with FaultProxy(broken.store.tcp_url, context) as proxy:
        door = await broken.door(proxy.url.replace("//", "//services:first@"))
        for authorization in (f"Bearer {broken.system.token}", None, "Bearer junk"):
            assert_unavailable(await door.every(authorization))

        async def told() -> bool:
            # Between two attempts it only says that the store cannot be reached.
            said = await door.ready()
            assert said.status_code == 503
            return "certificate" in said.text

        await wait_until(told)
