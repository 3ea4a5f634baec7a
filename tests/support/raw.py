"""A plain client, apart from our own connection, so a fault there cannot hide itself."""

from __future__ import annotations

from typing import Any

import redis


def raw_client(url: str, **options: Any) -> redis.Redis:
    """A blocking client that tells raw replies and never repeats a command: for arranging and looking, not
    for use."""
    return redis.Redis.from_url(url, protocol=2, retry=None, **options)
