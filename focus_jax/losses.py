"""What actor and critic minimise. Every loss is a weighted sum and the weight in it, so that parts of a batch add up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from focus_jax.trees import Array, as_array

# Log-ratios are cut here; e^20 is far beyond any clip, and its products and sums still fit float32.
MAX_LOG_RATIO = 20.0


@jax.jit
def policy_loss(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array | None = None,
    *,
    weights: Array | None = None,
    clip: ArrayLike = 0.2,
    clip_high: ArrayLike | None = None,
    sampler_logprobs: Array | None = None,
    max_importance: ArrayLike = 2.0,
) -> tuple[jax.Array, jax.Array]:
    """Clipped surrogate loss of tokens that an earlier policy sampled.

        r = exp(logprob - old logprob)
        loss = -c * min(r * A, clamp(r, 1 - clip, 1 + clip_high) * A),   c = min(exp(old - sampler logprob), max_importance)

    An old log-probability that is not finite is unknown: that token counts as on-policy, r is 1 and its gradient is
    A times that of the log-probability. With `sampler_logprobs` the trainer's own earlier log-probabilities are the old
    ones, and the truncated importance weight c corrects for a sampler that computes them differently; otherwise c is 1.

    Args:
        logprobs: float32 [...], of the sampled tokens under the policy that is trained.
        old_logprobs: float32 [...], of the same tokens, fixed: the sampler's, at the temperature it sampled with.
        advantages: float32 [...], of the segment each token belongs to, fixed.
        mask: bool [...], True where the policy generated the token; None: everywhere.
        weights: float32 [...], what each token counts for; None: 1. The mean over a segment's tokens, then segments,
            then questions, is 1 / (tokens of the segment * segments of the question * questions).
        clip: how far below 1, and above unless `clip_high` is given, the ratio still earns.
        clip_high: how far above 1; None: as `clip`.
        sampler_logprobs: float32 [...], what the sampler reported, where `old_logprobs` are not that; NaN is unknown, c = 1.
        max_importance: largest c.

    Returns:
        The sum of weight * loss and the sum of weights, float32 scalars, over the tokens of the mask.

    Raises:
        ValueError, TypeError: a shape, or a dtype, that does not fit.

    Example:
        >>> logprobs, old = jnp.log(jnp.array([0.6, 0.6])), jnp.log(jnp.array([0.4, 0.4]))
        >>> total, weight = policy_loss(logprobs, old, jnp.array([1.0, -1.0]))
        >>> print(f"{total / weight:.2f}")  # (-1.2 + 1.5) / 2
        0.15

    Source: project page, "Give the recovery its own learning signal".
    """
    logprobs, mask, weights = _counted("logprobs", logprobs, mask, weights)
    old = _known("old_logprobs", old_logprobs, lax.stop_gradient(logprobs), mask)
    advantages = _fixed("advantages", advantages, mask)
    ratio = _ratio(logprobs, old)
    low, high = jnp.asarray(clip, jnp.float32), jnp.asarray(clip if clip_high is None else clip_high, jnp.float32)
    surrogate = advantages * jnp.where(advantages > 0, jnp.minimum(ratio, 1 + high), jnp.maximum(ratio, 1 - low))
    if sampler_logprobs is not None:
        importance = _ratio(old, _known("sampler_logprobs", sampler_logprobs, old, mask))
        surrogate *= jnp.minimum(importance, jnp.asarray(max_importance, jnp.float32))
    return jnp.sum(-surrogate * weights), jnp.sum(weights)


@jax.jit
def value_loss(
    values: Array,
    targets: Array,
    mask: Array | None = None,
    *,
    weights: Array | None = None,
    old_values: Array | None = None,
    clip: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Squared error of values on fixed targets.

        loss = (V - G)^2,   with clipping   max((V - G)^2, (V_old + clamp(V - V_old, -clip, clip) - G)^2)

    Args:
        values: float32 [...], the critic's.
        targets: float32 [...], the target of `backup`; no gradient passes through it.
        mask: bool [...], True at the states that have a target (expanded, not terminal); None: everywhere.
        weights: float32 [...], what each state counts for; None: 1.
        old_values: float32 [...], the values before the update; with `clip` only.
        clip: how far from `old_values` a value may move and still earn; with `old_values` only.

    Returns:
        The sum of weight * loss and the sum of weights, float32 scalars, over the states of the mask.

    Raises:
        ValueError, TypeError: a shape, or a dtype, that does not fit; only one of `old_values` and `clip`.

    Example:
        >>> total, weight = value_loss(jnp.array([0.5, 0.5]), jnp.array([1.0, 0.0]), jnp.array([True, False]))
        >>> print(total / weight)
        0.25

    Source: project page, "Backup details".
    """
    values, mask, weights = _counted("values", values, mask, weights)
    targets = _fixed("targets", targets, mask)
    error = (values - targets) ** 2
    if (old_values is None) != (clip is None):
        raise ValueError("expected `old_values` and `clip` together, or neither, got one of them")
    if old_values is not None and clip is not None:
        old, reach = _fixed("old_values", old_values, mask), jnp.asarray(clip, jnp.float32)
        error = jnp.maximum(error, (old + jnp.clip(values - old, -reach, reach) - targets) ** 2)
    return jnp.sum(error * weights), jnp.sum(weights)


