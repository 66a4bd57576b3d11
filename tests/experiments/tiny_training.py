"""A training run small enough for tests, and what they compare."""

import json
from pathlib import Path

import jax
import numpy as np
from train_config import Config
from train_setup import fresh_learner, open_task

from focus_jax.training.checkpoint import Checkpoints

TINY = Config(
    hidden=16,
    layers=1,
    imitation_steps=2,
    rounds=3,
    num_problems=2,
    budget=96,
    num_roots=2,
    epochs=2,
    warmup_rounds=1,
    tokens_per_batch=512,
    evaluate_every=2,
    evaluate_problems=2,
    checkpoint_every=2,
    num_workers=1,
)


def parameters_of(folder, config=TINY):
    """Path -> bytes of all that the newest checkpoint of a run holds, and its step."""
    with open_task(config) as task, Checkpoints(Path(folder) / "checkpoints") as checkpoints:
        found = checkpoints.restore(fresh_learner(config, task))
    leaves = jax.tree_util.tree_leaves_with_path(found.state)
    return found.step, {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def lines_of(folder):
    """The metrics of a run, without what depends on the clock."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith("seconds")} for line in lines]
