"""What a policy server answers: the `Sampler` protocol and its data.

The protocol stands here because the agent's turn is what calls it; the implementations live in `focus_jax.sampling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


class SamplerError(Exception):
    """The policy server failed: unreachable, an error status, or an answer that lacks what was asked for.

    Args:
        message: what was expected, what came, what to do.
        num_tokens: tokens known to have been generated before the failure; they are charged to the budget.
    """

    def __init__(self, message: str, *, num_tokens: int = 0):
        super().__init__(message)
        self.num_tokens = num_tokens


class ContextLengthError(SamplerError):
    """The prompt leaves no room for a reply in the server's context. No request was made; nothing was generated."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one reply.

    Behaviour sampling for training keeps `top_p = 1`: a cut renormalises the log-probabilities.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy.
        top_p: nucleus mass, 1 keeps everything.
        stop: strings that end the reply; the ids keep the last token as sampled, the text view is trimmed.
        seed: seed of this one reply, in [0, 2**31); siblings get different ones.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"`max_tokens`: expected at least 1, got {self.max_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"`temperature`: expected a number >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p`: expected a number in (0, 1], got {self.top_p}")
        if any(not s for s in self.stop):
            raise ValueError("`stop`: expected non-empty strings, got an empty one")


@dataclass(frozen=True)
class Sample:
    """One reply of the policy: the ids are the record, the text is a view.

    Attributes:
        ids: int32 [T], exactly as sampled, a sampled end-of-turn token and the token holding a stop string included.
        logprobs: float32 [T], natural log-probability of each id under the distribution it was sampled from;
            NaN where the server could not tell (such a token gets ratio 1 in the loss and is counted).
        text: the reply as text, without the stop string or end-of-turn token.
        finish_reason: "stop" (end-of-turn token or stop string), "length" (max_tokens), "abort" (the server broke it off).
        policy_version: version of the weights that made it.
        stop: the stop string that ended the reply, or None when the policy ended its turn (or the reply did not end).
    """

    ids: np.ndarray
    logprobs: np.ndarray
    text: str
    finish_reason: FinishReason
    policy_version: int = 0
    stop: str | None = None

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            raise SamplerError(
                f"the sampler answered {len(self.ids)} ids but {len(self.logprobs)} log-probabilities; "
                "they must agree, or the sample must be re-scored",
                num_tokens=len(self.ids),
            )


class Sampler(Protocol):
    """Generates replies from token ids. One async call; many may be in flight.

    A sampler may also have `model`, the name of the served model: a journal tells one policy from another by it.

    Attributes:
        context_length: most tokens (prompt + reply) one call can hold.
    """

    context_length: int

    async def sample(self, prompt_ids: np.ndarray, params: SamplingParams) -> Sample:
        """Sample one reply to `prompt_ids` (int32 [T]).

        Raises:
            SamplerError: the server failed or its answer lacks ids or log-probabilities.
        """
        ...
