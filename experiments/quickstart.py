"""FOCUS at work on two cores: branch from partial solutions of math problems where that teaches the critic most.

First a scripted example with the numbers of the project page, then a real language model: root rollouts, value refinement
under a token budget, and uniform allocation of the same budget beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.markup import escape
from run_folder import log_metrics, open_run, parse

from focus_jax.agents import Agent, ChatRenderer, GraderFailure, Sampler, SamplingParams, Tokenizer
from focus_jax.collection import (
    AllAttemptsFailed,
    Budget,
    ConstantCritic,
    Continuation,
    HostTree,
    JournalError,
    Pass,
    RandomCritic,
    RootRollouts,
    Round,
    Rule,
    Uniform,
    ValueRefinement,
    collect,
    focus_credit,
    show_progress,
)
from focus_jax.report import show_rounds, show_tree, start_depths
from focus_jax.sampling import ByteTokenizer, HFTokenizer, SamplerError, ScriptedSampler
from focus_jax.sampling.llama_cpp import LlamaCppSampler, smollm2_path
from focus_jax.sampling.openai import OpenAISampler
from focus_jax.tasks.grading import Grader
from focus_jax.tasks.math import FINAL_REQUEST, STOP, MathEnvironment, Problem, builtin_problems, load_problems

console = Console()


@dataclass(frozen=True)
class Config:
    """What the quick start does."""

    sampler: Literal["llama-cpp", "openai"] = "llama-cpp"
    """llama-cpp serves SmolLM2-135M-Instruct here; openai connects a server that runs already."""
    base_url: str = "http://127.0.0.1:8000"
    """The server, with --sampler openai."""
    model: str | None = None
    """Name of the served model, or a GGUF file with --sampler llama-cpp."""
    tokenizer: str | None = None
    """Folder with the model's tokenizer.json, where the server itself does not tokenize."""
    data: Path | None = None
    """JSONL file of problems (MATH-500 or GSM8K format) instead of the built-in ones."""
    num_problems: int = 8
    num_roots: int = 3
    """Independent rollouts from the start of every problem."""
    budget: int = 320
    """Generated tokens per problem after the root rollouts."""
    kappa: float = 1.0
    """Weight of the critic's prediction, in observations."""
    critic: Literal["random", "constant"] = "random"
    """An untrained critic: it guesses at random, or answers 0.5 everywhere."""
    temperature: float = 0.7
    step_tokens: int = 32
    """Most tokens of one step of a solution."""
    max_steps: int = 5
    num_workers: int = 8
    num_threads: int | None = None
    """Threads of the local server; as many as the machine has cores, at most 4, unless given."""
    seed: int = 0
    run_folder: Path = Path("runs/quickstart")
    """The same folder again goes on where it stopped."""


def main(config: Config) -> None:
    """Show the worked example, then collect with both rules and compare them."""
    check(config)
    asyncio.run(show_worked_example())
    with Grader() as grader:
        problems = read_problems(config, grader)
        rounds = asyncio.run(compare(config, problems, grader))
    print_comparison(rounds, config)
    console.print(
        f"Run folder: {config.run_folder} (both journals, config.toml, metrics.jsonl, environment.json)",
        highlight=False,
        soft_wrap=True,
    )


async def show_worked_example() -> None:
    """One saved state, two continuations, one wrong and one right, under a critic that predicts 0.8."""
    console.rule("Scripted: one state, continued twice")
    tokenizer = ByteTokenizer()
    script = ["There are 3 boxes of 4 pens, so 12 pens.\n\n", r"The answer is \boxed{13}.", r"The answer is \boxed{12}."]
    sampler = ScriptedSampler(script, tokenizer)
    agent = Agent(sampler, ChatRenderer(tokenizer), SamplingParams(max_tokens=64, stop=STOP), max_turns=4, max_tokens=256)
    problem = Problem("pens", "Three boxes hold 4 pens each. How many pens are there?", "12")
    with Grader(num_workers=1) as grader:
        root = await agent.start(environment := MathEnvironment(grader), problem)
        first, saved = await agent.segment(environment, root, seed=0, charge=lambda tokens: None)
        ends = [await agent.segment(MathEnvironment(grader), saved, seed=s, charge=lambda tokens: None) for s in (1, 2)]
    tree = HostTree(problem.id, root, 0.8)
    tree.add(0, Continuation((first, ends[0][0]), (saved, ends[0][1]), (0.8, 0.0), (0, 0)), attempt=0)
    tree.add(1, Continuation((ends[1][0],), (ends[1][1],), (0.0,), (0,)), attempt=1)
    credit = focus_credit([tree])
    console.print(show_tree(tree, credit, 0, outcomes=np.array([1, 2, 1, 1]), decode=reader(tokenizer)), highlight=False)
    console.print(
        f"Prediction {tree.values[1]:.1f}, mean of the two outcomes (critic target) {credit.targets[0][1]:.1f}, "
        f"refined value {credit.refined[0][1]:.1f}.",
        highlight=False,
    )


