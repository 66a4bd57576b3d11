"""Refined values: the evidence of every continuation, carried from the leaves of a rollout tree to its root."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from focus_jax.sweeps import backed_up_sum, discounts
from focus_jax.trees import Array, RolloutTrees, as_array, as_trees


class Backup(NamedTuple):
    """What a backup gives, each [..., N] and 0 in padding.

    Attributes:
        refined: float32, Vt, the value that advantages use; 0 at terminal nodes, V where nothing was expanded.
        target: float32, G, the mean child return that the critic regresses on; 0 where nothing was expanded.
        num_children: int32, n, the number of direct children.
    """

    refined: jax.Array
    target: jax.Array
    num_children: jax.Array


@jax.jit
def backup(trees: RolloutTrees, values: Array, *, kappa: ArrayLike = 1.0, gamma: ArrayLike = 1.0) -> Backup:
    """Blend the critic's values with the outcomes below every node, from the leaves to the root.

        G(c)  = mean over children c' of (R(c') + gamma^d(c') * Vt(c'))
        Vt(c) = (kappa * V(c) + n(c) * G(c)) / (kappa + n(c))

    Differentiable in values, rewards, kappa and gamma (reverse mode, once).

    Args:
        trees: a batch [..., N].
        values: float32 [..., N], the critic's V; ignored at terminal nodes and in padding.
        kappa: how many observations the critic's prediction counts for, above 0.
        gamma: discount per task transition, in [0, 1].

    Returns:
        The refined values, the critic's targets and the numbers of children.

    Raises:
        ValueError, TypeError: a shape, or a dtype, that does not fit.

    Example:
        >>> trees = RolloutTrees(parent=jnp.array([0, 0, 0]), reward=jnp.array([0.0, 0.0, 1.0]),
        ...     steps=jnp.array([0, 1, 1]), terminal=jnp.array([False, True, True]), mask=jnp.ones(3, bool))
        >>> refined, target, num_children = backup(trees, jnp.array([0.8, 0.0, 0.0]))
        >>> print(target[0], round(float(refined[0]), 6), num_children[0])
        0.5 0.6 2

    Source: project page, "Backup details".
    """
    trees = as_trees(trees)
    values = as_array("values", values, trees.mask.shape, jnp.float32)
    open_ = trees.mask & ~trees.terminal
    scale = jnp.where(open_, discounts(trees, gamma), 0)
    total, num_children = backed_up_sum(trees, trees.reward, scale, values, kappa)
    target = total / jnp.maximum(num_children.astype(jnp.float32), 1)
    refined = jnp.where(open_, refine(jnp.where(open_, values, 0), target, num_children, kappa=kappa), 0)
    return Backup(refined, target, num_children)


@jax.jit
def refine(value: ArrayLike, target: ArrayLike, count: ArrayLike, *, kappa: ArrayLike = 1.0) -> jax.Array:
    """Blend a prediction, worth kappa observations, with the mean of `count` observations.

        (kappa * value + count * target) / (kappa + count); value where count is 0

    Args:
        value: float32 [...], the prediction.
        target: float32 [...], the mean; ignored where count is 0.
        count: int32 or float32 [...], how many observations the mean is over.
        kappa: weight of the prediction, in observations; above 0.

    Returns:
        float32 [...].

    Raises:
        ValueError, TypeError: a shape, or a dtype, that does not fit.

    Example:
        >>> print(refine(0.8, 0.5, 2).round(3))
        0.6

    Source: project page, "Try continuing from the same point".
    """
    value = as_array("value", value, None, jnp.float32)
    target = as_array("target", target, value.shape, jnp.float32)
    count = as_array("count", jnp.asarray(count, jnp.float32), value.shape, jnp.float32)
    kappa = jnp.asarray(kappa, jnp.float32)
    observed = count > 0
    blend = (kappa * value + count * jnp.where(observed, target, 0)) / jnp.where(observed, kappa + count, 1)
    return jnp.where(observed, blend, value)
