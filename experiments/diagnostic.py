"""Diagnostics that take minutes where learning takes an hour: `python experiments/diagnostic.py gradient`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from compare_learning import CONFIGS, RUNS
from learning import warm_start
from learning_config import Config, check
from learning_models import Params, over_seeds
from learning_rounds import Experiment
from rich.console import Console
from rich.table import Table
from run_folder import parse

from focus_jax.host_memory import keep_freed_memory


@dataclass(frozen=True)
class Gradient:
    """How well a round's policy gradient points along the true one, for one policy of `detour`, per method.

    The true gradient is that of the exact success, which dynamic programming differentiates, over many other problems.
    """

    num_seeds: int = 4
    first_seed: int = 100
    rounds: int = 4
    critic_rounds: int = 4
    """Rounds before, which train the critic of the methods that have one."""
    reference_rounds: int = 8
    """Rounds' worth of problems for the true gradient."""
    start: Path = Path("runs/diagnostic/start.npz")
    """File with the policies; where there is none, the warm start writes it."""


def gradient(options: Gradient) -> None:
    """Print the table."""
    keep_freed_memory()
    table = Table("", "cosine", "cosine of their mean", "rank correlation", title="gradient of a round beside the true one")
    truth: np.ndarray | None = None
    for name, (stored, changed) in RUNS.items():
        seeds = [f"--num-seeds={options.num_seeds}", f"--first-seed={options.first_seed}", f"--start={options.start}"]
        config = parse(Config, ["--config", str(CONFIGS / f"{stored}.toml"), *changed, *seeds])
        check(config)
        experiment = Experiment(config)
        experiment.learner = replace(experiment.learner, actor=warm_start(experiment))
        truth = true_gradient(experiment, options.reference_rounds) if truth is None else truth
        gradients, ranks = round_gradients(experiment, options)
        each = [np.nanmean(cosine(g, truth)) for g in gradients]
        error = np.std(each, ddof=1) / len(each) ** 0.5 if len(each) > 1 else float("nan")
        together = np.mean(cosine(sum(gradients), truth))  # type: ignore[arg-type]
        table.add_row(name, f"{np.mean(each):.3f} ± {error:.3f}", f"{together:.3f}", f"{np.mean(ranks):.2f}")
    Console().print(table)


def true_gradient(experiment: Experiment, rounds: int) -> np.ndarray:
    """Of the exact success, [seeds, parameters]."""

    def success(actor: Params, problems: object) -> jax.Array:
        return jnp.mean(experiment.exact(actor, problems)[:, 0, 0])  # type: ignore[arg-type]

    slope = jax.jit(over_seeds(jax.grad(success)))
    return sum(flat(slope(experiment.learner.actor, experiment.problems(50_000 + i))) for i in range(rounds))  # type: ignore[return-value]


def round_gradients(experiment: Experiment, options: Gradient) -> tuple[list[np.ndarray], list[float]]:
    """Gradients [seeds, parameters] that rounds with the policy as it is would follow, and their credit's rank correlation."""
    has_critic = experiment.config.method in ("focus", "actor-critic")
    warm = options.critic_rounds if has_critic else 0
    slope = jax.jit(over_seeds(jax.grad(experiment.actor_loss)))
    budget = jnp.full(len(experiment.seeds), experiment.budget, jnp.int32)
    gradients, ranks = [], []
    for number in range(warm + options.rounds):
        problems = experiment.problems(number)
        is_warm = number < warm
        lessons, metrics = experiment.collect(experiment.learner, problems, budget, warm=is_warm, key=jax.random.key(number))
        rows = experiment.rows(problems, lessons)
        if not is_warm:
            gradients.append(-flat(slope(experiment.learner.actor, rows)))
            ranks.append(float(jnp.mean(metrics["rank_correlation"])))
        experiment.learner = experiment.learn(experiment.learner, rows, actor=False)
    return gradients, ranks


def flat(tree: Params) -> np.ndarray:
    """Leaves [seeds, ...] side by side: [seeds, parameters]."""
    return np.concatenate([np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(tree)], 1)


def cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Along the last axis; 0 for a gradient that is 0."""
    return np.sum(x * y, -1) / np.maximum(np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1), 1e-20)


if __name__ == "__main__":
    # One command so far; a second makes this a choice.
    gradient(tyro.extras.subcommand_cli_from_dict({"gradient": Gradient}))
