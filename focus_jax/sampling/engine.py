"""What a kind of server must be able to do (`Engine`), and reading its answers with distrust."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from focus_jax.agents.sampler import FinishReason, SamplerError, SamplingParams
from focus_jax.sampling.transport import MEBIBYTE, JsonClient

# Engines write -9999 for a log-probability that is not a number to them; no sampled token is that unlikely.
_NO_LOGPROB = -9000.0


@dataclass(frozen=True)
class Answer:
    """A server's answer, checked: ids in the vocabulary and one log-probability each.

    Attributes:
        ids: int32 [T].
        logprobs: float32 [T], NaN where the server could not tell.
        text: without the stop string or end-of-turn token.
        finish_reason: see `Sample`.
        stop: the stop string that ended it, or None.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    text: str
    finish_reason: FinishReason
    stop: str | None


class Engine(Protocol):
    """One kind of server: how it is asked, and how its answers are read.

    Attributes:
        model: name of the served model.
        context_length: most tokens (prompt + reply) one call can hold.
        vocab_size: ids are in [0, vocab_size), or None where the server does not tell.
    """

    @property
    def model(self) -> str: ...

    @property
    def context_length(self) -> int: ...

    @property
    def vocab_size(self) -> int | None: ...

    async def reply(self, client: JsonClient, prompt: list[int], params: SamplingParams) -> Answer:
        """Sample one reply; `params.max_tokens` already fits the context."""
        ...

    async def encode(self, client: JsonClient, text: str) -> list[int] | None:
        """The server's own ids of a text without special tokens, or None where it cannot tell."""
        ...


def read_field(body: Any, name: str, kind: type, hint: str) -> Any:
    """`body[name]`, which must be there and of that kind; `hint` says how to make the server send it."""
    value = body.get(name) if isinstance(body, dict) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise SamplerError(f"the server's answer: expected `{name}` ({kind.__name__}), got {_brief(value)}; {hint}")
    return value


def read_ids(values: list[Any], vocab_size: int | None) -> np.ndarray:
    """Token ids as int32 [T]; anything that is no id of the vocabulary is an error."""
    limit = vocab_size or 2**31
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
            raise SamplerError(
                f"the server's answer: expected token ids in [0, {limit}), got {_brief(value)}", num_tokens=len(values)
            )
    return np.array(values, np.int32)


def read_logprob(value: Any) -> float:
    """A log-probability; NaN where the server has none: null, NaN, an infinity, a word, -9999, or above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    if not _NO_LOGPROB < value < 1e-3:
        return math.nan
    return min(float(value), 0.0)


def answer_limit(prompt: list[int], num_tokens: int) -> int:
    """Longest answer (bytes) that makes sense for so many generated tokens."""
    return MEBIBYTE + 64 * len(prompt) + 4096 * num_tokens


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
