"""A training run small enough for tests, and what they compare."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import train
from train_batches import Layout, over_processes
from train_config import Config
from train_models import acting_copy
from train_setup import fresh_learner, open_task

from focus_jax.agents import State
from focus_jax.collection import CriticExample, SegmentRecord
from focus_jax.models import make_mesh
from focus_jax.training import ActorBatch, ActorLoss, CriticBatch, actor_batches, critic_batches
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


def updated(num_processes=1):
    """Actor and critic after updates on records of five problems, of which each process has its share, on eight devices.

    Lengths differ, so that the processes have different numbers of batches of a length; one problem has no critic examples.
    """
    config = replace(TINY, fsdp=8, tokens_per_batch=1024 // num_processes, kl=0.1)
    draw = np.random.default_rng(0)
    records, examples = [], []
    for problem in range(5):
        for node in range(1, 4 + problem):
            length = int(draw.integers(4, 120)) if problem else 200
            ids, there = draw.integers(0, 256, length).astype(np.int32), np.ones(length - 3, bool)
            logprobs, versions = np.full(length - 3, -5.5, np.float32), np.zeros(length - 3, np.int32)
            records.append(SegmentRecord(f"p{problem}", node, ids[:3], ids[3:], there, logprobs, versions, float(draw.normal())))
            if problem != 4:
                state = State(ids, 0, b"", num_turns=node)
                examples.append(CriticExample(f"p{problem}", node, state, float(draw.random()), 1))
    mine = {f"p{problem}" for problem in range(jax.process_index(), 5, num_processes)}
    records, examples = ([item for item in items if item.problem in mine] for items in (records, examples))
    layout = Layout(config.tokens_per_batch, config.fsdp)
    with jax.set_mesh(make_mesh(8)), open_task(config) as task:
        learner = fresh_learner(config, task)
        rows = critic_batches(examples, read=task.read, **layout.options())
        learner, critic = train.update_critic(learner, over_processes(rows, CriticBatch, layout), epochs=2)
        rows = actor_batches(records, **layout.options())
        packed = over_processes(rows, ActorBatch, layout)
        learner, actor = train.update_actor(learner, packed, ActorLoss(kl=0.1), epochs=2)
    copies = acting_copy((learner.actor, learner.critic))  # on no mesh, as in the thread of what acts
    numbers = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(copies)}
    return numbers | {name: np.float32(value) for name, value in (critic | actor).items()}
