"""A tenant at store level for every script test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.store.connection import Connection
from tests.support import acl
from tests.support.world import TENANT, World


@pytest.fixture
async def world(redis_url: str) -> AsyncIterator[World]:
    async with Connection(redis_url) as connection:
        world = await World.create(connection)
        async with acl.serving(connection, TENANT) as services:
            world.serve_over(services)
            yield world
