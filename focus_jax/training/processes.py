"""What the processes of one run must do alike."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

Answer = TypeVar("Answer")


class FailedSomewhereError(Exception):
    """What failed on this process or another, in one line."""


def everywhere(action: Callable[[], Answer]) -> Answer:
    """What an action returns here, once it has ended on every process.

    Raises:
        FailedSomewhereError: on every process, if it failed on one.
    """
    reason = ""
    try:
        answer = action()
    except Exception as error:  # whatever the layers below make of a damaged file or a full disk
        reason = one_line(error)
    if anywhere(bool(reason)):
        raise FailedSomewhereError(reason or "another process failed")
    return answer


def anywhere(flag: bool) -> bool:
    """Whether it is set on some process. All must ask."""
    return flag if jax.process_count() == 1 else bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def one_line(error: Exception) -> str:
    """What an error says, cut to a bearable length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """Let a loop end itself, with a save, where SIGTERM would end the process.

    Yields a function that tells whether the signal has come, to one of the processes where there are several: all of them
    must ask at the same place, and get the same answer. For the main thread.

    Example:
        >>> import os
        >>> with stop_on_sigterm() as stop_requested:
        ...     for step in range(10):
        ...         os.kill(os.getpid(), signal.SIGTERM)
        ...         if stop_requested():
        ...             break  # after checkpoints.save(step, ...)
        >>> step
        0
    """
    came = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield lambda: anywhere(came.is_set())
    finally:
        signal.signal(signal.SIGTERM, before)
