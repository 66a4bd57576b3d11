"""Softmax attention: over a whole row of sequences, and of new tokens over a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from focus_jax.models.sharding import constrain, spec

# Query rows per piece where the full score matrix would be too large to hold.
BLOCK = 512


LayerCache = tuple[jax.Array, jax.Array]
"""Keys and values [B, K, S, head_dim], or a delta layer's last convolution inputs and state."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What every layer knows about the tokens at hand.

    Attributes:
        cos: float32 [B, T, rotary_dim / 2].
        sin: like `cos`.
        valid: bool [B, T], or None where every token counts.
        segment_ids: int32 [B, T] of rows that hold several sequences or padding, else None.
        start: int32 [B], tokens already in the cache, or None without one.
    """

    cos: jax.Array
    sin: jax.Array
    valid: jax.Array | None = None
    segment_ids: jax.Array | None = None
    start: jax.Array | None = None


def split_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """[B, T, heads * head_dim] -> [B, T, heads, head_dim]."""
    return x.reshape(*x.shape[:-1], -1, head_dim)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None]:
    """Attention over the row itself, or over the cache after the new keys and values are written to it."""
    if cache is None or rows.start is None:
        return causal_attention(q, k, v, rows.segment_ids), None
    keys, values = write(cache[0], k, rows.start), write(cache[1], v, rows.start)
    return cached_attention(q, keys, values, rows.start), (keys, values)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v, each token over those before it in its own segment.

    Args:
        q: [B, T, H, d].
        k: [B, T, K, d]; H is a multiple of K, head h reads k[:, :, h // (H / K)].
        v: like `k`.
        segment_ids: int32 [B, T], or None where every row is one sequence.

    Returns:
        [B, T, H, d] in the dtype of `q`. Tokens of segment 0 see each other, which keeps their numbers finite.

    On NVIDIA GPUs half precision goes to cuDNN's flash attention through `jax.nn.dot_product_attention`, which skips what
    lies above the diagonal. Rows with segments pass a mask beside that: JAX makes it a bias [B, 1, T, T], so their memory
    grows with T^2 (once per row, not per head; its unused gradient is as large). Everything else takes the plain path,
    in blocks where rows are long. The cuDNN calls were written from JAX's sources and have never run on a GPU.
    """
    length = q.shape[1]
    index = jnp.arange(length)
    if _has_flash_attention(q):
        heads = spec(k.shape, ("fsdp", None, "tensor", None))[2]  # cuDNN wants all three split alike, and by heads only
        q, k, v = (constrain(x, "fsdp", None, heads, None) for x in (q, k, v))
        mask = None if segment_ids is None else (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")

    def visible(rows: jax.Array) -> jax.Array:
        earlier = (rows[:, None] >= index[None])[None]
        if segment_ids is None:
            return earlier
        return earlier & (segment_ids[:, rows][:, :, None] == segment_ids[:, None, :])

    return _attend(q, k, v, visible)


def cached_attention(q: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
    """Attention of new tokens over a cache that already holds their own keys and values.

    Args:
        q: [B, T, H, d]; token t of row b stands at position start[b] + t.
        keys: [B, K, S, d].
        values: like `keys`.
        start: int32 [B].

    Returns:
        [B, T, H, d].
    """
    index = jnp.arange(keys.shape[2])
    if q.shape[1] == 1:
        return _attend_one(q[:, 0], keys, values, start[:, None] >= index[None])[:, None]

    def visible(rows: jax.Array) -> jax.Array:
        return (start[:, None] + rows[None])[:, :, None] >= index[None, None]

    return _attend(q, keys.swapaxes(1, 2), values.swapaxes(1, 2), visible)


def write(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Put new [B, T, K, d] into cache [B, K, S, d] at positions start[b] + t; what does not fit is dropped."""
    rows, index = jnp.arange(new.shape[0])[:, None], start[:, None] + jnp.arange(new.shape[1])[None]
    return cache.at[rows, :, index].set(new.astype(cache.dtype), mode="drop", unique_indices=True, indices_are_sorted=True)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`visible(rows)` says which keys the query rows see, bool [B or 1, len(rows), S]."""
    length = q.shape[1]
    if length <= 2 * BLOCK:
        return _dense(q, k, v, visible(jnp.arange(length)))

    # The scores of one block are recomputed in the backward pass: memory grows with S, not with T x S.
    @partial(jax.checkpoint, prevent_cse=False)
    def piece(first: jax.Array) -> jax.Array:
        rows = jnp.minimum(first + jnp.arange(BLOCK), length - 1)
        return _dense(q[:, rows], k, v, visible(rows))

    pieces = jax.lax.map(piece, jnp.arange(0, length, BLOCK))
    joined = jnp.moveaxis(pieces, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])
    return joined[:, :length]


def _attend_one(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """One query a row, [B, H, d], sees the keys in `mask` [B, S]: on CPUs twice as fast as the general way."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("bkgd,bksd->bkgs", grouped, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgs,bksd->bkgd", weights, v).reshape(q.shape)


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """One product for all queries of a key head, in float32: half precision would meet it in the backward pass."""
    dtype = q.dtype
    q, k, v = (x.astype(jnp.float32).swapaxes(1, 2) for x in (q, k, v))
    grouped = (q * q.shape[-1] ** -0.5).reshape(*k.shape[:2], -1, k.shape[-1])
    scores = jnp.einsum("bkqd,bksd->bkqs", grouped, k).reshape(*q.shape[:3], -1)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    out = jnp.einsum("bkqs,bksd->bkqd", weights.reshape(*grouped.shape[:3], -1), v)
    return out.reshape(q.shape).swapaxes(1, 2).astype(dtype)


def _has_flash_attention(q: jax.Array) -> bool:
    """Whether cuDNN's kernel takes it, backward as well: half precision, heads of up to 128 (256 from Hopper on), even T."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "")  # "9.0"; GPUs of other makers have names
    if device.platform != "gpu" or not capability[:1].isdigit():
        return False
    largest = 256 if float(capability) >= 9 else 128
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= largest and q.shape[1] % 2 == 0
    return fits and float(capability) >= 8 and q.dtype in (jnp.bfloat16, jnp.float16)
