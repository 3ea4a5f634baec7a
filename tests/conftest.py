"""Fixtures of all tests: a private real store per test worker, and children that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from shared.store.embedded import EmbeddedStore
from tests.support import acl
from tests.support.processes import Processes
from tests.support.raw import raw_client

pytest_plugins = ["tests.matrix", "tests.restricted"]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    """The worker's own server. Do not kill it or change its settings: ``own_store`` is for that."""
    with EmbeddedStore(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def redis_url(store: EmbeddedStore) -> str:
    """The worker's server, emptied; loaded scripts stay."""
    with raw_client(store.url) as client:
        client.flushall()
        acl.forget(client)
    return store.url


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    """A blocking client on the emptied server, raw bytes, for arranging and looking."""
    with raw_client(redis_url) as client:
        yield client


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    """A server of this test alone, to kill, restart, fill or set up as it likes."""
    with EmbeddedStore(tmp_path / "store", extra=acl.settings(tmp_path)) as server:
        yield server


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts programs; ends them with the test and fails it when one printed a traceback."""
    children = Processes(tmp_path)
    yield children
    printed = children.end()
    if printed:
        pytest.fail("a process printed a traceback:\n" + "\n---\n".join(printed))
