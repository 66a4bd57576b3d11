"""Does it learn? Many seeds of one method on `detour`, batched on the device, with exact values beside every estimate."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from learning_config import Config, check
from learning_models import Params, imitate, over_seeds
from learning_rounds import Experiment
from run_folder import open_run, parse

from focus_jax.host_memory import keep_freed_memory

History = dict[str, np.ndarray]


def main(config: Config) -> None:
    """Run every seed and write `history.npz`."""
    check(config)
    keep_freed_memory()
    folder = open_run(config.run_folder, config)
    history = run(config)
    np.savez(folder / "history.npz", allow_pickle=False, **history)


def run(config: Config) -> History:
    """Figures of every round, [rounds, seeds] each, "at" so many replies."""
    experiment = Experiment(config)
    experiment.learner = replace(experiment.learner, actor=warm_start(experiment))
    spent, unspent = np.zeros(config.num_seeds), np.zeros(config.num_seeds)
    history: list[History] = []
    while spent.min() < config.tokens:
        began = time.perf_counter()
        warm = config.method in ("focus", "actor-critic") and len(history) < config.warmup
        metrics = one_round(experiment, len(history), unspent, warm=warm)
        unspent += experiment.budget * config.num_problems - metrics["tokens"]
        history.append({"at": spent.copy(), **metrics})
        spent += metrics["tokens"]
        if len(history) % 10 == 1:
            means = " ".join(f"{name} {value.mean():.3f}" for name, value in metrics.items())
            print(f"round {len(history) - 1} {means} {time.perf_counter() - began:.1f} s", flush=True)
    return {name: np.stack([h[name] for h in history]) for name in history[0]}


def one_round(experiment: Experiment, number: int, unspent: np.ndarray, *, warm: bool) -> History:
    """Collect with policy and critic fixed, then train both; what a seed left of its budget so far, it may spend now."""
    problems = experiment.problems(number)
    budget = experiment.budget + (unspent / experiment.config.num_problems).astype(np.int32)
    key = jax.random.key(1000 + number)
    lessons, metrics = experiment.collect(experiment.learner, problems, jnp.asarray(budget, jnp.int32), warm=warm, key=key)
    experiment.learner = experiment.learn(experiment.learner, experiment.rows(problems, lessons), actor=not warm)
    return {name: np.asarray(value) for name, value in metrics.items()}


def warm_start(experiment: Experiment) -> Params:
    """Policies after imitation, from the file that holds them where there is one."""
    config, actor = experiment.config, experiment.learner.actor
    names = ("level", "num_seeds", "first_seed", "success", "noise", "hidden", "layers")
    made_with = ", ".join(f"{name} {getattr(config, name)}" for name in names)
    if config.start is not None and config.start.exists():
        return _read(config.start, actor, made_with)
    others = experiment.problems(99_999)
    solved = jax.jit(over_seeds(lambda actor, problems: jnp.mean(experiment.exact(actor, problems)[:, 0, 0])))
    actor = imitate(
        experiment.models,
        actor,
        lambda actor: solved(actor, others),
        level=experiment.level,
        seeds=experiment.seeds,
        success=config.success,
        noise=config.noise,
    )
    if config.start is not None:
        config.start.parent.mkdir(parents=True, exist_ok=True)
        np.savez(config.start, *jax.tree.leaves(actor), made_with=made_with)
    return actor


def _read(path: Path, like: Params, made_with: str) -> Params:
    with np.load(path) as stored:
        if str(stored["made_with"]) != made_with:
            raise SystemExit(f"--start: {path} was made with {stored['made_with']}, expected {made_with}; name another file")
        leaves, structure = jax.tree.flatten(like)
        return jax.tree.unflatten(structure, [jnp.asarray(stored[f"arr_{i}"]) for i in range(len(leaves))])


if __name__ == "__main__":
    main(parse(Config))
