"""Where a sequence stands in a row, and what stands beside it, changes nothing: logits, gradients, caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from focus_jax.models import Decoder, DeltaConfig, ModelConfig, attention, delta, empty_cache
from focus_jax.models.attention import causal_attention

VOCAB = 61
# Six sequences of up to three chunks of the delta rule (of 16 tokens here); the short ones do not fill the convolution.
LENGTHS = (40, 3, 17, 1, 2, 16)
LONGEST, WIDTH = max(LENGTHS), 64
ALONE = np.array([[t < length for t in range(LONGEST)] for length in LENGTHS])
LAYOUTS = {  # rows of sequences, by number, and of paddings, by negative length
    "left": [[length - WIDTH, i] for i, length in enumerate(LENGTHS)],
    "right": [[i] for i in range(6)],
    "packed": [[0, 1, 5, 4], [3, 2], [], [], [], []],
    "packed with padding between": [[-3, 1, -2, 0, -1, 3, -5], [5, -1, 2, -20, 4], [-WIDTH], [], [], []],
}
TOKENS, TARGETS = np.random.default_rng(0).integers(0, VOCAB, (2, len(LENGTHS), LONGEST)).astype(np.int32)


def make_decoder(family, **fields):
    """A tiny decoder with every parameter drawn at random, norms around one."""
    sizes = DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, kernel_size=4)
    kinds = ("linear_attention", "full_attention") if family == "qwen3_5" else ("full_attention",)
    more = {"qwen2": {"qkv_bias": True}, "qwen3_5": {"delta": sizes, "partial_rotary": 0.25}}.get(family, {})
    config = ModelConfig(family, VOCAB, 32, 48, 4, 2, 16, kinds, **more)
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        around = 1 if "norm" in jax.tree_util.keystr(path) and family != "qwen3_5" else 0
        return jnp.asarray(around + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map_with_path(draw, jax.eval_shape(lambda: Decoder(config, key=jax.random.key(0), **fields)))


def arrange(layout):
    """Tokens, targets, segment ids [6, WIDTH], and row and column of every token of every sequence [6, LONGEST]."""
    tokens, targets = np.where(np.arange(WIDTH) % 2, -7, 10**6) * np.ones((2, 6, 1), np.int32)  # padding holds anything
    segments, rows, columns = np.zeros((6, WIDTH), np.int32), *np.zeros((2, 6, LONGEST), np.int32)
    for row, pieces in enumerate(layout):
        at = 0
        for number, i in enumerate(pieces, 1):
            length = LENGTHS[i] if i >= 0 else -i
            if i >= 0:
                here = slice(at, at + length)
                tokens[row, here], targets[row, here], segments[row, here] = TOKENS[i, :length], TARGETS[i, :length], number
                rows[i, :length], columns[i, :length] = row, np.arange(at, at + length)
            at += length
    return tokens.astype(np.int32), targets.astype(np.int32), segments, rows, columns


@jax.jit
def logits_and_gradients(model, tokens, targets, real, segments):
    def loss(model):
        logits = model.logits(model(tokens, segments))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.where(real, targets, 0)[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(real, picked, 0)) / sum(LENGTHS), logits

    (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(model)
    return logits, gradients


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_5"])
def test_padded_and_packed_rows_are_as_sequences_alone(family, monkeypatch):
    """B50, B58: logits and the gradients of all parameters; tokens behind a sequence's end cannot matter to it."""
    monkeypatch.setattr(delta, "CHUNK", 16)
    model = make_decoder(family)
    alone, expected = logits_and_gradients(model, TOKENS, TARGETS, ALONE, None)
    assert 3 < np.abs(alone).max() < 30
    near = 1e-5 * max(np.std(alone), 1.0)  # logits of a few units: the last digits of float32
    for name, layout in LAYOUTS.items():
        tokens, targets, segments, rows, columns = arrange(layout)
        assert (segments > 0).sum() == sum(LENGTHS), name
        logits, gradients = logits_and_gradients(model, tokens, targets, segments > 0, segments)
        assert np.isfinite(logits).all(), name
        found = np.asarray(logits)[rows, columns]
        for i, length in enumerate(LENGTHS):
            np.testing.assert_allclose(found[i, :3][:length], alone[i, :3][:length], atol=near, err_msg=f"{name}: start of {i}")
        np.testing.assert_allclose(found[ALONE], np.asarray(alone)[ALONE], atol=near, err_msg=name)
        for (path, one), other in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True):
            assert np.isfinite(one).all(), (name, path)
            assert np.abs(other).max() > 1e-4, path
            np.testing.assert_allclose(one, other, atol=1e-5, err_msg=f"{name} {jax.tree_util.keystr(path)}")


