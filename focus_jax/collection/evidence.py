"""What the scheduler knows: observed outcomes per node of every tree, kept on the host while the trees grow.

These counts (the paper's N) are not the backup's child counts (n): an outcome is counted at the node where its
continuation started and at each node it created, and nowhere else. Source: project page, "Backup details".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from focus_jax.agents import Segment
from focus_jax.collection.tree import Continuation
from focus_jax.scheduling import OutcomeStats, token_entropy

_COLUMNS: dict[str, type] = {
    "value": np.float64,  # the critic's prediction
    "count": np.int32,  # observed outcomes, Welford's mean and sum of squared deviations
    "mean": np.float64,
    "m2": np.float64,
    "pending": np.int32,  # continuations in flight
    "open": np.bool_,  # a continuation may start here
    "price": np.int64,  # the most tokens it can generate
    "entropy_sum": np.float64,  # over the scored edges that leave the node
    "num_scored": np.int32,
    "probes": np.int32,  # probes that came back, and the mean of their returns
    "probe_mean": np.float64,
}


@dataclass(frozen=True)
class Frontier:
    """The candidates of one decision, in (tree, node) order; every array is [num_candidates].

    Attributes:
        tree, node: int, where each candidate stands.
        value: float32, the critic's prediction.
        stats: observed outcomes (count, mean, m2) and continuations in flight (pending).
        entropy: float64, mean token-entropy score over the edges leaving the node, +inf where none is scored.
        probes: int32, probes that came back.
        decision: launches before this one; rules that draw at random use it.
    """

    tree: np.ndarray
    node: np.ndarray
    value: np.ndarray
    stats: OutcomeStats
    entropy: np.ndarray
    probes: np.ndarray
    decision: int = 0

    def __len__(self) -> int:
        return len(self.tree)


class Evidence:
    """Outcome statistics of a batch of growing trees: `nodes` holds one array [num_trees, capacity] per quantity.

    One finished continuation adds one observation at its starting node and one at each node it created; strict
    ancestors of the starting node get nothing.

    Args:
        num_trees: how many trees there are.
        gamma: discount per task transition.
        window: tokens in a token-entropy window, or None where no pass uses the entropy.
    """

    def __init__(self, num_trees: int, *, gamma: float = 1.0, window: int | None = None):
        self.gamma = gamma
        self.window = window
        self.num_nodes = np.zeros(num_trees, np.int64)
        self.nodes: dict[str, np.ndarray] = {name: np.zeros((num_trees, 64), dtype) for name, dtype in _COLUMNS.items()}

    def add_root(self, tree: int, value: float, *, candidate: bool = True, price: int = 0) -> None:
        """Take in the bare root of a tree."""
        self._append(tree, value, candidate, price)

    def record(self, tree: int, start: int, continuation: Continuation) -> None:
        """Add a finished continuation: its nodes, and one observed suffix return at `start` and at each of them."""
        path = [start]
        c = continuation
        for segment, state, value, price in zip(c.segments, c.states, c.values, c.prices, strict=True):
            path.append(self._append(tree, value, segment.status == "open" and state.resumable, price))
        for node, outcome in zip(path, continuation.suffix_returns(self.gamma), strict=True):
            self._observe(tree, node, outcome)
        if self.window is not None:
            for node, score in zip(path[:-1], edge_entropies(continuation.segments, self.window), strict=True):
                if np.isfinite(score):
                    self.nodes["entropy_sum"][tree, node] += score
                    self.nodes["num_scored"][tree, node] += 1

    def record_probe(self, tree: int, start: int, continuation: Continuation) -> None:
        """Add a probe: only its return is kept, for the Monte Carlo value of the state it started from."""
        outcome = continuation.suffix_returns(self.gamma)[0]
        probes, mean = self.nodes["probes"], self.nodes["probe_mean"]
        probes[tree, start] += 1
        mean[tree, start] += (outcome - mean[tree, start]) / probes[tree, start]

    def frontier(self, purse: np.ndarray, *, max_pending: int = 1, decision: int = 0) -> Frontier:
        """Nodes with fewer than `max_pending` in flight whose price is at most `purse` (float [num_trees], -1 for none)."""
        mask = self.nodes["open"] & (self.nodes["pending"] < max_pending) & (self.nodes["price"] <= purse[:, None])
        at = np.flatnonzero(mask)
        value, count, mean, m2, pending, probes = (
            self.nodes[name].take(at) for name in ("value", "count", "mean", "m2", "pending", "probes")
        )
        stats = OutcomeStats(count=count, mean=mean.astype(np.float32), m2=m2.astype(np.float32), pending=pending)
        tree, node = np.divmod(at, mask.shape[1])
        return Frontier(tree, node, value.astype(np.float32), stats, self._entropy(at), probes, decision)

    def _entropy(self, at: np.ndarray) -> np.ndarray:
        """Mean score of the edges leaving each node, +inf where none is scored."""
        if self.window is None:
            return np.full(len(at), np.inf)
        total, num = self.nodes["entropy_sum"].take(at), self.nodes["num_scored"].take(at)
        return np.where(num > 0, total / np.maximum(num, 1), np.inf)

    def _observe(self, tree: int, node: int, outcome: float) -> None:
        """Welford's update."""
        count, mean, m2 = self.nodes["count"], self.nodes["mean"], self.nodes["m2"]
        count[tree, node] += 1
        delta = outcome - mean[tree, node]
        mean[tree, node] += delta / count[tree, node]
        m2[tree, node] += delta * (outcome - mean[tree, node])

    def _append(self, tree: int, value: float, candidate: bool, price: int) -> int:
        node = int(self.num_nodes[tree])
        if node == self.nodes["open"].shape[1]:
            self.nodes = {name: np.concatenate([a, np.zeros_like(a)], axis=1) for name, a in self.nodes.items()}
        self.num_nodes[tree] += 1
        self.nodes["value"][tree, node] = value
        self.nodes["open"][tree, node] = candidate
        self.nodes["price"][tree, node] = price
        return node


def edge_entropies(segments: Sequence[Segment], window: int) -> np.ndarray:
    """Token-entropy score of each segment, float32 [len(segments)]; NaN where no task token has a known log-probability.

    Source: project page, "Choose where another rollout is useful"; arXiv 2610.35801.
    """
    # Padded to powers of two, so that a run compiles a handful of shapes.
    rows = 1 << (len(segments) - 1).bit_length()
    width = 1 << max(6, (max(len(s.token_ids) for s in segments) - 1).bit_length())
    logprobs, mask = np.zeros((rows, width), np.float32), np.zeros((rows, width), bool)
    for i, s in enumerate(segments):
        known = s.task & np.isfinite(s.logprobs)
        mask[i, : len(known)] = known
        logprobs[i, : len(known)] = np.where(known, s.logprobs, 0)
    scores = np.asarray(token_entropy(logprobs, mask, window=window))
    return np.where(mask.any(1), scores, np.nan)[: len(segments)]
