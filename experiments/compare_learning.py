"""FOCUS beside GRPO, VinePPO and its own ablations on `detour`: run what is missing, then a table and a figure.

python experiments/compare_learning.py --folder runs/learning
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from focus_jax import paired_bootstrap

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"

# Name: stored options, and what is changed of them.
RUNS: dict[str, tuple[str, list[str]]] = {
    "FOCUS": ("detour_focus", []),
    "GRPO": ("detour_grpo", []),
    "VinePPO": ("detour_vineppo", []),
    "root rollouts, refined values": ("detour_focus", ["--allocation=root"]),
    "uniform allocation": ("detour_focus", ["--allocation=uniform"]),
    "credit with the child itself": ("detour_focus", ["--leave-one-out=False"]),
    "actor-critic": ("detour_focus", ["--method=actor-critic", "--leave-one-out=False"]),
    "kappa 1": ("detour_focus", ["--kappa=1"]),
    "full critic": ("detour_focus", ["--critic=full"]),
}


@dataclass(frozen=True)
class Config:
    """The whole comparison; a run that is there is not run again."""

    folder: Path = Path("runs/learning")
    jobs: int = 2
    """Runs at a time, one core each."""
    only: tuple[str, ...] = ()
    """Names of runs; all where none is given."""
    options: str = ""
    """More options for every run, for a quick look: --options="--num-seeds=2 --tokens=20000"."""
    baseline: str = "GRPO"
    threshold: float = 0.8


@dataclass(frozen=True)
class Run:
    """Figures [rounds, seeds] of a run."""

    history: dict[str, np.ndarray]

    @property
    def budget(self) -> float:
        """Replies up to which every seed has figures."""
        return float(self.history["at"][-1].min())

    def at(self, replies: float, name: str = "success") -> np.ndarray:
        """A figure [seeds] after so many replies, between the rounds' own."""
        at, figure = self.history["at"], smooth(self.history[name])
        return np.array([np.interp(replies, at[:, seed], figure[:, seed]) for seed in range(at.shape[1])])

    def mean(self, name: str) -> np.ndarray:
        """A figure [seeds] over all rounds."""
        return np.nanmean(self.history[name], 0)

    def replies_to(self, threshold: float) -> tuple[np.ndarray, np.ndarray]:
        """Replies [seeds] until the success first reaches the threshold, and whether it did; the budget where it did not."""
        reached = smooth(self.history["success"]) >= threshold
        at = np.take_along_axis(self.history["at"], np.argmax(reached, 0)[None], 0)[0]
        ever = np.asarray(reached.any(0))
        return np.where(ever, at, self.budget), ever

    def until(self, budget: float) -> Run:
        """The rounds that every seed began within a budget."""
        rounds = int((self.history["at"].max(1) <= budget).sum())
        return Run({name: figures[:rounds] for name, figures in self.history.items()})


def smooth(figures: np.ndarray) -> np.ndarray:
    """Means of three rounds."""
    padded = np.pad(figures, ((1, 1), (0, 0)), mode="edge")
    return (padded[:-2] + padded[1:-1] + padded[2:]) / 3


def main(config: Config) -> None:
    """Run what is missing, print the table, write it and the figure."""
    names = list(config.only or RUNS)
    if unknown := [name for name in [*names, config.baseline] if name not in RUNS]:
        raise SystemExit(f"--only: expected names among {', '.join(RUNS)}; got {', '.join(unknown)}")
    began = time.perf_counter()
    with ThreadPoolExecutor(config.jobs) as pool:
        first = names[:1] if not (config.folder / "start.npz").exists() else []
        for some in (first, [name for name in names if name not in first]):  # the first one writes the warm start for all
            list(pool.map(lambda name: run(name, config), some))
    print(f"{(time.perf_counter() - began) / 60:.1f} minutes")
    runs = {name: Run(dict(np.load(folder(config, name) / "history.npz"))) for name in names}
    text = table(runs, config)
    print(text)
    (config.folder / "table.md").write_text(text)
    draw(runs, config)


def folder(config: Config, name: str) -> Path:
    """Where a run writes."""
    return config.folder / name.lower().replace(",", "").replace(" ", "-")


