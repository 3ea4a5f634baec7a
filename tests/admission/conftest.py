"""A door with one tenant, and a caller of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.admission.house import Client, House, house


@pytest.fixture
async def door(redis_url: str) -> AsyncIterator[House]:
    async with house(redis_url) as made:
        yield made


@pytest.fixture
async def alice(door: House) -> Client:
    """A caller."""
    return await door.client("alice")


@pytest.fixture
async def bob(door: House) -> Client:
    """Another caller of the same tenant."""
    return await door.client("bob")
