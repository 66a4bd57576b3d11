"""The gated delta rule: a linear attention whose state forgets by a learned decay and corrects what it stores.

S_t = exp(g_t) S_(t-1);   S_t += k_t (beta_t (v_t - S_t^T k_t))^T;   o_t = S_t^T q_t

Rows are computed in chunks. Within a chunk that starts from S_0, with the decay d_ij = exp(g_(j+1) + ... + g_i), the
corrections u_i = beta_i (v_i - S_t^T k_i) of all tokens solve one unit lower-triangular system,

(I + A) U = beta (V - d_i K S_0),   A_ij = beta_i d_ij (k_i . k_j) for j < i,

after which outputs and the next state are plain matrix products. Only the states pass from chunk to chunk.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

# Tokens per chunk: long enough for products that keep a matrix unit busy, short enough for the quadratic part to be small.
CHUNK = 64
# Diagonal blocks of the triangular system that are inverted by products of full blocks; larger ones are put together.
INVERSE_BLOCK = 16

# Half-precision products would be felt in the state over thousands of tokens.
_einsum = partial(jnp.einsum, precision="highest")


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs and final state of the gated delta rule.

    Args:
        q: [B, T, K, key_dim], already normalised and scaled.
        k: [B, T, K, key_dim], already normalised.
        v: [B, T, H, value_dim]; H is a multiple of K, value head h reads key head h // (H / K).
        g: float32 [B, T, H], log of the decay, at most 0; 0 where a token is padding.
        beta: float32 [B, T, H], in [0, 1]; 0 where a token is padding.
        segment_ids: int32 [B, T]: the state starts from zero at every change, or None.
        state: float32 [B, H, key_dim, value_dim] before the first token; zeros by default.

    Returns:
        float32 [B, T, H, value_dim], and the state after the last token.

    Example:
        >>> import jax.numpy as jnp
        >>> k, v, one = jnp.ones((1, 3, 1, 1)), jnp.arange(3.0).reshape(1, 3, 1, 1), jnp.ones((1, 3, 1))
        >>> out, state = gated_delta_rule(k, k, v, 0 * one, one)  # keys are equal: each value replaces the last
        >>> out.ravel().tolist(), state.item()
        ([0.0, 1.0, 2.0], 2.0)
    """
    q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
    if state is None:
        state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]))
    state = state.astype(jnp.float32)
    if v.shape[1] == 1:
        out, state = _step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
        return out[:, None], state
    return _chunked(q, k, v, g, beta, segment_ids, state)


