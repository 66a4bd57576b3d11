"""The agent: how the policy takes turns in an environment, from one branch point to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np

from focus_jax.agents.context import AppendOnly, ContextManager
from focus_jax.agents.describe import describe
from focus_jax.agents.environment import (
    Action,
    Environment,
    EnvironmentFailure,
    Message,
    Observation,
    call_environment,
    check_observation,
    take_snapshot,
)
from focus_jax.agents.render import ChatRenderer
from focus_jax.agents.sampler import Sampler, SamplingParams
from focus_jax.agents.segment import SegmentBuilder
from focus_jax.agents.state import Segment, State
from focus_jax.agents.threads import run_environment, run_tokenizer


@dataclass(frozen=True)
class Agent:
    """The acting policy and the limits it acts under. Holds no state of its own: everything is in `State`.

    Which states keep a value when a segment ends there:
        "open": the critic's, or what its children refine it to (the policy can go on).
        "terminal": 0, the reward is on the segment. The episode ended, or a cap led to the forced last answer.
        "cut_off": the critic's, read after the last observation. A cap ended the trajectory under `cut_off="bootstrap"`.

    Args:
        sampler: generates the replies.
        renderer: turns messages into token ids.
        params: how a task turn is sampled; its seed is set for each call, its stop strings hold for task turns only.
        context_manager: what happens to the context between turns, and where the branch points are.
        max_turns: task turns per trajectory.
        max_tokens: generated tokens per trajectory, context management included.
        cut_off: at a cap, "forced_submit" asks for one last answer, beyond `max_turns` and `max_tokens`, and the
            environment must end; "bootstrap" leaves the rest to the critic.
        final_request: the user message that asks for the last answer.
        final_tokens: its most tokens; room for request and answer is kept free in the context.
        gamma: discount per task transition.

    Raises:
        ValueError: a number out of range.

    Source: project page, "Try continuing from the same point".
    """

    sampler: Sampler
    renderer: ChatRenderer
    params: SamplingParams
    context_manager: ContextManager = field(default_factory=AppendOnly)
    max_turns: int = 48
    max_tokens: int = 32_768
    cut_off: Literal["forced_submit", "bootstrap"] = "forced_submit"
    final_request: str = "This is your last turn: no more tools, no more steps. Give your final answer now."
    final_tokens: int = 512
    gamma: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "final_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}`: expected at least 1, got {getattr(self, name)}")
        if self.cut_off not in ("forced_submit", "bootstrap"):
            raise ValueError(f"`cut_off`: expected 'forced_submit' or 'bootstrap', got {self.cut_off!r}")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"`gamma`: expected a number in (0, 1], got {self.gamma}")

    def describe(self) -> dict[str, Any]:
        """The settings that shape what is collected, as plain data: the same in every process, whatever the server's address.

        Returns:
            "policy": the sampler's `model`, or its class where it has none; "template": the renderer's `digest`; and every
            other field by its name.

        Raises:
            TypeError: the context manager (or another setting) has nothing but its address to be known by.

        Example:
            >>> from focus_jax.agents import ChatRenderer, SamplingParams
            >>> from focus_jax.sampling import ByteTokenizer, ScriptedSampler
            >>> tokenizer = ByteTokenizer()
            >>> renderer = ChatRenderer(tokenizer, chat_template="{{ messages[0].content }}")
            >>> settings = Agent(ScriptedSampler(["4"], tokenizer), renderer, SamplingParams()).describe()
            >>> settings["policy"], settings["context_manager"]
            ('ScriptedSampler', {'class': 'AppendOnly'})
        """
        model = getattr(self.sampler, "model", None)
        policy = {"policy": model if isinstance(model, str) else type(self.sampler).__name__, "template": self.renderer.digest}
        return policy | {f.name: describe(getattr(self, f.name)) for f in fields(self) if f.name not in ("sampler", "renderer")}

    def max_generated(self, state: State) -> int:
        """Most tokens that a continuation from `state` can still generate, the forced answer included.

        With `AppendOnly` the turns left and the free context bound it too; other context managers may generate between
        turns and free the context, which leaves `max_tokens`.

        Args:
            state: one of this agent's.

        Returns:
            Tokens, at least 0: the price of a continuation, to be reserved before it is launched.

        Example:
            >>> from focus_jax.sampling import ByteTokenizer, ScriptedSampler
            >>> tokenizer = ByteTokenizer()
            >>> params = SamplingParams(max_tokens=100)
            >>> agent = Agent(ScriptedSampler([], tokenizer), ChatRenderer(tokenizer), params, max_turns=2, final_tokens=10)
            >>> agent.max_generated(State(np.zeros(20, np.int32), seed_length=0, environment=b""))
            210
        """
        left = self.max_tokens - state.num_tokens
        if isinstance(self.context_manager, AppendOnly):
            turns = (self.max_turns - state.num_turns) * self.params.max_tokens
            left = min(left, turns, self.sampler.context_length - len(state.context) - self._reserve)
        return max(left, 0) + (self.final_tokens if self.cut_off == "forced_submit" else 0)

    async def start(self, environment: Environment, task: Any) -> State:
        """Reset `environment` to `task` and open the context.

        Args:
            environment: a fresh one.
            task: what its `reset` takes.

        Returns:
            The root state. Where it is not resumable, only this environment can go on from it, once.

        Raises:
            ValueError: the opening leaves no room for a reply, or the chat template refuses it.
            EnvironmentFailure: the environment broke.

        Example: see `segment`.
        """
        observation = await run_environment(environment, call_environment, "reset", environment.reset, task)
        check_observation(observation, "reset")
        if not observation.messages or observation.done or observation.reward:
            raise EnvironmentFailure("`reset`: expected opening messages, no reward and `done=False`")
        context, seed_length = await run_tokenizer(self.renderer.tokenizer, self._open, observation.messages)
        snapshot, resumable = await run_environment(environment, take_snapshot, environment)
        return State(context, seed_length, snapshot, resumable=resumable)

    async def segment(
        self, environment: Environment, state: State, *, seed: int, charge: Callable[[int], None]
    ) -> tuple[Segment, State]:
        """Let the policy go on from `state` to the next branch point, the end of the episode, or a cap.

        Environment calls run in a thread. After a failure or a cancellation the environment may still be busy there:
        throw it away.

        Args:
            environment: takes on the state's snapshot; where the state is not resumable, the very environment that
                stands at it.
            state: where to start; left untouched.
            seed: each policy call gets its own seed, drawn from this one and the call's number.
            charge: called after every policy call, failed ones included, with the number of tokens generated.

        Returns:
            The segment and the state it leads to.

        Raises:
            SamplerError: the server failed or broke a reply off. The attempt fails, and may be launched again.
            EnvironmentFailure, GraderFailure: the environment or its grader broke, or gave a reward that is not finite.

        Example:
            >>> import asyncio
            >>> from focus_jax.sampling import ByteTokenizer, ScriptedSampler
            >>> class Sum:
            ...     def reset(self, task):
            ...         return Observation((Message("user", task),))
            ...     def step(self, action):
            ...         return Observation(reward=float(action.text == "4"), done=True)
            ...     def snapshot(self):
            ...         return b""
            ...     def restore(self, snapshot):
            ...         pass
            >>> tokenizer = ByteTokenizer()
            >>> agent = Agent(ScriptedSampler(["4"], tokenizer), ChatRenderer(tokenizer), SamplingParams())
            >>> async def attempt():
            ...     root = await agent.start(Sum(), "2 + 2")
            ...     return await agent.segment(Sum(), root, seed=0, charge=lambda num_tokens: None)
            >>> segment, state = asyncio.run(attempt())
            >>> segment.reward, segment.status, state.num_tokens
            (1.0, 'terminal', 2)
        """
        if state.resumable:
            await run_environment(environment, call_environment, "restore", environment.restore, state.environment)
        reserve = await run_tokenizer(self.renderer.tokenizer, lambda: self._reserve)
        segment = SegmentBuilder(
            state, environment, self.sampler, self.renderer, self.params, self.gamma, seed, charge, self.max_tokens, reserve
        )
        while (cap := self._cap(segment)) is None:
            observation = await self._turn(segment, self.params.max_tokens, self.params.stop)
            if observation.done:
                return segment.finish("terminal", "done")
            await segment.append(observation.messages)
            if self._cap(segment) in ("turn_cap", "token_cap"):
                continue
            # A full context is the manager's business first: it may make room.
            is_branch_point = await self.context_manager.after_turn(segment)
            if is_branch_point and self._cap(segment) is None:
                reason = "compaction" if segment.resets else "turn"
                return segment.finish("open", reason, *await run_environment(environment, take_snapshot, environment))
        if self.cut_off == "bootstrap":
            return segment.finish("cut_off", cap, *await run_environment(environment, take_snapshot, environment))
        await self._submit(segment)
        return segment.finish("terminal", cap)

    def _open(self, messages: Sequence[Message]) -> tuple[np.ndarray, int]:
        """The context that the opening makes, and how much of it every later context begins with."""
        context = self.renderer.opening(messages)
        longest = self.sampler.context_length - self._reserve - 1
        if len(context) > longest:
            raise ValueError(
                f"the opening has {len(context)} tokens, at most {longest} leave room for a reply within the context of "
                f"{self.sampler.context_length}: shorten the prompt, lower `final_tokens`, or serve a longer context"
            )
        # The longest common start, because a template may word the last message differently before a reply.
        seed = self.renderer.opening(messages, generation_prompt=False)
        length = min(len(seed), len(context))
        seed_length = int(np.append(seed[:length] == context[:length], False).argmin())
        context.flags.writeable = False
        return context, seed_length

    @cached_property
    def _reserve(self) -> int:
        """Context tokens that the forced answer needs."""
        if self.cut_off == "bootstrap":
            return 0
        return len(self.renderer.turn([Message("user", self.final_request)], -1)) + self.final_tokens

    def _cap(self, segment: SegmentBuilder) -> str | None:
        """The cap that stands in the way of another turn."""
        if segment.state.num_turns + segment.num_turns >= self.max_turns:
            return "turn_cap"
        if segment.num_generated >= segment.token_limit:
            return "token_cap"
        return "context_cap" if segment.room < 1 else None

    async def _turn(
        self, segment: SegmentBuilder, max_tokens: int, stop: tuple[str, ...] = (), *, last: bool = False
    ) -> Observation:
        """One reply of the policy and the environment's answer to it."""
        sample = await segment.generate(max_tokens, task=True, stop=stop)
        ended = sample.finish_reason == "stop" and sample.stop is None
        action = Action(sample.text, ended=ended, last=last, stop=sample.stop)
        observation = await run_environment(segment.environment, call_environment, "step", segment.environment.step, action)
        check_observation(observation, "step")
        segment.add_transition(float(observation.reward), observation.num_transitions)
        return observation

    async def _submit(self, segment: SegmentBuilder) -> None:
        """Ask for one last answer; an observation that does not leave room for it is left out."""
        segment.reserve, segment.token_limit = 0, segment.num_generated + self.final_tokens
        request = [Message("user", self.final_request)]
        await segment.append(request)
        if segment.room < self.final_tokens:
            segment.drop_pending()
            await segment.append(request)
        observation = await self._turn(segment, self.final_tokens, last=True)
        if not observation.done:
            raise EnvironmentFailure("`step`: the last action must end the episode: expected `done=True`, got False")
