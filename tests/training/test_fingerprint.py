"""The fingerprint sees every change of an array, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from focus_jax.models import make_mesh
from focus_jax.training.fingerprint import fingerprint

DRAW = np.random.default_rng(0)


def slow_fingerprint(words):
    """The formula over Python's whole numbers."""

    def mix(x):
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    sums = [sum(mix(word ^ mix((i + salt) % 2**32)) for i, word in enumerate(words)) % 2**32 for salt in (0, 0x9E3779B9)]
    return f"{sums[0]:08x}{sums[1]:08x}"


@pytest.mark.parametrize(
    "x",
    [
        jnp.asarray(DRAW.normal(size=(3, 4, 5)), jnp.float32),
        jnp.asarray(DRAW.normal(size=(7,)), jnp.bfloat16),
        jnp.asarray(DRAW.normal(size=(7,)), jnp.float8_e4m3fn),
        jnp.asarray(DRAW.integers(-9, 9, 6), jnp.int8),
        jnp.array(-3),
        jnp.array([True, False, True]),
        jnp.zeros((0, 3)),
        DRAW.normal(size=(2, 3)),
        DRAW.normal(size=(4, 3)).T,
        DRAW.integers(-9, 9, 4).astype(np.int64),
        np.array(1.5),
    ],
    ids=lambda x: f"{type(x).__name__}-{x.dtype}-{x.shape}",
)
def test_it_is_the_formula_over_the_words_in_order(x):
    word = np.dtype(f"<u{min(x.dtype.itemsize, 4)}")
    words = np.frombuffer(np.asarray(x).tobytes(), word)
    assert fingerprint(x) == slow_fingerprint(words.tolist())


def test_any_flipped_bit_shows():
    x = DRAW.normal(size=(4, 3)).astype(np.float32)
    found = {fingerprint(x)}
    for bit in range(x.size * 32):
        words = x.view(np.uint32).copy()
        words.flat[bit // 32] ^= np.uint32(1 << bit % 32)
        found.add(fingerprint(words.view(np.float32)))
    assert len(found) == 1 + x.size * 32


def test_order_shows_and_so_do_the_sign_of_zero_and_what_a_nan_carries():
    x = jnp.arange(6.0)
    assert fingerprint(x) != fingerprint(x[::-1])
    assert fingerprint(jnp.array([0.0, 0.0])) != fingerprint(jnp.array([0.0, -0.0]))
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert fingerprint(nans[:1]) != fingerprint(nans[1:])


@pytest.mark.parametrize(("layout", "axes"), [((8, 1), ("fsdp",)), ((2, 4), ("tensor", "fsdp")), ((4, 2), ())])
def test_it_does_not_depend_on_how_the_array_is_split(layout, axes):
    x = DRAW.normal(size=(8, 16)).astype(np.float32)
    split = jax.device_put(x, NamedSharding(make_mesh(*layout), PartitionSpec(*axes)))
    assert fingerprint(split) == fingerprint(x)


@pytest.mark.parametrize("x", [jnp.zeros(2, jnp.complex64), jax.random.key(0)], ids=["complex", "key"])
def test_what_is_neither_whole_nor_real_is_refused(x):
    with pytest.raises(TypeError, match="expected bool, integers or real numbers, got"):
        fingerprint(x)
