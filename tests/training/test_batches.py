import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated import make_continuation, make_segment, make_tree
from training_records import letter_records, letter_round, make_example, make_record, sequences, to_ids, trained

from focus_jax.collection import Budget, Pass, RootRollouts, Round
from focus_jax.training import actor_batches, critic_batches, outcome_examples

small = functools.partial(actor_batches, tokens_per_batch=64)


def total(packed, field="weights"):
    return sum(float(getattr(batch, field)[batch.mask].sum()) for batch in packed.batches)


def test_a_chain_of_ten_segments_is_one_row():
    contexts = ["Q" + "ab" * i for i in range(10)]
    packed = small([make_record(context, "ab", i + 1) for i, context in enumerate(contexts)])
    assert trained(packed) == [("Q" + "ab" * 10, "." + "xx" * 10)]


def test_siblings_have_rows_of_their_own_in_which_the_shared_part_is_conditioning():
    packed = small(
        [make_record("Q", "ab", 1), make_record("Qab", "cd", 2), make_record("Qab", "ef", 3), make_record("Qabcd", "g", 4)]
    )
    assert trained(packed) in ([("Qabcdg", ".xxxxx"), ("Qabef", "...xx")], [("Qabcdg", "...xxx"), ("Qabef", ".xxxx")])


def test_segments_that_say_the_same_are_spread_over_the_rows_of_what_follows():
    """Three siblings alike, two of which go on in different ways: three rows would do, two are enough for the first two."""
    records = [make_record("Q", "a", node) for node in (1, 2, 3)]
    records += [make_record("Qa", "b", 4), make_record("Qa", "c", 5)]
    assert trained(small(records)) == [("Qa", ".x"), ("Qab", ".xx"), ("Qac", ".xx")]
    assert trained(small(records[1:])) == [("Qab", ".xx"), ("Qac", ".xx")]


def test_what_follows_the_last_trained_token_is_dropped_and_what_lies_between_is_kept():
    record = make_record("Q", "abOBS", generated="xx...")
    assert trained(small([record])) == [("Qab", ".xx")]
    assert trained(small([record, make_record("QabOBS", "c", 2)])) == [("QabOBSc", ".xx...x")]
    # A segment without anything sampled has no record; its tokens stand between two that have.
    assert trained(small([record, make_record("QabOBSmore", "c", 2)])) == [("QabOBSmorec", ".xx.......x")]


def test_the_same_tokens_of_another_problem_are_another_row():
    assert len(trained(small([make_record("Q", "a"), make_record("Qa", "b", problem="q")]))) == 2


def test_every_sampled_token_of_grown_trees_is_trained_once_with_what_belongs_to_it():
    records, _ = letter_records()
    packed = small(records, tokens_per_batch=256)
    advantage = Counter()
    for record in records:
        for t in np.flatnonzero(record.generated):
            row = (*record.prompt_ids, *record.token_ids[: t + 1])
            advantage[row, round(record.advantage, 5), round(float(record.logprobs[t]), 5)] += 1
    found = Counter()
    for batch in packed.batches:
        for row, here in sequences(batch):
            for t in np.flatnonzero(batch.mask[row, here]):
                ids = tuple(batch.tokens[row, here.start : here.start + t + 1].tolist())
                values = (batch.advantages[row, here.start + t], batch.old_logprobs[row, here.start + t])
                found[(ids, *(round(float(v), 5) for v in values))] += 1
    assert found == advantage
    assert sum(found.values()) == letter_round().tokens()
    # One row for every path to a leaf and not one more, whatever the letters say.
    leaves = sum(len(tree) - len(set(tree.parent[1:].tolist())) for tree in letter_round().grown)
    assert sum(1 for batch in packed.batches for _ in sequences(batch)) <= leaves


def test_weights_are_the_mean_over_tokens_then_segments_then_problems():
    records = [make_record("Q", "abcd", 1), make_record("Qabcd", "e", 2), make_record("Q", "ab", 1, "other")]
    packed = small(records)
    weights = sorted(float(w) for batch in packed.batches for w in batch.weights[batch.mask])
    np.testing.assert_allclose(weights, [1 / 2 / 2 / 4] * 4 + [1 / 2 / 2, 1 / 2 / 2] + [1 / 2 / 2] * 1, rtol=1e-6)
    assert total(packed) == pytest.approx(1)
    assert {float(w) for batch in small(records, weighting="token").batches for w in batch.weights[batch.mask]} == {1.0}


def test_a_rollout_of_several_rows_counts_once_b24():
    """Rows of 50 and 100 tokens, three of 30, one of 40: a loss of 1 per token is 1 on the mean, each rollout a third of it."""
    rollouts = {1: (50, 100), 2: (30, 30, 30), 3: (40,)}
    records = [
        make_record(chr(65 + i) * (node + 1), "x" * length, node)
        for node, lengths in rollouts.items()
        for i, length in enumerate(lengths)
    ]
    packed = actor_batches(records, tokens_per_batch=256)
    assert total(packed) == pytest.approx(1)
    by_length = Counter()
    for batch in packed.batches:
        for row, here in sequences(batch):
            by_length[int(batch.mask[row, here].sum())] += float(batch.weights[row, here].sum())
    assert by_length[50] + by_length[100] == pytest.approx(1 / 3)
    assert by_length[30] == pytest.approx(1 / 3)
    assert by_length[40] == pytest.approx(1 / 3)


