"""A short text that tells whether an array is still the one it was."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def fingerprint(x: jax.Array | np.ndarray) -> str:
    """16 hexadecimal digits of an array's bits and their order, the same however it is split over devices and processes.

    Each word w is mixed with its index i, and the results are added up: sum of mix(w ^ mix(i + salt)) modulo 2^32, for two
    salts. Every device reads its own part where it lies, no copy is made, and only two numbers travel. A change within one
    word always shows, any other with probability 1 - 2^-64. It guards against accidents; whoever means to can forge it.

    Args:
        x: any shape; bool, integers or real numbers of at most 64 bits.

    Raises:
        TypeError: complex numbers, or keys (take `jax.random.key_data`).

    Example:
        >>> import jax.numpy as jnp
        >>> fingerprint(jnp.arange(3.0)) == fingerprint(jnp.arange(3.0))
        True
        >>> fingerprint(jnp.zeros(1)) == fingerprint(-jnp.zeros(1))
        False

    Source: the mixing is the end of MurmurHash3.
    """
    if not (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.floating)):
        raise TypeError(f"expected bool, integers or real numbers, got {x.dtype}")
    if isinstance(x, np.ndarray) and x.dtype.itemsize == 8:
        x = np.ascontiguousarray(x).view(np.uint32)  # 64 bits would not survive the way to jax
    return "".join(f"{int(part):08x}" for part in np.asarray(_sums(x)))


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """uint32 [2], one sum for each salt."""
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo(x.dtype).bits
    words = jax.lax.bitcast_convert_type(x, f"uint{min(bits, 32)}").astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    salts = (jnp.uint32(0), jnp.uint32(0x9E3779B9))
    return jnp.stack([jnp.sum(_mix(words ^ _mix(index + salt)), dtype=jnp.uint32) for salt in salts])


def _mix(x: jax.Array) -> jax.Array:
    """A permutation of the 32-bit words in which every bit depends on every other."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
