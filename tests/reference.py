"""Slow, obvious versions of every formula, in float64, to be checked by eye.

A tree is a `Tree` of plain lists without padding; nothing here is shared with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tree:
    """One host tree: an entry per node, parents before children; node 0 is the root."""

    parent: list[int]
    reward: list[float]
    steps: list[int]
    terminal: list[bool]

    def __len__(self) -> int:
        return len(self.parent)

    def children(self, node: int) -> list[int]:
        return [i for i in range(1, len(self)) if self.parent[i] == node]


def random_tree(rng: np.random.Generator, num_nodes: int, shape: str = "random") -> Tree:
    """A tree whose parents are drawn at random, or a "chain" or a "star"; about half of its leaves are terminal."""
    draw = {"random": lambda i: int(rng.integers(0, i)), "chain": lambda i: i - 1, "star": lambda i: 0}[shape]
    parent = [0] + [draw(i) for i in range(1, num_nodes)]
    inner = set(parent[1:])
    return Tree(
        parent=parent,
        reward=[float(r) for r in rng.normal(size=num_nodes).astype(np.float32)],
        steps=[int(d) for d in rng.integers(0, 10, num_nodes)],
        terminal=[i not in inner and bool(rng.random() < 0.5) for i in range(num_nodes)],
    )


def backup(
    tree: Tree, values: Sequence[float], kappa: float = 1.0, gamma: float = 1.0
) -> tuple[list[float], list[float], list[int]]:
    """Refined values, targets and numbers of children."""
    size = len(tree)
    refined, target, num_children = [0.0] * size, [0.0] * size, [0] * size
    arriving: list[list[float]] = [[] for _ in range(size)]
    for i in reversed(range(size)):
        num_children[i] = n = len(arriving[i])
        if n:
            target[i] = sum(arriving[i]) / n
        refined[i] = 0.0 if tree.terminal[i] else (kappa * values[i] + n * target[i]) / (kappa + n)
        arriving[tree.parent[i]].append(tree.reward[i] + gamma ** tree.steps[i] * refined[i])
    return refined, target, num_children


def segment_advantages(tree: Tree, refined: Sequence[float], gamma: float = 1.0, lam: float = 0.0) -> list[float]:
    advantages = [0.0] * len(tree)
    for i in reversed(range(1, len(tree))):
        remaining = 0.0 if tree.terminal[i] else refined[i]
        advantages[i] = tree.reward[i] + gamma ** tree.steps[i] * remaining - refined[tree.parent[i]]
        later = [advantages[c] for c in tree.children(i)] if lam else []
        if later:
            advantages[i] += lam * gamma ** tree.steps[i] * sum(later) / len(later)
    return advantages


def leave_one_out_advantages(
    tree: Tree, values: Sequence[float], refined: Sequence[float], kappa: float = 1.0, gamma: float = 1.0
) -> list[float]:
    advantages = [0.0] * len(tree)
    weight = max(kappa, 1.0)
    x = [tree.reward[i] + gamma ** tree.steps[i] * (0.0 if tree.terminal[i] else refined[i]) for i in range(len(tree))]
    for i in range(1, len(tree)):
        others = [x[j] for j in tree.children(tree.parent[i]) if j != i]
        advantages[i] = x[i] - (weight * values[tree.parent[i]] + sum(others)) / (weight + len(others))
    return advantages


def grpo_advantages(returns: Sequence[float], mask: Sequence[bool]) -> list[float]:
    there = [r for r, m in zip(returns, mask, strict=True) if m]
    if len(set(there)) < 2:
        return [0.0] * len(returns)
    mean = sum(there) / len(there)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in there) / (len(there) - 1))
    return [(r - mean) / (deviation + 1e-6) if m else 0.0 for r, m in zip(returns, mask, strict=True)]


def beta_bernoulli(value: float, outcomes: Sequence[float], kappa: float) -> tuple[float, float]:
    n = len(outcomes)
    mu = (kappa * value + sum(outcomes)) / (kappa + n)
    return (value - mu) ** 2 + mu * (1 - mu) / (kappa + n + 1), mu * (1 - mu)


def normal(value: float, outcomes: Sequence[float], kappa: float) -> tuple[float, float]:
    n = len(outcomes)
    mu = (kappa * value + sum(outcomes)) / (kappa + n)
    spread = max(float(np.var(outcomes, ddof=1)), 1e-3) if n >= 2 else 0.25
    return (value - mu) ** 2 + spread / (kappa + n), spread * (1 + 1 / (kappa + n))


def mse(e2: float, s2: float, n: float, kappa: float) -> float:
    return (kappa**2 * e2 + n * s2) / (kappa + n) ** 2


def benefit_slope(e2: float, s2: float, n: float, kappa: float) -> float:
    return (2 * kappa**2 * e2 + (n - kappa) * s2) / (kappa + n) ** 3


def benefit_step(e2: float, s2: float, n: float, kappa: float) -> float:
    return mse(e2, s2, n, kappa) - mse(e2, s2, n + 1, kappa)


def allocate(
    benefit_of: Callable[[np.ndarray], np.ndarray], pending: np.ndarray, candidates: np.ndarray, num: int, max_pending: int
) -> tuple[list[int], list[float]]:
    """Choose one at a time: the highest positive benefit, the lowest index among equals, pending raised by one."""
    pending = pending.copy()
    index, bought = [-1] * num, [0.0] * num
    for pick in range(num):
        benefits = np.where(candidates & (pending < max_pending), benefit_of(pending), -np.inf)
        best = int(np.argmax(benefits))
        if benefits.flat[best] <= 0:
            break
        index[pick], bought[pick] = best, float(benefits.flat[best])
        pending.flat[best] += 1
    return index, bought


def token_entropy(logprobs: Sequence[float], mask: Sequence[bool], window: int) -> float:
    surprise = [-math.exp(lp) * lp if lp > -math.inf else 0.0 for lp, m in zip(logprobs, mask, strict=True) if m]
    if not surprise:
        return 0.0
    length = min(window, len(surprise))
    return max(sum(surprise[i : i + length]) / length for i in range(len(surprise) - length + 1))


def gated_delta_rule(q, k, v, g, beta, segment_ids=None, state=None):
    """Token after token: the state forgets, corrects what it holds for the key, and answers the query."""
    batch, length, heads, value_dim = v.shape
    out, last = np.zeros(v.shape), np.zeros((batch, heads, k.shape[-1], value_dim))
    for b in range(batch):
        for h in range(heads):
            key_head = h // (heads // k.shape[2])
            s = last[b, h] if state is None else np.array(state[b, h], np.float64)
            for t in range(length):
                if segment_ids is not None and t and segment_ids[b, t] != segment_ids[b, t - 1]:
                    s = np.zeros_like(s)
                key, query = (np.asarray(x[b, t, key_head], np.float64) for x in (k, q))
                s = s * math.exp(g[b, t, h])
                s = s + np.outer(key, float(beta[b, t, h]) * (np.asarray(v[b, t, h], np.float64) - s.T @ key))
                out[b, t, h] = s.T @ query
            last[b, h] = s
    return out, last


def attention(q, k, v, segment_ids=None):
    """Each token over itself and those before it in its segment."""
    batch, length, heads, size = q.shape
    out = np.zeros(q.shape)
    for b in range(batch):
        for h in range(heads):
            head = h // (heads // k.shape[2])
            for t in range(length):
                seen = [s for s in range(t + 1) if segment_ids is None or segment_ids[b, s] == segment_ids[b, t]]
                scores = np.array([np.dot(q[b, t, h].astype(float), k[b, s, head].astype(float)) for s in seen]) / math.sqrt(size)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = sum(w * v[b, s, head].astype(float) for w, s in zip(weights / weights.sum(), seen, strict=True))
    return out


def policy_loss(
    logprobs: Sequence[float],
    old: Sequence[float],
    advantages: Sequence[float],
    mask: Sequence[bool],
    weights: Sequence[float],
    low: float = 0.2,
    high: float = 0.2,
    sampler: Sequence[float] | None = None,
    max_importance: float = 2.0,
) -> tuple[float, float]:
    total, weight = 0.0, 0.0
    for t, there in enumerate(mask):
        if not there:
            continue
        before = old[t] if math.isfinite(old[t]) else logprobs[t]
        ratio = math.exp(logprobs[t] - before)
        clipped = min(max(ratio, 1 - low), 1 + high)
        surrogate = min(ratio * advantages[t], clipped * advantages[t])
        if sampler is not None and math.isfinite(sampler[t]):
            surrogate *= min(math.exp(before - sampler[t]), max_importance)
        total -= weights[t] * surrogate
        weight += weights[t]
    return total, weight


def value_loss(
    values: Sequence[float],
    targets: Sequence[float],
    mask: Sequence[bool],
    weights: Sequence[float],
    old: Sequence[float] | None = None,
    clip: float = 0.0,
) -> tuple[float, float]:
    total, weight = 0.0, 0.0
    for i, there in enumerate(mask):
        if there:
            error = (values[i] - targets[i]) ** 2
            if old is not None:
                error = max(error, (min(max(values[i], old[i] - clip), old[i] + clip) - targets[i]) ** 2)
            total += weights[i] * error
            weight += weights[i]
    return total, weight


def kl_penalty(
    logprobs: Sequence[float], reference: Sequence[float], mask: Sequence[bool], weights: Sequence[float]
) -> tuple[float, float]:
    total, weight = 0.0, 0.0
    for t, there in enumerate(mask):
        if there:
            d = reference[t] - logprobs[t]
            total += weights[t] * (math.exp(d) - 1 - d)
            weight += weights[t]
    return total, weight


def token_scores(hidden: np.ndarray, head: np.ndarray, target: int, temperature: float) -> tuple[float, float]:
    """Log-probability of one token and the entropy, for one state [D] and the whole head [V, D]."""
    logits = head.astype(np.float64) @ hidden.astype(np.float64) / temperature
    logp = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
    return float(logp[target]), float(-(np.exp(logp) * logp).sum())


def token_scores_gradient(
    hidden: np.ndarray, head: np.ndarray, target: int, temperature: float, d_logprob: float, d_entropy: float
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of d_logprob * log-probability + d_entropy * entropy, [D] and [V, D], through the softmax's Jacobian."""
    logits = head.astype(np.float64) @ hidden.astype(np.float64) / temperature
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    jacobian = np.diag(p) - np.outer(p, p)
    d_p = np.where(np.arange(len(p)) == target, d_logprob / p, 0.0) - d_entropy * (np.log(p) + 1)
    d_logits = jacobian @ d_p / temperature
    return d_logits @ head.astype(np.float64), np.outer(d_logits, hidden.astype(np.float64))


def detour_values(next_page: Sequence[Sequence[int]], probs: Sequence[Sequence[float]], max_steps: int) -> np.ndarray:
    """Chance to reach the goal, [max_steps + 1, pages + 1], by replies so far and page; a reply that is none loses a step."""
    goal = len(next_page)
    values = np.zeros((max_steps + 1, goal + 1))
    values[:, goal] = 1.0
    for step in reversed(range(max_steps)):
        for page in range(goal):
            value = sum(p * values[step + 1, following] for p, following in zip(probs[page], next_page[page], strict=True))
            values[step, page] = value + (1 - sum(probs[page])) * values[step + 1, page]
    return values


def actor_objective(questions: Sequence[Sequence[Sequence[tuple[float, float, float]]]], clip: float = 0.2) -> float:
    """Mean over questions, of the mean over their segments, of the mean over their tokens: log-prob, old one, advantage."""

    def token(logprob: float, old: float, advantage: float) -> float:
        ratio = math.exp(logprob - old) if math.isfinite(old) else 1.0
        return -min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)

    def mean(numbers: Sequence[float]) -> float:
        return sum(numbers) / len(numbers)

    return mean([mean([mean([token(*t) for t in segment]) for segment in question]) for question in questions])
