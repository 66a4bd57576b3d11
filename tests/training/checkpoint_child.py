"""What child processes of the checkpoint tests do: python checkpoint_child.py MODE FOLDER [...]."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from focus_jax.training.checkpoint import CheckpointError, Checkpoints
from focus_jax.training.processes import stop_on_sigterm


def state_of(step):
    """Four megabytes that tell which step they are of, and do not compress."""
    noise = np.random.default_rng(step).normal(size=(1024, 1024)).astype(np.float32)
    return {"noise": jnp.asarray(noise), "step": jnp.full((3,), step, jnp.int32)}


def say(*what):
    print(*what, flush=True)


def endless(folder):
    """Save step after step; the parent kills this at some moment."""
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in range(1, 10_000):
            checkpoints.save(step, state_of(step), {"step": step})
            say(step)


def stalled(folder):
    """Save step 1, then write all of step 2 but never give it its name."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state_of(1), {"step": 1})
    checkpoints.wait()
    finalize = ocp.StandardCheckpointHandler.finalize

    def stall(self, directory):
        finalize(self, directory)
        say("written")
        time.sleep(600)

    ocp.StandardCheckpointHandler.finalize = stall
    checkpoints.save(2, state_of(2), {"step": 2})
    checkpoints.wait()


def limited(folder):
    """Save step 1, then step 2 where no file may grow beyond 64 KiB, then step 3 without the limit."""
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state_of(1), {"step": 1})
        checkpoints.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
        try:
            checkpoints.save(2, state_of(2), {"step": 2})
            checkpoints.wait()
        except CheckpointError as error:
            say("refused:", error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        say(checkpoints.steps())
        checkpoints.save(3, state_of(3), {"step": 3})


def terminated(folder):
    """Count until SIGTERM comes, and save the count."""
    with Checkpoints(folder) as checkpoints, stop_on_sigterm() as stop_requested:
        for step in range(1, 10_000):
            time.sleep(0.01)
            if stop_requested():
                checkpoints.save(step, state_of(step), {"step": step})
                break
            if step == 3:
                say("started")


def train(folder):
    """Go on from step 3 for two more."""
    from test_checkpoint import fresh_run, train_step

    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(jax.eval_shape(fresh_run))
        state = found.state
        for _ in range(2):
            state = train_step(state)
        checkpoints.save(found.step + 2, state, found.info)


def distributed(folder, rank, address):
    """One of two processes with four devices each: save, restore, agree on a signal that came to one of them."""
    jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    wide = np.arange(64, dtype=np.float32).reshape(16, 4)
    state = {
        "wide": jax.make_array_from_callback(wide.shape, split, lambda index: wide[index]),
        "count": jax.make_array_from_callback((), whole, lambda index: np.int32(5)),
    }
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, jax.tree.map(lambda x, step=step: x * jnp.array(step, x.dtype), state), {"step": step})
        found = checkpoints.restore(state)
        equal = [
            np.array_equal(shard.data, 2 * wide[shard.index]) and shard.data.shape == (2, 4)
            for shard in found.state["wide"].addressable_shards
        ]
        said = [found.step, int(found.state["count"].addressable_data(0)), len(equal), all(equal)]
    with stop_on_sigterm() as stop_requested:
        before = stop_requested()
        if rank == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        said += [before, stop_requested()]
    Path(f"{folder}-{rank}.json").write_text(json.dumps(said))  # Gloo talks on stdout


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
