"""Sums over children and sweeps through whole trees, on which backup and advantages are built.

A sweep is written twice: on CPU one pass over the nodes, which no parallel form beats there; elsewhere pointer
doubling, which needs a number of parallel rounds logarithmic in the depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from focus_jax.trees import Array, RolloutTrees


def is_edge(trees: RolloutTrees) -> jax.Array:
    """bool [..., N], True where an edge enters the node: neither at the root nor in padding."""
    return jnp.logical_and(trees.mask, _node(trees) > 0)


def discounts(trees: RolloutTrees, gamma: ArrayLike) -> jax.Array:
    """float32 [..., N], gamma^d of the edge entering each node; 0 where none does."""
    log_gamma = jnp.log(jnp.maximum(jnp.asarray(gamma, jnp.float32), jnp.finfo(jnp.float32).tiny))
    return jnp.where(is_edge(trees), jnp.exp(trees.steps.astype(jnp.float32) * log_gamma), 0)


def from_parent(trees: RolloutTrees, x: jax.Array) -> jax.Array:
    """[..., N], x of the parent of each node; of the node itself where no edge enters it."""
    return jnp.take_along_axis(x, _upward(trees), axis=-1)


def child_sum(trees: RolloutTrees, x: Array) -> jax.Array:
    """[..., N], the sum of x over the children of each node."""
    rows = (_upward(trees), jnp.where(is_edge(trees), x, 0))
    return _add_to_parents(*map(_rows, rows)).reshape(trees.mask.shape)


def backed_up_sum(
    trees: RolloutTrees, offset: Array, scale: Array, value: Array, kappa: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Sum over the children of each node of what they send up, leaves to root, and the number of children.

        total(c) = sum over children c' of sent(c')
        sent(c)  = offset(c) + scale(c) * (kappa * value(c) + total(c)) / (kappa + count(c))

    Args:
        trees: a batch [..., N].
        offset: float32 [..., N], ignored where no edge enters the node.
        scale: float32 [..., N], finite, and 0 where no edge enters the node.
        value: float32 [..., N], ignored where scale is 0.
        kappa: weight of the value, in children; where it is 0 the value counts at leaves alone.

    Returns:
        total, float32 [..., N], with derivatives in all but the trees (reverse mode, once), and count, int32 [..., N].
    """
    rows = map(_rows, (_upward(trees), offset, scale, value))
    # No smaller, so that leaves are not 0 / 0; and under shard_map one for each shard, whose gradients are then summed.
    weight = jnp.maximum(jnp.asarray(kappa, jnp.float32), 1e-30) + jnp.zeros_like(_rows(scale)[:1, :1])
    total, count = _to_root(*rows, weight)
    return total.reshape(trees.mask.shape), count.reshape(trees.mask.shape)


def _node(trees: RolloutTrees) -> jax.Array:
    """The index of every node in its tree."""
    return lax.broadcasted_iota(jnp.int32, trees.mask.shape, trees.mask.ndim - 1)


def _upward(trees: RolloutTrees) -> jax.Array:
    """Index of the parent, and of the node itself where it has none: a walk upward stays at the root."""
    return jnp.where(is_edge(trees), trees.parent, _node(trees))


def _rows(x: Array) -> jax.Array:
    """[..., N] as [B, N]."""
    return jnp.reshape(x, (-1, x.shape[-1]))


def _forest(parent: jax.Array) -> jax.Array:
    """Parents [B, N] as indices into all B * N nodes; unsigned, as those are never taken to count from the end."""
    num_trees, num_nodes = parent.shape
    return (parent + jnp.arange(num_trees, dtype=jnp.int32)[:, None] * num_nodes).reshape(-1).astype(jnp.uint32)


def _add_to_parents(parent: jax.Array, x: jax.Array) -> jax.Array:
    """Sum of x [B, N] over the nodes that have this parent."""
    flat = x.reshape(-1)
    return jnp.zeros_like(flat).at[_forest(parent)].add(flat).reshape(x.shape)


def _sent(
    offset: jax.Array, scale: jax.Array, value: jax.Array, kappa: jax.Array, total: jax.Array, count: jax.Array
) -> jax.Array:
    """What a node sends up to its parent."""
    return offset + scale * (kappa * jnp.where(scale == 0, 0, value) + total) / (kappa + count.astype(jnp.float32))


def _is_root(parent: jax.Array) -> jax.Array:
    """bool [B, N], True at roots and in padding, which are their own parents."""
    return parent == lax.broadcasted_iota(jnp.int32, parent.shape, 1)


