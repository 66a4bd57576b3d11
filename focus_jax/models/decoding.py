"""Rows that decode together: the compiled steps that generation is made of.

`Slots` hold what earlier tokens left behind, each row at its own length. `prefill` reads prompts into some of them, `decode`
adds tokens to all of them, `take` and `place` copy a row out and in again. Those that change the slots use up the ones they
are given, so that the caches are written in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from focus_jax.models.config import ModelConfig
from focus_jax.models.decoder import Cache, Decoder, empty_cache
from focus_jax.models.draw import draw
from focus_jax.models.layers import Linear
from focus_jax.models.qwen3_5 import Convolution


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Rows that each hold one sequence so far.

    Attributes:
        cache: of all tokens.
        hidden: [B, hidden_size], the decoder's output at the last of them, from which the next one is drawn.
    """

    cache: Cache
    hidden: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Settings:
    """How each row is sampled, and where it stands.

    Attributes:
        seed: uint32 [B]; token t of a reply is drawn with the key fold_in(key(seed), t).
        temperature: float32 [B].
        top_p: float32 [B].
        stop_ids: int32 [B, K], filled up with -1.
        step: int32 [B], tokens of the reply so far.
        limit: int32 [B], most tokens of the reply; a row rests where `step` has reached it.
    """

    seed: Any
    temperature: Any
    top_p: Any
    stop_ids: Any
    step: Any
    limit: Any


def for_decoding(model: Decoder) -> Decoder:
    """The same decoder with its blocks apart and the weights of its products in the computation's dtype.

    Stacked weights would be copied out of their stack for every token. The copy holds all weights once more: drop the
    model where only generation follows.

    Example:
        >>> import jax
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> len(for_decoding(Decoder(config, key=jax.random.key(0))).blocks)
        2
    """
    if isinstance(model.blocks, nnx.List):
        return model
    result: Decoder = jax.tree.map(lambda leaf: leaf, model)
    result.blocks = nnx.List(result.unstacked())
    for module in (part for _, part in nnx.iter_modules(result) if isinstance(part, Linear | Convolution)):
        module.weight.set_value(module.weight[...].astype(model.dtype))
    # Copies, because a training step takes over the buffers of the model it is given.
    for weight, dtype in ((result.embed_tokens, model.dtype), (result.lm_head, model.dtype), (result.norm.weight, jnp.float32)):
        if weight is not None:
            weight.set_value(jnp.array(weight[...], dtype, copy=True))
    return result


def empty_slots(model: Decoder, num_rows: int, size: int) -> Slots:
    """Rows without tokens, with room for `size` each."""
    cache = empty_cache(model.config, num_rows, size, dtype=model.dtype)
    return Slots(cache, jnp.zeros((num_rows, model.config.hidden_size), model.dtype))


@partial(jax.jit, donate_argnames="slots")
def prefill(model: Decoder, slots: Slots, rows: jax.Array, tokens: jax.Array, count: jax.Array) -> Slots:
    """Read tokens into some rows.

    Args:
        model: see `for_decoding`.
        slots: B rows with room for the tokens.
        rows: int32 [R], which; B where there is none.
        tokens: int32 [R, T], valid ones first.
        count: int32 [R], how many are valid.
    """
    cache = jax.tree.map(lambda leaf: leaf.at[rows].get(mode="clip"), slots.cache)
    hidden, cache = model.extend(tokens, count, cache)
    last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    rows = jnp.where(count > 0, rows, len(slots.hidden))
    return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new, mode="drop"), slots, Slots(cache, last))


@partial(jax.jit, static_argnames="num_steps", donate_argnames="slots")
def decode(model: Decoder, slots: Slots, settings: Settings, num_steps: int) -> tuple[Slots, jax.Array, jax.Array]:
    """Draw and read `num_steps` tokens in every row that is not at rest; a row rests after a stop id or its limit.

    Args:
        model: see `for_decoding`.
        slots: B rows, with room for the tokens.
        settings: of the rows.
        num_steps: how many.

    Returns:
        The slots, ids int32 [num_steps, B] and log-probabilities float32 [num_steps, B]; those of rests are meaningless.
    """
    keys = jax.vmap(jax.random.key)(settings.seed)

    def step(carry: tuple[Slots, jax.Array, jax.Array], _: None) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        slots, num, limit = carry
        active = num < limit
        uniforms = jax.vmap(lambda key, t: jax.random.uniform(jax.random.fold_in(key, t), (2,)))(keys, num)
        ids, logprobs = draw(model.logits(slots.hidden[:, None])[:, 0], uniforms, settings.temperature, settings.top_p)
        hidden, cache = model.extend(ids[:, None], active.astype(jnp.int32), slots.cache)
        num = num + active.astype(jnp.int32)
        limit = jnp.where((ids[:, None] == settings.stop_ids).any(-1) & active, num, limit)
        return (Slots(cache, jnp.where(active[:, None], hidden[:, 0], slots.hidden)), num, limit), (ids, logprobs)

    (slots, _, _), (ids, logprobs) = jax.lax.scan(step, (slots, settings.step, settings.limit), length=num_steps)
    return slots, ids, logprobs


@partial(jax.jit, static_argnames=("config", "size"))
def take(slots: Slots, config: ModelConfig, row: jax.Array, size: int) -> Slots:
    """A copy of one row, with attention caches of `size` tokens."""
    return _resize(jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1), slots), config, size)


@partial(jax.jit, donate_argnames="slots")
def place(slots: Slots, saved: Slots, row: jax.Array, length: jax.Array) -> Slots:
    """Put a copied row into the slots, cut to its first `length` tokens.

    Layers with a state cannot be cut: there `length` must be all of it.
    """

    def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(leaf, new, (row, *[jnp.zeros_like(row)] * (leaf.ndim - 1)))

    slots = jax.tree.map(put, slots, saved)
    return replace(slots, cache=replace(slots.cache, length=slots.cache.length.at[row].set(length)))


@partial(jax.jit, static_argnames=("config", "size"))
def resize(slots: Slots, config: ModelConfig, size: int) -> Slots:
    """The same rows with room for `size` tokens."""
    return _resize(slots, config, size)


def _resize(slots: Slots, config: ModelConfig, size: int) -> Slots:
    def fit(leaf: jax.Array) -> jax.Array:
        return jnp.pad(leaf[:, :, :size], ((0, 0), (0, 0), (0, max(size - leaf.shape[2], 0)), (0, 0)))

    def layers(block: tuple[Any, ...]) -> tuple[Any, ...]:
        pairs = zip(config.block, block, strict=True)
        return tuple(jax.tree.map(fit, layer) if kind == "full_attention" else layer for kind, layer in pairs)

    blocks = tuple(map(layers, slots.cache.blocks))
    return replace(slots, cache=replace(slots.cache, blocks=blocks))
