"""Errors that add up over micro-batches, and intervals that cover what they promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from focus_jax import paired_bootstrap, value_error


def test_value_error_is_a_sum_and_a_weight_that_add_up_over_parts():
    rng = np.random.default_rng(0)
    values, truth = rng.random((2, 6, 10), dtype=np.float32)
    mask = rng.random((6, 10)) < 0.5
    total, weight = value_error(values, truth, mask)
    np.testing.assert_allclose([total, weight], [np.sum((values - truth)[mask] ** 2), mask.sum()], rtol=1e-6)
    parts = [value_error(values[rows], truth[rows], mask[rows]) for rows in (slice(0, 1), slice(1, 6))]
    np.testing.assert_allclose(np.sum(parts, axis=0), [total, weight], rtol=1e-6)
    np.testing.assert_allclose(value_error(values, truth), [np.sum((values - truth) ** 2), 60.0], rtol=1e-6)
    each = jax.vmap(value_error)(values, truth, mask)
    np.testing.assert_allclose(each[1], mask.sum(axis=1))


def test_value_error_ignores_nan_where_masked_and_is_zero_over_nothing():
    values, mask = jnp.array([0.5, jnp.nan]), jnp.array([True, False])
    assert [float(x) for x in value_error(values, jnp.zeros(2), mask)] == [0.25, 1.0]
    assert jax.grad(lambda v: value_error(v, jnp.zeros(2), mask)[0])(values).tolist() == [1.0, 0.0]
    assert [float(x) for x in value_error(values, values, jnp.zeros(2, bool))] == [0.0, 0.0]


def test_paired_bootstrap_takes_out_what_both_methods_share():
    difficulty, noise = np.random.default_rng(1).normal(size=(2, 60)).astype(np.float32) * np.array([[100], [1]], np.float32)
    estimate, low, high = paired_bootstrap(difficulty + 1 + noise, difficulty, key=jax.random.key(2))
    error = np.std(noise) / np.sqrt(60)
    np.testing.assert_allclose(estimate, 1 + np.mean(noise), rtol=1e-4)
    np.testing.assert_allclose([low, high], [estimate - 1.96 * error, estimate + 1.96 * error], atol=0.05)


def test_paired_bootstrap_widens_with_confidence_and_repeats_with_its_key():
    scores, baseline = np.random.default_rng(2).random((2, 60), dtype=np.float32)
    narrow, wide, again = (paired_bootstrap(scores, baseline, confidence=c, key=jax.random.key(1)) for c in (0.5, 0.99, 0.99))
    assert wide.low < narrow.low < narrow.estimate < narrow.high < wide.high
    assert wide == again
    other = paired_bootstrap(scores, baseline, confidence=0.99, key=jax.random.key(2))
    assert (other.estimate, (other.low, other.high) != (wide.low, wide.high)) == (wide.estimate, True)


def test_paired_bootstrap_takes_leading_axes():
    scores = np.random.default_rng(3).random((2, 3, 60), dtype=np.float32)
    together = paired_bootstrap(scores, scores * 0.5, key=jax.random.key(1))
    alone = paired_bootstrap(scores[1, 2], scores[1, 2] * 0.5, key=jax.random.key(1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1, 2], b, rtol=1e-6), together, alone)


def test_shapes_dtypes_and_numbers_are_refused_by_name():
    with pytest.raises(ValueError, match=r"`reference`: expected shape \(3,\), got \(2,\)"):
        value_error(jnp.zeros(3), jnp.zeros(2))
    with pytest.raises(TypeError, match="`mask`: expected bool, got float32"):
        value_error(jnp.zeros(3), jnp.zeros(3), jnp.ones(3))
    with pytest.raises(ValueError, match=r"`baseline`: expected shape \(3,\), got \(4,\)"):
        paired_bootstrap(jnp.zeros(3), jnp.zeros(4), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"`scores`: expected shape \(..., N\) with N >= 1, got \(2, 0\)"):
        paired_bootstrap(jnp.zeros((2, 0)), jnp.zeros((2, 0)), key=jax.random.key(0))
    with pytest.raises(ValueError, match="`num_resamples`: expected 1 or more, got 0"):
        paired_bootstrap(jnp.zeros(3), jnp.zeros(3), num_resamples=0, key=jax.random.key(0))
