"""Loaded into the test runs of mutants: what they prove does not need a disk."""

from __future__ import annotations

import pytest

from shared.store.embedded import EmbeddedStore
from tests.support.raw import raw_client


@pytest.fixture(scope="session", autouse=True)
def _without_waiting_for_the_disk(store: EmbeddedStore) -> None:
    with raw_client(store.url) as client:
        client.config_set("appendfsync", "no")
