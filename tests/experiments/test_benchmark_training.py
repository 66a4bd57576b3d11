"""What the comparison of trainers makes of their timings, and the records that this package's trainer trains on."""

import numpy as np
import pytest
from benchmarks.trainers.grpo_focus_jax import group_records
from benchmarks.training import Training, figures, make_setting

from focus_jax.training import actor_batches


def steps(seconds, *, num_tokens=6.0):
    return [{"whole": s, "sample": s / 4, "update": 3 * s / 4, "cpu": 2 * s, "num_tokens": num_tokens} for s in seconds]


def test_medians_leave_the_warm_up_out_and_pool_the_processes():
    processes = {"focus_jax": [steps([50, 1, 2]), steps([60, 3, 9])], "trl": [steps([8, 5, 5]), steps([8, 5, 5])]}
    measured = {figure.name: figure for figure in figures(processes, 6, 1)}
    assert measured["whole step, focus_jax"].value == 2.5  # of 1, 2, 3, 9
    assert measured["trained tokens, focus_jax"].value == pytest.approx(6 / 2.5)
    assert measured["whole step, trl / focus_jax"].value == 2.0
    assert measured["whole step, trl / focus_jax"].met
    assert measured["update, trl / focus_jax"].value == 2.0
    assert measured["first 1 steps, compilation included, focus_jax"].value == 55


def test_a_slower_package_misses_the_target():
    measured = {figure.name: figure for figure in figures({"focus_jax": [steps([1, 4])], "tunix": [steps([1, 4])]}, 6, 1)}
    assert measured["whole step, tunix / focus_jax"].met is False


def test_a_trainer_that_stopped_early_is_refused():
    with pytest.raises(ValueError, match=r"expected 6 trained tokens.*'trl': \{5\}"):
        figures({"focus_jax": [steps([1, 1])], "trl": [steps([1, 1], num_tokens=5.0)]}, 6, 1)


def test_every_trainer_gets_prompts_of_the_model_vocabulary():
    setting = make_setting(Training(num_prompts=2, prompt_length=3, vocab_size=7, warm_up=1, steps=2), "folder")
    prompts = np.array(setting["prompts"])
    assert prompts.shape == (3, 2, 3)
    assert prompts.min() >= 0
    assert prompts.max() < 7


def test_records_hold_every_reply_with_the_advantage_of_its_group():
    # Shares of even ids: 1 and 0 in the first group, 1/2 twice in the second.
    replies = [([2, 4], [-1.0, -2.0]), ([1, 3], [-3.0, -4.0]), ([1, 2], [-5.0, -6.0]), ([2, 1], [-7.0, -8.0])]
    records = group_records([[5, 6], [7, 8]], replies, 3)
    assert [record.problem for record in records] == ["p0", "p0", "p1", "p1"]
    np.testing.assert_allclose([record.advantage for record in records], [0.5**0.5, -(0.5**0.5), 0, 0], atol=1e-4)
    packed = actor_batches(records, weighting="token", tokens_per_batch=16, buckets=(4,))
    assert sum(int(batch.mask.sum()) for batch in packed.batches) == 8
    np.testing.assert_array_equal(records[3].prompt_ids, [7, 8])
    np.testing.assert_array_equal(records[3].logprobs, np.float32([-7, -8]))
    np.testing.assert_array_equal(records[3].versions, [3, 3])
