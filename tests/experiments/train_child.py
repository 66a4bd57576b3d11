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
from tiny_training import TINY, updated


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


def update(out, rank, address):
    """One of two processes with four devices each: updates on this process's share of fixed records."""
    jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
    np.savez(f"{out}-{rank}.npz", **updated(num_processes=2))


def processes(folder, rank, address):
    """One of two processes of a whole run, tiny as it is."""
    shared = {"num_processes": 2, "process_id": int(rank), "coordinator": address, "fsdp": 8, "rounds": 2}
    train.main(replace(TINY, run_folder=Path(folder), **shared))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
