from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_jax import OutcomeStats, benefit, normal
from focus_jax.collection import (
    Budget,
    Frontier,
    Ledger,
    Pass,
    Probes,
    Random,
    RootRollouts,
    TokenEntropy,
    Uniform,
    ValueRefinement,
)


def make_frontier(seed, size, *, pending=True):
    rng = np.random.default_rng(seed)
    count = rng.integers(0, 5, size).astype(np.int32)
    mean = np.where(count > 0, rng.integers(0, 3, size) / 2, 0).astype(np.float32)
    stats = OutcomeStats(count, mean, (count * mean * (1 - mean)).astype(np.float32), np.zeros(size, np.int32))
    if pending:
        stats = replace(stats, pending=rng.integers(0, 2, size).astype(np.int32))
    tree = np.sort(rng.integers(0, 3, size))
    node = np.concatenate([np.arange((tree == t).sum()) for t in range(3)])
    entropy = rng.choice([0.1, 0.2, 0.3, np.inf], size)
    return Frontier(
        tree, node, rng.integers(0, 5, size).astype(np.float32) / 4, stats, entropy, rng.integers(0, 3, size), decision=seed
    )


RULES = [
    RootRollouts(),
    RootRollouts(2),
    Uniform(),
    Random(1),
    TokenEntropy(),
    ValueRefinement(),
    ValueRefinement(0.3, normal),
    Probes(3),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000), num=st.integers(1, 6), max_pending=st.integers(1, 3))
def test_several_at_once_equal_one_at_a_time(rule, seed, num, max_pending):
    frontier = make_frontier(seed, 11)
    together = rule(frontier, num, max_pending=max_pending)
    one_by_one = []
    for k in range(num):
        # The collector offers only what is below the cap.
        at = np.flatnonzero(frontier.stats.pending < max_pending)
        stats = OutcomeStats(*(getattr(frontier.stats, f)[at] for f in ("count", "mean", "m2", "pending")))
        offered = Frontier(
            frontier.tree[at], frontier.node[at], frontier.value[at], stats, frontier.entropy[at], frontier.probes[at], seed + k
        )
        choice = rule(offered, 1, max_pending=max_pending)
        if not choice:
            break
        pick = int(at[choice[0][0]])
        one_by_one.append(pick)
        frontier.stats.pending[pick] += 1
    assert [pick for pick, _ in together] == one_by_one


def test_value_refinement_buys_the_largest_positive_benefit():
    frontier = make_frontier(3, 40, pending=False)
    gains = np.asarray(benefit(frontier.value, frontier.stats))
    (pick, score), *_ = ValueRefinement()(frontier, 3, max_pending=1)
    assert pick == int(np.argmax(gains))
    assert score == pytest.approx(gains.max(), rel=1e-5)
    settled = replace(frontier, stats=replace(frontier.stats, count=np.zeros(40, np.int32)))
    assert ValueRefinement()(settled, 3, max_pending=1) == []  # kappa 1 and no outcome: nothing is worth it


def test_uniform_takes_the_least_visited_and_ties_go_to_the_lower_tree_then_node():
    count = np.array([2, 1, 1, 3, 1], np.int32)
    zeros = np.zeros(5, np.float32)
    stats = OutcomeStats(count, zeros, zeros, np.zeros(5, np.int32))
    frontier = Frontier(np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 1]), zeros, stats, zeros, np.zeros(5, int))
    assert [i for i, _ in Uniform()(frontier, 4, max_pending=1)] == [1, 2, 4, 0]


def test_random_differs_by_seed_and_decision_and_covers_the_candidates():
    frontier = make_frontier(0, 10, pending=False)

    def draw(seed, decision):
        return Random(seed)(replace(frontier, decision=decision), 1, max_pending=1)[0][0]

    assert {draw(0, d) for d in range(100)} == set(range(10))
    assert [draw(0, d) for d in range(20)] != [draw(1, d) for d in range(20)]
    assert draw(5, 7) == draw(5, 7)


@pytest.mark.parametrize("limits", [{}, {"continuations": 0}, {"tokens": -5}, {"tokens": 1.5}, {"continuations": True}])
def test_a_budget_of_nothing_is_refused(limits):
    with pytest.raises(ValueError, match="Budget"):
        Budget(**limits)


@pytest.mark.parametrize("limits", [{"max_pending": 0}, {"max_attempts": 0}])
def test_limits_of_a_pass_are_checked(limits):
    with pytest.raises(ValueError, match="at least 1"):
        Pass(Uniform(), Budget(tokens=1), **limits)


def test_ledger_keeps_charged_plus_reserved_within_the_budget():
    ledger = Ledger(Budget(continuations=3, tokens=100))
    ledger.reserve(60)
    assert ledger.free_tokens() == 40
    with pytest.raises(ValueError, match="do not fit"):
        ledger.reserve(41)
    ledger.reserve(40)
    ledger.settle(60, tokens=10, finished=True)
    assert ledger.free_tokens() == 50
    ledger.settle(40, tokens=7, finished=False)  # a failed attempt costs its tokens, not a continuation
    assert (ledger.tokens, ledger.continuations, ledger.free_tokens()) == (17, 1, 83)
    ledger.reserve(1)
    ledger.reserve(1)
    assert ledger.free_tokens() == -1


def test_describe_and_recorded_are_inverse():
    for rule in RULES:
        spec = Pass(rule, Budget(tokens=10), max_attempts=4)
        again = Pass.recorded(spec.describe())
        assert (again.is_probe, again.window, again.budget) == (spec.is_probe, spec.window, spec.budget)
        assert again.attempt_limit == spec.attempt_limit
        with pytest.raises(ValueError, match="chooses nothing"):
            again.rule(make_frontier(0, 3), 1, max_pending=1)
