"""Decoder-only transformers: Llama, Qwen2 and Qwen3 are written out here, Qwen3.5's layers in `qwen3_5`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from focus_jax.models.attention import LayerCache, Rows, attend, split_heads
from focus_jax.models.check import check_length, check_rows
from focus_jax.models.config import LayerType, ModelConfig
from focus_jax.models.layers import MLP, Linear, RMSNorm, matmul_transposed, rotary_angles, rotate
from focus_jax.models.qwen3_5 import GatedAttention, GatedDeltaNet
from focus_jax.models.sharding import constrain, normal, param


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """What earlier tokens left behind, for rows that each hold one sequence.

    Attributes:
        length: int32 [B], tokens so far.
        blocks: per block, per layer of the block, its `LayerCache`.
    """

    length: jax.Array
    blocks: tuple[tuple[LayerCache | None, ...], ...]


class Attention(nnx.Module):
    """Grouped-query attention with rotary embedding; Qwen3 also normalises each head of queries and keys."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, key: jax.Array) -> None:
        blocks, width, size = config.num_blocks, config.hidden_size, config.head_dim
        q, k, v, o = jax.random.split(key, 4)
        heads, kv_heads = config.num_heads * size, config.num_kv_heads * size
        self.q_proj = Linear(blocks, width, heads, ("tensor", "fsdp"), bias=config.qkv_bias, dtype=dtype, key=q)
        self.k_proj = Linear(blocks, width, kv_heads, ("tensor", "fsdp"), bias=config.qkv_bias, dtype=dtype, key=k)
        self.v_proj = Linear(blocks, width, kv_heads, ("tensor", "fsdp"), bias=config.qkv_bias, dtype=dtype, key=v)
        self.o_proj = Linear(blocks, heads, width, ("fsdp", "tensor"), bias=config.out_bias, dtype=dtype, key=o)
        has_norms = config.family == "qwen3"
        self.q_norm = RMSNorm(blocks, size, eps=config.norm_eps, zero_centered=False) if has_norms else None
        self.k_norm = RMSNorm(blocks, size, eps=config.norm_eps, zero_centered=False) if has_norms else None
        self.head_dim = size

    def __call__(self, x: jax.Array, rows: Rows, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None]:
        q, k, v = (split_heads(proj(x), self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        y, cache = attend(rotate(q, rows.cos, rows.sin), rotate(k, rows.cos, rows.sin), v, rows, cache)
        return self.o_proj(y.reshape(*x.shape[:-1], -1)), cache


class Layer(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, kind: LayerType, *, dtype: DTypeLike, key: jax.Array) -> None:
        mixer, mlp = jax.random.split(key)
        zero_centered = config.family == "qwen3_5"
        self.input_layernorm = RMSNorm(config.num_blocks, config.hidden_size, eps=config.norm_eps, zero_centered=zero_centered)
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config, dtype=dtype, key=mixer)
        else:
            attention = GatedAttention if config.family == "qwen3_5" else Attention
            self.self_attn = attention(config, dtype=dtype, key=mixer)
        self.is_linear = kind == "linear_attention"
        self.post_attention_layernorm = RMSNorm(
            config.num_blocks, config.hidden_size, eps=config.norm_eps, zero_centered=zero_centered
        )
        self.mlp = MLP(config, dtype=dtype, key=mlp)

    def __call__(self, x: jax.Array, rows: Rows, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None]:
        mixer = self.linear_attn if self.is_linear else self.self_attn
        y, cache = mixer(constrain(self.input_layernorm(x), "fsdp", None, None), rows, cache)
        x = constrain(x + y, "fsdp", "tensor", None)
        y = self.mlp(constrain(self.post_attention_layernorm(x), "fsdp", None, None))
        return constrain(x + y, "fsdp", "tensor", None), cache


class Block(nnx.Module):
    """The run of layers that repeats; its parameters are stacked over the repetitions."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, key: jax.Array) -> None:
        keys = jax.random.split(key, len(config.block))
        self.layers = nnx.List([Layer(config, kind, dtype=dtype, key=k) for kind, k in zip(config.block, keys, strict=True)])

    def __call__(
        self, x: jax.Array, rows: Rows, caches: tuple[LayerCache | None, ...] | None = None
    ) -> tuple[jax.Array, tuple[LayerCache | None, ...]]:
        new: list[LayerCache | None] = []
        for layer, cache in zip(self.layers, caches or (None,) * len(self.layers), strict=True):
            x, cache = layer(x, rows, cache)
            new.append(cache)
        return x, tuple(new)


class Decoder(nnx.Module):
    """Token ids to hidden states.

    Args:
        config: its shape.
        dtype: of the computation; parameters are float32.
        remat: what the backward pass may keep of a layer beside its input (a policy of `jax.checkpoint_policies`), or None
            to keep all. The default keeps the products and computes the rest again, which is quicker than to write it down.
        key: typed PRNG key of the initial parameters.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> model = Decoder(config, key=jax.random.key(0))
        >>> model(jnp.array([[1, 2, 3]])).shape
        (1, 3, 64)
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        remat: Callable[..., bool] | None = jax.checkpoint_policies.dots_saveable,
        key: jax.Array,
    ) -> None:
        embed, blocks, head = jax.random.split(key, 3)
        shape = (config.vocab_size, config.hidden_size)
        self.config = config
        self.dtype = jnp.dtype(dtype)
        if self.dtype not in map(jnp.dtype, ("float32", "bfloat16", "float16")):
            raise ValueError(f"`dtype`: expected float32, bfloat16 or float16, got {self.dtype}")
        self.remat = remat
        self.embed_tokens = param(normal(embed, shape), "tensor", "fsdp")
        self.blocks: Any = Block(config, dtype=self.dtype, key=blocks)
        self.norm = RMSNorm(1, config.hidden_size, eps=config.norm_eps, zero_centered=config.family == "qwen3_5")
        self.lm_head = None if config.tied else param(normal(head, shape), "tensor", "fsdp")

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Hidden states after the final norm.

        Args:
            tokens: int32 [B, T].
            segment_ids: int32 [B, T]: 0 is padding, a run of equal positive numbers one sequence; several may share a
                row. None: every row is one sequence.

        Returns:
            [B, T, hidden_size] in the computation's dtype; at padding finite, otherwise meaningless. NaN in the row of a
            token outside the vocabulary (see `check_tokens`).

        Raises:
            ValueError, TypeError: a shape or dtype that does not fit; without `segment_ids`, rows beyond the position limit.
        """
        tokens, segment_ids = jnp.asarray(tokens), None if segment_ids is None else jnp.asarray(segment_ids)
        check_rows(tokens, segment_ids)
        if segment_ids is None:
            check_length(self.config, tokens.shape[1])
            positions, valid = jnp.arange(tokens.shape[1])[None], None
        else:
            positions, valid = segment_positions(segment_ids), segment_ids > 0
        cos, sin = rotary_angles(positions, self.config)
        rows = Rows(cos, sin, valid, segment_ids)

        def run(layer: Layer, x: jax.Array) -> jax.Array:
            return layer(x, rows, None)[0]

        if self.remat is not None:  # layer by layer: the backward pass then holds one layer's activations, not a block's
            run = jax.checkpoint(run, policy=self.remat)

        def body(x: jax.Array, block: Block) -> tuple[jax.Array, None]:
            for layer in block.layers:
                x = run(layer, x)
            return x, None

        x, _ = jax.lax.scan(body, self._embed(tokens, valid), self.blocks)
        return self._final_norm(x)

    def extend(self, tokens: jax.Array, count: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Hidden states of new tokens, each row going on where its cache ends.

        Args:
            tokens: int32 [B, T], valid ones first.
            count: int32 [B], how many are valid, 0 leaves the row as it is.
            cache: of B rows; it must have room.

        Returns:
            Hidden states [B, T, hidden_size] and the cache with the new tokens in it.
        """
        step = jnp.arange(tokens.shape[1])[None]
        valid = step < count[:, None]
        cos, sin = rotary_angles(cache.length[:, None] + step, self.config)
        rows = Rows(cos, sin, valid, start=cache.length)
        x = self._embed(tokens, valid)
        new = []
        for block, caches in zip(self.unstacked(), cache.blocks, strict=True):
            x, layers = block(x, rows, caches)
            new.append(layers)
        return self._final_norm(x), replace(cache, length=cache.length + count, blocks=tuple(new))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores over the vocabulary, in the dtype of `hidden`: [..., hidden_size] -> [..., vocab_size]."""
        return matmul_transposed(hidden, self.head_weight().astype(hidden.dtype))

    def head_weight(self) -> jax.Array:
        """[vocab_size, hidden_size]: the output head, or the embedding where they are tied."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head)[...]

    def unstacked(self) -> list[Block]:
        """The blocks one by one, for code that does not scan over them."""
        if isinstance(self.blocks, Block):
            return [jax.tree.map(lambda leaf, i=i: leaf[i], self.blocks) for i in range(self.config.num_blocks)]
        return list(self.blocks)

    def _embed(self, tokens: jax.Array, valid: jax.Array | None) -> jax.Array:
        if valid is not None:
            tokens = jnp.where(valid, tokens, 0)  # padding may hold any number
        # An id outside the vocabulary has no row; left to itself, JAX would take the nearest one's.
        rows = self.embed_tokens[...].at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return constrain(rows.astype(self.dtype), "fsdp", "tensor", None)

    def _final_norm(self, x: jax.Array) -> jax.Array:
        return jax.tree.map(lambda leaf: leaf[0], self.norm)(x)


