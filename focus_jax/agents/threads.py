"""Runs blocking calls beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_blocking(function: Callable[..., T], *args: Any) -> T:
    """Run `function(*args)` in a thread of its own and await its result.

    Unlike `asyncio.to_thread` there is no pool to run dry, and the thread is a daemon: a tool that hangs is left behind
    when its deadline passes and does not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():  # cancelled: nobody waits any more
            set_outcome(outcome)

    def work() -> None:
        settled: tuple[Callable[[Any], None], Any]
        try:
            settled = (future.set_result, function(*args))
        except BaseException as error:
            settled = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, *settled)

    threading.Thread(target=work, daemon=True, name=f"blocking-{getattr(function, '__name__', 'call')}").start()
    return await future


async def run_environment(environment: object, function: Callable[..., T], *args: Any) -> T:
    """Run an environment's code beside the event loop, or right here where the environment says `blocking = False`."""
    if getattr(environment, "blocking", True):
        return await run_blocking(function, *args)
    return function(*args)
