"""How fast the pure functions are, beside NumPy, Numba and a Python heap doing the same work."""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.figures import Figure, in_turns, show
from focus_jax import OutcomeStats, RolloutTrees, allocate, backup, benefit, pack

KAPPA, GAMMA = 1.0, 0.99


@dataclass(frozen=True)
class Kernels:
    """Time backup on a batch of trees and allocate on many candidates; ratios are of medians over interleaved rounds."""

    num_trees: int = 1024
    num_nodes: int = 1024
    num_candidates: int = 1_000_000
    num_picks: int = 256
    rounds: int = 10
    output: Path | None = None
    """Also write the figures to this JSON file."""


def main(config: Kernels) -> None:
    """Run the benchmark and print its table."""
    keep_freed_memory()
    figures = backup_figures(config) + compile_figures(config) + allocate_figures(config)
    show(f"kernels: {config.num_trees} trees x {config.num_nodes} nodes", figures, config, output=config.output)


def backup_figures(config: Kernels) -> list[Figure]:
    """Backup on bushy trees and on chains, against NumPy and Numba."""
    rng = np.random.default_rng(0)
    shape = (config.num_trees, config.num_nodes)
    bushy, values = random_trees(rng, *shape), rng.random(shape, dtype=np.float32)
    chains = replace(bushy, parent=np.broadcast_to(np.maximum(np.arange(shape[1], dtype=np.int32) - 1, 0), shape).copy())
    on_device = jax.device_put((bushy, chains, values))
    mesh = jax.make_mesh((2,), ("trees",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("trees")
    sharded = jax.jit(jax.shard_map(partial(backup, kappa=KAPPA, gamma=GAMMA), mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    halves = jax.device_put((bushy, values), jax.sharding.NamedSharding(mesh, spec))
    one_thread = numba_backup()

    contestants: dict[str, Callable[[], Any]] = {
        "numpy": lambda: numpy_backup(bushy, values),
        "numba": lambda: one_thread(bushy, values),
        "jax": lambda: backup(on_device[0], on_device[2], kappa=KAPPA, gamma=GAMMA),
        "jax, chains": lambda: backup(on_device[1], on_device[2], kappa=KAPPA, gamma=GAMMA),
        "jax, two devices": lambda: sharded(*halves),
    }
    results = {name: f() for name, f in contestants.items()}
    for name in ("numba", "jax", "jax, two devices"):
        for got, want in zip(results[name], results["numpy"], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    times = in_turns(contestants, config.rounds)
    return [
        *(Figure(f"backup, {name}", 1e3 * seconds, "ms") for name, seconds in times.items()),
        Figure("backup, numpy / jax", times["numpy"] / times["jax"], "x", "at least", 12),
        Figure("backup, jax / numba on one thread", times["jax"] / times["numba"], "x", "at most", 1.3),
        Figure("backup, numpy / jax on two devices", times["numpy"] / times["jax, two devices"], "x", "at least", 20),
        Figure("backup, chains / bushy trees", times["jax, chains"] / times["jax"], "x", "at most", 1.0),
    ]


def compile_figures(config: Kernels) -> list[Figure]:
    """Seconds to compile backup, and compiles over batches of many sizes."""
    rng = np.random.default_rng(1)
    shape = (config.num_trees, config.num_nodes)
    trees = random_trees(rng, *shape)
    seconds = []
    for _ in range(3):
        jax.clear_caches()
        start = time.perf_counter()
        backup.lower(trees, trees.reward, kappa=KAPPA, gamma=GAMMA).compile()
        seconds.append(time.perf_counter() - start)
    backup.clear_cache()  # type: ignore[attr-defined]
    buckets = set()
    for size in rng.integers(1, config.num_nodes + 1, 100):
        tree = jax.tree.map(lambda leaf, size=size: leaf[0, :size], trees)
        packed, _ = pack([tree])
        backup(packed, packed.reward, kappa=KAPPA, gamma=GAMMA)
        buckets.add(packed.mask.shape)
    compiles = backup._cache_size()  # type: ignore[attr-defined]
    return [
        Figure("backup, compile", statistics.median(seconds), "s", "at most", 1.0),
        Figure("backup, compiles per bucket over 100 sizes", compiles / len(buckets), "", "at most", 1.0),
    ]


def allocate_figures(config: Kernels) -> list[Figure]:
    """Allocate against one evaluation of the benefits and against a heap."""
    rng = np.random.default_rng(2)
    shape = (config.num_candidates,)
    returns = jax.device_put(rng.integers(0, 2, (3, *shape)).astype(np.float32))
    stats = OutcomeStats.zeros(shape)
    for row in returns:
        stats = stats.record(row, jax.device_put(rng.random(shape) < 0.7))
    values, candidates = jax.device_put((rng.random(shape, dtype=np.float32), np.ones(shape, bool)))
    scores = np.asarray(benefit(values, stats, kappa=KAPPA)).tolist()

    def heap() -> list[int]:
        entries = [(-score, index) for index, score in enumerate(scores) if score > 0]
        heapq.heapify(entries)
        return [heapq.heappop(entries)[1] for _ in range(config.num_picks)]

    contestants: dict[str, Callable[[], Any]] = {
        "benefit": lambda: benefit(values, stats, kappa=KAPPA),
        "allocate": lambda: allocate(values, stats, candidates, config.num_picks, kappa=KAPPA),
        "allocate, max_pending 4": lambda: allocate(values, stats, candidates, config.num_picks, kappa=KAPPA, max_pending=4),
    }
    assert contestants["allocate"]().index.tolist() == heap()
    times = in_turns(contestants, config.rounds) | in_turns({"heap": heap}, 1)
    return [
        *(Figure(f"{name}, {config.num_candidates:,}", 1e3 * seconds, "ms") for name, seconds in times.items()),
        Figure(f"allocate {config.num_picks} / benefit", times["allocate"] / times["benefit"], "x", "at most", 5),
        Figure(f"heap / allocate {config.num_picks}", times["heap"] / times["allocate"], "x", "at least", 50),
    ]


def random_trees(rng: np.random.Generator, num_trees: int, num_nodes: int) -> RolloutTrees:
    """Full trees that grow by continuations: a node follows the one before it, or any earlier one, with equal chance."""
    shape = (num_trees, num_nodes)
    parent = np.zeros(shape, np.int32)
    for i in range(1, num_nodes):
        parent[:, i] = np.where(rng.random(num_trees) < 0.5, i - 1, rng.integers(0, i, num_trees))
    inner = np.zeros(shape, bool)
    np.put_along_axis(inner, parent, True, axis=1)
    return RolloutTrees(
        parent=parent,
        reward=rng.random(shape, dtype=np.float32),
        steps=rng.integers(0, 6, shape).astype(np.int32),
        terminal=~inner & (rng.random(shape) < 0.3),
        mask=np.ones(shape, bool),
    )


def numpy_backup(trees: RolloutTrees, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Level by level from the deepest, what a level sends up summed by one bincount."""
    shape = num_trees, num_nodes = values.shape
    rows = np.arange(num_trees)
    depth = np.zeros((num_nodes, num_trees), np.int16)
    for i, above in enumerate(np.asarray(trees.parent).T.copy()[1:], 1):
        depth[i] = depth[above, rows] + 1
    level = np.where(trees.mask & (np.arange(num_nodes) > 0), depth.T, 0).ravel()
    order = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[order], np.arange(level.max() + 2))

    parent = (trees.parent + rows[:, None] * num_nodes).ravel()
    terminal, reward = np.ravel(trees.terminal), np.ravel(trees.reward)
    value = np.where(terminal, np.float32(0), values.ravel())
    discount = powers(trees)[np.ravel(trees.steps)]
    count = np.bincount(parent[order[bounds[1] :]], minlength=values.size)
    total = np.zeros(values.size)
    refined = value.copy()
    for d in range(len(bounds) - 2, -1, -1):
        nodes = order[bounds[d] : bounds[d + 1]]
        n = count[nodes]
        blend = (KAPPA * value[nodes] + total[nodes]) / (KAPPA + n)
        refined[nodes] = np.where(terminal[nodes] | (n == 0), value[nodes], blend)
        if d > 0:
            sent = reward[nodes] + discount[nodes] * refined[nodes]
            total += np.bincount(parent[nodes], sent, minlength=values.size)
    target = (total / np.maximum(count, 1)).astype(np.float32)
    return refined.reshape(shape), target.reshape(shape), count.reshape(shape)


def numba_backup() -> Callable[[RolloutTrees, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """One compiled pass over the nodes of each tree, last to first, on one thread."""
    try:
        from numba import njit
    except ImportError as error:
        raise SystemExit("the yardstick numba is missing: pip install 'focus_jax[benchmark]'") from error

    @njit
    def sweep(
        parent: np.ndarray,
        reward: np.ndarray,
        steps: np.ndarray,
        terminal: np.ndarray,
        mask: np.ndarray,
        values: np.ndarray,
        discount: np.ndarray,
        kappa: np.float32,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        num_trees, num_nodes = parent.shape
        refined, target = np.zeros_like(values), np.zeros_like(values)
        count, total = np.zeros_like(parent), np.empty(num_nodes, np.float32)
        for tree in range(num_trees):
            total[:] = 0
            for i in range(num_nodes - 1, -1, -1):
                if not mask[tree, i]:
                    continue
                n = np.float32(count[tree, i])
                value = np.float32(0) if terminal[tree, i] else values[tree, i]
                if n > 0:
                    target[tree, i] = total[i] / n
                    if not terminal[tree, i]:
                        value = (kappa * value + total[i]) / (kappa + n)
                refined[tree, i] = value
                if i > 0:
                    p = parent[tree, i]
                    total[p] += reward[tree, i] + discount[steps[tree, i]] * value
                    count[tree, p] += 1
        return refined, target, count

    def run(trees: RolloutTrees, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        fields = (trees.parent, trees.reward, trees.steps, trees.terminal, trees.mask)
        return sweep(*fields, values, powers(trees), np.float32(KAPPA))

    return run


def powers(trees: RolloutTrees) -> np.ndarray:
    """gamma^d for all d that occur."""
    return np.float32(GAMMA) ** np.arange(int(trees.steps.max()) + 1, dtype=np.float32)


def keep_freed_memory() -> None:
    """Let no contestant pay for pages that an array freed a moment ago gave back to the kernel (glibc only)."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