def segment_positions(segment_ids: jax.Array) -> jax.Array:
    """Place of every token in its own segment: [..., T] -> int32 [..., T].

    Example:
        >>> import jax.numpy as jnp
        >>> segment_positions(jnp.array([0, 1, 1, 2, 2, 2, 0])).tolist()
        [0, 0, 1, 0, 1, 2, 0]
    """
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[-1]), segment_ids.shape)
    first = jnp.concatenate([jnp.ones_like(segment_ids[..., :1], bool), segment_ids[..., 1:] != segment_ids[..., :-1]], -1)
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=segment_ids.ndim - 1)


def empty_cache(config: ModelConfig, num_rows: int, length: int, *, dtype: DTypeLike = jnp.float32) -> Cache:
    """Room for `num_rows` sequences of at most `length` tokens."""

    def layer(kind: LayerType) -> LayerCache:
        if kind == "full_attention":
            shape = (num_rows, config.num_kv_heads, length, config.head_dim)
            return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        assert config.delta is not None
        sizes = config.delta
        inputs = jnp.zeros((num_rows, sizes.kernel_size - 1, sizes.num_channels), dtype)
        return inputs, jnp.zeros((num_rows, sizes.num_value_heads, sizes.key_dim, sizes.value_dim), jnp.float32)

    blocks = tuple(tuple(layer(kind) for kind in config.block) for _ in range(config.num_blocks))
    return Cache(jnp.zeros(num_rows, jnp.int32), blocks)