def test_a_record_left_out_leaves_the_denominator_too_b26():
    assert total(small([make_record("Q", "abcd", 1)])) == total(small([make_record("Q", "abcd", 1), make_record("Q", "efgh", 2)]))


def test_rows_fill_batches_of_a_short_list_of_shapes():
    records = [make_record("Q", chr(65 + i) * length, i + 1) for i, length in enumerate([40, 29, 20, 9, 9, 3])]
    packed = actor_batches(records, tokens_per_batch=64, buckets=(16, 32, 64))
    # 41 + 21 leave 2 of 64; 30 opens two rows of 32, which hold the rest: 10 + 10 + 4 in the second.
    shapes = [batch.tokens.shape for batch in packed.batches]
    assert shapes == [(1, 64), (2, 32)]
    assert packed.num_tokens == 41 + 30 + 21 + 10 + 10 + 4
    assert packed.padding == pytest.approx(1 - 116 / 128)
    assert [batch.segment_ids.max(1).tolist() for batch in packed.batches] == [[2], [1, 3]]
    assert packed.problems == (("p",), ("p",))


def test_the_number_of_rows_is_a_multiple_of_what_the_mesh_wants():
    records = [make_record("Q", "a" * 19)]
    for tokens, multiple, rows in ((64, 1, 2), (128, 4, 4), (224, 4, 4), (32, 8, 8), (8 * 32, 4, 8)):
        packed = actor_batches(records, tokens_per_batch=tokens, buckets=(32,), row_multiple=multiple)
        assert packed.batches[0].tokens.shape == (rows, 32)


def test_a_hundred_batches_of_random_lengths_compile_no_more_than_there_are_buckets_b65():
    draw = np.random.default_rng(0)

    @jax.jit
    def use(batch):
        return jnp.sum(jnp.where(batch.mask, batch.weights, 0))

    padding = []
    for _ in range(100):
        lengths = draw.integers(1, 4096, draw.integers(1, 6))
        records = [make_record("Q", "a" * length, i, str(i)) for i, length in enumerate(lengths)]
        packed = actor_batches(records, tokens_per_batch=4096)
        assert sum(float(use(batch)) for batch in packed.batches) == pytest.approx(1, rel=1e-4)
        padding.append(packed.padding)
    assert 1 < use._cache_size() <= 6  # 128, 256, ..., 4096
    assert 0 < np.mean(padding) < 0.5


def test_unknown_logprobs_stay_unknown_b32():
    logprobs = np.array([-0.1, np.nan, -9999.0, -np.inf, -0.3], np.float32)
    (batch,) = small([make_record("Q", "abcde", logprobs=logprobs)]).batches
    np.testing.assert_allclose(batch.old_logprobs[0, 1:6], [-0.1, np.nan, np.nan, np.nan, -0.3], rtol=1e-6)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"advantage": np.nan}, "node 7: expected a finite advantage, got nan"),
        ({"generated": ".."}, "node 7: expected tokens that the policy sampled, got none"),
        ({"prompt": ""}, "node 7: expected a prompt"),
        ({"logprobs": np.array([-0.1, 0.5])}, "node 7: expected log-probabilities, at most 0, NaN where unknown, got 0.5"),
        ({"versions": np.zeros(3, int)}, "node 7: expected arrays of one length, got .*'versions': 3"),
        ({"reply": "a" * 100}, "node 7: expected a row of at most 64 tokens, the longest bucket, got 101; raise"),
    ],
)
def test_what_means_nothing_is_refused_with_problem_and_node(record, message):
    good = make_record("Q", "a", 1, "fine")
    with pytest.raises(ValueError, match=rf"problem 'odd', {message}"):
        small([good, make_record(**{"prompt": "Q", "reply": "ab", "node": 7, "problem": "odd"} | record)])


def test_numbers_out_of_range_are_refused():
    records = [make_record("Q", "a")]
    for knobs, message in [
        ({"weighting": "row"}, "`weighting`: expected 'segment' or 'token', got 'row'"),
        ({"max_staleness": -1}, "`max_staleness`: expected at least 0"),
        ({"tokens_per_batch": 0}, "`tokens_per_batch` and `row_multiple` of at least 1, got 0 and 1"),
        ({"row_multiple": 0}, "got 64 and 0"),
        ({"buckets": (4, 4)}, r"`buckets`: expected increasing lengths of at least 1, got \(4, 4\)"),
        ({"buckets": ()}, "`buckets`"),
    ]:
        with pytest.raises(ValueError, match=message):
            small(records, **knobs)
    with pytest.raises(ValueError, match="at least one record to train on, got none"):
        small([])


