"""Runs blocking calls beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

# Threads that wait for work, each by its inbox; one that hangs in a call never comes back here. They are kept between
# calls, for the whole process, because starting one waits until it runs: about 2 ms a call on a busy machine.
_idle: deque[SimpleQueue[Callable[[], None]]] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork


async def run_blocking(function: Callable[..., T], *args: Any) -> T:
    """Run `function(*args)` in another thread and await its result.

    Unlike `asyncio.to_thread` there is no pool to run dry, and the threads are daemons: a tool that hangs is left behind
    when its deadline passes and does not keep the process alive.

    Args:
        function: may block for any time. After a cancellation it runs on, and its result is dropped.
        args: its arguments.

    Returns:
        What it returns; what it raises is raised.

    Example:
        >>> asyncio.run(run_blocking(divmod, 7, 2))
        (3, 1)
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():  # cancelled: nobody waits any more
            set_outcome(outcome)

    def work() -> None:
        settled: tuple[Any, ...]
        try:
            settled = (future.set_result, function(*args))
        except BaseException as error:
            settled = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, *settled)

    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), daemon=True, name="blocking-call").start()
    inbox.put(work)
    return await future


async def run_environment(environment: object, function: Callable[..., T], *args: Any) -> T:
    """Run an environment's code beside the event loop, or right here where the environment says `blocking = False`."""
    if getattr(environment, "blocking", True):
        return await run_blocking(function, *args)
    return function(*args)


async def run_tokenizer(tokenizer: object, function: Callable[..., T], *args: Any) -> T:
    """Run what uses a tokenizer right here, or beside the event loop where the tokenizer says `blocking = True`."""
    if getattr(tokenizer, "blocking", False):
        return await run_blocking(function, *args)
    return function(*args)


def _serve(inbox: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        inbox.get()()
        _idle.append(inbox)