@jax.jit
def kl_penalty(
    logprobs: Array, reference_logprobs: Array, mask: Array | None = None, *, weights: Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Divergence from a reference policy, KL(policy || reference), estimated on tokens the policy sampled.

        value: exp(d) - 1 - d, with d = reference logprob - logprob;   gradient: that of d^2 / 2

    The value has low variance and is never negative, but its own gradient is, on average, that of the other divergence,
    KL(reference || policy). The gradient of d^2 / 2 is, on average over tokens of the very policy that is trained, that of
    KL(policy || reference); so this is what is passed back.

    Args:
        logprobs: float32 [...], of the sampled tokens under the policy that is trained.
        reference_logprobs: float32 [...], of the same tokens under the reference, fixed.
        mask: bool [...], True where the policy generated the token; None: everywhere.
        weights: float32 [...], what each token counts for, as in `policy_loss`; None: 1.

    Returns:
        The sum of weight * estimate and the sum of weights, float32 scalars, over the tokens of the mask.

    Raises:
        ValueError, TypeError: a shape, or a dtype, that does not fit.

    Example:
        >>> total, weight = kl_penalty(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -1.0]))
        >>> print(f"{total / weight:.4f}")  # (0.3679 + 0.7183) / 2
        0.5431

    Source: an option beside the project page's loss.
    """
    logprobs, mask, weights = _counted("logprobs", logprobs, mask, weights)
    d = _fixed("reference_logprobs", reference_logprobs, mask) - logprobs
    near = lax.stop_gradient(jnp.minimum(d, MAX_LOG_RATIO))
    value = jnp.maximum(jnp.expm1(near) - near, 0)
    square = d**2 / 2
    return jnp.sum((value + (square - lax.stop_gradient(square))) * weights), jnp.sum(weights)


def _counted(name: str, array: Array, mask: Array | None, weights: Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is trained, the mask, and the weights; 0 where masked."""
    array = as_array(name, array, None, jnp.float32)
    mask = jnp.ones(array.shape, bool) if mask is None else as_array("mask", mask, array.shape, jnp.bool_)
    given = jnp.ones(array.shape, jnp.float32) if weights is None else as_array("weights", weights, array.shape, jnp.float32)
    return jnp.where(mask, array, 0), mask, lax.stop_gradient(jnp.where(mask, given, 0))


def _fixed(name: str, array: Array, mask: jax.Array) -> jax.Array:
    """Without gradient, 0 where masked."""
    return lax.stop_gradient(jnp.where(mask, as_array(name, array, mask.shape, jnp.float32), 0))


def _known(name: str, logprobs: Array, otherwise: jax.Array, mask: jax.Array) -> jax.Array:
    """Without gradient; `otherwise` where masked or not finite."""
    logprobs = as_array(name, logprobs, mask.shape, jnp.float32)
    return lax.stop_gradient(jnp.where(mask & jnp.isfinite(logprobs), logprobs, otherwise))


def _ratio(logprobs: jax.Array, other: jax.Array) -> jax.Array:
    """exp(logprobs - other) without overflow."""
    return jnp.exp(jnp.clip(logprobs - other, -MAX_LOG_RATIO, MAX_LOG_RATIO))
