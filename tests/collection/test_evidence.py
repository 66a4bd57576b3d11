import numpy as np
import pytest
from simulated import make_continuation, make_segment

from focus_jax.collection import Evidence
from focus_jax.collection.evidence import edge_entropies


def test_one_observation_at_the_start_and_at_every_new_node_none_above():
    evidence = Evidence(1)
    evidence.add_root(0, 0.5)
    evidence.record(0, 0, make_continuation(make_segment(), make_segment(), make_segment(reward=1.0, status="terminal")))
    assert evidence.nodes["count"][0, :4].tolist() == [1, 1, 1, 1]
    evidence.record(0, 2, make_continuation(make_segment(reward=0.0, status="terminal")))
    assert evidence.nodes["count"][0, :5].tolist() == [1, 1, 2, 1, 1]  # strict ancestors of node 2 keep theirs
    assert evidence.nodes["mean"][0, :4].tolist() == [1.0, 1.0, 0.5, 0.0]
    assert evidence.nodes["m2"][0, 2] == pytest.approx(0.5)


def test_suffix_returns_are_discounted_by_task_transitions():
    evidence = Evidence(1, gamma=0.9)
    evidence.add_root(0, 0.0)
    path = [make_segment(reward=1.0, steps=2), make_segment(steps=0), make_segment(reward=2.0, steps=3, status="terminal")]
    evidence.record(0, 0, make_continuation(*path))
    np.testing.assert_allclose(evidence.nodes["mean"][0, :4], [1 + 0.81 * 2, 2, 2, 0])


def test_a_cut_off_path_ends_in_the_critics_value_b12():
    evidence = Evidence(1, gamma=0.9)
    evidence.add_root(0, 0.6)
    evidence.record(0, 0, make_continuation(make_segment(status="cut_off"), values=[0.7]))
    assert evidence.nodes["mean"][0, 0] == pytest.approx(0.63)
    assert not evidence.nodes["open"][0, 1]  # no candidate, see the table of node kinds


def test_welford_equals_numpy_on_many_outcomes():
    evidence = Evidence(1)
    evidence.add_root(0, 0.0)
    outcomes = 1000 + np.random.default_rng(0).normal(size=200)
    for outcome in outcomes:
        evidence.record(0, 0, make_continuation(make_segment(reward=float(outcome), status="terminal")))
    root = {name: column[0, 0] for name, column in evidence.nodes.items()}
    assert root["mean"] == pytest.approx(outcomes.mean(), rel=1e-12)
    assert root["m2"] == pytest.approx(((outcomes - outcomes.mean()) ** 2).sum(), rel=1e-9)
    assert evidence.num_nodes[0] == 201  # and the arrays have grown past their first capacity


def test_frontier_holds_open_affordable_nodes_below_the_pending_cap():
    evidence = Evidence(3)
    for tree in range(3):
        evidence.add_root(tree, 0.1 * tree, price=10)
        evidence.record(tree, 0, make_continuation(make_segment(), make_segment(status="terminal"), price=4))
    evidence.nodes["pending"][1, 0] = 1
    frontier = evidence.frontier(np.array([np.inf, 10, 5]))
    assert list(zip(frontier.tree, frontier.node, strict=True)) == [(0, 0), (0, 1), (1, 1), (2, 1)]
    assert len(evidence.frontier(np.array([-1.0, -1, -1]))) == 0
    assert len(evidence.frontier(np.array([np.inf] * 3), max_pending=2)) == 6


def test_a_state_that_cannot_be_copied_is_never_offered_b43():
    from dataclasses import replace

    evidence = Evidence(1)
    evidence.add_root(0, 0.0)
    c = make_continuation(make_segment(), make_segment(status="terminal"))
    evidence.record(0, 0, replace(c, states=(replace(c.states[0], resumable=False), c.states[1])))
    assert evidence.frontier(np.array([np.inf])).node.tolist() == [0]


def test_probes_are_averaged_and_add_nothing_else():
    evidence = Evidence(1)
    evidence.add_root(0, 0.0)
    before = {name: column.copy() for name, column in evidence.nodes.items()}
    for reward in (1.0, 0.0, 0.0, 1.0):
        evidence.record_probe(0, 0, make_continuation(make_segment(reward=reward, status="terminal")))
    assert (evidence.nodes["probes"][0, 0], evidence.nodes["probe_mean"][0, 0]) == (4, 0.5)
    for name in ("count", "mean", "m2", "pending", "open"):
        np.testing.assert_array_equal(evidence.nodes[name], before[name])


def slow_entropy(logprobs, task, window):
    """Largest mean of -p log p over windows of consecutive task tokens, in float64."""
    h = [-np.exp(x) * x for x, t in zip(logprobs.astype(np.float64), task, strict=True) if t]
    windows = [h[i : i + window] for i in range(max(1, len(h) - window + 1))]
    return max(np.mean(w) for w in windows)


def test_edge_entropies_equal_the_definition():
    rng = np.random.default_rng(1)
    segments = []
    for length in (1, 3, 8, 9, 70):
        logprobs = -rng.exponential(1, length).astype(np.float32)
        task = rng.random(length) < 0.7
        task[0] = True
        segments.append(make_segment("x" * length, logprobs=logprobs, task=task))
    expected = [slow_entropy(s.logprobs, s.task, 8) for s in segments]
    np.testing.assert_allclose(edge_entropies(segments, 8), expected, rtol=1e-5)


def test_unknown_log_probabilities_and_context_management_do_not_count_b32():
    logprobs = np.array([-1.0, np.nan, -1.0], np.float32)
    score = edge_entropies([make_segment("abc", logprobs=logprobs), make_segment("abc", task=np.zeros(3, bool))], 8)
    assert score[0] == pytest.approx(np.exp(-1))
    assert np.isnan(score[1])
