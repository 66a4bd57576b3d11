"""Credit: how far each segment, or each rollout, did better than expected."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from focus_jax.sweeps import backed_up_sum, child_sum, discounts, from_parent, is_edge
from focus_jax.trees import Array, RolloutTrees, as_array, as_trees


def segment_advantages(trees: RolloutTrees, refined: Array, *, gamma: ArrayLike = 1.0, lam: ArrayLike = 0.0) -> jax.Array:
    """Change in expected return over each segment, the temporal-difference residual of the refined values.

        delta(c) = R(c) + gamma^d(c) * Vt(c) - Vt(parent)
        A(c)     = delta(c) + lam * gamma^d(c) * mean over children c' of A(c')

    On a chain, lam > 0 is generalised advantage estimation. The remaining value of a terminal node is 0 whatever
    `refined` holds there; a node that was cut off and is to bootstrap is simply not terminal.

    Args:
        trees: a batch [..., N].
        refined: float32 [..., N], Vt from `backup` (or any other state values).
        gamma: discount per task transition, in [0, 1].
        lam: weight of later residuals, in [0, 1]; the paper's experiments use 0.

    Returns:
        float32 [..., N], of the segment entering each node; 0 at the root and in padding.

    Raises:
        ValueError, TypeError: a shape, or a dtype, that does not fit.

    Example:
        >>> import focus_jax
        >>> trees = focus_jax.RolloutTrees(parent=jnp.array([0, 0]), reward=jnp.zeros(2), steps=jnp.array([0, 1]),
        ...     terminal=jnp.zeros(2, bool), mask=jnp.ones(2, bool))
        >>> print(segment_advantages(trees, jnp.array([0.4, 0.6])).round(6))
        [0.  0.2]

    Source: project page, "Give the recovery its own learning signal".
    """
    return _segment_advantages(trees, refined, gamma, lam, one_step=isinstance(lam, int | float) and lam == 0)


@partial(jax.jit, static_argnames="one_step")
def _segment_advantages(trees: RolloutTrees, refined: Array, gamma: ArrayLike, lam: ArrayLike, *, one_step: bool) -> jax.Array:
    trees = as_trees(trees)
    refined = as_array("refined", refined, trees.mask.shape, jnp.float32)
    residual = jnp.where(is_edge(trees), _returns(trees, refined, gamma) - _baseline(trees, refined), 0)
    if one_step:
        return residual
    decay = jnp.asarray(lam, jnp.float32) * discounts(trees, gamma)
    later, num_children = backed_up_sum(trees, residual, decay, jnp.zeros_like(residual), 0.0)
    return residual + decay * later / jnp.maximum(num_children.astype(jnp.float32), 1)


@jax.jit
def leave_one_out_advantages(
    trees: RolloutTrees, values: Array, refined: Array, *, kappa: ArrayLike = 1.0, gamma: ArrayLike = 1.0
) -> jax.Array:
    """Advantage of each segment over a baseline in which it had no part: the critic and the segment's siblings.

        x(c) = R(c) + gamma^d(c) * Vt(c),   k = max(kappa, 1),   n = number of children of the parent
        A(c) = x(c) - (k * V(parent) + sum over the other children of x) / (k + n - 1)

    The refined value of the parent contains the very child it judges, which shrinks advantages most where there are
    few children; leaving it out removes that.

    Args:
        trees: a batch [..., N].
        values: float32 [..., N], the critic's V.
        refined: float32 [..., N], Vt from `backup`.
        kappa: how many observations the critic's prediction counts for; at least 1 is used.
        gamma: discount per task transition, in [0, 1].

    Returns:
        float32 [..., N], of the segment entering each node; 0 at the root and in padding.

    Raises:
        ValueError, TypeError: a shape, or a dtype, that does not fit.

    Example:
        >>> import focus_jax
        >>> trees = focus_jax.RolloutTrees(parent=jnp.array([0, 0, 0]), reward=jnp.array([0.0, 0.0, 1.0]),
        ...     steps=jnp.array([0, 1, 1]), terminal=jnp.array([False, True, True]), mask=jnp.ones(3, bool))
        >>> values = jnp.array([0.8, 0.0, 0.0])
        >>> refined = focus_jax.backup(trees, values).refined
        >>> print(leave_one_out_advantages(trees, values, refined).round(6))
        [ 0.  -0.9  0.6]

    Source: an option beside the project page's rule.
    """
    trees = as_trees(trees)
    values = as_array("values", values, trees.mask.shape, jnp.float32)
    returns = _returns(trees, as_array("refined", refined, trees.mask.shape, jnp.float32), gamma)
    siblings = from_parent(trees, child_sum(trees, returns)) - returns
    num_siblings = jnp.maximum(from_parent(trees, child_sum(trees, jnp.ones_like(returns))) - 1, 0)
    weight = jnp.maximum(jnp.asarray(kappa, jnp.float32), 1)
    baseline = (weight * _baseline(trees, values) + siblings) / (weight + num_siblings)
    return jnp.where(is_edge(trees), returns - baseline, 0)


def vineppo_advantages(trees: RolloutTrees, mc_values: Array, *, gamma: ArrayLike = 1.0) -> jax.Array:
    """VinePPO's advantage of each segment, from Monte Carlo estimates of the states at both ends.

        A(c) = R(c) + gamma^d(c) * V_mc(c) - V_mc(parent)

    Args:
        trees: a batch [..., N].
        mc_values: float32 [..., N], mean return of the probes from each state; ignored at terminal nodes.
        gamma: discount per task transition, in [0, 1].

    Returns:
        float32 [..., N], of the segment entering each node; 0 at the root and in padding.

    Raises:
        ValueError, TypeError: a shape, or a dtype, that does not fit.

    Example:
        >>> import focus_jax
        >>> trees = focus_jax.RolloutTrees(parent=jnp.array([0, 0]), reward=jnp.array([0.0, 1.0]),
        ...     steps=jnp.array([0, 1]), terminal=jnp.array([False, True]), mask=jnp.ones(2, bool))
        >>> print(vineppo_advantages(trees, jnp.array([0.25, 0.0])))
        [0.   0.75]

    Source: project page, "Watch how the methods assign credit".
    """
    mc_values = as_array("mc_values", mc_values, jnp.shape(trees.mask), jnp.float32)
    return segment_advantages(trees, mc_values, gamma=gamma)


@jax.jit
def grpo_advantages(returns: Array, mask: Array | None = None) -> jax.Array:
    """GRPO's advantage of each rollout within its group, for every token it generated.

        A = (return - mean of the group) / (sample standard deviation of the group + 1e-6)

    A group with one member, or whose returns are all equal, gives 0.

    Args:
        returns: float32 [..., G], one row per group.
        mask: bool [..., G], False where a rollout was lost; it then takes no part in mean and deviation. None: all there.

    Returns:
        float32 [..., G]; 0 where masked.

    Raises:
        ValueError, TypeError: a shape, or a dtype, that does not fit.

    Example:
        >>> print(grpo_advantages(jnp.array([1.0, 0.0, 0.0, jnp.nan]), jnp.array([True, True, True, False])).round(1))
        [ 1.2 -0.6 -0.6  0. ]

    Source: project page, "Watch how the methods assign credit".
    """
    returns = as_array("returns", returns, None, jnp.float32)
    mask = jnp.ones(returns.shape, bool) if mask is None else as_array("mask", mask, returns.shape, jnp.bool_)
    lowest = lax.stop_gradient(jnp.min(returns, axis=-1, keepdims=True, where=mask, initial=jnp.inf))
    above = jnp.where(mask, returns - lowest, 0)  # equal returns are exactly 0 here, without rounding to blow up
    count = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32)
    deviation = jnp.where(mask, above - jnp.sum(above, axis=-1, keepdims=True) / jnp.maximum(count, 1), 0)
    variance = jnp.sum(deviation**2, axis=-1, keepdims=True) / jnp.maximum(count - 1, 1)
    spread = jnp.max(above, axis=-1, keepdims=True, initial=0) > 0
    return jnp.where(spread, deviation / (jnp.sqrt(jnp.where(spread, variance, 1)) + 1e-6), 0)


def _returns(trees: RolloutTrees, refined: jax.Array, gamma: ArrayLike) -> jax.Array:
    """R + gamma^d Vt of the edge entering each node; 0 where none does."""
    remaining = jnp.where(trees.mask & ~trees.terminal, refined, 0)
    return jnp.where(is_edge(trees), trees.reward, 0) + discounts(trees, gamma) * remaining


def _baseline(trees: RolloutTrees, values: jax.Array) -> jax.Array:
    """The value of the state in which each node's edge starts."""
    return from_parent(trees, jnp.where(trees.mask, values, 0))