async def compare(config: Config, problems: list[Problem], grader: Grader) -> dict[str, Round]:
    """Collect twice over the same problems: with value refinement and with uniform allocation."""
    console.rule(f"{len(problems)} problems, {config.num_roots} root rollouts each, then {config.budget} tokens each")
    rounds: dict[str, Round] = {}
    async with connect(config) as (sampler, tokenizer):
        agent = Agent(
            sampler,
            ChatRenderer(tokenizer),
            SamplingParams(max_tokens=config.step_tokens, temperature=config.temperature, stop=STOP),
            max_turns=config.max_steps,
            max_tokens=config.max_steps * config.step_tokens,
            final_request=FINAL_REQUEST,
            final_tokens=config.step_tokens,
        )
        # Only now that the policy answers: a mistyped server leaves no folder that belongs to it.
        folder = open_run(config.run_folder, config, free=("run_folder", "num_workers", "num_threads", "base_url"))
        rules: dict[str, Rule] = {"focus": ValueRefinement(config.kappa), "uniform": Uniform()}
        for name, rule in rules.items():
            passes = [
                Pass(RootRollouts(config.num_roots), Budget(continuations=config.num_roots)),
                Pass(rule, Budget(tokens=config.budget)),
            ]
            with show_progress(name, console) as report:
                rounds[name] = await collect(
                    agent,
                    RandomCritic(config.seed) if config.critic == "random" else ConstantCritic(0.5),
                    {p.id: p for p in problems},
                    passes,
                    make_environment=lambda: MathEnvironment(grader),
                    num_workers=config.num_workers,
                    seed=config.seed,
                    journal=folder / f"{name}.sqlite",
                    report=report,
                )
            log_metrics(folder, method=name, **measure(rounds[name]))
        console.print(f"Policy: {sampler}", highlight=False, soft_wrap=True)
        print_tree_of_most_interest(rounds["focus"], config, tokenizer)
    return rounds


@contextlib.asynccontextmanager
async def connect(config: Config) -> AsyncIterator[tuple[Sampler, Tokenizer]]:
    """The policy's server and its tokenizer."""
    tokenizer = HFTokenizer(config.tokenizer) if config.tokenizer else None
    if config.sampler == "openai":
        async with await OpenAISampler.connect(config.base_url, model=config.model, tokenizer=tokenizer) as remote:
            yield remote, remote.tokenizer
    else:
        model = Path(config.model) if config.model else smollm2_path()
        # Every call served at once takes memory for a whole context; further workers wait their turn.
        num_parallel, num_threads = min(config.num_workers, 16), config.num_threads or min(4, os.cpu_count() or 1)
        async with LlamaCppSampler.start(model, num_parallel=num_parallel, num_threads=num_threads) as local:
            yield local, tokenizer or local.tokenizer


def read_problems(config: Config, grader: Grader) -> list[Problem]:
    """The first problems of the file, or of the built-in set."""
    if config.data is None:
        return list(builtin_problems()[: config.num_problems])
    problems, excluded = load_problems(config.data, grader=grader)
    if excluded:
        console.print(f"left out, their reference answer cannot be parsed: {', '.join(excluded)}", highlight=False)
    return list(problems[: config.num_problems])


def check(config: Config) -> None:
    """Refuse numbers that mean nothing before anything is started."""
    for name in ("num_problems", "num_roots", "budget", "step_tokens", "max_steps", "num_workers", "num_threads"):
        number = getattr(config, name)
        if number is not None and number < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {number}")
    if not 0 <= config.temperature < math.inf:
        raise ValueError(f"--temperature: expected a finite number of at least 0, got {config.temperature}")
    if not 0 < config.kappa < math.inf:
        raise ValueError(f"--kappa: expected a finite number above 0, got {config.kappa}")
    most = config.max_steps * config.step_tokens + config.step_tokens
    if config.budget < most:
        raise ValueError(f"--budget: expected at least {most}, what one continuation may generate, got {config.budget}")


def measure(round_: Round) -> dict[str, float]:
    """Totals of a round."""
    ledgers = [ledger for group in round_.ledgers for ledger in group]
    return {
        "continuations": sum(ledger.continuations for ledger in ledgers),
        "tokens": round_.tokens(),
        "nodes": sum(len(t) for t in round_.grown),
        "failures": len(round_.failures),
    }


def print_comparison(rounds: dict[str, Round], config: Config) -> None:
    """One line per problem and method, then the totals."""
    console.print(show_rounds(rounds, kappa=config.kappa))
    for name, round_ in rounds.items():
        console.print(f"{name}: " + ", ".join(f"{v} {k}" for k, v in measure(round_).items()), highlight=False)
        for problem, reason in round_.errors.items():
            console.print(f"  {escape(problem)} ended early: {escape(reason)}", highlight=False)


def print_tree_of_most_interest(round_: Round, config: Config, tokenizer: Tokenizer) -> None:
    """The tree whose outcomes differ most, and among those the one with most branches below its root."""

    def interest(index: int) -> tuple[float, int]:
        tree = round_.trees[index]
        if tree is None or not tree.terminal.any():
            return (-1.0, 0)
        return (-abs(float(tree.reward[tree.terminal].mean()) - 0.5), sum(v for d, v in start_depths(tree).items() if d))

    index = max(range(len(round_.trees)), key=interest)
    tree = round_.trees[index]
    if tree is not None:
        outcomes = np.asarray(round_.stats(index).count)
        credit = focus_credit([tree], kappa=config.kappa)
        console.print(show_tree(tree, credit, 0, outcomes=outcomes, decode=reader(tokenizer)), highlight=False)


def reader(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    """Token ids to text, without the token that ends a turn."""
    return lambda ids: tokenizer.decode([i for i in ids if i not in tokenizer.eos_ids])


if __name__ == "__main__":
    try:
        main(parse(Config))
    except (ValueError, OSError, ImportError, SamplerError, GraderFailure, JournalError, AllAttemptsFailed) as error:
        raise SystemExit(f"quickstart: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on where it was") from None
