"""Fixtures of the fault tests: a tenant on a store of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.store.embedded import EmbeddedStore
from tests.faults.system import System
from tests.support.processes import Processes


@pytest.fixture
async def system(own_store: EmbeddedStore, processes: Processes, tmp_path: Path) -> AsyncIterator[System]:
    """A tenant with the fault contracts; nothing runs yet."""
    async with System.create(own_store, processes, tmp_path) as made:
        yield made
