"""The gated delta rule in chunks against the rule written out token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from focus_jax.models.delta import CHUNK, gated_delta_rule

run = jax.jit(gated_delta_rule)

LENGTH = 200
LAYOUTS = {  # (segment, tokens), filled up with padding
    "one": [(1, 200)],
    "edges of chunks": [(1, CHUNK), (2, CHUNK), (3, 72)],
    "beside the edges": [(1, CHUNK - 1), (2, 2), (3, CHUNK), (4, 70)],
    "short": [(1, 1), (2, 2), (3, 3), (4, 1), (5, 57), (6, 1), (7, 3), (8, 2), (9, 130)],
    "padding around and between": [(0, 5), (1, 60), (0, 3), (2, 1), (0, 60), (3, 40)],
    "padding over a chunk": [(1, 3), (0, 130), (2, 67)],
    "padding": [(0, 200)],
}


def layout(pieces):
    ids = [segment for segment, count in pieces for _ in range(count)]
    return np.array(ids + [0] * (LENGTH - len(ids)), np.int32)


SEGMENTS = np.stack([layout(pieces) for pieces in LAYOUTS.values()])


def make_inputs(length, *, batch=2, key_heads=2, heads=4, key_dim=8, value_dim=6, seed=0):
    """q, k, v, g, beta and a state; decays from near 1 to near 0."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(batch, length, key_heads, key_dim)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(batch, length, heads, value_dim))
    g, beta = -np.exp(rng.normal(size=(batch, length, heads)) * 2 - 2), rng.random((batch, length, heads))
    state = rng.normal(size=(batch, heads, key_dim, value_dim))
    return [np.asarray(x, np.float32) for x in (q * key_dim**-0.5, k, v, g, beta)], np.asarray(state, np.float32)


def make_hard_inputs(seed=0):
    """Rows of all layouts: a few strong decays among weak ones and none, beta 0 and 1, keys that are nearly equal."""
    (q, k, v, g, beta), state = make_inputs(LENGTH, batch=len(SEGMENTS), seed=seed)
    rng = np.random.default_rng(seed + 1)
    k[:, 20:120] = k[:, 20:21] + 0.1 * k[:, 20:120]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    for choice, value in enumerate((-50.0, -1e-6, 0.0, -1e4)):
        g[rng.choice(12, g.shape) == choice] = value
    for choice, value in enumerate((0.0, 1.0)):
        beta[rng.choice(4, beta.shape) == choice] = value
    g, beta = (np.where(SEGMENTS[..., None] > 0, x, 0).astype(np.float32) for x in (g, beta))
    return [q, k, v, g, beta], state


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 200])
def test_any_length(length):
    inputs, state = make_inputs(length, seed=length)
    out, final = run(*inputs, state=state)
    expected_out, expected_final = reference.gated_delta_rule(*inputs, state=state)
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(final, expected_final, atol=2e-6)


def test_no_segment_hears_of_another():
    inputs, state = make_hard_inputs()
    out, final = run(*inputs, segment_ids=SEGMENTS, state=state)
    expected_out, expected_final = reference.gated_delta_rule(*inputs, segment_ids=SEGMENTS, state=state)
    np.testing.assert_allclose(out, expected_out, atol=5e-6, err_msg="B50")
    np.testing.assert_allclose(final, expected_final, atol=5e-6)
    # The first segment goes on from the given state, the others from nothing.
    without, _ = run(*inputs, segment_ids=SEGMENTS, state=0 * state)
    heard = np.abs(np.asarray(out - without)).max((2, 3)) > 0
    first = np.cumsum(np.diff(SEGMENTS, axis=1, prepend=SEGMENTS[:, :1]) != 0, axis=1) == 0
    assert heard[:, 0].all()
    assert not heard[~first].any()


