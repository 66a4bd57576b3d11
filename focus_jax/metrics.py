"""Numbers to judge values and methods by."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from focus_jax.trees import Array, as_array


@jax.jit
def value_error(values: Array, reference: Array, mask: Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Squared error of values against reference values, as a sum and a weight, so that parts of a batch add up.

    Args:
        values: float32 [...], estimates.
        reference: float32 [...], the values to compare with.
        mask: bool [...], which entries count; None: all.

    Returns:
        The sum of (values - reference)^2 and the number of entries in it, float32 scalars; their quotient is the mean.

    Raises:
        ValueError, TypeError: a shape, or a dtype, that does not fit.

    Example:
        >>> total, weight = value_error(jnp.array([0.5, 0.9]), jnp.array([0.0, 0.9]))
        >>> print(total / weight)
        0.125

    Source: project page, "Does choosing the evidence help?".
    """
    values = as_array("values", values, None, jnp.float32)
    reference = as_array("reference", reference, values.shape, jnp.float32)
    mask = jnp.ones(values.shape, bool) if mask is None else as_array("mask", mask, values.shape, jnp.bool_)
    difference = jnp.where(mask, values, 0) - jnp.where(mask, reference, 0)
    return jnp.sum(difference**2), jnp.sum(mask, dtype=jnp.float32)


class Interval(NamedTuple):
    """An estimate and the bounds of its confidence interval, each float32 [...]."""

    estimate: jax.Array
    low: jax.Array
    high: jax.Array


@partial(jax.jit, static_argnames=("num_resamples",))
def paired_bootstrap(
    scores: Array, baseline: Array, *, num_resamples: int = 10_000, confidence: ArrayLike = 0.95, key: jax.Array
) -> Interval:
    """Mean difference of two methods on the same questions, with a percentile bootstrap interval.

    Questions are resampled, not scores, so what makes a question hard for both cancels.

    Args:
        scores: float32 [..., N], one score per question.
        baseline: float32 [..., N], the other method's scores on the same questions.
        num_resamples: how many times N questions are drawn with replacement.
        confidence: coverage of the interval, in (0, 1).
        key: typed PRNG key.

    Returns:
        The mean of scores - baseline over the last axis, and the bounds of its interval.

    Raises:
        ValueError: shapes disagree or there is no question.
        TypeError: a dtype is of the wrong kind.

    Example:
        >>> scores = jnp.tile(jnp.array([1.0, 1.0, 0.0, 1.0]), 25)
        >>> estimate, low, high = paired_bootstrap(scores, scores - 0.25, key=jax.random.key(0))
        >>> print(estimate, low, high)
        0.25 0.25 0.25

    Source: project page, "Benchmark results with Qwen3.5-9B".
    """
    scores = as_array("scores", scores, None, jnp.float32)
    difference = scores - as_array("baseline", baseline, scores.shape, jnp.float32)
    if not scores.shape or scores.shape[-1] == 0:
        raise ValueError(f"`scores`: expected shape (..., N) with N >= 1, got {scores.shape}")
    if num_resamples < 1:
        raise ValueError(f"`num_resamples`: expected 1 or more, got {num_resamples}")
    num_questions = difference.shape[-1]

    def resampled_mean(key: jax.Array) -> jax.Array:
        drawn = jax.random.randint(key, (num_questions,), 0, num_questions)
        return jnp.mean(jnp.take(difference, drawn, axis=-1), axis=-1)

    means = lax.map(resampled_mean, jax.random.split(key, num_resamples))
    tail = (1 - jnp.asarray(confidence, jnp.float32)) / 2
    low, high = jnp.quantile(means, jnp.stack([tail, 1 - tail]), axis=0)
    return Interval(jnp.mean(difference, axis=-1), low, high)
