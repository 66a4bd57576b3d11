"""Cheap checks before any long computation: token ids, lengths, whether a tokenizer fits; shapes and dtypes of arrays."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from focus_jax.models.config import ModelConfig


def check_decoder(model: object) -> None:
    """Refuse what gives no scores over a vocabulary, such as a critic.

    Raises:
        TypeError: what came, and what to give.
    """
    if not hasattr(model, "head_weight"):
        hint = "; a critic's `backbone` has no output head to sample from" if hasattr(model, "backbone") else ""
        raise TypeError(f"`model`: expected a Decoder to sample from, got {type(model).__name__}{hint}")


def check_tokens(config: ModelConfig, tokens: ArrayLike, segment_ids: ArrayLike | None = None) -> None:
    """Refuse token ids beyond the vocabulary and sequences beyond the position limit.

    A compiled model cannot raise: it answers NaN for such ids, and goes on beyond the limit in rows with `segment_ids`.

    Args:
        config: the model's.
        tokens: integers [..., T].
        segment_ids: integers [..., T]: 0 is padding, whose ids may be anything; a run of equal positive numbers is one
            sequence. None: every row is one sequence.

    Raises:
        ValueError: which row, where, what came, and what the model takes.

    Example:
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2, max_positions=8)
        >>> check_tokens(config, [[1, 2, -1]], [[1, 1, 0]])
        >>> check_tokens(config, [[1, 512]])
        Traceback (most recent call last):
        ValueError: `tokens`: expected ids in [0, 512), got 512 at (0, 1); was it made with this model's tokenizer?
    """
    tokens = _integers("tokens", tokens)
    valid: np.ndarray | None = None
    if segment_ids is None:
        longest = tokens.shape[-1]
    else:
        segment_ids = _integers("segment_ids", segment_ids)
        if segment_ids.shape != tokens.shape:
            raise ValueError(f"`segment_ids`: expected the shape of `tokens`, {tokens.shape}, got {segment_ids.shape}")
        if (segment_ids < 0).any():
            raise ValueError(f"`segment_ids`: expected 0 for padding, else positive numbers, got {segment_ids.min()}")
        valid = segment_ids > 0
        longest = _longest_segment(segment_ids) if tokens.shape[-1] > config.max_positions else 0
    wrong = (tokens < 0) | (tokens >= config.vocab_size)
    if valid is not None:
        wrong &= valid
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"`tokens`: expected ids in [0, {config.vocab_size}), got {tokens[at]} at {at}; "
            "was it made with this model's tokenizer?"
        )
    check_length(config, longest)


def check_length(config: ModelConfig, length: int) -> None:
    """Refuse a sequence of `length` tokens, those yet to be generated included, beyond the position limit.

    Raises:
        ValueError: it is longer than `config.max_positions`.

    Example:
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2, max_positions=8)
        >>> check_length(config, 9)
        Traceback (most recent call last):
        ValueError: expected sequences of at most 8 tokens (the checkpoint's `max_position_embeddings`), got 9; shorten it
    """
    if length > config.max_positions:
        raise ValueError(
            f"expected sequences of at most {config.max_positions} tokens (the checkpoint's `max_position_embeddings`), "
            f"got {length}; shorten it"
        )


def check_tokenizer(config: ModelConfig, tokenizer: int | Any) -> None:
    """Refuse a tokenizer that knows more tokens than the model has rows of its embedding.

    Fewer are usual: embeddings are padded to round sizes.

    Args:
        config: the model's.
        tokenizer: its number of tokens, or anything with a `len` or a `vocab_size`; `len` goes first, as it counts
            tokens that were added.

    Raises:
        ValueError: it may answer ids the model does not have.

    Example:
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> check_tokenizer(config, 512)
    """
    size = tokenizer if isinstance(tokenizer, int) else len(tokenizer) if isinstance(tokenizer, Sized) else tokenizer.vocab_size
    if size > config.vocab_size:
        raise ValueError(
            f"expected a tokenizer of at most {config.vocab_size} tokens, the rows of the model's embedding, got {size}; "
            "take the one in the checkpoint's own folder"
        )


def check_rows(tokens: jax.Array, segment_ids: jax.Array | None) -> None:
    """Refuse what is no batch of rows, by shapes and dtypes alone, so that it can be done while tracing.

    Raises:
        ValueError: another number of dimensions, nothing to read, or segment ids of another shape.
        TypeError: no integers.
    """
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"`tokens`: expected shape (B, T), at least one row of at least one token, got {tokens.shape}")
    check_array("tokens", tokens, tokens.shape, jnp.integer)
    if segment_ids is not None:
        check_array("segment_ids", segment_ids, tokens.shape, jnp.integer)


def check_array(name: str, array: jax.Array, shape: tuple, kind: type) -> None:
    """Refuse an array of another shape or kind of dtype; `name` is the caller's for it.

    Example:
        >>> check_array("mask", jnp.zeros((2, 3)), (2, 3), jnp.bool_)
        Traceback (most recent call last):
        TypeError: `mask`: expected bool, got float32
    """
    if array.shape != shape:
        raise ValueError(f"`{name}`: expected shape {shape}, got {array.shape}")
    if not jnp.issubdtype(array.dtype, kind):
        raise TypeError(f"`{name}`: expected {kind.__name__}, got {array.dtype}")


def _integers(name: str, values: ArrayLike) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"`{name}`: expected rows of one length, padded where shorter: {error}") from None
    if array.ndim == 0 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"`{name}`: expected integers [..., T], got {array.dtype} of shape {array.shape}")
    return array


def _longest_segment(segment_ids: np.ndarray) -> int:
    """Tokens of the longest run of equal positive numbers."""
    rows = np.pad(segment_ids.reshape(-1, segment_ids.shape[-1]), ((0, 0), (1, 1)))
    # A row starts and ends with padding, so that its runs begin and end at changes inside it.
    edges = np.flatnonzero(np.diff(rows.ravel(), prepend=0))
    lengths = np.diff(edges, append=rows.size)
    return int(lengths[rows.ravel()[edges] > 0].max(initial=0))