def test_tokens_of_an_older_policy_are_refused_unless_allowed():
    records = [make_record("Q", "ab", 1, versions=np.array([3, 3])), make_record("Q", "cd", 2, versions=np.array([3, 2]))]
    with pytest.raises(ValueError, match=r"problem 'p', node 2: expected tokens of policy versions 3 to 3, got 2"):
        small(records)
    assert total(small(records, max_staleness=1)) == pytest.approx(1)
    # Where nothing was sampled there is no version.
    small([make_record("Q", "abO", 1, generated="xx.", versions=np.array([3, 3, -1]))])


def test_states_that_begin_one_another_share_a_row():
    packed = critic_batches(
        [make_example("Q", 0, target=0.1), make_example("Qab", 1, target=0.2), make_example("Qabcd", 2, target=0.3)],
        tokens_per_batch=8,
    )
    (batch,) = packed.batches
    assert trained(packed) == [("Qabcd", "x.x.x")]
    np.testing.assert_allclose(batch.targets[batch.mask], [0.1, 0.2, 0.3], rtol=1e-6)
    np.testing.assert_allclose(batch.weights[batch.mask], 1 / 3, rtol=1e-6)


def test_states_that_read_the_same_are_all_trained():
    examples = [make_example("Q", 0), make_example("Qa", 1, target=0.0), make_example("Qa", 2, target=1.0)]
    packed = critic_batches([*examples, make_example("Qab", 3)], tokens_per_batch=8)
    assert trained(packed) == [("Qa", "xx"), ("Qab", ".xx")]
    assert total(packed, "targets") == pytest.approx(0.5 + 0 + 1 + 0.5)


def test_the_critic_reads_what_it_is_told_to():
    examples = [make_example("Q", 0), make_example("Qab", 1, "q")]
    packed = critic_batches(examples, read=lambda state: to_ids("left 3 ")[: len(state.context) + 2], tokens_per_batch=16)
    assert trained(packed) == [("lef", "..x"), ("left ", "....x")]
    assert packed.problems == (("p", "q"),)
    for read, message in [(lambda state: to_ids(""), "int32"), (lambda state: np.zeros(2), "float64")]:
        with pytest.raises(ValueError, match=f"problem 'p', node 0: expected `read` to answer integers .*{message}"):
            critic_batches(examples, read=read)
    with pytest.raises(ValueError, match="problem 'p', node 4: expected a finite target, got inf"):
        critic_batches([make_example("Q", 4, target=np.inf)])


def test_critic_weights_are_the_mean_over_states_then_problems():
    packed = critic_batches([make_example("Q", 0), make_example("Qa", 1), make_example("R", 0, "r")], tokens_per_batch=8)
    assert sorted(float(w) for batch in packed.batches for w in batch.weights[batch.mask]) == [0.25, 0.25, 0.5]


def test_every_state_of_grown_trees_has_its_target_at_its_last_token():
    """B15: the value of a state is read at the last token of its context."""
    _, examples = letter_records()
    wanted = Counter((tuple(e.state.context.tolist()), round(e.target, 5)) for e in examples)
    found = Counter()
    for batch in critic_batches(examples, tokens_per_batch=256).batches:
        for row, here in sequences(batch):
            for t in np.flatnonzero(batch.mask[row, here]):
                ids = tuple(batch.tokens[row, here.start : here.start + t + 1].tolist())
                found[ids, round(float(batch.targets[row, here.start + t]), 5)] += 1
    assert found == wanted


def test_outcome_examples_hold_mean_suffix_outcomes_instead_of_the_critics_predictions():
    """Two rollouts through one state: the root has seen one from its own start, the state one of each."""
    round_ = Round([Pass(RootRollouts(1), Budget(continuations=1))], ["p", "never started"])
    tree = make_tree(value=0.9)
    first = make_continuation(make_segment("a"), make_segment("b", reward=1.0, status="terminal"), values=[0.8, 0.0])
    second = make_continuation(make_segment("c"), make_segment("d", status="terminal"), values=[0.7, 0.0])
    round_.trees[0] = tree
    round_.evidence.add_root(0, 0.9)
    for start, continuation in ((0, first), (1, second)):
        tree.add(start, continuation, 0)
        round_.evidence.record(0, start, continuation)
    examples = outcome_examples(round_)
    assert [(e.node, e.target, e.num_children) for e in examples] == [(0, 1.0, 1), (1, 0.5, 2), (3, 0.0, 1)]
    assert "".join(map(chr, examples[2].state.context)) == "Qac"


def test_outcome_examples_of_a_collected_round_are_its_evidence():
    round_ = letter_round()
    examples = outcome_examples(round_)
    for example in examples:
        problem = round_.problems.index(example.problem)
        assert example.target == pytest.approx(float(round_.evidence.nodes["mean"][problem, example.node]))
    # The same states as those with a mean child return.
    assert {(e.problem, e.node) for e in examples} == {(e.problem, e.node) for e in letter_records()[1]}
