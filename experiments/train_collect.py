"""How `train.py` collects: the policy and the critic that act, a round of trees, and an evaluation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from train_config import Config
from train_models import Learner, ReadingCritic, acting_copy
from train_rounds import measure_round, plan_passes, summarize
from train_task import Task

from focus_jax.agents import derive_seed
from focus_jax.collection import Budget, ConstantCritic, Critic, Pass, Progress, RootRollouts, Round, collect, show_progress
from focus_jax.models import Decoder, FlaxCritic
from focus_jax.sampling.flax_sampler import FlaxSampler

console = Console()


@dataclass
class Acting:
    """The policy and the critic that collect, which stay as they are while the learner's are trained."""

    sampler: FlaxSampler
    critic: Critic
    policy: Decoder
    version: int

    @classmethod
    def start(cls, config: Config, task: Task, learner: Learner, version: int) -> Acting:
        """A sampler of this learner's policy, and its critic or, where the method has none, a constant."""
        policy = acting_copy(learner.actor)
        critic: Critic = ConstantCritic(0.5)
        if learner.critic is not None:
            critic = ReadingCritic(FlaxCritic(acting_copy(learner.critic), version=version), task.read)
        sampler = FlaxSampler(
            policy,
            task.tokenizer,
            num_slots=config.num_workers,
            context_length=task.context_length,
            policy_version=version,
            prompt_cache_mib=config.prompt_cache,
            num_steps=1 if config.task == "detour" else 8,
        )
        return cls(sampler, critic, policy, version)

    def publish(self, learner: Learner, version: int) -> None:
        """Go on with what the learner has become."""
        if version == self.version:
            return
        self.policy, self.version = acting_copy(learner.actor), version
        asyncio.run(self.sampler.publish(self.policy, version))
        if isinstance(self.critic, ReadingCritic) and learner.critic is not None:
            self.critic.critic.publish(acting_copy(learner.critic), version=version)


class Stopped(Exception):
    """The run is to end while a round is collected; its journal keeps what there is."""


@dataclass(frozen=True)
class Collected:
    """A round, the version of the policy that collected it, and that policy's exact values where the task has them."""

    round: Round
    version: int
    exact: np.ndarray | None

    def spent(self) -> int:
        """Tokens generated per problem, over all processes."""
        return int(summarize({"tokens": (self.round.tokens(), len(self.round.problems))})["tokens"])


def collect_round(
    config: Config, task: Task, acting: Acting, folder: Path, stops: Callable[[], bool], number: int, budget: int
) -> Collected:
    """This process's share of a round, gone on with where its journal ends."""
    agent = task.make_agent(acting.sampler, config.temperature, 1.0)
    passes = plan_passes(
        config.method, agent, budget=budget, num_roots=config.num_roots, kappa=config.kappa, branch_every=task.branch_every
    )
    alone, process = jax.process_count() == 1, jax.process_index()
    mine = list(task.problems(number, config.num_problems).items())[process :: jax.process_count()]

    def report(progress: Progress) -> None:
        if stops():
            raise Stopped
        draw(progress)

    shown = alone and not config.overlap
    with show_progress(f"round {number}", console) if shown else contextlib.nullcontext(lambda progress: None) as draw:
        round_ = asyncio.run(
            collect(
                agent,
                acting.critic,
                dict(mine),
                passes,
                make_environment=task.make_environment,
                num_workers=config.num_workers,
                seed=derive_seed(config.seed, number, process),
                journal=folder / "rounds" / f"{number:06d}{'' if alone else f'-{process}'}.sqlite",
                policy_version=acting.version,
                report=report,
            )
        )
    exact = None if task.exact is None else task.exact(acting.policy, [problem for _, problem in mine])
    return Collected(round_, acting.version, exact)


def evaluate(config: Config, task: Task, acting: Acting, number: int) -> dict[str, float]:
    """Success on held-out problems: exact where the task can tell, else of one rollout each."""
    problems = task.held_out(config.evaluate_problems)
    if task.exact is not None:
        return {"success": float(task.exact(acting.policy, list(problems.values()))[:, 0, 0].mean())}
    mine = dict(list(problems.items())[jax.process_index() :: jax.process_count()])
    round_ = asyncio.run(
        collect(
            task.make_agent(acting.sampler, *task.evaluation),
            ConstantCritic(0.5),
            mine,
            [Pass(RootRollouts(1), Budget(continuations=1))],
            make_environment=task.make_environment,
            num_workers=config.num_workers,
            seed=derive_seed(config.seed, number, jax.process_index(), 1),
            policy_version=acting.version,
        )
    )
    return {"success": summarize(measure_round(round_, len(round_.grown)))["reward"]}


def drop_journals(folder: Path, *, after: int) -> None:
    """Forget rounds later than the one a run goes on from."""
    for path in (folder / "rounds").glob("*.sqlite*"):
        if int(path.name[:6]) > after:
            path.unlink()
