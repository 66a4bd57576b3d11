"""The memory of the process, where CPUs compute."""

from __future__ import annotations

import ctypes

_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1  # of glibc's malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next computation, where it would give it back to the system.

    For every large buffer XLA asks for memory anew, and on CPUs the system hands it over page by page while it is first
    written to: that can take longer than what is computed. The training step of a small model becomes two to three times
    as fast. The price: the process keeps the most memory that it ever held at once. Call it before computing anything.

    Returns:
        Whether the C library does so: glibc, hence most of Linux. Elsewhere nothing changes.

    Example:
        >>> keep_freed_memory() in (True, False)
        True

    Source: ours; mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One arena: those of other threads fetch and return what is larger than 64 MB each time.
    settings = {_ARENA_MAX: 1, _MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: _LARGEST}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
