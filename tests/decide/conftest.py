"""A tenant at store level for every test of deciding."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.store.connection import Connection
from tests.support.world import World


@pytest.fixture
async def world(redis_url: str) -> AsyncIterator[World]:
    async with Connection(redis_url) as connection:
        yield await World.create(connection)
