"""The embedded store: durable over every kill, alone on its directory, gone with its owner."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
import redis

from shared.store.embedded import (
    BINARY_VARIABLE,
    SETTINGS,
    SOCKET_PATH_LIMIT,
    DirectoryInUse,
    EmbeddedStore,
    EmbeddedStoreError,
    find_server_binary,
)
from tests.support.polling import wait_until_blocking
from tests.support.processes import Process, Processes, is_alive
from tests.support.raw import raw_client

OWNER = """
import sys, threading, time
from pathlib import Path
from shared.store.embedded import EmbeddedStore

store = EmbeddedStore(Path(sys.argv[1]))
if sys.argv[2] == "thread":
    starter = threading.Thread(target=store.start)
    starter.start()
    starter.join()
else:
    store.start()
print(f"store {store.pid} guard {store._guard.pid}", flush=True)
time.sleep(600)
"""


def own(processes: Processes, directory: Path, how: str = "main") -> tuple[Process, int, int]:
    """Another process that owns a store; returns it with the pids of server and guard."""
    owner = processes.python("-c", OWNER, str(directory), how)
    found = owner.wait_for(r"store (\d+) guard (\d+)")
    return owner, int(found[1]), int(found[2])


def test_every_acknowledged_write_survives_kill_and_restart(own_store: EmbeddedStore) -> None:
    url = own_store.url
    with raw_client(url) as client:
        for number in range(200):
            client.set(f"key-{number}", number)
        client.execute_command("XADD", "stream", "1-0", "name", "value")
        own_store.kill()
    assert not own_store.running
    own_store.start()
    assert own_store.url == url
    with raw_client(url) as client:
        assert client.dbsize() == 201
        assert client.get("key-199") == b"199"
        assert client.xlen("stream") == 1


def test_a_write_in_flight_at_the_kill_is_kept_if_it_was_acknowledged(own_store: EmbeddedStore) -> None:
    for kept in range(1, 6):
        with raw_client(own_store.url) as client:
            for _ in range(50):
                last = client.incr("counter")
            os.kill(own_store.pid, signal.SIGKILL)
        wait_until_blocking(lambda: not own_store.running)
        own_store.start()
        with raw_client(own_store.url) as client:
            assert last == kept * 50
            assert client.get("counter") == str(last).encode()


def test_stop_in_order_keeps_everything_and_ends_the_process(own_store: EmbeddedStore) -> None:
    with raw_client(own_store.url) as client:
        client.set("key", "value")
    pid = own_store.pid
    own_store.stop()
    own_store.stop()
    assert not is_alive(pid)
    assert not own_store.socket_path.exists()
    own_store.start()
    with raw_client(own_store.url) as client:
        assert client.get("key") == b"value"


def test_the_settings_reach_the_server(own_store: EmbeddedStore) -> None:
    with raw_client(own_store.url) as client:
        for name, value in SETTINGS.items():
            wanted = "" if value == '""' else value
            assert client.config_get(name) == {name: wanted}


def test_another_process_cannot_open_the_directory(own_store: EmbeddedStore, processes: Processes) -> None:
    second = processes.python("-c", OWNER, str(own_store.directory), "main", may_print_traceback=True)
    assert second.wait() == 1
    last_line = second.output.strip().splitlines()[-1]
    assert "DirectoryInUse" in last_line
    assert str(own_store.directory) in last_line
    assert str(os.getpid()) in last_line


def test_a_second_launcher_in_this_process_is_refused_too(own_store: EmbeddedStore) -> None:
    with pytest.raises(DirectoryInUse, match="in use by another embedded store"):
        EmbeddedStore(own_store.directory).start(lock_within=0)
    with raw_client(own_store.url) as client:
        assert client.ping()


def test_starting_a_running_store_again_is_refused(own_store: EmbeddedStore) -> None:
    with pytest.raises(EmbeddedStoreError, match="already running"):
        own_store.start()
    assert own_store.running


@pytest.mark.parametrize("how", ["main", "thread"])
def test_the_server_dies_with_its_owner_not_with_the_thread_that_started_it(
    how: str, processes: Processes, tmp_path: Path
) -> None:
    owner, server, guard = own(processes, tmp_path / "store", how)
    assert is_alive(server)
    with raw_client(EmbeddedStore(tmp_path / "store").url) as client:
        client.set("key", "value")
    owner.kill()
    wait_until_blocking(lambda: not is_alive(server) and not is_alive(guard))
    with EmbeddedStore(tmp_path / "store") as again, raw_client(again.url) as client:
        assert client.get("key") == b"value"


def test_the_server_dies_with_a_killed_guard(processes: Processes, tmp_path: Path) -> None:
    _, server, guard = own(processes, tmp_path / "store")
    os.kill(guard, signal.SIGKILL)
    wait_until_blocking(lambda: not is_alive(server))


def test_a_stopped_server_does_not_outlive_its_owner(processes: Processes, tmp_path: Path) -> None:
    owner, server, _ = own(processes, tmp_path / "store")
    os.kill(server, signal.SIGSTOP)
    owner.kill()
    wait_until_blocking(lambda: not is_alive(server), timeout=20)


def test_a_signal_to_the_owners_group_does_not_reach_the_server(processes: Processes, tmp_path: Path) -> None:
    owner, server, guard = own(processes, tmp_path / "store")
    groups = {os.getpgid(owner.pid), os.getpgid(server)}
    assert len(groups) == 2
    assert os.getpgid(guard) == os.getpgid(server)


def test_a_loopback_port_is_added_on_request_and_kept(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "store", port=0) as store:
        first = store.tcp_url
        with raw_client(first) as client:
            client.set("key", "value")
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
        store.kill()
        store.start()
        assert store.tcp_url == first
        with raw_client(first) as client:
            assert client.get("key") == b"value"


def test_without_a_port_nothing_listens(own_store: EmbeddedStore) -> None:
    with pytest.raises(EmbeddedStoreError, match="no TCP port"):
        _ = own_store.tcp_url
    with raw_client(own_store.url) as client:
        assert client.config_get("port") == {"port": "0"}


def test_extra_settings_reach_the_server_and_win(tmp_path: Path) -> None:
    extra = {"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru", "requirepass": "secret"}
    store = EmbeddedStore(tmp_path / "store", extra=extra)
    with store, raw_client(store.url, password="secret") as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(50 << 20)}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        with raw_client(store.url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.get("key")


def test_added_environment_reaches_the_server_alone(tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$MARK" > {tmp_path}/mark\nexec {find_server_binary({})} "$@"\n')
    wrapper.chmod(0o755)
    with EmbeddedStore(tmp_path / "store", env={"MARK": "seen"}, binary=wrapper):
        assert (tmp_path / "mark").read_text() == "seen\n"
    assert "MARK" not in os.environ


def test_the_owners_environment_is_in_no_argument_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKGATE_TEST_SECRET", "do-not-print-this")
    with EmbeddedStore(tmp_path / "store") as store:
        assert store._guard is not None
        for pid in (store.pid, store._guard.pid):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert arguments
            assert b"do-not-print-this" not in arguments


def test_a_line_break_cannot_smuggle_a_setting(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedStoreError, match="line break"):
        EmbeddedStore(tmp_path / "store", extra={"maxmemory": "0\nappendonly no"})


def test_a_wrong_setting_fails_with_the_servers_own_words(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "store", extra={"no-such-setting": "1"})
    with pytest.raises(EmbeddedStoreError, match="no-such-setting"):
        store.start()
    assert not store.running
    # The failed start let go of the directory.
    with EmbeddedStore(tmp_path / "store"):
        pass


def test_damaged_data_is_an_error_and_not_an_empty_store(own_store: EmbeddedStore) -> None:
    with raw_client(own_store.url) as client:
        for number in range(50):
            client.set(f"key-{number}", "value" * 10)
    own_store.stop()
    [data] = own_store.directory.glob("appendonlydir/*.incr.aof")
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 8] = b"\xff" * 8
    data.write_bytes(damaged)
    with pytest.raises(EmbeddedStoreError, match="Bad file format"):
        own_store.start()
    assert not own_store.running


@pytest.mark.parametrize("name", ['with "quotes" and spaces', "back\\slash", "per%cent"])
def test_odd_directory_names_work(name: str, tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / name) as store, raw_client(store.url) as client:
        client.set("key", "value")
        assert list(store.directory.glob("appendonlydir/*.aof"))


def test_a_long_directory_name_gets_a_short_private_socket(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 25)
    with EmbeddedStore(directory) as store:
        place = store.socket_path.parent
        assert len(os.fsencode(store.socket_path)) <= SOCKET_PATH_LIMIT
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert EmbeddedStore(directory).url == store.url
        with raw_client(store.url) as client:
            assert client.ping()
    assert not place.exists()


def test_a_socket_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / ("open" * 25))
    place = store.socket_path.parent
    place.mkdir()
    place.chmod(0o755)
    try:
        with pytest.raises(EmbeddedStoreError, match="not a private directory"):
            store.start()
    finally:
        place.rmdir()


def test_data_and_settings_are_private(own_store: EmbeddedStore) -> None:
    assert stat.S_IMODE(own_store.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((own_store.directory / "server.conf").stat().st_mode) == 0o600
    assert stat.S_IMODE(own_store.socket_path.stat().st_mode) == 0o700


def test_an_unanswering_server_is_given_up_and_ended(tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho $$ > "$(dirname "$1")/pid"\nexec sleep 600\n'
    )
    silent.chmod(0o755)
    store = EmbeddedStore(tmp_path / "store", binary=silent)
    with pytest.raises(EmbeddedStoreError, match="did not answer in time"):
        store.start(ready_within=0.5)
    assert not store.running
    pid = int((tmp_path / "store" / "pid").read_text())
    assert not is_alive(pid)


def test_a_named_binary_is_used_and_its_absence_is_an_error(tmp_path: Path) -> None:
    bundled = find_server_binary({})
    link = tmp_path / "my-server"
    link.symlink_to(bundled)
    assert find_server_binary({BINARY_VARIABLE: str(link)}) == link
    with pytest.raises(EmbeddedStoreError, match=BINARY_VARIABLE):
        find_server_binary({BINARY_VARIABLE: str(tmp_path / "absent")})


def test_a_bundled_binary_that_cannot_run_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho too old >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("shared.store.embedded._bundled_binary", lambda: broken)
    with pytest.raises(EmbeddedStoreError, match=f"set {BINARY_VARIABLE} .*too old"):
        find_server_binary({})


def test_the_log_is_set_aside_when_it_grows(own_store: EmbeddedStore) -> None:
    log = own_store.directory / "server.log"
    own_store.stop()
    log.write_bytes(b"old line\n" * 200_000)
    own_store.start()
    assert log.stat().st_size < 100_000
    assert log.with_suffix(".log.1").stat().st_size == 1_800_000
    assert "Ready to accept connections" in own_store.log_tail()
