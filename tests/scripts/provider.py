"""What any provider of the state must do before it may claim the execution capability: the same checks for
our scripts and for the faulty ones that must not pass them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from shared.domain.decide import Change
from shared.domain.guard import TimeGuard
from shared.store.codes import Code
from tests.scripts.scenes import offered, terminal_change
from tests.support.world import World

Check = Callable[[World, int], AsyncIterator[str]]


async def faults(make: Callable[[], Awaitable[World]]) -> list[str]:
    """Everything a provider gets wrong, each check on a fresh tenant; empty when it may claim to execute."""
    found = []
    for check in (guarded_create, guarded_replace, lost_update, same_instant):
        world = await make()
        now = await world.start()
        found += [f"{check.__name__}: {fault}" async for fault in check(world, now)]
    return found


async def _untouched(world: World, call: Awaitable[object]) -> bool:
    before = await world.dump()
    await call
    return await world.dump() == before


async def guarded_create(world: World, now: int) -> AsyncIterator[str]:
    """RT-GUARD-02, 04, 05, 08: [not before, not after) on the store's clock, in the commit."""
    await world.open()
    for offset, inside in ((-1, False), (0, True), (9, True), (10, False)):
        await world.at(now + 100 + offset)
        new = world.command(f"c{offset + 1}", kind="concurrent")
        untouched = await _untouched(world, world.admit(new, TimeGuard(now + 100, now + 110)))
        if untouched == inside:
            yield f"at {offset}: {'refused' if inside else 'written'}"


async def guarded_replace(world: World, now: int) -> AsyncIterator[str]:
    op = await world.load(await offered(world))
    for offset in (-1, 10):
        await world.at(now + 100 + offset)
        change = terminal_change(op, not_before_ms=now + 100, not_after_ms=now + 110)
        if not await _untouched(world, world.commit(op, change)):
            yield f"at {offset}: written"
    await world.at(now + 100)
    inside = terminal_change(op, not_before_ms=now + 100, not_after_ms=now + 110)
    if (await world.commit(op, inside)).code is not Code.OK:
        yield "at 0: refused"


async def lost_update(world: World, now: int) -> AsyncIterator[str]:
    """RT-STORE-04 and 05: of two replacements of one revision the second changes nothing."""
    op = await world.load(await offered(world))
    await world.commit(op, Change(sets=(("o:0", b"first"),)))
    if not await _untouched(world, world.commit(op, Change(sets=(("o:0", b"second"),)))):
        yield "a replacement of an old revision was written"


async def same_instant(world: World, now: int) -> AsyncIterator[str]:
    """RT-GUARD-03: the instant that is told is the one that was judged and stored."""
    new = await offered(world)
    op = await world.load(new)
    await world.at(now + 5)
    reply = await world.commit(op, terminal_change(op))
    decision = (await world.load(new)).decision
    if decision is None or not reply.now_ms == decision.at_ms == now + 5:
        yield "another instant was told than stored"
