"""How much of 64 workers' time the collector keeps busy, and what a continuation costs it in CPU time."""

from __future__ import annotations

import asyncio
import heapq
import random
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, show
from focus_jax.agents import Action, Agent, ChatRenderer, Message, Observation, Sample, SamplingParams
from focus_jax.collection import Budget, Pass, RandomCritic, RootRollouts, ValueRefinement, collect
from focus_jax.sampling import ByteTokenizer


@dataclass(frozen=True)
class Collector:
    """Grow trees against a simulated server whose latencies are exponential."""

    num_workers: int = 64
    num_continuations: int = 10_000
    num_problems: int = 64
    latency: float = 0.2
    """Mean seconds of one call."""
    max_turns: int = 8
    seed: int = 0
    output: Path | None = None
    """Also write the figures to this JSON file."""


def main(config: Collector) -> None:
    """Run the benchmark and print its table."""
    sampler = SimulatedSampler(config.latency, seed=config.seed)
    agent = Agent(
        sampler,
        ChatRenderer(sampler.tokenizer),
        SamplingParams(max_tokens=16),
        max_turns=config.max_turns,
        max_tokens=1000,
        final_tokens=16,
    )
    roots = 2 * config.num_problems
    passes = [
        Pass(RootRollouts(), Budget(continuations=roots)),
        Pass(ValueRefinement(), Budget(continuations=config.num_continuations - roots), max_pending=2),
    ]
    tasks = {f"p{i}": i for i in range(config.num_problems)}
    with tempfile.TemporaryDirectory() as folder:
        wall, cpu = time.perf_counter(), time.process_time()
        asyncio.run(
            collect(
                agent,
                RandomCritic(config.seed),
                tasks,
                passes,
                make_environment=StepsEnvironment,
                num_workers=config.num_workers,
                seed=config.seed,
                journal=Path(folder) / "journal.sqlite",
                shared_budget=True,
            )
        )
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    durations = sampler.durations()
    ideal = ideal_wall(durations, config.num_workers)
    # The second pass starts when the first has ended, which leaves workers without work meanwhile.
    in_turn = sum(ideal_wall(part, config.num_workers) for part in (durations[:roots], durations[roots:]))
    figures = [
        Figure("share of the ideal wall time", 100 * ideal / wall, "%", "at least", 95),
        Figure("wall time", wall, "s"),
        Figure("ideal wall time", ideal, "s"),
        Figure("the same, one pass after the other", in_turn, "s"),
        Figure("CPU time of a continuation, all threads", 1e3 * cpu / len(durations), "ms"),
        Figure("calls of a continuation", sampler.num_calls / len(durations), ""),
    ]
    title = f"collector: {config.num_workers} workers, {len(durations):,} continuations, calls of {config.latency} s on average"
    show(title, figures, config, output=config.output)


def ideal_wall(durations: list[float], num_workers: int) -> float:
    """Wall time of workers without any overhead: each takes the next continuation the moment it is free."""
    free = [0.0] * num_workers
    for duration in durations:
        heapq.heappush(free, heapq.heappop(free) + duration)
    return max(free)


class SimulatedSampler:
    """Replies after an exponential latency; replies and latencies are drawn beforehand, and a request's seed takes one."""

    context_length = 1 << 20

    def __init__(self, latency: float, max_tokens: int = 16, seed: int = 0) -> None:
        self.tokenizer = ByteTokenizer()
        self.num_calls = 0
        draw = random.Random(seed)
        texts = ["".join(draw.choices("abcdefgh", k=max_tokens - 1)) for _ in range(1 << 12)]
        self._replies = [(draw.expovariate(1 / latency), self._reply(text)) for text in texts]
        self._latencies: defaultdict[asyncio.Task[object], float] = defaultdict(float)

    async def sample(self, prompt_ids: np.ndarray, params: SamplingParams) -> Sample:
        latency, reply = self._replies[params.seed % len(self._replies)]
        task = asyncio.current_task()
        assert task is not None
        self._latencies[task] += latency  # one asyncio task is one continuation
        self.num_calls += 1
        await asyncio.sleep(latency)
        return reply

    def _reply(self, text: str) -> Sample:
        ids = np.array([*self.tokenizer.encode(text), min(self.tokenizer.eos_ids)], np.int32)
        return Sample(ids, np.full(len(ids), -1.0, np.float32), text, "stop")

    def durations(self) -> list[float]:
        """What each continuation spent waiting for the server, in the order of launch."""
        return list(self._latencies.values())


class StepsEnvironment:
    """Ends with probability 1/4 a turn, in success where the reply's letters say so; at most some turns."""

    blocking = False

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, task: int) -> Observation:
        self.turns = 0
        return Observation((Message("user", f"problem {task}"),))

    def step(self, action: Action) -> Observation:
        self.turns += 1
        done = action.last or action.text[0] in "ab"
        reward = float(done and action.text[-1] in "abcd")
        return Observation(() if done else (Message("user", "go on"),), reward=reward, done=done)

    def snapshot(self) -> bytes:
        return self.turns.to_bytes(2, "little")

    def restore(self, snapshot: bytes) -> None:
        self.turns = int.from_bytes(snapshot, "little")
