"""What is published at the store, told without waiting: a mark comes after all that was before it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, Self

import redis

from tests.support.polling import wait_until_blocking

_MARK: Final = b"test:heard"


class Listening:
    """Hears every channel for as long as the block runs."""

    def __init__(self, raw: redis.Redis) -> None:
        client: Any = raw
        self._raw = client
        self._pubsub = client.pubsub()

    def __enter__(self) -> Self:
        self._pubsub.psubscribe("*")
        assert self._next()["type"] == "psubscribe"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pubsub.close()

    def messages(self) -> list[tuple[bytes, bytes]]:
        """Channel and message of everything since the last call."""
        self._raw.publish(_MARK.decode(), "")
        found: list[tuple[bytes, bytes]] = []
        while (message := self._next())["channel"] != _MARK:
            found.append((message["channel"], message["data"]))
        return found

    def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = wait_until_blocking(lambda: self._pubsub.get_message(timeout=0.1))
        return message
