"""A house to arrange things in, beside the processes that are attacked."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.admission.house import House, house


@pytest.fixture
async def arranged(redis_url: str) -> AsyncIterator[House]:
    """Tenant ``acme`` with its contracts, peers and a door of the test's own."""
    async with house(redis_url) as made:
        yield made