def sequential(q, k, v, g, beta, segment_ids, state):
    """The rule by a scan over tokens, to be differentiated."""
    q, k = (jnp.repeat(x, v.shape[2] // k.shape[2], axis=2) for x in (q, k))
    new = np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0

    def step(state, at):
        q, k, v, g, beta, new = at
        state = jnp.where(new[:, None, None, None], 0, jnp.exp(g)[..., None, None] * state)
        error = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * error[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    final, out = jax.lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, jnp.asarray(new))))
    return jnp.moveaxis(out, 0, 1), final


def test_gradients_of_every_input():
    inputs, state = make_hard_inputs(seed=3)
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((*SEGMENTS.shape, 4, 6), state.shape)]

    def gradients(rule):
        def loss(q, k, v, g, beta, state):
            return sum(jnp.vdot(w, y) for w, y in zip(weights, rule(q, k, v, g, beta, SEGMENTS, state), strict=True))

        return jax.jit(jax.grad(loss, argnums=tuple(range(6))))(*inputs, state)

    chunked = gradients(lambda *x: gated_delta_rule(*x[:5], segment_ids=x[5], state=x[6]))
    for name, one, other in zip(("q", "k", "v", "g", "beta", "state"), chunked, gradients(sequential), strict=True):
        assert np.isfinite(one).all(), name
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max(), err_msg=name)


def test_equal_keys_lose_no_digits():
    """A product of powers of the system's matrix, the obvious way to invert it, would be wrong by ten orders here."""
    (q, k, v, g, beta), state = make_inputs(LENGTH)
    k[:] = k[:, :1]
    out, final = run(q, k, v, 0 * g, np.ones_like(beta), state=0 * state)
    q, k = (np.repeat(x, 2, axis=2) for x in (q, k))
    np.testing.assert_allclose(final, k[:, 0][..., None] * v[:, -1][..., None, :], atol=1e-5)  # the last value stands alone
    np.testing.assert_allclose(out, np.sum(q * k, -1, keepdims=True) * v, atol=1e-5)


def test_padding_at_the_right_leaves_the_state_of_the_last_token():
    """As a cache is filled: rows of different lengths, no segments."""
    inputs, state = make_inputs(LENGTH)
    counts = (LENGTH, 70)
    for x in inputs[3:]:
        x[1, counts[1] :] = 0
    out, final = run(*inputs, state=state)
    for row, count in enumerate(counts):
        one = [x[row : row + 1, :count] for x in inputs]
        expected_out, expected_final = reference.gated_delta_rule(*one, state=state[row : row + 1])
        np.testing.assert_allclose(out[row, :count], expected_out[0], atol=2e-6)
        np.testing.assert_allclose(final[row], expected_final[0], atol=2e-6)


def test_token_by_token_is_the_same_as_at_once():
    inputs, state = make_inputs(65)
    whole, final = run(*inputs, state=state)
    for t in range(65):
        out, state = run(*(x[:, t : t + 1] for x in inputs), state=state)
        np.testing.assert_allclose(out[:, 0], whole[:, t], atol=2e-6)
    np.testing.assert_allclose(state, final, atol=2e-6)


def test_half_precision_inputs_are_computed_in_float32():
    inputs, _ = make_inputs(3)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:3])
    out, final = run(q, k, v, *inputs[3:])
    expected_out, expected_final = reference.gated_delta_rule(*(np.asarray(x, np.float32) for x in (q, k, v)), *inputs[3:])
    assert out.dtype == final.dtype == jnp.float32
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(final, expected_final, atol=2e-6)


def test_backward_keeps_no_state_per_token():
    length, heads, size = 512, 2, 64
    shape = jax.ShapeDtypeStruct((1, length, heads, size), jnp.float32)
    scalar = jax.ShapeDtypeStruct((1, length, heads), jnp.float32)
    loss = jax.grad(lambda *x: jnp.sum(gated_delta_rule(*x)[0] ** 2), argnums=(0, 1, 2, 3, 4))
    memory = jax.jit(loss).lower(shape, shape, shape, scalar, scalar).compile().memory_analysis()
    assert memory.temp_size_in_bytes < length * heads * size * size * 4 / 2