@jax.custom_vjp
def _to_root(
    parent: jax.Array, offset: jax.Array, scale: jax.Array, value: jax.Array, kappa: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Totals and counts [B, N]; kappa is [1, 1]."""
    args = (parent, offset, scale, value, kappa)
    return lax.platform_dependent(*args, cpu=_to_root_sequential, default=_to_root_doubling)


def _to_leaves(parent: jax.Array, source: jax.Array, slope: jax.Array) -> jax.Array:
    """y [B, N] with y(c) = source(p) + slope(p) * y(p), p the parent of c: the transpose of the sweep to the root."""
    return lax.platform_dependent(parent, source, slope, cpu=_to_leaves_sequential, default=_to_leaves_doubling)


def _to_root_forward(*args: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    total, count = _to_root(*args)
    return (total, count), (*args, total, count)


def _to_root_backward(saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array | None, ...]:
    parent, offset, scale, value, kappa, total, count = saved
    arriving = _to_leaves(parent, cotangents[0], _slope(scale, kappa, count))
    _, pull = jax.vjp(lambda o, s, v, k: _sent(o, s, v, k, total, count), offset, scale, value, kappa)
    return None, *pull(jnp.where(_is_root(parent), 0, arriving))


_to_root.defvjp(_to_root_forward, _to_root_backward)


def _slope(scale: jax.Array, kappa: jax.Array, count: jax.Array) -> jax.Array:
    """Derivative of what a node sends by the total of its children."""
    return jnp.where(count > 0, scale / (kappa + count.astype(jnp.float32)), 0)


@jax.custom_batching.sequential_vmap
def _to_root_sequential(
    parent: jax.Array, offset: jax.Array, scale: jax.Array, value: jax.Array, kappa: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One pass to count, and one from the last node to the first, each with a single array that XLA updates in place."""
    upward, offset_, scale_, value_ = _forest(parent), offset.reshape(-1), scale.reshape(-1), value.reshape(-1)

    def count_child(count: jax.Array, i: jax.Array) -> jax.Array:
        p = _at(upward, i)
        return lax.dynamic_update_index_in_dim(count, _at(count, p) + 1, p, 0)

    def send(total: jax.Array, i: jax.Array) -> jax.Array:
        p = _at(upward, i)
        sent = _sent(_at(offset_, i), _at(scale_, i), _at(value_, i), kappa[0, 0], _at(total, i), _at(count, i))
        return lax.dynamic_update_index_in_dim(total, _at(total, p) + jnp.where(p == i, 0, sent), p, 0)

    minus_self = -_is_root(parent).reshape(-1).astype(jnp.int32)
    count = _visit_nodes(count_child, minus_self, parent.shape, reverse=True)
    total = _visit_nodes(send, jnp.zeros_like(offset_), parent.shape, reverse=True)
    return total.reshape(parent.shape), count.reshape(parent.shape)


@jax.custom_batching.sequential_vmap
def _to_leaves_sequential(parent: jax.Array, source: jax.Array, slope: jax.Array) -> jax.Array:
    """One pass, first node first."""
    upward, source_, slope_ = _forest(parent), source.reshape(-1), slope.reshape(-1)

    def visit(y: jax.Array, i: jax.Array) -> jax.Array:
        p = _at(upward, i)
        return lax.dynamic_update_index_in_dim(y, _at(source_, p) + _at(slope_, p) * _at(y, p), i, 0)

    return _visit_nodes(visit, jnp.zeros_like(source_), source.shape, reverse=False).reshape(source.shape)


def _visit_nodes(
    visit: Callable[[jax.Array, jax.Array], jax.Array], carry: jax.Array, shape: tuple[int, ...], *, reverse: bool
) -> jax.Array:
    """Fold `visit` over the nodes of all trees [B, N], in order or in reverse; four trees at a time where B allows."""
    # Side by side, trees hide the latency of a chain, in which every node waits for the one before.
    streams = math.gcd(shape[0], 4)
    length = math.prod(shape) // streams

    def step(k: jax.Array, carry: jax.Array) -> jax.Array:
        first = jnp.uint32(length - 1) - k if reverse else k
        for stream in range(streams):
            carry = visit(carry, first + jnp.uint32(stream * length))
        return carry

    return lax.fori_loop(jnp.uint32(0), jnp.uint32(length), step, carry)


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _to_root_doubling(
    parent: jax.Array, offset: jax.Array, scale: jax.Array, value: jax.Array, kappa: jax.Array
) -> tuple[jax.Array, jax.Array]:
    count = _add_to_parents(parent, 1 - _is_root(parent).astype(jnp.int32))
    alone = jnp.where(_is_root(parent), 0, _sent(offset, scale, value, kappa, jnp.zeros_like(offset), count))
    slope = _slope(scale, kappa, count)
    sent = _double(parent, slope, alone, lambda x, weight, ancestor: x.at[ancestor].add(weight * x))
    return _add_to_parents(parent, sent), count


def _to_leaves_doubling(parent: jax.Array, source: jax.Array, slope: jax.Array) -> jax.Array:
    arriving = jnp.take_along_axis(source, parent, axis=-1)
    return _double(parent, slope, arriving, lambda y, weight, ancestor: y + weight * y[ancestor])


def _double(
    parent: jax.Array, slope: jax.Array, x: jax.Array, step: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Apply `step` with each node's ancestor 1, 2, 4, ... edges up and the product of the slopes on the way there."""
    State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def unfinished(state: State) -> jax.Array:
        _, _, ancestor, further = state
        return jnp.any(ancestor != further)

    def double(state: State) -> State:
        x, weight, ancestor, further = state
        return step(x, weight, ancestor), weight * weight[ancestor], further, further[further]

    ancestor = _forest(parent)
    start = (x.reshape(-1), slope.reshape(-1)[ancestor], ancestor, ancestor[ancestor])
    return lax.while_loop(unfinished, double, start)[0].reshape(x.shape)
