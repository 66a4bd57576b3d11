"""The two kinds of layers of Qwen3.5: gated attention, and the gated delta net between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from focus_jax.models.attention import LayerCache, Rows, attend, split_heads
from focus_jax.models.config import ModelConfig
from focus_jax.models.delta import gated_delta_rule
from focus_jax.models.layers import Linear, RMSNorm, like, normalize, rotate
from focus_jax.models.sharding import normal, param


class GatedAttention(nnx.Module):
    """Grouped-query attention whose output is multiplied by sigmoid of a gate that is projected beside the queries."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, key: jax.Array) -> None:
        blocks, width, size = config.num_blocks, config.hidden_size, config.head_dim
        q, k, v, o = jax.random.split(key, 4)
        heads, kv_heads = config.num_heads * size, config.num_kv_heads * size
        # Per head: the query, then its gate.
        self.q_proj = Linear(blocks, width, 2 * heads, ("tensor", "fsdp"), bias=config.qkv_bias, dtype=dtype, key=q)
        self.k_proj = Linear(blocks, width, kv_heads, ("tensor", "fsdp"), bias=config.qkv_bias, dtype=dtype, key=k)
        self.v_proj = Linear(blocks, width, kv_heads, ("tensor", "fsdp"), bias=config.qkv_bias, dtype=dtype, key=v)
        self.o_proj = Linear(blocks, heads, width, ("fsdp", "tensor"), bias=config.out_bias, dtype=dtype, key=o)
        self.q_norm = RMSNorm(blocks, size, eps=config.norm_eps, zero_centered=True)
        self.k_norm = RMSNorm(blocks, size, eps=config.norm_eps, zero_centered=True)
        self.head_dim = size

    def __call__(self, x: jax.Array, rows: Rows, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None]:
        q, gate = jnp.split(split_heads(self.q_proj(x), 2 * self.head_dim), 2, axis=-1)
        k, v = (split_heads(proj(x), self.head_dim) for proj in (self.k_proj, self.v_proj))
        q, k = (rotate(norm(u), rows.cos, rows.sin) for norm, u in ((self.q_norm, q), (self.k_norm, k)))
        y, cache = attend(q, k, v, rows, cache)
        return self.o_proj((y * jax.nn.sigmoid(gate)).reshape(*x.shape[:-1], -1)), cache


