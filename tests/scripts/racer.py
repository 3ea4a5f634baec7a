"""One process of a race: waits at the barrier with all others, runs its part, prints what it was told.

python -m tests.scripts.racer URL AUTHORITY NUMBER PROCESSES PART
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter

from shared.store.connection import Connection
from shared.store.replies import Grant
from tests.support.polling import wait_until
from tests.support.world import World

BARRIER = "test:barrier"
EQUALS = 50
OTHERS = 25
DISTINCT = 40
CLAIMED = 40


async def at_the_barrier(world: World, processes: int) -> None:
    """Leave together with all other processes."""
    await world.connection.call("INCR", BARRIER)

    async def everybody() -> bool:
        return int(await world.connection.call("GET", BARRIER)) >= processes

    await wait_until(everybody, timeout=30, every=0.001)


async def equals(world: World, number: int) -> Counter[str]:
    """The same admission again and again, each with the others' at the same time."""
    replies = await asyncio.gather(*(world.admit(world.command("same")) for _ in range(EQUALS)))
    return Counter(reply.code.value for reply in replies)


async def others(world: World, number: int) -> Counter[str]:
    """Different intents under one id: none of two processes is the same."""
    news = [world.command("one", input_bytes=b'{"amount":%d}' % (number * OTHERS + n)) for n in range(OTHERS)]
    replies = await asyncio.gather(*(world.admit(new) for new in random.sample(news, len(news))))
    return Counter(reply.code.value for reply in replies)


async def distinct(world: World, number: int) -> Counter[str]:
    """Different commands into one session."""
    news = [world.command(f"{number}-{n}", kind="concurrent") for n in range(DISTINCT)]
    replies = await asyncio.gather(*(world.admit(new) for new in news))
    return Counter(reply.code.value for reply in replies)


async def claims(world: World, number: int) -> Counter[str]:
    """Every process claims every offer; a grant is told by its operation and fence."""
    told: Counter[str] = Counter()
    for n in random.sample(range(CLAIMED), CLAIMED):
        reply = await world.claim(world.command(f"offer-{n}", kind="concurrent"), f"h{number}")
        if isinstance(reply, Grant):
            told[f"{reply.lease.operation_id}/{reply.lease.fence}"] += 1
    return told


PARTS = {"equals": equals, "others": others, "distinct": distinct, "claims": claims}


async def race(url: str, authority: str, number: int, processes: int, part: str) -> Counter[str]:
    async with Connection(url) as connection:
        world = World(connection, authority)
        await at_the_barrier(world, processes)
        return await PARTS[part](world, number)


if __name__ == "__main__":
    given = sys.argv[1:]
    result = asyncio.run(race(given[0], given[1], int(given[2]), int(given[3]), given[4]))
    print("told " + json.dumps(result), flush=True)
