"""The gated delta rule: a linear attention whose state forgets by a learned decay and corrects what it stores.

S_t = exp(g_t) S_(t-1);   S_t += k_t (beta_t (v_t - S_t^T k_t))^T;   o_t = S_t^T q_t
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
        q: [B, T, H, key_dim], already normalised and scaled.
        k: [B, T, H, key_dim], already normalised.
        v: [B, T, H, value_dim].
        g: float32 [B, T, H], log of the decay, at most 0; 0 where a token is padding.
        beta: float32 [B, T, H], in [0, 1]; 0 where a token is padding.
        segment_ids: int32 [B, T]: the state starts from zero at every change, or None.
        state: float32 [B, H, key_dim, value_dim] before the first token; zeros by default.

    Returns:
        float32 [B, T, H, value_dim], and the state after the last token.
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    initial = jnp.zeros((*k.shape[:1], *k.shape[2:], v.shape[-1]), jnp.float32) if state is None else state
    keep = jnp.exp(g)
    if segment_ids is not None:
        first = jnp.concatenate([jnp.zeros_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], 1)
        keep = jnp.where(first[..., None], 0.0, keep)

    def step(state: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, keep, beta = at
        state = state * keep[..., None, None]
        error = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., :, None] * error[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    final, out = jax.lax.scan(step, initial, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, keep, beta)))
    return jnp.moveaxis(out, 0, 1), final