class GatedDeltaNet(nnx.Module):
    """Linear attention by the gated delta rule, behind a short causal convolution."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, key: jax.Array) -> None:
        assert config.delta is not None
        blocks, width, sizes = config.num_blocks, config.hidden_size, config.delta
        heads, inner = sizes.num_value_heads, sizes.num_value_heads * sizes.value_dim
        keys = jax.random.split(key, 7)
        self.in_proj_qkv = Linear(blocks, width, sizes.num_channels, ("tensor", "fsdp"), dtype=dtype, key=keys[0])
        self.in_proj_z = Linear(blocks, width, inner, ("tensor", "fsdp"), dtype=dtype, key=keys[1])
        self.in_proj_b = Linear(blocks, width, heads, ("tensor", "fsdp"), dtype=dtype, key=keys[2])
        self.in_proj_a = Linear(blocks, width, heads, ("tensor", "fsdp"), dtype=dtype, key=keys[3])
        self.conv1d = Convolution(blocks, sizes.num_channels, sizes.kernel_size, dtype=dtype, key=keys[4])
        # Decay rates between 1 and 16, as published; they are used in float32 whatever the computation's dtype.
        self.A_log = param(jnp.log(jax.random.uniform(keys[5], (blocks, heads), jnp.float32, 1.0, 16.0)), None, "tensor")
        self.dt_bias = param(jnp.ones((blocks, heads), jnp.float32), None, "tensor")
        self.norm = GatedRMSNorm(blocks, sizes.value_dim, eps=config.norm_eps)
        self.out_proj = Linear(blocks, inner, width, ("fsdp", "tensor"), dtype=dtype, key=keys[6])
        self.sizes = sizes

    def __call__(self, x: jax.Array, rows: Rows, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None]:
        inputs, state = (None, None) if cache is None else cache
        if rows.valid is not None:
            x = jnp.where(rows.valid[..., None], x, 0)
        sizes, keys = self.sizes, self.sizes.num_key_heads * self.sizes.key_dim
        u = self.in_proj_qkv(x)
        q, k, v = jnp.split(jax.nn.silu(self.conv1d(u, rows, inputs)), (keys, 2 * keys), axis=-1)
        q, k = (l2_normalize(split_heads(w, sizes.key_dim)) for w in (q, k))
        beta = jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32))
        a = self.in_proj_a(x).astype(jnp.float32)
        g = -like(jnp.exp(self.A_log[...]), a) * jax.nn.softplus(a + like(self.dt_bias[...], a))
        if rows.valid is not None:  # padding neither forgets nor stores
            beta, g = (jnp.where(rows.valid[..., None], w, 0) for w in (beta, g))
        v = split_heads(v, sizes.value_dim)
        y, state = gated_delta_rule(q * sizes.key_dim**-0.5, k, v, g, beta, segment_ids=rows.segment_ids, state=state)
        y = self.norm(y, split_heads(self.in_proj_z(x), sizes.value_dim)).astype(x.dtype)
        new = None if inputs is None or rows.valid is None else (last_inputs(inputs, u, rows.valid), state)
        return self.out_proj(y.reshape(*x.shape[:-1], -1)), new


class Convolution(nnx.Module):
    """Causal depthwise convolution: y_t = sum_j weight_j x_(t - taps + 1 + j), within a segment."""

    def __init__(self, blocks: int, channels: int, taps: int, *, dtype: DTypeLike, key: jax.Array) -> None:
        self.weight = param(normal(key, (blocks, channels, 1, taps), taps**-0.5), None, "tensor", None, None)
        self.dtype = dtype

    def __call__(self, x: jax.Array, rows: Rows, before: jax.Array | None = None) -> jax.Array:
        """x [B, T, C] -> [B, T, C]; `before` [B, taps - 1, C] are the inputs ahead of it, zeros by default."""
        weight = self.weight[...][:, 0].astype(self.dtype)
        taps, length = weight.shape[-1], x.shape[1]
        before = jnp.zeros((x.shape[0], taps - 1, x.shape[2]), x.dtype) if before is None else before.astype(x.dtype)
        padded = jnp.concatenate([before, x], 1)
        y = jnp.zeros_like(x)
        for j in range(taps):
            u = padded[:, j : j + length]
            back = taps - 1 - j
            if rows.segment_ids is not None and back:
                segments = jnp.pad(rows.segment_ids, ((0, 0), (back, 0)))[:, :length]
                u = jnp.where((segments == rows.segment_ids)[..., None], u, 0)
            y = y + u * like(weight[:, j], u)
        return y


def last_inputs(before: jax.Array, x: jax.Array, valid: jax.Array) -> jax.Array:
    """The convolution inputs that the next token will need: the last before [B, n, C] and the valid x [B, T, C]."""
    size, count = before.shape[1], valid.sum(1)
    index = count[:, None] + jnp.arange(size)[None]
    return jnp.take_along_axis(jnp.concatenate([before, x.astype(before.dtype)], 1), index[..., None], axis=1)


class GatedRMSNorm(nnx.Module):
    """x / rms(x) * weight * silu(gate) over the last axis, float32; its weight is the plain kind."""

    def __init__(self, blocks: int, size: int, *, eps: float) -> None:
        self.weight = param(jnp.ones((blocks, size)), None, None)
        self.eps = eps

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        return normalize(x, self.eps) * like(self.weight[...], x) * jax.nn.silu(gate.astype(jnp.float32))


def l2_normalize(x: jax.Array) -> jax.Array:
    """x / sqrt(|x|^2 + 1e-6) over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
