"""Freed memory: the C library keeps it, or says that it does not."""

import resource
import subprocess
import sys

import pytest

from focus_jax import host_memory

SCRIPT = """
import resource, sys
from focus_jax.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
size = 64_000_000
b"1" * size
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    b"1" * size  # freed at once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode):
    ran = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    return int(ran.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_that_was_freed_is_used_again():
    pages = 64_000_000 // resource.getpagesize()
    assert page_faults("keep") < pages / 10 < 9 * pages < page_faults("leave")


def test_a_c_library_that_cannot_is_left_alone(monkeypatch):
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: object())
    assert not host_memory.keep_freed_memory()


def test_a_setting_that_is_refused_is_told(monkeypatch):
    class Refusing:
        mallopt = staticmethod(lambda name, value: int(name != -8))

    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: Refusing)
    assert not host_memory.keep_freed_memory()