@pytest.mark.parametrize(("family", "dtype", "tolerance"), [("qwen3_5", jnp.float32, 1e-5), ("qwen3", jnp.bfloat16, 0.1)])
def test_the_width_of_the_padding_does_not_matter(family, dtype, tolerance):
    """B57: the same prompt in 512 and in 1,024 columns."""
    model, prompt = make_decoder(family, dtype=dtype), TOKENS[:1]
    found = []
    for width in (512, 1024):
        tokens, segments = np.full((1, width), -7, np.int32), np.zeros((1, width), np.int32)
        tokens[:, :LONGEST], segments[:, :LONGEST] = prompt, 1
        logits = jax.jit(lambda tokens, segments: model.logits(model(tokens, segments)[:, :LONGEST]))(tokens, segments)
        assert logits.dtype == dtype
        found.append(np.asarray(logits[0], np.float32))
    np.testing.assert_allclose(*found, atol=tolerance)
    second, first = np.sort(found[0])[:, -2:].T
    clear = first - second > 2 * tolerance  # where two tokens are level, the last bit of bfloat16 decides
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(*(x.argmax(-1)[clear] for x in found))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_row_without_new_tokens_is_left_as_it_was(family):
    model = make_decoder(family)
    extend = jax.jit(lambda tokens, count, cache: model.extend(tokens, jnp.array(count), cache))
    pieces = TOKENS[:2, :12].reshape(2, 3, 4)
    cache = start = extend(pieces[:, 0], (4, 3), empty_cache(model.config, 2, 10))[1]
    for garbage in (-7, 10**6):  # the first row goes on until its cache is full, and beyond
        _, cache = extend(np.where([[True], [False]], pieces[:, 1], garbage), (4, 0), cache)
    assert cache.length.tolist() == [12, 3]
    for one, other in zip(jax.tree.leaves(cache.blocks), jax.tree.leaves(start.blocks), strict=True):
        if 10 in one.shape:  # of keys and values, the three that are there; beyond them anything may stand
            one, other = (np.take(x, range(3), axis=x.shape.index(10)) for x in (one, other))
        np.testing.assert_array_equal(one[1], other[1])
    later, _ = extend(pieces[:, 2], (0, 4), cache)
    expected, _ = extend(pieces[:, 2], (0, 4), start)
    np.testing.assert_array_equal(later[1], expected[1])


SEGMENTS = np.array([[1] * 20 + [2] * 1 + [3] * 16, [0] * 5 + [1] * 15 + [0] * 3 + [2] * 10 + [0] * 4], np.int32)


def make_heads(length=37, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, length, heads, 8)), dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("segment_ids", [SEGMENTS, None], ids=["packed", "whole"])
def test_attention_dense_and_in_blocks(monkeypatch, segment_ids):
    q, k, v = make_heads()
    weights = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def value_and_gradients():
        def loss(q, k, v):
            out = causal_attention(q, k, v, None if segment_ids is None else jnp.asarray(segment_ids))
            return jnp.vdot(weights, out), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    (_, dense), gradients = value_and_gradients()
    monkeypatch.setattr(attention, "BLOCK", 8)  # 37 tokens: the last block is not full
    (_, blocks), gradients_of_blocks = value_and_gradients()
    np.testing.assert_allclose(dense, reference.attention(*map(np.asarray, (q, k, v)), segment_ids), atol=2e-6)
    np.testing.assert_allclose(blocks, dense, atol=2e-6)
    for one, other in zip(gradients_of_blocks, gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_attention_in_half_precision_forward_and_backward():
    def loss(q, k, v):
        out = causal_attention(q, k, v, jnp.asarray(SEGMENTS))
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    half = make_heads(dtype=jnp.bfloat16)
    value_and_gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, out), gradients = value_and_gradients(*half)
    (_, expected), others = value_and_gradients(*(x.astype(jnp.float32) for x in half))
    for one, other in zip((out, *gradients), (expected, *others), strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=0.03, atol=0.03)


def test_memory_of_long_rows_does_not_grow_with_the_square():
    def temporary(length):
        q, k = (jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (2, 1))
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
        loss = jax.grad(lambda q, k, v, segments: jnp.sum(causal_attention(q, k, v, segments) ** 2), argnums=(0, 1, 2))
        return jax.jit(loss).lower(q, k, k, segments).compile().memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 2.2 * temporary(2048)
