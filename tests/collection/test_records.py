import numpy as np
import pytest
from simulated import make_continuation, make_segment, make_tree

from focus_jax.agents import Reset
from focus_jax.collection import focus_credit, grpo_credit, training_records, vineppo_credit


def end(reward, **fields):
    return make_segment("z", reward=reward, status="terminal", **fields)


def test_worked_example_of_the_project_page():
    tree = make_tree(value=0.8)
    for reward in (0.0, 1.0):
        tree.add(0, make_continuation(end(reward)), attempt=0)
    credit = focus_credit([tree])
    assert credit.targets[0][0] == pytest.approx(0.5)
    assert credit.refined[0][0] == pytest.approx(0.6)
    np.testing.assert_allclose(credit.advantages[0], [0, -0.6, 0.4], atol=1e-6)


def test_the_state_value_at_a_terminal_node_leaks_nowhere_b19():
    tree = make_tree(value=0.4)
    tree.add(0, make_continuation(end(1.0), values=[0.3]), attempt=0)
    credit = focus_credit([tree], gamma=0.9, kappa=1e9)  # the refined value stays at the critic's 0.4
    assert credit.advantages[0][1] == pytest.approx(0.6)


def test_cut_off_bootstraps_from_the_last_state_b12():
    tree = make_tree(value=0.6)
    tree.add(0, make_continuation(make_segment(status="cut_off"), values=[0.7]), attempt=0)
    credit = focus_credit([tree], gamma=0.9, kappa=1e9)
    assert credit.advantages[0][1] == pytest.approx(0.03, abs=1e-6)


def test_eight_graded_and_two_lost_average_over_eight_b38():
    tree = make_tree(value=0.2)
    for reward in [1.0] * 4 + [0.0] * 4:
        tree.add(0, make_continuation(end(reward)), attempt=0)
    credit = focus_credit([tree])  # the two lost ones are not in the tree at all
    assert (credit.targets[0][0], credit.num_children[0][0]) == (0.5, 8)


def test_leave_one_out_judges_a_segment_without_its_own_outcome():
    tree = make_tree(value=0.5)
    for reward in (1.0, 0.0, 0.0):
        tree.add(0, make_continuation(end(reward)), attempt=0)
    credit = focus_credit([tree], leave_one_out=True)
    np.testing.assert_allclose(credit.advantages[0], [0, 1 - 0.5 / 3, -1.5 / 3, -1.5 / 3], atol=1e-6)
    with pytest.raises(ValueError, match="`lam`"):
        focus_credit([tree], leave_one_out=True, lam=0.5)


def test_grpo_shares_a_rollouts_advantage_over_its_segments():
    tree = make_tree()
    for reward in (1.0, 0.0, 0.0):
        tree.add(0, make_continuation(make_segment(), end(reward)), attempt=0)
    other = make_tree("lonely")
    other.add(0, make_continuation(end(1.0)), attempt=0)
    credit = grpo_credit([tree, other])
    mean, spread = 1 / 3, np.std([1, 0, 0], ddof=1)
    expected = [0, *[(1 - mean) / spread] * 2, *[-mean / spread] * 4]
    np.testing.assert_allclose(credit.advantages[0], expected, rtol=1e-4)
    np.testing.assert_array_equal(credit.advantages[1], [0, 0])  # a group of one, B17


def test_grpo_refuses_a_tree_that_branches_below_its_root():
    tree = make_tree()
    tree.add(0, make_continuation(make_segment(), end(1.0)), attempt=0)
    tree.add(1, make_continuation(end(0.0)), attempt=1)
    with pytest.raises(ValueError, match="node 1 branches"):
        grpo_credit([tree])


def test_vineppo_uses_probe_means():
    tree = make_tree()
    tree.add(0, make_continuation(make_segment(), end(1.0)), attempt=0)
    credit = vineppo_credit([tree], [np.array([0.25, 0.75, 0.0])])
    np.testing.assert_allclose(credit.advantages[0], [0, 0.5, 0.25], atol=1e-6)


def test_every_sampled_token_is_in_exactly_one_record():
    tree = make_tree(context="Q")
    tree.add(0, make_continuation(make_segment("ab"), make_segment("cd"), end(1.0)), attempt=0)
    tree.add(1, make_continuation(make_segment("ef"), end(0.0)), attempt=1)
    segments, examples = training_records([tree], focus_credit([tree]))
    rows = [("".join(map(chr, s.prompt_ids)), "".join(map(chr, s.token_ids))) for s in segments]
    assert rows == [("Q", "ab"), ("Qab", "cd"), ("Qabcd", "z"), ("Qab", "ef"), ("Qabef", "z")]
    contexts = [("".join(map(chr, e.state.context)), e.num_children) for e in examples]
    assert contexts == [("Q", 1), ("Qab", 2), ("Qabcd", 1), ("Qabef", 1)]
    assert examples[1].target == pytest.approx((0.5 + 0.0) / 2)  # children refined to (0+1)/2 and (0+0)/2


def test_after_compaction_the_prompt_is_the_new_context():
    tree = make_tree(context="Q")
    reset = Reset(4, np.array([ord(c) for c in "QS"], np.int32))
    tree.add(0, make_continuation(make_segment("long", resets=(reset,), reason="compaction"), end(1.0)), attempt=0)
    segments, _ = training_records([tree], focus_credit([tree]))
    assert [("".join(map(chr, s.prompt_ids)), "".join(map(chr, s.token_ids))) for s in segments] == [("Q", "long"), ("QS", "z")]


def test_every_context_of_a_segment_has_its_row():
    tree = make_tree(context="Q")
    resets = tuple(Reset(position, np.array([ord(c) for c in context], np.int32)) for position, context in [(2, "R"), (3, "S")])
    tree.add(0, make_continuation(make_segment("abcd", resets=resets), end(1.0)), attempt=0)
    segments, examples = training_records([tree], focus_credit([tree]))
    rows = [("".join(map(chr, s.prompt_ids)), "".join(map(chr, s.token_ids)), s.node) for s in segments]
    assert rows == [("Q", "ab", 1), ("R", "c", 1), ("S", "d", 1), ("Sd", "z", 2)]
    assert "".join(map(chr, examples[1].state.context)) == "Sd"
    assert len({s.advantage for s in segments[:3]}) == 1


def test_observations_are_not_generated_and_empty_segments_are_left_out():
    tree = make_tree()
    observed = np.array([True, False, False])
    empty = make_segment("", status="terminal")
    tree.add(0, make_continuation(make_segment("abc", generated=observed, task=observed), empty), attempt=0)
    segments, _ = training_records([tree], focus_credit([tree]))
    assert [s.generated.tolist() for s in segments] == [[True, False, False]]
