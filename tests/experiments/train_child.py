"""What child processes of the training tests do: python train_child.py MODE FOLDER [...]."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import train
import train_collect
from tiny_training import TINY


def killed(folder, *moments):
    """Train, and die at a moment: after so many outcomes of a round, in the middle of a save, ..."""
    where, count = moments
    seen = 0

    def die_at(name):
        nonlocal seen
        seen += name == where
        if seen == int(count):
            os.kill(os.getpid(), signal.SIGKILL)

    collect, update, save, write = train_collect.collect, train.update, train.Checkpoints.save, train.MetricsLog.write

    async def collect_and_die(*arguments, report, **options):
        return await collect(*arguments, report=lambda progress: (report(progress), die_at("outcome")), **options)

    def and_die(function, name):
        def dies(*arguments, **options):
            answer = function(*arguments, **options)
            die_at(name)
            return answer

        return dies

    train_collect.collect, train.update = collect_and_die, and_die(update, "update")
    train.Checkpoints.save, train.MetricsLog.write = and_die(save, "save"), and_die(write, "line")
    train.main(replace(TINY, run_folder=Path(folder)))


def run(folder):
    """Train to the end."""
    train.main(replace(TINY, run_folder=Path(folder)))


def shared_update(out, rank, address):
    """One of two processes with four devices each: an update of actor and critic on this process's share of fixed records."""
    from tiny_training import updated

    if int(rank) >= 0:
        jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
    result = updated()
    if int(rank) <= 0:
        np.savez(out, **result)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
