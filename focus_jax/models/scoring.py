"""Log-probabilities of given tokens, and the entropy they were drawn with, without ever holding [tokens, vocabulary].

The logits are made piece by piece, forward and once more backward. The outer loop runs over the vocabulary, so that each
row of the head is cast, and gathered over a mesh, once per pass, and its gradient is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from focus_jax.models.check import check_array
from focus_jax.models.decoder import Decoder
from focus_jax.models.sharding import Axis

# Positions and rows of the head whose logits are there at once: what a CPU's cache holds, and what fills an accelerator.
CPU_CHUNK, CHUNK = (512, 512), (4096, 1024)

# Stands for minus infinity where 0 times it must be 0.
LOWEST = -1e30


class TokenScores(NamedTuple):
    """What a policy says about tokens that are already there.

    Attributes:
        logprobs: float32 [...], natural log-probability of each token.
        entropy: float32 [...], entropy in nats of the distribution each token was drawn from.
    """

    logprobs: jax.Array
    entropy: jax.Array


def score(
    model: Decoder,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    temperature: float = 1.0,
) -> TokenScores:
    """Log-probability of every token given the tokens before it in its own sequence.

    Args:
        model: the policy.
        tokens: int32 [B, T].
        segment_ids: int32 [B, T] as `Decoder` takes them: 0 is padding, a run of equal positive numbers one sequence.
            None: every row is one sequence.
        mask: bool [B, T], the tokens to score; the rest gives 0 and costs no part of the head. None: all.
        temperature: of the distribution, as the sampler had it; see `token_logprobs`.

    Returns:
        float32 [B, T] each; entry t belongs to `tokens[:, t]`. Exactly 0, without gradient, at padding and at the first
        token of every sequence, which nothing predicts. NaN in the row of a token outside the vocabulary.

    Raises:
        ValueError, TypeError: a shape, a dtype, a length or a temperature that does not fit.

    Example:
        >>> from focus_jax.models import ModelConfig
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> model = Decoder(config, key=jax.random.key(0))
        >>> scores = score(model, jnp.array([[7, 8, 9, 4, 5, 0]]), jnp.array([[1, 1, 1, 2, 2, 0]]))
        >>> (scores.logprobs < 0).tolist()
        [[False, True, True, False, True, False]]
    """
    hidden = model(tokens, segment_ids)
    tokens = jnp.asarray(tokens)
    if segment_ids is None:
        follows = jnp.ones(tokens[:, 1:].shape, bool)
    else:
        segment_ids = jnp.asarray(segment_ids)
        follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    if mask is not None:
        check_array("mask", mask, tokens.shape, jnp.bool_)
        follows &= mask[:, 1:]
    # The state at t predicts the token at t + 1; the last one predicts nothing, but keeps the rows whole.
    targets, mask = (jnp.pad(x, ((0, 0), (0, 1))) for x in (tokens[:, 1:], follows))
    scores = token_logprobs(hidden, model.head_weight(), targets, mask, temperature=temperature)
    return TokenScores(*(jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in scores))


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None = None,
    *,
    temperature: float = 1.0,
    chunk: tuple[int, int] | None = None,
) -> TokenScores:
    """Log-probability of one token per position, and the entropy there; both can be differentiated, once, in reverse.

        z = hidden head^T / temperature;   logprob = z[target] - log sum exp z;   entropy = -sum softmax(z) log softmax(z)

    Products are made in the dtype of `hidden` and summed in float32. On a mesh, positions are split over `fsdp` and the
    vocabulary over `tensor`; a piece of the head is gathered at a time.

    Args:
        hidden: [..., D], states that predict.
        head: [V, D], the output head.
        targets: int32 [...], the tokens that came; NaN is answered for one outside the vocabulary.
        mask: bool [...], which positions count; the others give exactly 0 and no gradient, whatever they hold. None: all.
        temperature: what a sampler divided the logits by. The log-probabilities of a greedy reply (temperature 0) are
            those of the distribution it took the maximum of, temperature 1, and are to be asked for as such.
        chunk: at most how many positions and how many entries of the vocabulary have logits at once; by default what
            suits the backend.

    Returns:
        float32 [...] each.

    Raises:
        ValueError, TypeError: a shape, a dtype or a temperature that does not fit.

    Example:
        >>> hidden, head = jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 0.0], [0.0, 1.0]])
        >>> for temperature in (0.5, 1.0):
        ...     print(token_logprobs(hidden, head, jnp.array([0]), temperature=temperature).logprobs.round(4))
        [-0.0181]
        [-0.1269]
    """
    if not temperature > 0:
        raise ValueError(
            f"`temperature`: expected a number > 0, got {temperature}; a greedy reply is scored at temperature 1, "
            "the distribution whose maximum it is"
        )
    if chunk is None:
        chunk = CPU_CHUNK if jax.default_backend() == "cpu" else CHUNK
    if min(chunk) < 1:
        raise ValueError(f"`chunk`: expected two numbers >= 1, got {chunk}")
    check_array("hidden", hidden, hidden.shape if hidden.ndim else (..., "D"), jnp.floating)
    expected = ("V" if head.ndim != 2 else head.shape[0], hidden.shape[-1])
    check_array("head", head, expected, jnp.floating)
    check_array("targets", targets, hidden.shape[:-1], jnp.integer)
    if mask is not None:
        check_array("mask", mask, hidden.shape[:-1], jnp.bool_)
    return _token_logprobs(hidden, head, targets, mask, float(temperature), chunk)


@partial(jax.jit, static_argnames=("temperature", "chunk"))
def _token_logprobs(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array | None, temperature: float, chunk: tuple[int, int]
) -> TokenScores:
    shape, count = targets.shape, targets.size
    hidden, targets = hidden.reshape(count, hidden.shape[-1]), targets.reshape(count)
    if mask is not None:
        mask = mask.reshape(count)
        hidden, targets = jnp.where(mask[:, None], hidden, 0), jnp.where(mask, targets, 0)
    plan = _plan(count, head.shape, temperature, chunk)
    padding = -count % plan.multiple
    if padding:
        hidden, targets = jnp.pad(hidden, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
    wanted = None if mask is None else jnp.pad(mask, (0, padding))
    scores = (x[:count] for x in _scores(plan, hidden, head, targets, wanted))
    return TokenScores(*((x if mask is None else jnp.where(mask, x, 0)).reshape(shape) for x in scores))


@dataclass(frozen=True)
class _Plan:
    """How the work is cut: over the mesh, if there is one, and into pieces on each device."""

    temperature: float
    blocks: int  # of positions, on each device
    multiple: int  # the number of positions is one of this
    rows: int  # of the head, in a piece
    positions: Axis  # mesh axes
    vocabulary: Axis
    width: Axis


def _plan(count: int, head: tuple[int, ...], temperature: float, chunk: tuple[int, int]) -> _Plan:
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {axis: size for axis, size in mesh.shape.items() if axis in mesh.auto_axes}
    fsdp, tensor = sizes.get("fsdp", 1), sizes.get("tensor", 1)
    blocks = max(-(-count // (chunk[0] * fsdp)), 1)
    splits = head[0] % tensor == 0
    return _Plan(
        temperature=temperature,
        blocks=blocks,
        multiple=blocks * fsdp,
        rows=min(chunk[1], head[0] // tensor if splits else head[0]),
        positions="fsdp" if "fsdp" in sizes else None,
        vocabulary="tensor" if "tensor" in sizes and splits else None,
        width="fsdp" if "fsdp" in sizes and head[1] % fsdp == 0 else None,
    )


def _on_each_device(plan: _Plan, function: Callable[..., Any], inputs: str, outputs: str) -> Callable[..., Any]:
    """`function` of parts of hidden states "h", of the head "w", and of numbers for every position "p"."""
    axes = {axis for axis in (plan.positions, plan.vocabulary, plan.width) if axis is not None}
    function = partial(function, plan)
    if not axes:
        return function
    specs = {"h": PartitionSpec(plan.positions, None), "w": PartitionSpec(plan.vocabulary, plan.width)}
    specs["p"] = PartitionSpec(plan.positions)
    in_specs, out_specs = (tuple(specs[kind] for kind in kinds) for kinds in (inputs, outputs))
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(
    plan: _Plan, hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    return _scores_forward(plan, hidden, head, targets, mask)[0]


def _scores_forward(
    plan: _Plan, hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array | None
) -> tuple[Any, Any]:
    logprobs, entropy, normalizer = _on_each_device(plan, _forward, "hwpp", "ppp")(hidden, head, targets, mask)
    return (logprobs, entropy), (hidden, head, targets, mask, entropy, normalizer)


def _scores_backward(plan: _Plan, kept: Any, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, None, None]:
    d_hidden, d_head = _on_each_device(plan, _backward, "hwpppppp", "hw")(*kept, *gradients)
    return d_hidden, d_head, None, None


_scores.defvjp(_scores_forward, _scores_backward)


@dataclass(frozen=True)
class _Order:
    """Positions that count before the others, in blocks, of which only those with any of the first are worked on."""

    plan: _Plan
    index: jax.Array | None
    num_blocks: jax.Array | int

    @classmethod
    def by(cls, plan: _Plan, mask: jax.Array | None) -> _Order:
        if mask is None:
            return cls(plan, None, plan.blocks)
        size = len(mask) // plan.blocks
        return cls(plan, jnp.argsort(~mask, stable=True), (jnp.sum(mask, dtype=jnp.int32) + size - 1) // size)

    def cut(self, x: jax.Array) -> jax.Array:
        """[positions, ...] -> [blocks, positions of a block, ...]."""
        x = x if self.index is None else x[self.index]
        return x.reshape(self.plan.blocks, -1, *x.shape[1:])

    def join(self, x: jax.Array) -> jax.Array:
        """The way back."""
        x = x.reshape(-1, *x.shape[2:])
        return x if self.index is None else jnp.zeros_like(x).at[self.index].set(x, unique_indices=True)


def _forward(
    plan: _Plan, hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probability, entropy and log of the summed exponentials of every position."""
    order = _Order.by(plan, mask)
    states, columns = order.cut(hidden), order.cut(_own_rows(plan, targets, head))

    def piece(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weight, start, new = _piece(plan, head, index, hidden.dtype)

        def block(k: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            peak, total, moment, own = (x[k] for x in sums)
            logits = _logits(plan, states[k], weight, new)
            highest = jnp.maximum(peak, logits.max(-1))
            above = logits - highest[:, None]
            share, fade = jnp.exp(above), jnp.exp(peak - highest)
            column = columns[k] - start
            hit = (columns[k] >= index * plan.rows) & (column >= 0) & (column < plan.rows)
            found = jnp.take_along_axis(logits, jnp.clip(column, 0, plan.rows - 1)[:, None], 1)[:, 0]
            updated = (
                highest,
                fade * total + share.sum(-1),
                fade * (moment + (peak - highest) * total) + (share * above).sum(-1),
                jnp.where(hit, found, own),
            )
            return tuple(x.at[k].set(y) for x, y in zip(sums, updated, strict=True))

        return lax.fori_loop(0, order.num_blocks, block, sums)

    zeros = jnp.zeros(columns.shape, jnp.float32)
    sums = (zeros + LOWEST, zeros, zeros, zeros)
    peak, total, moment, own = (order.join(x) for x in lax.fori_loop(0, _num_pieces(plan, head), piece, sums))
    total = jnp.where(total > 0, total, 1)  # 0 where nobody looked
    if plan.vocabulary is not None:
        highest = lax.pmax(peak, plan.vocabulary)
        fade = jnp.exp(peak - highest)
        moment = lax.psum(fade * (moment + (peak - highest) * total), plan.vocabulary)
        total, own = lax.psum(fade * total, plan.vocabulary), lax.psum(own, plan.vocabulary)
        peak = highest
    # A token outside the vocabulary has no probability.
    size = head.shape[0] * (1 if plan.vocabulary is None else lax.axis_size(plan.vocabulary))
    own = jnp.where((targets >= 0) & (targets < size), own, jnp.nan)
    normalizer = peak + jnp.log(total)
    return own - normalizer, jnp.log(total) - moment / total, normalizer


def _backward(
    plan: _Plan,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None,
    entropy: jax.Array,
    normalizer: jax.Array,
    d_logprobs: jax.Array,
    d_entropy: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of hidden states and head. With p the distribution and H its entropy,

    d logprob / d z_j = [j = target] - p_j   and   d entropy / d z_j = -p_j (log p_j + H).
    """
    order = _Order.by(plan, mask)
    states = order.cut(hidden)
    numbers = [order.cut(x) for x in (_own_rows(plan, targets, head), entropy, normalizer, d_logprobs, d_entropy)]

    def piece(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_hidden, d_head = sums
        weight, start, new = _piece(plan, head, index, hidden.dtype)

        def block(k: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            d_hidden, d_weight = sums
            targets, entropy, normalizer, d_logprobs, d_entropy = (x[k] for x in numbers)
            log_p = _logits(plan, states[k], weight, new) - normalizer[:, None]
            pull = d_logprobs[:, None] + d_entropy[:, None] * (log_p + entropy[:, None])
            hit = (jnp.arange(plan.rows)[None] == (targets - start)[:, None]) & new
            d_logits = jnp.where(hit, d_logprobs[:, None], 0) - jnp.exp(log_p) * pull
            d_logits = (d_logits / plan.temperature).astype(hidden.dtype)
            d_weight += _product(d_logits, states[k], 0, 0)
            return d_hidden.at[k].add(_product(d_logits, weight, 1, 0)), d_weight

        d_hidden, d_weight = lax.fori_loop(0, order.num_blocks, block, (d_hidden, jnp.zeros(weight.shape, jnp.float32)))
        if plan.width is not None:
            d_weight = lax.psum_scatter(d_weight, plan.width, scatter_dimension=1, tiled=True)
        elif plan.positions is not None:
            d_weight = lax.psum(d_weight, plan.positions)
        before = lax.dynamic_slice_in_dim(d_head, start, plan.rows)
        return d_hidden, lax.dynamic_update_slice_in_dim(d_head, before + d_weight, start, 0)

    zeros = jnp.zeros(states.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    d_hidden, d_head = lax.fori_loop(0, _num_pieces(plan, head), piece, zeros)
    if plan.vocabulary is not None:
        d_hidden = lax.psum(d_hidden, plan.vocabulary)
    return order.join(d_hidden).astype(hidden.dtype), d_head.astype(head.dtype)


def _num_pieces(plan: _Plan, head: jax.Array) -> int:
    return -(-head.shape[0] // plan.rows)


def _piece(plan: _Plan, head: jax.Array, index: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of the head in the dtype of the product, the first one's place, and which of them were in no earlier piece."""
    start = jnp.minimum(index * plan.rows, head.shape[0] - plan.rows)
    weight = lax.dynamic_slice_in_dim(head, start, plan.rows).astype(dtype)
    if plan.width is not None:
        weight = lax.all_gather(weight, plan.width, axis=1, tiled=True)
    return weight, start, start + jnp.arange(plan.rows)[None] >= index * plan.rows


def _logits(plan: _Plan, hidden: jax.Array, weight: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.where(new, _product(hidden, weight, 1, 1) / plan.temperature, LOWEST)


def _product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Sum over one axis of each, in float32."""
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _own_rows(plan: _Plan, targets: jax.Array, head: jax.Array) -> jax.Array:
    """Where in this device's part of the vocabulary the targets are; outside of it for those of other devices."""
    return targets if plan.vocabulary is None else targets - lax.axis_index(plan.vocabulary) * head.shape[0]
