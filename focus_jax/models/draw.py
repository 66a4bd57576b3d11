"""One token from the scores of a vocabulary: temperature, nucleus, and the log-probability it was drawn with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Tokens per run of the vocabulary; a run is drawn first, then a token in it.
_RUN = 256


def draw(logits: jax.Array, uniforms: jax.Array, temperature: jax.Array, top_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw from softmax(logits / temperature), cut to its nucleus.

    The nucleus is the smallest set of most likely tokens whose mass is at least `top_p`, ties with its last included; the
    rest gets probability 0 and what is left is renormalised. Two uniform numbers a row invert the cumulative distribution,
    one among runs of 256 tokens and one inside the run, so that a large vocabulary costs one pass and no noise. A token of
    probability 0 is never drawn.

    Args:
        logits: [B, V].
        uniforms: float32 [B, 2], in [0, 1).
        temperature: float32 [B]; 0 takes the most likely token.
        top_p: float32 [B], in (0, 1].

    Returns:
        Ids int32 [B], and float32 [B] the log-probability of each under the distribution it was drawn from; that of
        temperature 1, without a nucleus, where the temperature is 0. NaN where the scores are not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> logits = jnp.log(jnp.array([[0.5, 0.25, 0.25]]))
        >>> ids, logprobs = draw(logits, jnp.array([[0.0, 0.6]]), jnp.ones(1), jnp.ones(1))
        >>> ids.tolist(), jnp.exp(logprobs).round(3).tolist()
        ([1], [0.25])
    """
    greedy = temperature == 0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1, temperature)[:, None]
    highest = scaled.max(-1, keepdims=True)
    weights = jnp.exp(scaled - highest)
    floor = jax.lax.cond(
        jnp.any((top_p < 1) & ~greedy),
        lambda: jnp.where(greedy, 0.0, _nucleus_floor(weights, top_p)),
        lambda: jnp.zeros_like(top_p),
    )
    weights = jnp.where(weights >= floor[:, None], weights, 0)
    runs = jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % _RUN))).reshape(len(weights), -1, _RUN)
    mass = runs.sum(-1)
    run = _invert(mass, uniforms[:, 0])
    inside = jnp.take_along_axis(runs, run[:, None, None], axis=1)[:, 0]
    ids = jnp.where(greedy, jnp.argmax(logits, -1).astype(jnp.int32), run * _RUN + _invert(inside, uniforms[:, 1]))
    chosen = jnp.take_along_axis(scaled, ids[:, None], axis=1)
    return ids, (chosen - highest)[:, 0] - jnp.log(mass.sum(-1))


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """First index at which the cumulative sum passes uniform * total, for weights [B, N]; int32 [B]."""
    total = jnp.cumsum(weights, -1)
    passed = (total > uniform[:, None] * total[:, -1:]) & (weights > 0)
    # Rounding may leave none: then the last that can be drawn.
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, -1)
    return jnp.where(passed.any(-1), jnp.argmax(passed, -1), last).astype(jnp.int32)


def _nucleus_floor(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """The largest weight w with the mass of all weights >= w at least top_p of the whole; float32 [B].

    Bisection over the bits of the float, which for numbers >= 0 are ordered as they are: exact after 31 halvings, and many
    times cheaper than sorting a vocabulary.
    """
    needed = top_p * weights.sum(-1)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        floor = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.where(weights >= floor[:, None], weights, 0).sum(-1) >= needed
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    one = jax.lax.bitcast_convert_type(jnp.ones_like(top_p), jnp.int32)  # the largest weight is exp(0)
    low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros_like(one), one + 1))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
