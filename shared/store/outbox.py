"""One sidecar's reading of its peer's outbox: blocking, on a connection of its own.

Entries are references and prove nothing: whether there still is work is what *claim* answers. They are
acknowledged and deleted by the script that stores an answer or withdraws an offer, never from here, and
what a dead reader left behind is offered again after the contract's claim time (DESIGN section 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from shared.domain.records import Admission
from shared.store.address import Address
from shared.store.connection import Connection, Limits
from shared.store.keys import Keys
from shared.store.registry import GROUP

_REPLY_S: Final = 5.0
_FORGOTTEN_MS: Final = 3_600_000
_admissions = msgspec.json.Decoder(Admission)


class Request(msgspec.Struct, frozen=True):
    """One entry: which attempt of which branch is offered. ``message_id`` names it in every process
    (RT-OUT-03).
    """

    entry_id: str
    operation_id: str
    branch: int
    attempt: int
    session_id: str
    message_id: str


class Outbox:
    """The outbox of one peer as ``consumer`` reads it; only :meth:`new` blocks, the rest goes over
    ``shared``.

    Raises as a connection does; ReplyError NOGROUP where the peer is not registered.
    """

    def __init__(
        self, shared: Connection, address: Address, tenant: str, peer: str, consumer: str, block_ms: int
    ) -> None:
        self._keys = Keys(tenant)
        self._stream = self._keys.outbox(peer)
        self._consumer = consumer
        self._block_ms = block_ms
        self._shared = shared
        self._blocking = Connection(address, Limits(timeout_s=block_ms / 1000 + _REPLY_S))

    async def new(self, count: int) -> list[Request]:
        """Up to ``count`` entries that nobody was given before; empty when none came within the
        block time.
        """
        options = ("COUNT", count, "BLOCK", self._block_ms)
        return await self._read(self._blocking, ">", *options)

    async def mine(self, count: int) -> list[Request]:
        """Entries this consumer was given that are still offered, oldest first.

        After a lost reply they are the only trace of what was handed out with it.
        """
        return await self._read(self._shared, "0", "COUNT", count)

    async def _read(self, connection: Connection, after: str, *options: str | int) -> list[Request]:
        reply = await connection.call(
            "XREADGROUP", "GROUP", GROUP, self._consumer, *options, "STREAMS", self._stream, after
        )
        return list(_requests(reply[0][1])) if reply else []

    async def admission(self, operation_id: str) -> Admission | None:
        """The frozen part of an operation: its contract tells how long a lease to ask for. None for
        tombstones.
        """
        raw = await self._shared.call("HGET", self._keys.op(operation_id), "admission")
        return None if raw is None else _admissions.decode(raw)

    async def registered(self) -> bool:
        """Whether the peer has an outbox to read from."""
        return bool(await self._shared.call("EXISTS", self._stream))

    async def stop(self) -> None:
        """Stop reading new entries, also in the middle of a block."""
        await self._blocking.close()

    async def leave(self) -> None:
        """Forget this consumer. What it was given stays offered until it is withdrawn or offered again."""
        await self._shared.call("XGROUP", "DELCONSUMER", self._stream, GROUP, self._consumer)

    async def tidy(self) -> None:
        """Forget consumers of processes that died long ago and hold nothing: every start adds one."""
        for row in await self._shared.call("XINFO", "CONSUMERS", self._stream, GROUP):
            facts = dict(zip(row[::2], row[1::2], strict=True))
            if facts[b"pending"] == 0 and facts[b"idle"] > _FORGOTTEN_MS:
                await self._shared.call("XGROUP", "DELCONSUMER", self._stream, GROUP, facts[b"name"])


def _requests(entries: Sequence[Sequence[object]]) -> Iterator[Request]:
    """Entries deleted since they were handed out have no fields; entries of other kinds are not requests."""
    for entry_id, flat in entries:
        if not isinstance(flat, list) or not isinstance(entry_id, bytes):
            continue
        fields = {name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2], strict=True)}
        if fields.get("k") == "request":
            yield Request(
                entry_id.decode(), fields["o"], int(fields["b"]), int(fields["a"]), fields["s"], fields["m"]
            )
