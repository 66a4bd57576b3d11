import asyncio
import threading

import pytest

from focus_jax.agents.threads import run_blocking, run_environment


def test_results_and_exceptions_come_back():
    assert asyncio.run(run_blocking(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_blocking(divmod, 7, 0))


def test_the_loop_goes_on_while_a_call_blocks():
    async def main():
        released = threading.Event()
        waiting = asyncio.create_task(run_blocking(released.wait, 30))
        await asyncio.sleep(0)
        released.set()
        return await waiting

    assert asyncio.run(main())


def test_only_an_environment_that_says_so_runs_in_the_loop_itself():
    class Quick:
        blocking = False

    def here():
        return threading.current_thread() is threading.main_thread()

    assert asyncio.run(run_environment(Quick(), here))
    assert not asyncio.run(run_environment(object(), here))
