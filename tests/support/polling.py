"""Polling with a deadline in the place of sleeping."""

from __future__ import annotations

import inspect
import time
from asyncio import sleep
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")


@overload
async def wait_until(
    condition: Callable[[], Awaitable[T]], timeout: float = ..., every: float = ...
) -> T: ...
@overload
async def wait_until(condition: Callable[[], T], timeout: float = ..., every: float = ...) -> T: ...
async def wait_until(condition: Callable[[], Any], timeout: float = 10.0, every: float = 0.01) -> Any:
    """Poll until the condition holds and return what it returned; AssertionError after ``timeout`` seconds.

    The condition may be a coroutine function. It is looked at once more after the deadline, so a machine
    that stood still does not fail the test.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        found = condition()
        value = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if late:
            raise AssertionError(f"not within {timeout} s: {_source(condition)}")
        await sleep(every)


def wait_until_blocking(condition: Callable[[], T], timeout: float = 10.0, every: float = 0.01) -> T:
    """``wait_until`` for tests without an event loop."""
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        value = condition()
        if value:
            return value
        if late:
            raise AssertionError(f"not within {timeout} s: {_source(condition)}")
        time.sleep(every)


def _source(condition: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except OSError:
        return repr(condition)