def run(name: str, config: Config) -> None:
    """One run in a process of its own."""
    where = folder(config, name)
    if (where / "history.npz").exists():
        return
    stored, changed = RUNS[name]
    command = [sys.executable, str(HERE / "learning.py"), "--config", str(CONFIGS / f"{stored}.toml")]
    command += [*changed, *shlex.split(config.options), f"--start={config.folder / 'start.npz'}", f"--run-folder={where}"]
    flags = os.environ.get("XLA_FLAGS", "") + (" --xla_cpu_multi_thread_eigen=false" if config.jobs > 1 else "")
    began = time.perf_counter()
    where.mkdir(parents=True, exist_ok=True)
    with (where / "log.txt").open("w") as log:
        environment = {"JAX_COMPILATION_CACHE_DIR": str(config.folder / "compiled"), **os.environ, "XLA_FLAGS": flags}
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed; see {where / 'log.txt'}")
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


def table(runs: dict[str, Run], config: Config) -> str:
    """Success over replies, replies to the threshold beside the baseline's, and the errors, as Markdown."""
    marks = np.unique(np.round(np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1]) * max(run.budget for run in runs.values()), -3))
    header = [
        "",
        *(f"{mark / 1000:.0f}k" for mark in marks),
        f"to {config.threshold:.0%}",
        "seeds",
        f"ratio to {config.baseline}",
    ]
    lines = [header, ["---"] * len(header)]
    for name, run in runs.items():
        replies, reached = run.replies_to(config.threshold)
        success = [f"{run.at(mark).mean():.2f}" if mark <= 1.02 * run.budget else "" for mark in marks]
        seeds = f"{reached.sum()}/{len(reached)}"
        lines.append([name, *success, f"{np.median(replies) / 1000:.0f}k", seeds, ratio(run, runs.get(config.baseline), config)])
    errors = {"critic": "critic_error", "refined": "refined_error", "outcomes": "outcome_error"}
    agree = {"rank correlation": "rank_correlation", "correlation": "correlation"}
    header = ["", *(f"squared error, {name}" for name in errors), *agree]
    more = [header, ["---"] * len(header)]
    for name, run in runs.items():
        figures = [f"{run.mean(key).mean():.3f}" for key in errors.values()]
        more.append([name, *figures, *(f"{run.mean(key).mean():.2f}" for key in agree.values())])
    return "\n\n".join("\n".join(f"| {' | '.join(line)} |" for line in part) for part in (lines, more)) + "\n"


def ratio(run: Run, baseline: Run | None, config: Config) -> str:
    """Geometric mean over the seeds of the replies it takes beside the baseline's, with its 95 % interval."""
    if baseline is None or run is baseline:
        return "1"
    both = [r.until(min(run.budget, baseline.budget)) for r in (run, baseline)]
    ours, theirs = (jnp.asarray(np.log(r.replies_to(config.threshold)[0]), jnp.float32) for r in both)
    mean, low, high = (float(jnp.exp(x)) for x in paired_bootstrap(ours, theirs, key=jax.random.key(0)))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def draw(runs: dict[str, Run], config: Config) -> None:
    """Success over replies, with bootstrap bands of the mean, as `learning.png` and `learning.svg`."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no figure: pip install matplotlib")
        return
    mpl.use("agg")
    import matplotlib.pyplot as plt

    main_runs: list[str] = [name for name in ("FOCUS", "GRPO", "VinePPO") if name in runs]
    others = [name for name in runs if name not in main_runs]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, squeeze=False, layout="constrained")
    panels: list[tuple[Any, list[str]]] = [(axes[0, 0], main_runs), (axes[0, 1], [*main_runs[:1], *others])]
    for panel, names in panels:
        for name in names:
            plot(panel, name, runs[name], color=f"C{list(runs).index(name)}", band=names is main_runs)
        panel.axhline(config.threshold, color="0.7", linewidth=0.8, linestyle=":")
        panel.set_xlabel("generated tokens")
        panel.legend(fontsize=8, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("success (exact)")
    axes[0, 0].set_ylim(0, 1)
    for kind in ("png", "svg"):
        figure.savefig(config.folder / f"learning.{kind}", dpi=150)


def plot(panel: Any, name: str, run: Run, *, color: str, band: bool) -> None:
    """One curve: the mean over the seeds, and its bootstrap interval."""
    grid = np.linspace(0, run.budget, 60)
    curves = jnp.asarray(np.stack([run.at(replies) for replies in grid]), jnp.float32)
    mean, low, high = paired_bootstrap(curves, jnp.zeros_like(curves), num_resamples=2000, key=jax.random.key(0))
    panel.plot(grid, mean, label=name, color=color, linewidth=1.6)
    if band:
        panel.fill_between(grid, np.asarray(low), np.asarray(high), color=color, alpha=0.2, linewidth=0)


if __name__ == "__main__":
    main(tyro.cli(Config))
