"""Secrets stay where they belong: after a hostile run no log, answer, metric or argument holds one."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from shared.store.embedded import EmbeddedStore
from tests.admission.house import house
from tests.hostile.door import HOST, Served, connected, serve
from tests.support.belongings import belongings
from tests.support.polling import wait_until
from tests.support.processes import Processes
from tests.support.raw import raw_client

PASSWORD = "odd/pass@word:with?signs&more"
HOOK_KEY = "key-of-the-handler-0123456789"
SAID = "said-in-confidence-0123456789"


def login(store: EmbeddedStore) -> str:
    """The URL of a store with its password."""
    return store.tcp_url.replace("//", f"//:{quote(PASSWORD, safe='')}@") + "/0"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EmbeddedStore]:
    """A store that asks for a password."""
    with EmbeddedStore(tmp_path / "guarded", port=0, extra={"requirepass": f'"{PASSWORD}"'}) as server:
        yield server


def arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def assert_kept(told: dict[str, str], *secrets: str) -> None:
    """None of ``told`` holds one of these, not even an unusual part of it."""
    for place, text in told.items():
        for secret in secrets:
            for form in (secret, quote(secret, safe="")):
                where = text.find(form)
                assert where < 0, f"{place}: {text[max(0, where - 200) : where + 200]}"


async def attack(door: Served, token: str) -> str:
    """Put a token and what was said wherever a caller can put it; gives everything that came back."""
    came: list[str] = []
    auth = {"authorization": f"Bearer {token}"}
    wrong = token[:-6] + "AAAAAA"
    json_type = {"content-type": "application/json"}
    command = {"command_id": "c1", "name": "note.write", "input": {"text": SAID}}
    requests: list[tuple[str, str, dict[str, Any]]] = [
        ("PUT", "/v1/sessions/s1", {"json": {"actor_id": "a", "profile": {"id": "urn:x", "version": SAID}}}),
        ("POST", "/v1/sessions/s1/commands", {"json": command}),
        ("POST", "/v1/sessions/s1/commands", {"json": {**command, "input": {"secret": token}}}),
        ("POST", "/v1/sessions/s1/commands", {"content": f'{{"{SAID}":1,"{SAID}":2}}'[:-1]}),
        ("POST", "/v1/sessions/s1/commands", {"content": token, "headers": json_type}),
        ("POST", "/v1/sessions/s1/commands", {"json": command, "headers": {"idempotency-key": token}}),
        ("POST", "/v1/sessions/s1/commands", {"json": command, "headers": {"content-type": token}}),
        ("GET", "/v1/sessions/s1", {"headers": {"authorization": f"Basic {token}"}}),
        ("GET", "/v1/sessions/s1", {"headers": {"authorization": token}}),
        ("GET", "/v1/sessions/s1", {"headers": {"authorization": f"Bearer {wrong}"}}),
        ("GET", "/v1/sessions/s1", {"headers": {"authorization": f"Bearer {token[:-3]}\xff"}}),
        ("GET", "/v1/sessions/s1", {"headers": {"authorization": f"Bearer {token}\t{token}"}}),
        ("GET", "/v1/sessions/s1", {"params": {"token": token}}),
        ("GET", f"/v1/sessions/{token}", {}),
        ("GET", f"/{token}", {}),
        ("GET", "/v1/sessions/s1/updates", {"params": {"after": token}}),
        ("GET", "/v1/sessions/s1/updates", {"headers": {"last-event-id": token}}),
        ("GET", "/v1/sessions/s1/updates", {"headers": {"prefer": f"wait={token}"}}),
        ("GET", "/v1/authority", {"headers": {"traceparent": token}}),
        ("GET", "/readyz", {}),
    ]
    async with httpx.AsyncClient(base_url=door.base, headers=auth, timeout=20, trust_env=False) as client:
        for method, path, more in requests:
            headers = {
                name.encode(): value.encode("latin-1") for name, value in more.pop("headers", {}).items()
            }
            with contextlib.suppress(httpx.TransportError):
                response = await client.request(method, path, headers=headers, **more)
                came += [response.text, str(response.headers)]
    for raw in (
        f"GET /{token} HTTP/1.1\r\nhost: door\r\nauthorization : Bearer {token}\r\n\r\n".encode(),
        f"{token} / HTTP/1.1\r\n\r\n".encode(),
        f"GET /{token} HTTP/9.9\r\n".encode() + HOST + b"\r\n",
    ):
        async with connected(door.port) as held:
            await held.send(raw)
            came.append((await held.rest()).decode("latin-1"))
    return "\n".join(came)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_nothing_that_a_process_tells_holds_a_secret(
    guarded: EmbeddedStore, processes: Processes, log_format: str
) -> None:
    """Also while the store is away, and when it does not take the password any more."""
    url = login(guarded)
    async with house(url) as arranged:
        token = await arranged.token("alice", "caller", "operator")
        door = await begin(processes, url, "admission_svc", log_format)
        hook = f"http://127.0.0.1:1/hook?key={HOOK_KEY}"
        sidecar = await begin(
            processes, url, "settlement_svc", log_format, tenant="acme", peer="alfa", handler_url=hook
        )
        central = await begin(processes, url, "settlement_svc", log_format)
        alice = await arranged.client("alice")
        assert (await alice.open("s1")).status_code == 201
        came = await attack(door, token)

        with raw_client(url) as client:
            client.config_set("requirepass", "another-one")
            client.client_kill_filter(_type="normal", skipme=True)
        came += await attack(door, token)
        await unready(door)
        guarded.kill()
        came += await attack(door, token)
        came += await metrics_of(door) + await metrics_of(sidecar) + await metrics_of(central)

        running = {"door": door.process, "sidecar": sidecar.process, "central": central.process}
        told = {f"arguments of the {name}": arguments(process.pid) for name, process in running.items()}
        for process in running.values():
            process.terminate()
        for name, process in running.items():
            process.wait(60)
            assert process.output.strip(), name
            told[f"log of the {name}"] = process.output
    told["answers and metrics"] = came
    assert "unavailable" in came
    secret = token.rpartition(".")[2]
    assert_kept(told, token, secret, secret[:-3], PASSWORD, url, HOOK_KEY, SAID, "another-one")


async def begin(processes: Processes, url: str, module: str, log_format: str, **settings: object) -> Served:
    """Start a service that logs all it can."""
    return await serve(processes, url, module, log_level="debug", log_format=log_format, **settings)


async def metrics_of(served: Served) -> str:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"http://127.0.0.1:{served.metrics_port}/metrics")).text


async def unready(door: Served) -> None:
    async with httpx.AsyncClient(base_url=door.base, trust_env=False) as client:

        async def refused() -> bool:
            return (await client.get("/readyz")).status_code == 503

        await wait_until(refused, 30)


async def test_a_password_given_as_a_flag_is_no_argument_of_the_service(
    guarded: EmbeddedStore, processes: Processes
) -> None:
    url = login(guarded)
    options = ("--redis-url", url, "--port", "0", "--metrics-port", "off")
    door = processes.python("-m", "shared.cli.main", "admission", *options)
    door.wait_for(r'"event": "listening"')
    assert "admission_svc" in arguments(door.pid)
    assert_kept({"arguments": arguments(door.pid), "log": door.output}, PASSWORD, url)


def test_a_wrong_store_url_is_refused_without_being_told(processes: Processes) -> None:
    for url in (f"http://:{PASSWORD}@x", f"redis://:{PASSWORD}@[::1", f"redis://:{PASSWORD}@x:port/"):
        for module in ("admission_svc", "settlement_svc"):
            door = processes.python("-m", module, env={"LOCKGATE_REDIS_URL": url}, may_print_traceback=True)
            assert door.wait(30) != 0
            assert_kept({module: door.output}, PASSWORD, url)


@pytest.mark.timeout(240)
async def test_what_up_starts_has_no_secret_among_its_arguments_and_logs(
    processes: Processes, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    up = processes.python("-m", "shared.cli.main", "up", "--data-dir", str(data), "--port", "0")
    up.wait_for(r"^Ctrl-C drains", 60)
    base, *tokens = (
        up.wait_for(pattern)[1]
        for pattern in (
            r"lockgate is up: http://127.0.0.1:(\S+)",
            r"^caller token +(\S+)",
            r"^operator token +(\S+)",
        )
    )
    started = belongings(data)
    assert len(started) > 8
    port = int(base)
    await attack(Served(up, port, port), tokens[0])
    up.terminate()
    assert up.wait(60) == 0
    told = {f"arguments of {pid}": text for pid, text in started.items()}
    told |= {path.name: path.read_text(errors="replace") for path in data.glob("*.log")}
    assert len(told) > len(started) + 4
    secrets = [token.rpartition(".")[2] for token in tokens]
    assert_kept(told, *secrets, SAID)
    for place, text in told.items():
        assert not re.search(r"(redis|unix)s?://", text), (place, text)


@pytest.mark.timeout(240)
def test_what_the_demo_starts_has_no_secret_among_its_arguments(processes: Processes) -> None:
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        demo = processes.python("-m", "settlement_svc.examples.demo", env={"TMPDIR": folder})
        seen: set[str] = set()
        while demo.running:
            seen |= {text for pid, text in belongings(Path(folder)).items() if pid != demo.pid}
            time.sleep(0.1)
    assert demo.wait() == 0, demo.output
    assert len(seen) > 5
    for text in seen:
        assert not re.search(r"://|lg1\.", text), text
