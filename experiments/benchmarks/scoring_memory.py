"""Temporary memory of a loss on log-probabilities and entropies, with its gradient, by XLA's own account."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from focus_jax.models import TokenScores, token_logprobs
from focus_jax.models.scoring import CHUNK

How = Literal["dense", "chunked"]


def scoring_memory(num_tokens: int = 4096, vocab_size: int = 248_320) -> dict[str, float]:
    """Megabytes of temporaries, nothing is run: {"hidden 256 float32 dense": ..., "... chunked": ..., "... share, %": ...}.

    Measured with small and large hidden states, in float32 and bfloat16 under a float32 head, with the pieces a CPU gets
    by default and with those an accelerator gets. Inputs, and gradients given back, are not temporaries.
    """
    measured: dict[str, float] = {}
    for hidden_size in (256, 4096):
        for dtype in (jnp.float32, jnp.bfloat16):
            case = f"hidden {hidden_size} {jnp.dtype(dtype).name}"
            sizes = (num_tokens, vocab_size, hidden_size)
            dense, ours = (temporary_bytes(how, *sizes, dtype=dtype) for how in ("dense", "chunked"))
            large = temporary_bytes("chunked", *sizes, dtype=dtype, chunk=CHUNK)
            measured |= {f"{case} dense": dense / 1e6, f"{case} chunked": ours / 1e6, f"{case} share, %": 100 * ours / dense}
            measured |= {f"{case} large chunks": large / 1e6, f"{case} large chunks, share, %": 100 * large / dense}
    return measured


def temporary_bytes(
    how: How,
    num_tokens: int,
    vocab_size: int,
    hidden_size: int,
    *,
    dtype: DTypeLike = jnp.float32,
    chunk: tuple[int, int] | None = None,
) -> int:
    """Of the compiled loss and its gradients with respect to hidden states and head."""

    def loss(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        scores = dense(hidden, head, targets) if how == "dense" else token_logprobs(hidden, head, targets, chunk=chunk)
        return -jnp.sum(scores.logprobs) - 0.01 * jnp.sum(scores.entropy)

    arguments = (
        jax.ShapeDtypeStruct((num_tokens, hidden_size), dtype),
        jax.ShapeDtypeStruct((vocab_size, hidden_size), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
    )
    memory = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile().memory_analysis()
    if memory is None:
        raise RuntimeError(f"expected XLA's memory analysis, got none; the backend {jax.default_backend()} does not give it")
    return memory.temp_size_in_bytes


def dense(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> TokenScores:
    """The plain way, with all logits in memory."""
    numbers = (((1,), (1,)), ((), ()))
    logits = jax.lax.dot_general(hidden, head.astype(hidden.dtype), numbers, preferred_element_type=jnp.float32)
    logp = jax.nn.log_softmax(logits)
    return TokenScores(jnp.take_along_axis(logp, targets[:, None], 1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, -1))