def _step(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of every row, [B, heads, ...]: the rule as it is written."""
    q, k = (jnp.repeat(x, v.shape[1] // k.shape[1], axis=1) for x in (q, k))
    state = jnp.exp(g)[..., None, None] * state
    error = beta[..., None] * (v - _einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., :, None] * error[..., None, :]
    return _einsum("bhkv,bhk->bhv", state, q), state


def _chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array | None,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    batch, length, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    chunk = min(CHUNK, 1 << (length - 1).bit_length())
    num_chunks = -(-length // chunk)
    missing = num_chunks * chunk - length

    def split(x: jax.Array, *by_head: int) -> jax.Array:
        """[B, T, heads, ...] -> [chunks, B, *by_head, chunk, ...]; what is missing at the end neither forgets nor stores."""
        x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(batch, num_chunks, chunk, *by_head, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 2 + len(by_head)))

    group = heads // key_heads  # value heads that share a key head, `g` in the equations below
    q, k = split(q, key_heads), split(k, key_heads)
    v, g, beta = (split(x, key_heads, group) for x in (v, g, beta))

    # Sums over the tokens between j and i, each on its own: differences of cumulative sums would lose the small decays
    # that follow a strong one. As nothing but decays is summed, no exponent is positive.
    i, j, t = np.ix_(*(np.arange(chunk),) * 3)
    between = ((j < t) & (t <= i)).astype(np.float32)
    pair = jnp.tril(jnp.exp(_einsum("nbhgt,ijt->nbhgij", g, between)))
    start = jnp.exp(_einsum("nbhgt,it->nbhgi", g, jnp.tri(chunk)))
    if segment_ids is not None:
        changes = (segment_ids[:, 1:] != segment_ids[:, :-1]).astype(jnp.int32)
        run = jnp.cumsum(jnp.pad(changes, ((0, 0), (1, missing))), 1)
        run = run.reshape(batch, num_chunks, chunk).swapaxes(0, 1)
        before = jnp.concatenate([run[:1, :, :1], run[:-1, :, -1:]])  # of the token ahead of the chunk
        pair = jnp.where((run[..., :, None] == run[..., None, :])[:, :, None, None], pair, 0)
        start = jnp.where((run == before)[:, :, None, None], start, 0)
    scores = _einsum("nbhik,nbhjk->nbhij", q, k)[:, :, :, None] * pair
    overlap = _einsum("nbhik,nbhjk->nbhij", k, k)[:, :, :, None] * pair
    solve = invert(jnp.tril(beta[..., None] * overlap, -1))

    def step(state: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, beta, start, end, scores, solve = at
        error = beta[..., None] * (v - start[..., None] * _einsum("bhik,bhgkv->bhgiv", k, state))
        correction = _einsum("bhgij,bhgjv->bhgiv", solve, error)
        out = start[..., None] * _einsum("bhik,bhgkv->bhgiv", q, state) + _einsum("bhgij,bhgjv->bhgiv", scores, correction)
        stored = _einsum("bhjk,bhgjv->bhgkv", k, end[..., None] * correction)
        return start[..., -1, None, None] * state + stored, out

    state = state.reshape(batch, key_heads, group, key_dim, value_dim)
    final, out = jax.lax.scan(step, state, (q, k, v, beta, start, pair[..., -1, :], scores, solve))
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(batch, -1, heads, value_dim)
    return out[:, :length], final.reshape(batch, heads, key_dim, value_dim)


@jax.custom_jvp
def invert(a: jax.Array) -> jax.Array:
    """(I + a)^-1 for strictly lower-triangular a [..., n, n], n a power of two.

    Diagonal blocks are inverted in pairs of doubling size by [[X, 0], [-Y a X, Y]], which is forward substitution made of
    matrix products. (The shorter product (I - a)(I + a^2)(I + a^4)... loses all digits where keys are alike.)
    """
    size = a.shape[-1]
    block = min(INVERSE_BLOCK, size)
    # Small blocks stay in their place, as a matrix unit takes no smaller ones; large ones are cut out.
    diagonal = jnp.stack([a[..., i : i + block, i : i + block] for i in range(0, size, block)], -3)
    at = np.arange(block)
    halves = np.array([2**level for level in range(block.bit_length() - 1)]).reshape(-1, 1, 1)
    below = (at[:, None] // halves == at // halves + 1) & (at[:, None] // halves % 2 == 1)

    def double(x: jax.Array, below: jax.Array) -> tuple[jax.Array, None]:
        return x - _product(x, jnp.where(jnp.broadcast_to(below, x.shape), diagonal, 0), x), None

    x, _ = jax.lax.scan(double, jnp.broadcast_to(jnp.eye(block), diagonal.shape), below)
    half = block
    while half < size:
        cross = jnp.stack([a[..., i + half : i + 2 * half, i : i + half] for i in range(0, size, 2 * half)], -3)
        top, bottom = x[..., 0::2, :, :], x[..., 1::2, :, :]
        left = jnp.concatenate([top, -_product(bottom, cross, top)], -2)
        x = jnp.concatenate([left, jnp.concatenate([jnp.zeros_like(cross), bottom], -2)], -1)
        half *= 2
    return x[..., 0, :, :]


@invert.defjvp
def _invert_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    x = invert(*primals)
    return x, -_product(x, tangents[0], x)


def _product(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return _einsum("...ij,...jk->...ik", _einsum("...ij,...jk->...ik", a, b), c)
