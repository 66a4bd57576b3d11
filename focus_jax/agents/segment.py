"""A segment while it is being built: what the turn loop and the context managers append to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from focus_jax.agents.environment import Environment, EnvironmentFailure, Message
from focus_jax.agents.render import ChatRenderer
from focus_jax.agents.sampler import Sample, Sampler, SamplerError, SamplingParams
from focus_jax.agents.seeds import derive_seed
from focus_jax.agents.state import Reset, Segment, State, Status
from focus_jax.agents.threads import run_tokenizer


@dataclass
class SegmentBuilder:
    """Grows one segment from a state: messages and replies in, a `Segment` and the `State` it leads to out.

    Made by `Agent.segment`; a context manager gets it after each task turn, and may use everything below but `finish`.
    Messages wait until the next reply is sampled, so that a request added to an observation is rendered with it.

    Attributes:
        state: where the segment starts.
        environment: the live environment.
        token_limit: most tokens the path may have generated.
        reserve: context tokens kept free for a forced last answer.
        context: int32 [T], the ids so far, without the messages that wait.
        pending: messages that wait.
        resets: where the context was replaced so far.
        num_turns: task turns in this segment, that is since the start or the last compaction.
        num_steps: d, task transitions in this segment.
        reward: R = sum_t gamma^t r_t so far.
    """

    state: State
    environment: Environment
    sampler: Sampler
    renderer: ChatRenderer
    params: SamplingParams
    gamma: float
    seed: int
    charge: Callable[[int], None]
    token_limit: int
    reserve: int
    context: np.ndarray = field(init=False)
    pending: tuple[Message, ...] = ()
    resets: list[Reset] = field(default_factory=list)
    num_turns: int = 0
    num_steps: int = 0
    reward: float = 0.0
    _num_calls: int = 0
    _num_generated: int = 0
    _pending_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    # The prompt's length in the context; what the segment added to the contexts before this one.
    _prompt_length: int = field(init=False)
    _before: list[np.ndarray] = field(default_factory=list)
    # position in the segment; log-probabilities; whether a task turn; policy version
    _replies: list[tuple[int, np.ndarray, bool, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = self.state.context
        self._prompt_length = len(self.context)

    @property
    def num_tokens(self) -> int:
        """Length of the prompt that the policy would see next."""
        return len(self.context) + len(self._pending_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated on the whole path, context management included."""
        return self.state.num_tokens + self._num_generated

    @property
    def room(self) -> int:
        """Most tokens that can be generated now (below 1: none), leaving room for a forced last answer."""
        return min(self.token_limit - self.num_generated, self.sampler.context_length - self.num_tokens - self.reserve)

    async def append(self, messages: Sequence[Message]) -> None:
        """Add messages after the context; consecutive user messages become one, for templates that want alternation.

        Args:
            messages: what came back, or what the policy is asked; they wait until the next reply is sampled.

        Raises:
            ValueError: the chat template refuses them.
            RuntimeError: the context has just been replaced and awaits a reply.
        """
        if self.resets and self.resets[-1].position == self._length:
            raise RuntimeError("the context has just been replaced and awaits a reply: give `replace` all the messages")
        pending = list(self.pending)
        for message in messages:
            if pending and pending[-1].role == message.role == "user":
                pending[-1] = Message("user", f"{pending[-1].content}\n\n{message.content}")
            else:
                pending.append(message)
        ids = await run_tokenizer(self.renderer.tokenizer, self.renderer.turn, pending, int(self.context[-1]))
        self.pending, self._pending_ids = tuple(pending), ids

    def drop_pending(self) -> None:
        """Forget the messages that wait: they do not fit."""
        self.pending, self._pending_ids = (), np.zeros(0, np.int32)

    async def generate(self, max_tokens: int, *, task: bool = False, stop: tuple[str, ...] = ()) -> Sample:
        """Sample a reply of the policy and append it exactly as sampled.

        Args:
            max_tokens: most tokens to generate; cut to `room`.
            task: True for a task turn, False for context management (trained all the same, d counts 0).
            stop: stop strings.

        Returns:
            The reply; it is in the context already.

        Raises:
            SamplerError: the server failed, or broke the reply off. What it generated has been charged; the attempt
                fails and may be launched again, nothing of the broken reply is kept or graded.
            RuntimeError: there is no room.
        """
        limit = min(max_tokens, self.room)
        if limit < 1:
            raise RuntimeError(f"no room to generate ({self.room} tokens); look at `room` first")
        self._flush()
        params = replace(self.params, max_tokens=limit, stop=stop, seed=derive_seed(self.seed, self._num_calls))
        self._num_calls += 1
        try:
            sample = await self.sampler.sample(self.context, params)
        except SamplerError as error:
            self.charge(error.num_tokens)
            raise
        num_tokens = len(sample.ids)
        self.charge(num_tokens)
        if sample.finish_reason == "abort":
            raise SamplerError(f"the server broke the reply off after {num_tokens} tokens", num_tokens=num_tokens)
        if num_tokens > limit:
            raise SamplerError(
                f"`max_tokens`: asked for at most {limit}, the sampler answered {num_tokens}", num_tokens=num_tokens
            )
        self._num_generated += num_tokens
        self._replies.append((self._length, sample.logprobs, task, sample.policy_version))
        self._add(np.asarray(sample.ids, np.int32))
        return sample

    def add_transition(self, reward: float, num_transitions: int) -> None:
        """Count a task turn: R += gamma^d * reward, then d += num_transitions.

        Args:
            reward: of this turn.
            num_transitions: task transitions that it counts for the discount.
        """
        self.add_reward(reward)
        self.num_steps += num_transitions
        self.num_turns += 1

    def add_reward(self, reward: float) -> None:
        """Add a reward at this point, outside any task turn: R += gamma^d * reward."""
        self.reward += self.gamma**self.num_steps * reward

    async def replace(self, messages: Sequence[Message], *, keep_opening: bool = True) -> None:
        """Let the opening and `messages` replace the context.

        Args:
            messages: what the policy sees after the opening, complete messages; an invitation to reply follows them.
            keep_opening: False drops the opening, too; there is none to keep from then on.

        Raises:
            EnvironmentFailure: the new context leaves no room for a reply.
            ValueError: the chat template refuses the messages.
        """
        # What waits is part of the transcript even though the new context does not show it.
        self._flush()
        render = self.renderer.extend if keep_opening else self.renderer.opening
        opening = self.state.context[: self.state.seed_length if keep_opening else 0]
        context = np.concatenate([opening, await run_tokenizer(self.renderer.tokenizer, render, messages)])
        longest = self.sampler.context_length - self.reserve - 1
        if len(context) > longest:
            raise EnvironmentFailure(
                f"after compaction the context would hold {len(context)} tokens, at most {longest} leave room for a reply: "
                "shorten the workspace's text, the opening or `summary_tokens`"
            )
        self.resets.append(Reset(self._length, _frozen(context)))
        self._before.append(self.context[self._prompt_length :])
        self.context, self._prompt_length = context, len(context)

    def finish(self, status: Status, reason: str, environment: bytes = b"", resumable: bool = False) -> tuple[Segment, State]:
        """The segment, and the state that it leads to; messages that wait and fit are appended.

        Args:
            status: what it led to.
            reason: why it ended; see `Segment`.
            environment: the environment's snapshot, for a state that can be resumed.
            resumable: whether there is one.
        """
        self._flush()
        token_ids = np.concatenate([*self._before, self.context[self._prompt_length :]])
        generated, task = np.zeros(len(token_ids), bool), np.zeros(len(token_ids), bool)
        logprobs, versions = np.zeros(len(token_ids), np.float32), np.full(len(token_ids), -1, np.int32)
        for position, reply_logprobs, is_task, version in self._replies:
            span = slice(position, position + len(reply_logprobs))
            generated[span], task[span], logprobs[span], versions[span] = True, is_task, reply_logprobs, version
        segment = Segment(
            token_ids=_frozen(token_ids),
            generated=_frozen(generated),
            task=_frozen(task),
            logprobs=_frozen(logprobs),
            versions=_frozen(versions),
            reward=self.reward,
            num_steps=self.num_steps,
            status=status,
            reason=reason,
            resets=tuple(self.resets),
        )
        state = State(
            context=_frozen(self.context),
            seed_length=self.state.seed_length,
            environment=environment,
            num_turns=self.state.num_turns + self.num_turns,
            num_tokens=self.num_generated,
            resumable=resumable,
        )
        return segment, state

    def _flush(self) -> None:
        if len(self._pending_ids) and self.num_tokens <= self.sampler.context_length:
            self._add(self._pending_ids)
        self.drop_pending()

    def _add(self, ids: np.ndarray) -> None:
        self.context = _frozen(np.concatenate([self.context, ids]))

    @property
    def _length(self) -> int:
        """Tokens of the segment so far."""
        return sum(map(len, self._before)) + len(self.context) - self._prompt_length


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
