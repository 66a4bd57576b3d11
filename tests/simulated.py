"""A small agent for collection tests: a policy of random letters in an environment that adds them up."""

import asyncio
import json
import multiprocessing
import random

import numpy as np

from focus_jax.agents import (
    Action,
    Agent,
    ChatRenderer,
    EnvironmentFailure,
    Message,
    Observation,
    Sample,
    SamplerError,
    SamplingParams,
    Segment,
    State,
)
from focus_jax.collection import (
    Budget,
    Continuation,
    HostTree,
    Pass,
    RandomCritic,
    RootRollouts,
    Round,
    ValueRefinement,
    collect,
)
from focus_jax.sampling import ByteTokenizer

TURNS = 4
TASKS = {f"p{i}": f"task {i}" for i in range(5)}
PASSES = [Pass(RootRollouts(2), Budget(continuations=2)), Pass(ValueRefinement(), Budget(continuations=6))]
CRITIC = RandomCritic(1)


class LetterEnvironment:
    """`TURNS` turns of one reply each; the reward is 1 where the replies' letters sum to an even number."""

    def __init__(self) -> None:
        self.letters = ""
        self.turns = 0

    def reset(self, task: str) -> Observation:
        if task == "broken":
            raise EnvironmentFailure("no such task")
        self.letters, self.turns = task, 0
        return Observation((Message("user", f"Letters for {task}"),))

    def step(self, action: Action) -> Observation:
        if action.text.startswith("hang"):
            raise EnvironmentFailure("the letter box is stuck")
        self.letters += action.text
        self.turns += 1
        if self.turns >= TURNS or action.last:
            return Observation(reward=float(sum(map(ord, self.letters)) % 2 == 0), done=True)
        return Observation((Message("user", "more"),))

    def snapshot(self) -> bytes:
        return json.dumps([self.letters, self.turns]).encode()

    def restore(self, snapshot: bytes) -> None:
        self.letters, self.turns = json.loads(snapshot)


class LetterSampler:
    """Replies with letters drawn from the seed, after a delay drawn from it; a share of calls fails part-way."""

    context_length = 4096

    def __init__(self, *, delay: float = 0.0, failing: float = 0.0, tokenizer: ByteTokenizer | None = None) -> None:
        self.delay, self.failing = delay, failing
        self.tokenizer = tokenizer or ByteTokenizer()
        self.in_flight = self.most_in_flight = self.num_calls = 0

    async def sample(self, prompt_ids: np.ndarray, params: SamplingParams) -> Sample:
        draw = random.Random(f"{params.seed}-{len(prompt_ids)}")
        self.num_calls += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(draw.expovariate(1 / self.delay) if self.delay else 0)
        finally:
            self.in_flight -= 1
        text = "".join(draw.choice("abcdefgh") for _ in range(draw.randint(1, params.max_tokens - 1)))
        ids = np.array([*self.tokenizer.encode(text), min(self.tokenizer.eos_ids)], np.int32)
        if draw.random() < self.failing:
            raise SamplerError("the server fell over", num_tokens=len(ids) // 2)
        logprobs = np.log(np.array([draw.uniform(0.05, 1) for _ in ids], np.float32))
        return Sample(ids, logprobs, text, "stop")


def letter_agent(**sampler) -> Agent:
    sampler = LetterSampler(**sampler)
    return Agent(
        sampler,
        ChatRenderer(sampler.tokenizer),
        SamplingParams(max_tokens=6),
        max_turns=TURNS + 1,
        max_tokens=6 * TURNS,
        final_tokens=6,
    )


def collect_letters(
    agent=None, *, tasks=TASKS, passes=PASSES, critic=CRITIC, make_environment=LetterEnvironment, **knobs
) -> Round:
    """`collect` with a letter agent, from start to end."""
    return asyncio.run(collect(agent or letter_agent(), critic, tasks, passes, make_environment=make_environment, **knobs))


# Processes that fork off one which has imported all this: quicker to start than an interpreter, and free of JAX's threads.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["pytest", "focus_jax.collection", "focus_jax.sampling"])


def make_segment(text: str = "abc", *, reward: float = 0.0, status: str = "open", steps: int = 1, **fields) -> Segment:
    """A segment of one generated token per letter, log-probability -0.5 each."""
    n = len(text)
    ones = np.ones(n, bool)
    columns = {
        "token_ids": np.array([ord(c) for c in text], np.int32),
        "generated": ones,
        "task": ones,
        "logprobs": np.full(n, -0.5, np.float32),
        "versions": np.zeros(n, np.int32),
    }
    return Segment(**{**columns, "reward": reward, "num_steps": steps, "status": status, **fields})


def make_continuation(*segments: Segment, values: list[float] | None = None, price: int = 1) -> Continuation:
    """A continuation over the given segments; values are 0 unless given."""
    states = [State(np.zeros(0, np.int32), 0, b"", i + 1, 0) for i in range(len(segments))]
    return Continuation(segments, tuple(states), tuple(values or [0.0] * len(segments)), (price,) * len(segments))


def make_tree(problem: str = "p", value: float = 0.0, context: str = "Q") -> HostTree:
    """A bare root."""
    return HostTree(problem, State(np.array([ord(c) for c in context], np.int32), len(context), b""), value)
