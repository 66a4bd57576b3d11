"""Where an agent can be resumed (`State`) and what led from one such place to the next (`Segment`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from focus_jax.agents.environment import EnvironmentFailure, GraderFailure
from focus_jax.agents.sampler import SamplerError

# What a segment led to. "open": the policy can go on from here. "terminal": the episode is over.
# "cut_off": a cap ended it and the task bootstraps from the critic there.
Status = Literal["open", "terminal", "cut_off"]


@dataclass(frozen=True)
class State:
    """Everything the same policy needs to go on; resuming it any number of times leaves it untouched.

    Attributes:
        context: int32 [T], the token ids the policy sees next, ready to be sampled from (read-only).
        seed_length: how many of the first tokens are the opening messages, which survive context management.
        environment: the environment's snapshot.
        num_turns: task turns taken so far.
        num_tokens: tokens generated so far on the path, context management included.
        resumable: False where the environment could not be copied; such a state is never offered for a continuation.
    """

    context: np.ndarray
    seed_length: int
    environment: bytes
    num_turns: int = 0
    num_tokens: int = 0
    resumable: bool = True


@dataclass(frozen=True)
class Reset:
    """Context management: from a place in a segment on, another context stands for everything before it.

    Attributes:
        position: how many of the segment's tokens came before.
        context: int32 [T], the ids that replace the context there.
    """

    position: int
    context: np.ndarray


@dataclass(frozen=True)
class Segment:
    """One edge of a rollout tree: the tokens appended to the parent's context, the reward, and where it led.

    The context of the child is `parent context + token_ids`, unless the context was replaced on the way (`resets`).

    Attributes:
        token_ids: int32 [T], generated and observed tokens in order.
        generated: bool [T], True where the policy sampled the token.
        task: bool [T], True where a generated token belongs to a task turn (False for context management).
        logprobs: float32 [T], the sampler's log-probabilities; 0 where not generated, NaN where unknown.
        versions: int32 [T], policy version that sampled the token; -1 where not generated.
        reward: R = sum_t gamma^t r_t over the segment's task transitions.
        num_steps: d, the number of task transitions (context management counts 0).
        status: what the segment led to.
        reason: why it ended ("done", "turn_cap", "token_cap", "context_cap", "compaction", "turn").
        resets: where the context was replaced, in order.
    """

    token_ids: np.ndarray
    generated: np.ndarray
    task: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    num_steps: int
    status: Status
    reason: str = "turn"
    resets: tuple[Reset, ...] = ()

    @property
    def num_generated(self) -> int:
        """Generated tokens, what a budget is charged."""
        return int(self.generated.sum())

    def rows(self, context: np.ndarray) -> Iterator[tuple[np.ndarray, slice]]:
        """What the policy saw and what followed, once for every context: one row unless the context was replaced.

        A training row is the prompt and those tokens, with loss on the generated ones.

        Args:
            context: int32 [T], the parent's.

        Yields:
            A prompt, int32, and which of the segment's tokens follow it.

        Example:
            >>> ids, flags = np.array([7, 8, 9], np.int32), np.ones(3, bool)
            >>> reset = Reset(2, np.array([5], np.int32))
            >>> segment = Segment(ids, flags, flags, np.zeros(3), np.zeros(3, int), 0.0, 2, "open", resets=(reset,))
            >>> [(prompt.tolist(), ids[span].tolist()) for prompt, span in segment.rows(np.array([1, 2], np.int32))]
            [([1, 2], [7, 8]), ([5], [9])]
        """
        start = 0
        for reset in self.resets:
            yield context, slice(start, reset.position)
            start, context = reset.position, reset.context
        yield context, slice(start, len(self.token_ids))


FailureKind = Literal["sampler", "environment", "grader", "time", "critic"]


class AttemptFailure(Exception):
    """Why an attempt came to nothing: recorded with it, never a reward.

    Args:
        kind: who failed.
        message: what happened.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def classify_failure(error: BaseException) -> AttemptFailure | None:
    """Who failed, or None for a mistake in a program, which should stop the run.

    Example:
        >>> classify_failure(TimeoutError("600 s are over")).kind
        'time'
        >>> classify_failure(TypeError("no")) is None
        True
    """
    if isinstance(error, AttemptFailure):
        return error
    kinds: dict[type[Exception], FailureKind] = {
        SamplerError: "sampler",
        EnvironmentFailure: "environment",
        GraderFailure: "grader",
        TimeoutError: "time",
    }
    for exception, kind in kinds.items():
        if isinstance(error, exception):
            return AttemptFailure(kind, str(error) or type(error).__name__)
    return None
