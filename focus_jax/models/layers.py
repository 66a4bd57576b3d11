"""The parts every decoder is made of: linear map, RMS norm, rotary embedding, gated MLP.

Parameters of all blocks of a decoder are stacked along a leading axis, so that the blocks run under one `jax.lax.scan`;
inside the scan each part sees its own slice. Attributes are named as in the checkpoints, weights keep the checkpoints'
[out, in] layout.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from focus_jax.models.config import ModelConfig
from focus_jax.models.sharding import Axis, constrain, normal, param


class Linear(nnx.Module):
    """y = x W^T + b, computed in `dtype` from float32 parameters.

    Args:
        blocks: how many are stacked.
        in_size: features of x.
        out_size: features of y.
        axes: mesh axes of W, (out, in).
        bias: with a bias, 0 at first.
        dtype: of the product.
        key: typed PRNG key.
    """

    def __init__(
        self,
        blocks: int,
        in_size: int,
        out_size: int,
        axes: tuple[Axis, Axis],
        *,
        bias: bool = False,
        dtype: DTypeLike,
        key: jax.Array,
    ) -> None:
        self.weight = param(normal(key, (blocks, out_size, in_size)), None, *axes)
        self.bias = param(jnp.zeros((blocks, out_size)), None, axes[0]) if bias else None
        self.dtype = dtype
        # The features that stay split over `tensor`, here and backward; those of the other side are whole or summed up.
        self.in_axis, self.out_axis = (axis if axis == "tensor" else None for axis in reversed(axes))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.in_axis is not None:
            x = constrain(x, "fsdp", None, self.in_axis)
        y = matmul_transposed(x.astype(self.dtype), self.weight[...].astype(self.dtype))
        if self.out_axis is not None:
            y = constrain(y, "fsdp", None, self.out_axis)
        return y if self.bias is None else y + like(self.bias[...].astype(self.dtype), y)


def like(weight: jax.Array, x: jax.Array) -> jax.Array:
    """weight [n] with leading axes of size 1, to broadcast over x [..., n]."""
    return jnp.expand_dims(weight, tuple(range(x.ndim - weight.ndim)))


def matmul_transposed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x W^T for x [..., in] and W [out, in]."""
    if x.ndim == 3 and x.shape[1] == 1:
        # One token a row: with the weights on the left, XLA's product for CPUs is almost twice as fast. The barrier keeps
        # the compiler from turning it around again.
        return jax.lax.optimization_barrier(weight @ x[:, 0].T).T[:, None]
    return _product(x, weight)


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


def _product_backward(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    dx = jax.lax.dot_general(dy, weight, (((dy.ndim - 1,), (0,)), ((), ())))
    # As matrices: over several axes XLA for CPUs would first write the left side down in another order, slowly.
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return dx, jax.lax.dot_general(dy, x, (((0,), (0,)), ((), ())))


_product.defvjp(lambda x, weight: (_product(x, weight), (x, weight)), _product_backward)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32, returned in the dtype of x.

    `zero_centered` norms (Qwen3.5) keep the scale's offset from one, so that small offsets survive bfloat16.
    """

    def __init__(self, blocks: int, size: int, *, eps: float, zero_centered: bool) -> None:
        self.weight = param(jnp.zeros((blocks, size)) if zero_centered else jnp.ones((blocks, size)), None, None)
        self.eps = eps
        self.zero_centered = zero_centered

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = like(self.weight[...].astype(jnp.float32), x)
        return (normalize(x, self.eps) * (1 + scale if self.zero_centered else scale)).astype(x.dtype)


def normalize(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def rotary_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, each float32 [..., rotary_dim / 2], of position * theta^(-2i / rotary_dim)."""
    exponents = jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32) / config.rotary_dim
    positions = positions[..., None].astype(jnp.float32)
    angles = positions * like(1 / config.rope_theta**exponents, positions)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of x [..., heads, head_dim] by angles [..., rotary_dim / 2]; halves are paired, the rest passes."""
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x.dtype)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, key: jax.Array) -> None:
        blocks, width, wide = config.num_blocks, config.hidden_size, config.intermediate_size
        gate, up, down = jax.random.split(key, 3)
        self.gate_proj = Linear(blocks, width, wide, ("tensor", "fsdp"), dtype=dtype, key=gate)
        self.up_proj = Linear(blocks, width, wide, ("tensor", "fsdp"), dtype=dtype, key=up)
        self.down_proj = Linear(blocks, wide, width, ("fsdp", "tensor"), dtype=dtype, key=down)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
