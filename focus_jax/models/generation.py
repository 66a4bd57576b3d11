"""Replies to a batch of prompts, each from its own seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from focus_jax.models.check import check_decoder, check_length
from focus_jax.models.decoder import Decoder
from focus_jax.models.engine import ContinuousBatch, Reply, Request, check_prompt, check_stop_ids

_MOST_STEPS = 8


@dataclass(frozen=True)
class Generation:
    """Replies to B prompts, filled up with zeros to the longest, N.

    Attributes:
        ids: int32 [B, N], a stop id that was drawn included.
        logprobs: float32 [B, N], log-probability of each under the distribution it was drawn from.
        length: int32 [B], tokens of each reply.
        finish_reason: "stop" (a stop id) or "length" (`max_tokens`), one per row.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    length: np.ndarray
    finish_reason: tuple[Literal["stop", "length"], ...]


def generate(
    model: Decoder,
    prompts: Sequence[ArrayLike] | np.ndarray,
    *,
    max_tokens: int,
    seeds: Sequence[int],
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_ids: Sequence[int] = (),
    lengths: ArrayLike | None = None,
) -> Generation:
    """Sample one reply to each prompt.

    Token t of a row is drawn with the key fold_in(key(seed), t), so a reply depends on its own prompt and seed alone.
    Compiled once for every number of prompts and every bucket of lengths (powers of two).

    Args:
        model: the decoder. From `for_decoding` it is used as it is; otherwise its weights are laid out anew each call.
        prompts: integers, one row [T] per prompt; or an array [B, T], filled up at the right, with `lengths`.
        max_tokens: most tokens of a reply, at least 1.
        seeds: one in [0, 2**32) per prompt.
        temperature: 0 takes the most likely token; log-probabilities are then those of temperature 1.
        top_p: mass of the nucleus. For evaluation: below 1 the log-probabilities are renormalised over the nucleus, which a
            trainer's distribution does not have.
        stop_ids: ids that end a reply.
        lengths: int [B], how many tokens of each row of an array count.

    Raises:
        ValueError: something out of range; ids beyond the vocabulary; prompt and reply longer than the model's positions.
        TypeError: a model that is no decoder, such as a critic.
        FloatingPointError: the model's scores are not finite.

    Example:
        >>> import jax
        >>> from focus_jax.models import ModelConfig
        >>> config = ModelConfig("llama", 64, 32, 64, 2, 1, 16, ("full_attention",))
        >>> model = Decoder(config, key=jax.random.key(0))
        >>> reply = generate(model, [[1, 2, 3], [4]], max_tokens=4, seeds=[0, 1])
        >>> reply.ids.shape, reply.length.tolist(), reply.finish_reason
        ((2, 4), [4, 4], ('length', 'length'))
    """
    check_decoder(model)
    rows = _rows(prompts, lengths)
    for row in rows:
        check_prompt(model.config, row)
    if np.ndim(seeds) != 1 or len(seeds) != len(rows):
        got = len(seeds) if np.ndim(seeds) == 1 else repr(seeds)
        raise ValueError(f"`seeds`: expected one for each of {len(rows)} prompts, got {got}")
    stop_ids = tuple(stop_ids)
    check_stop_ids(model.config, stop_ids)
    requests = [Request(row, max_tokens, seed, temperature, top_p, stop_ids) for row, seed in zip(rows, seeds, strict=True)]
    check_length(model.config, max(map(len, rows)) + max_tokens)
    batch = ContinuousBatch(
        model,
        num_slots=len(rows),
        context_length=model.config.max_positions,
        num_steps=min(_MOST_STEPS, 1 << (max_tokens - 1).bit_length()),
    )
    handles = [batch.submit(request) for request in requests]
    replies: dict[int, Reply] = {}
    while batch.num_waiting or batch.num_active:
        replies |= batch.step()
    return _pack([replies[handle] for handle in handles])


def _rows(prompts: Sequence[ArrayLike] | np.ndarray, lengths: ArrayLike | None) -> list[np.ndarray]:
    """Every prompt by itself, without what fills it up."""
    rows = [np.asarray(prompt) for prompt in prompts]
    if not rows:
        raise ValueError("`prompts`: expected at least one, got none")
    if lengths is None:
        return rows
    counts = np.asarray(lengths)
    if counts.shape != (len(rows),) or any(not 1 <= n <= len(row) for n, row in zip(counts, rows, strict=True)):
        raise ValueError(f"`lengths`: expected one number per prompt, at least 1 and at most its length, got {counts.tolist()}")
    return [row[:n] for n, row in zip(counts, rows, strict=True)]


def _pack(replies: Sequence[Reply]) -> Generation:
    length = np.array([len(reply.ids) for reply in replies], np.int32)
    ids = np.zeros((len(replies), length.max()), np.int32)
    logprobs = np.zeros(ids.shape, np.float32)
    for row, reply in enumerate(replies):
        ids[row, : length[row]], logprobs[row, : length[row]] = reply.ids, reply.logprobs
    if np.isnan(logprobs).any():
        row = int(np.isnan(logprobs).any(1).argmax())
        raise FloatingPointError(f"the model's scores are not finite in the reply to prompt {row}; look at its weights")
    reasons = tuple(reply.finish_reason or "length" for reply in replies)
    return Generation(ids, logprobs, length, reasons)
