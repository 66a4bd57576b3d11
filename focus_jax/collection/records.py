"""From grown trees to what a trainer consumes: credit for every segment, targets for the critic, token records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from focus_jax.advantages import grpo_advantages, leave_one_out_advantages, segment_advantages, vineppo_advantages
from focus_jax.agents import State
from focus_jax.backup import backup
from focus_jax.collection.tree import HostTree
from focus_jax.trees import pack


@dataclass(frozen=True)
class Credit:
    """What a method makes of the trees; each field is a list with one array [N] per tree.

    Attributes:
        advantages: float32, of the segment entering each node; 0 at the root.
        refined: float32, refined values (the critic's prediction where a method refines nothing).
        targets: float32, mean child return G; 0 where nothing was expanded.
        num_children: int32, direct children; the critic trains where it is positive.
    """

    advantages: list[np.ndarray]
    refined: list[np.ndarray]
    targets: list[np.ndarray]
    num_children: list[np.ndarray]


@dataclass(frozen=True)
class SegmentRecord:
    """One segment to train the actor on. The row is `prompt_ids + token_ids`, the loss on `generated` alone.

    A segment is shared by every branch that passes through it and appears once. One whose context was replaced on the way
    has a record for every context.

    Attributes:
        problem: the problem's id.
        node: the node the segment enters.
        prompt_ids: int32 [P], the context that the tokens followed; no loss.
        token_ids: int32 [T], generated and observed tokens.
        generated: bool [T], True where the policy sampled the token, context management included.
        logprobs: float32 [T], the sampler's log-probabilities; NaN where unknown.
        versions: int32 [T], policy version of each sampled token, -1 elsewhere.
        advantage: the segment's credit.
    """

    problem: str
    node: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    generated: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    advantage: float


@dataclass(frozen=True)
class CriticExample:
    """One expanded nonterminal state to train the critic on.

    Attributes:
        problem: the problem's id.
        node: the state's node.
        state: what the critic is asked about: its context (int32 [T]), turns taken, environment.
        target: G, the mean child return; fixed, no gradient flows through it.
        num_children: how many children it averages.
    """

    problem: str
    node: int
    state: State
    target: float
    num_children: int


def focus_credit(
    trees: Sequence[HostTree], *, kappa: float = 1.0, gamma: float = 1.0, lam: float = 0.0, leave_one_out: bool = False
) -> Credit:
    """Refine values over the trees and credit every segment with its change in value.

    Args:
        trees: grown trees.
        kappa: weight of the critic's prediction, in observations; above 0.
        gamma: discount per task transition, in [0, 1].
        lam: how much of the following segments' credit flows back, in [0, 1]; 0 in the paper.
        leave_one_out: judge each segment against a baseline that leaves its own outcome out (`lam` must be 0).

    Raises:
        ValueError: no trees, or a number out of range.

    Source: project page, "Give the recovery its own learning signal" and "Backup details".
    """
    if leave_one_out and lam:
        raise ValueError(f"`lam`: expected 0 with `leave_one_out`, got {lam}")
    if not 0 < kappa < np.inf:
        raise ValueError(f"`kappa`: expected a finite number above 0, got {kappa}")
    _check_share(gamma=gamma, lam=lam)
    packed, arrays = pack(trees, values=[t.values for t in trees])
    result = backup(packed, arrays["values"], kappa=kappa, gamma=gamma)
    if leave_one_out:
        advantages = leave_one_out_advantages(packed, arrays["values"], result.refined, kappa=kappa, gamma=gamma)
    else:
        advantages = segment_advantages(packed, result.refined, gamma=gamma, lam=lam)
    return Credit(*(_unpack(a, trees) for a in (advantages, result.refined, result.target, result.num_children)))


def vineppo_credit(trees: Sequence[HostTree], mc_values: Sequence[np.ndarray], *, gamma: float = 1.0) -> Credit:
    """Credit every segment with the change in Monte Carlo value, R + gamma^d V(c') - V(c); no critic is trained.

    Args:
        trees: root rollouts.
        mc_values: per tree, float [N]: mean probe return of each state (`Round.mc_values`).
        gamma: discount per task transition.

    Returns:
        The credit; `refined` holds the Monte Carlo values.

    Raises:
        ValueError: a state has no probe, or `gamma` is out of range.
    """
    _check_share(gamma=gamma)
    for tree, values in zip(trees, mc_values, strict=True):
        if np.isnan(values).any():
            node = int(np.flatnonzero(np.isnan(values))[0])
            raise ValueError(
                f"tree of problem {tree.problem!r}: node {node} has no probe; give the pass of probes a larger budget"
            )
    packed, arrays = pack(trees, mc=list(mc_values))
    advantages = vineppo_advantages(packed, arrays["mc"], gamma=gamma)
    return _without_critic(trees, _unpack(advantages, trees), [np.asarray(v, np.float32) for v in mc_values])


def grpo_credit(trees: Sequence[HostTree], *, gamma: float = 1.0) -> Credit:
    """Credit every segment of a root rollout with the rollout's return, normalised within its problem.

    Raises:
        ValueError: no trees, one that branches below its root, so that its paths are no independent rollouts, or `gamma`
            out of range.
    """
    if not trees:
        raise ValueError("`trees`: expected at least one tree, got none")
    _check_share(gamma=gamma)
    rollouts = [_root_rollouts(tree, gamma) for tree in trees]
    group = np.zeros((len(trees), max(len(returns) for returns, _ in rollouts)), np.float32)
    mask = np.zeros(group.shape, bool)
    for i, (returns, _) in enumerate(rollouts):
        group[i, : len(returns)] = returns
        mask[i, : len(returns)] = True
    advantages = np.asarray(grpo_advantages(group, mask))
    per_node = [np.concatenate([[0], advantages[i, member[1:]]]).astype(np.float32) for i, (_, member) in enumerate(rollouts)]
    return _without_critic(trees, per_node, [t.values for t in trees])


def training_records(trees: Sequence[HostTree], credit: Credit) -> tuple[list[SegmentRecord], list[CriticExample]]:
    """Token records of every segment and critic examples of every expanded nonterminal state.

    What holds nothing that the policy generated is left out.
    """
    segments: list[SegmentRecord] = []
    examples: list[CriticExample] = []
    for tree, advantages, targets, counts in zip(trees, credit.advantages, credit.targets, credit.num_children, strict=True):
        for i, node in enumerate(tree.nodes):
            if counts[i] > 0:
                examples.append(CriticExample(tree.problem, i, tree.state(i), float(targets[i]), int(counts[i])))
            if (g := node.segment) is not None:
                for prompt, span in g.rows(tree.context(node.parent)):
                    if g.generated[span].any():
                        arrays = (g.token_ids[span], g.generated[span], g.logprobs[span], g.versions[span])
                        segments.append(SegmentRecord(tree.problem, i, prompt, *arrays, float(advantages[i])))
    return segments, examples


def _check_share(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            raise ValueError(f"`{name}`: expected a number in [0, 1], got {number}")


def _without_critic(trees: Sequence[HostTree], advantages: list[np.ndarray], values: list[np.ndarray]) -> Credit:
    """Credit of a method that refines nothing and trains no critic."""
    targets = [np.zeros(len(t), np.float32) for t in trees]
    return Credit(advantages, values, targets, [np.zeros(len(t), np.int32) for t in trees])


def _unpack(packed: jax.Array, trees: Sequence[HostTree]) -> list[np.ndarray]:
    array = np.asarray(packed)
    return [array[i, : len(tree)] for i, tree in enumerate(trees)]


def _root_rollouts(tree: HostTree, gamma: float) -> tuple[list[float], np.ndarray]:
    """Return of each root rollout, and for every node which rollout it belongs to."""
    returns: list[float] = []
    discount = np.ones(len(tree))
    member = np.zeros(len(tree), np.int64)
    has_child = np.zeros(len(tree), bool)
    for i, node in enumerate(tree.nodes[1:], 1):
        if node.parent and has_child[node.parent]:
            raise ValueError(f"tree of problem {tree.problem!r}: expected independent root rollouts, node {node.parent} branches")
        has_child[node.parent] = True
        assert node.segment is not None
        if node.parent == 0:
            member[i] = len(returns)
            returns.append(0.0)
        else:
            member[i] = member[node.parent]
        returns[member[i]] += discount[node.parent] * node.segment.reward
        discount[i] = discount[node.parent] * gamma**node.segment.num_steps
    return returns, member
