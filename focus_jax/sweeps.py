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

from focus_jax.trees import RolloutTrees


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


def child_sum(trees: RolloutTrees, x: jax.Array) -> jax.Array:
    """[..., N], the sum of x over the children of each node."""
    parent, x = _rows(_upward(trees)), _rows(jnp.where(is_edge(trees), x, 0))
    return _scatter_to_parents(parent, x).reshape(trees.mask.shape)


def accumulate(trees: RolloutTrees, offset: jax.Array, scale: jax.Array) -> jax.Array:
    """total [..., N] with total(c) = sum over children c' of (offset(c') + scale(c') * total(c')), leaves to root.

    Differentiable in offset and scale, in reverse mode, any number of times.
    """
    edge = is_edge(trees)
    rows = (_upward(trees), jnp.where(edge, offset, 0), jnp.where(edge, scale, 0))
    return _to_root(*map(_rows, rows)).reshape(trees.mask.shape)


def _upward(trees: RolloutTrees) -> jax.Array:
    """Index of the parent, and of the node itself where it has none: a walk upward stays at the root."""
    return jnp.where(is_edge(trees), trees.parent, _node(trees))


def _node(trees: RolloutTrees) -> jax.Array:
    """The index of every node in its tree."""
    return lax.broadcasted_iota(jnp.int32, trees.mask.shape, trees.mask.ndim - 1)


def _rows(x: jax.Array) -> jax.Array:
    """[..., N] as [B, N]."""
    return x.reshape(-1, x.shape[-1])


def _forest(parent: jax.Array) -> jax.Array:
    """Parents [B, N] as indices into all B * N nodes."""
    num_trees, num_nodes = parent.shape
    return (parent + jnp.arange(num_trees, dtype=jnp.int32)[:, None] * num_nodes).reshape(-1)


def _scatter_to_parents(parent: jax.Array, x: jax.Array) -> jax.Array:
    """Add x of every node to its parent, [B, N]."""
    flat = x.reshape(-1)
    return jnp.zeros_like(flat).at[_forest(parent)].add(flat).reshape(x.shape)


# The two sweeps are each other's transpose, and so each other's derivative.


@jax.custom_vjp
def _to_root(parent: jax.Array, offset: jax.Array, scale: jax.Array) -> jax.Array:
    """t with t(c) = sum over children c' of (offset(c') + scale(c') * t(c'))."""
    return lax.platform_dependent(parent, offset, scale, cpu=_to_root_sequential, default=_to_root_doubling)


@jax.custom_vjp
def _to_leaves(parent: jax.Array, source: jax.Array, scale: jax.Array) -> jax.Array:
    """y with y(c) = source(p) + scale(p) * y(p), p the parent of c."""
    return lax.platform_dependent(parent, source, scale, cpu=_to_leaves_sequential, default=_to_leaves_doubling)


def _to_root_forward(parent: jax.Array, offset: jax.Array, scale: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    total = _to_root(parent, offset, scale)
    return total, (parent, scale, total)


def _to_root_backward(saved: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[None, jax.Array, jax.Array]:
    parent, scale, total = saved
    arriving = _to_leaves(parent, cotangent, scale)
    return None, arriving, total * arriving


def _to_leaves_forward(parent: jax.Array, source: jax.Array, scale: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    value = _to_leaves(parent, source, scale)
    return value, (parent, scale, value)


def _to_leaves_backward(saved: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[None, jax.Array, jax.Array]:
    parent, scale, value = saved
    arriving = _to_root(parent, cotangent, scale)
    return None, arriving, value * arriving


_to_root.defvjp(_to_root_forward, _to_root_backward)
_to_leaves.defvjp(_to_leaves_forward, _to_leaves_backward)


def _to_root_sequential(parent: jax.Array, offset: jax.Array, scale: jax.Array) -> jax.Array:
    """One pass, last node first."""
    # XLA updates `total` in place only while each step reads and adds to it once per node, in this form.
    parent_, offset_, scale_ = _forest(parent), offset.reshape(-1), scale.reshape(-1)

    def visit(total: jax.Array, i: jax.Array) -> jax.Array:
        return total.at[parent_[i]].add(offset_[i] + scale_[i] * total[i], mode="promise_in_bounds")

    return _visit_nodes(visit, offset, reverse=True)


def _to_leaves_sequential(parent: jax.Array, source: jax.Array, scale: jax.Array) -> jax.Array:
    """One pass, first node first."""
    parent_, source_, scale_ = _forest(parent), source.reshape(-1), scale.reshape(-1)

    def visit(value: jax.Array, i: jax.Array) -> jax.Array:
        p = parent_[i]
        return value.at[i].set(source_[p] + scale_[p] * value[p], mode="promise_in_bounds")

    return _visit_nodes(visit, source, reverse=False)


def _visit_nodes(visit: Callable[[jax.Array, jax.Array], jax.Array], like: jax.Array, *, reverse: bool) -> jax.Array:
    """Fold `visit` over all nodes of [B, N], parents after children or before; four trees at a time where B allows."""
    # Trees side by side hide the latency of a chain, where every node waits for the one before.
    streams = math.gcd(like.shape[0], 4)
    length = like.size // streams

    def step(k: jax.Array, carry: jax.Array) -> jax.Array:
        i = length - 1 - k if reverse else k
        for stream in range(streams):
            carry = visit(carry, i + stream * length)
        return carry

    return lax.fori_loop(0, length, step, jnp.zeros_like(like.reshape(-1)), unroll=4 // streams).reshape(like.shape)


def _to_root_doubling(parent: jax.Array, offset: jax.Array, scale: jax.Array) -> jax.Array:
    through = _double(parent, scale, offset, lambda x, weight, ancestor: x.at[ancestor].add(weight * x))
    return _scatter_to_parents(parent, through)


def _to_leaves_doubling(parent: jax.Array, source: jax.Array, scale: jax.Array) -> jax.Array:
    arriving = jnp.take_along_axis(source, parent, axis=-1)
    return _double(parent, scale, arriving, lambda y, weight, ancestor: y + weight * y[ancestor])


def _double(
    parent: jax.Array, scale: jax.Array, x: jax.Array, step: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Apply `step` with each node's ancestor 1, 2, 4, ... edges up and the product of the scales on the way there."""
    State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def unfinished(state: State) -> jax.Array:
        _, _, ancestor, further = state
        return jnp.any(ancestor != further)

    def double(state: State) -> State:
        x, weight, ancestor, further = state
        return step(x, weight, ancestor), weight * weight[ancestor], further, further[further]

    ancestor = _forest(parent)
    start = (x.reshape(-1), scale.reshape(-1)[ancestor], ancestor, ancestor[ancestor])
    return lax.while_loop(unfinished, double, start)[0].reshape(x.shape)
