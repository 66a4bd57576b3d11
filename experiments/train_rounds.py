"""What sets the methods of `train.py` apart, passes and credit, and what is measured on a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from focus_jax.agents import Agent, State
from focus_jax.collection import (
    Budget,
    Credit,
    HostTree,
    Pass,
    Probes,
    RootRollouts,
    Round,
    ValueRefinement,
    focus_credit,
    grpo_credit,
    vineppo_credit,
)
from focus_jax.tasks.detour import page_of
from focus_jax.training import Packed

Method = Literal["focus", "grpo", "vineppo"]
Measures = dict[str, tuple[float, float]]
"""Names to a sum and the weight in it: those of several processes add up."""


def plan_passes(method: Method, agent: Agent, *, budget: int, num_roots: int, kappa: float, branch_every: int) -> list[Pass]:
    """The passes of a round that generate at most `budget` tokens per problem.

    VinePPO's root rollouts are as many as leave room for a probe of every state they may come by, at the highest price: a
    rollout and its probes cost at most p(0) + p(1) + ... with p(k) what a continuation can generate from the k-th branch
    point on, and the root's own probe p(0). What they do not use stays unspent.

    Raises:
        ValueError: the budget does not hold a round.
    """
    nothing = np.zeros(0, np.int32)
    turns = range(0, agent.max_turns, branch_every)
    prices = [agent.max_generated(State(nothing, 0, b"", num_turns=k, num_tokens=k)) for k in turns]
    if method == "grpo":
        _check_budget(budget, 2 * prices[0], "two rollouts")
        return [Pass(RootRollouts(), Budget(tokens=budget))]
    if method == "vineppo":
        _check_budget(budget, prices[0] + sum(prices), "one rollout and a probe of every state on it")
        num = (budget - prices[0]) // sum(prices)
        return [
            Pass(RootRollouts(num), Budget(continuations=num)),
            Pass(Probes(), Budget(tokens=budget - num * prices[0])),
        ]
    _check_budget(budget, (num_roots + 1) * prices[0], f"{num_roots} root rollouts and one continuation")
    return [
        Pass(RootRollouts(num_roots), Budget(continuations=num_roots)),
        Pass(ValueRefinement(kappa), Budget(tokens=budget - num_roots * prices[0])),
    ]


def _check_budget(budget: int, least: int, what: str) -> None:
    if budget < least:
        raise ValueError(f"--budget: expected at least {least} tokens, room for {what}, got {budget}")


def give_credit(method: Method, round_: Round, *, kappa: float, lam: float, leave_one_out: bool) -> tuple[list[HostTree], Credit]:
    """The trees to learn from, and the method's credit; trees in which nothing came back, or a probe is missing, are left out.

    Raises:
        ValueError: no tree is left.
    """
    values = round_.mc_values() if method == "vineppo" else [t.values for t in round_.grown]
    kept = [(t, v) for t, v in zip(round_.grown, values, strict=True) if len(t) > 1 and not np.isnan(v).any()]
    if not kept:
        raise ValueError("no tree of the round is complete; " + "; ".join(f.message for f in round_.failures[:3]))
    trees = [tree for tree, _ in kept]
    if method == "vineppo":
        return trees, vineppo_credit(trees, [value for _, value in kept], gamma=round_.gamma)
    if method == "grpo":
        return trees, grpo_credit(trees, gamma=round_.gamma)
    return trees, focus_credit(trees, kappa=kappa, gamma=round_.gamma, lam=lam, leave_one_out=leave_one_out)


def measure_round(round_: Round, num_trees: int) -> Measures:
    """What came back, as counts of the problems and the rollouts from their roots."""
    reward = count = solved = 0.0
    for problem, tree in enumerate(round_.trees):
        if tree is not None:
            stats = round_.stats(problem)
            if stats.count[0]:  # one share for each problem: refinement starts more rollouts where outcomes differ
                count += 1
                reward += float(stats.mean[0])
            solved += bool((tree.reward > 0).any())
    ledgers = [ledger for group in round_.ledgers for ledger in group]
    return {
        "reward": (reward, count),
        "solved": (solved, len(round_.problems)),
        "tokens_generated": (float(round_.tokens()), 0),
        "continuations": (sum(ledger.continuations for ledger in ledgers), 0),
        "failures": (len(round_.failures), 0),
        "problems_ended_early": (len(round_.errors), 0),
        "problems_left_out": (len(round_.problems) - num_trees, 0),
    }


def measure_critic(trees: list[HostTree], credit: Credit) -> Measures:
    """What `explained_variance` is made of: targets G, and what the critic's predictions leave of them."""
    expanded = [n > 0 for n in credit.num_children]
    targets = np.concatenate([t[e] for t, e in zip(credit.targets, expanded, strict=True)]).astype(np.float64)
    rest = targets - np.concatenate([t.values[e] for t, e in zip(trees, expanded, strict=True)])
    columns = {"_target": targets, "_target2": targets**2, "_rest": rest, "_rest2": rest**2}
    return {name: (float(column.sum()), len(column)) for name, column in columns.items()}


def measure_batches(name: str, packed: Packed[Any] | None, *, updates: int) -> Measures:
    """Tokens that the updates run over, and the share of the positions that hold nothing."""
    tokens = 0 if packed is None else packed.num_tokens
    positions = 0 if packed is None else sum(batch.tokens.size for batch in packed.batches)
    return {f"{name}_tokens_trained": (float(tokens * updates), 0), f"{name}_padding": (float(positions - tokens), positions)}


def measure_values(round_: Round, trees: list[HostTree], credit: Credit, exact: np.ndarray, *, critic: bool) -> Measures:
    """Squared errors against exact values [P, max_steps + 1, S + 1] of `round_`'s problems, at the open nodes of the trees."""
    errors: dict[str, list[np.ndarray]] = {"critic": [], "refined": [], "outcomes": []}
    for tree, refined in zip(trees, credit.refined, strict=True):
        problem = round_.problems.index(tree.problem)
        is_open = ~tree.terminal
        where = [page_of(node.environment) if alive else (0, 0) for node, alive in zip(tree.nodes, is_open, strict=True)]
        truth = np.array([exact[problem, replies, page] for page, replies in where])
        stats = round_.stats(problem)
        seen = is_open & (np.asarray(stats.count) > 0)
        errors["critic"].append((tree.values - truth)[is_open])
        errors["refined"].append((refined - truth)[is_open])
        errors["outcomes"].append((np.asarray(stats.mean) - truth)[seen])
    if not critic:  # predictions and refined values of methods without a critic mean nothing
        del errors["critic"], errors["refined"]
    return {f"error_{name}": (float((np.concatenate(e) ** 2).sum()), sum(map(len, e))) for name, e in errors.items()}


def summarize(measures: Measures) -> dict[str, float]:
    """Means where there is a weight, sums elsewhere, over all processes; explained variance in place of its parts."""
    totals = _over_processes(measures)
    means = {name: total / weight if weight else total for name, (total, weight) in totals.items()}
    if "_target" in means:
        target, target2, rest, rest2 = (means.pop(f"_{name}") for name in ("target", "target2", "rest", "rest2"))
        variance = target2 - target**2
        means["explained_variance"] = 1 - (rest2 - rest**2) / variance if variance > 0 else 0.0
    return means


def _over_processes(measures: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    if jax.process_count() == 1:
        return dict(measures)
    totals = np.sum(multihost_utils.process_allgather(np.array(list(measures.values()), np.float64)), 0)
    return dict(zip(measures, map(tuple, totals.tolist()), strict=True))
