"""Train a policy with FOCUS, or with GRPO or VinePPO on the same budget of generated tokens.

Every round: collect with policy and critic fixed; work out credit and targets; update the critic, then the actor; publish
both; evaluate and save now and then. The same command goes on with a run wherever it was stopped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from run_folder import parse
from train_batches import Layout, over_processes
from train_collect import Acting, Collected, Stopped, collect_round, console, drop_journals, evaluate
from train_config import Config, check
from train_log import MetricsLog
from train_models import Learner
from train_rounds import give_credit, measure_batches, measure_critic, measure_round, measure_values, summarize
from train_setup import begin, identity, open_folder, open_task, several_processes
from train_task import Task

from focus_jax.agents import GraderFailure, SamplerError
from focus_jax.collection import AllAttemptsFailed, JournalError, training_records
from focus_jax.host_memory import keep_freed_memory
from focus_jax.training import (
    ActorBatch,
    ActorLoss,
    CriticBatch,
    CriticLoss,
    NonFiniteError,
    Packed,
    UpdateReport,
    actor_batches,
    critic_batches,
    outcome_examples,
    update,
    without_adapters,
)
from focus_jax.training.checkpoint import CheckpointError, Checkpoints
from focus_jax.training.processes import FailedSomewhereError, everywhere, stop_on_sigterm

Metrics = dict[str, Any]


def main(config: Config) -> None:
    """Train round by round, from wherever the run stands."""
    check(config)
    keep_freed_memory()
    with contextlib.ExitStack() as stack:
        stack.enter_context(several_processes(config))
        task = stack.enter_context(open_task(config))
        stop_requested = stack.enter_context(stop_on_sigterm())
        folder = open_folder(config)
        checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", keep=config.keep))
        log = stack.enter_context(MetricsLog(folder, is_writer=jax.process_index() == 0))
        learner, saved, unspent = begin(config, task, checkpoints)
        log.go_on(after=saved)
        if config.overlap:  # with a policy one update older than the one they would be collected with now
            drop_journals(folder, after=saved)

        # All that acts has a thread of its own: on no mesh, and beside the learner where they overlap.
        pool, ending = ThreadPoolExecutor(1), threading.Event()
        acting = pool.submit(Acting.start, config, task, learner, max(saved, 0)).result()
        stack.callback(acting.sampler.close)
        stack.enter_context(pool)
        stack.callback(ending.set)
        alone = jax.process_count() == 1

        def stops() -> bool:  # several processes agree on a signal when a round is over
            return ending.is_set() or (alone and stop_requested())

        def gather(number: int, unspent: int) -> Future[Collected]:
            return pool.submit(collect_round, config, task, acting, folder, stops, number, config.budget + unspent)

        def publish(version: int) -> None:
            pool.submit(acting.publish, learner, version).result()

        def judge(number: int) -> Metrics:
            return pool.submit(evaluate, config, task, acting, number).result()

        def save(number: int) -> None:
            nonlocal saved
            if saved < number:
                checkpoints.save(number, learner, {"identity": identity(config, task), "unspent": unspent})
                saved = number

        if saved < 0:
            show(config, log, 0, judge(0))
            save(0)
        ahead: Future[Collected] | None = None
        for number in range(saved + 1, config.rounds + 1):
            clock = Clock()
            if ahead is None:
                publish(number - 1)
                ahead = gather(number, unspent)
            try:
                collected = ahead.result() if alone else everywhere(ahead.result)
            except Stopped:
                save(number - 1)
                raise SystemExit(f"stopped by SIGTERM in round {number}; the same command goes on") from None
            publish(number - 1)
            unspent = min(max(config.budget + unspent - collected.spent(), 0), config.budget)
            evaluates, saves = (is_due(number, every, config) for every in (config.evaluate_every, config.checkpoint_every))
            ahead = gather(number + 1, unspent) if config.overlap and not (evaluates or saves) else None
            clock.lap("collect")
            learner, metrics = learn(config, task, learner, collected, number, clock)
            if evaluates:
                publish(number)
                metrics |= judge(number)
                clock.lap("evaluate")
            show(config, log, number, metrics | clock.seconds)
            is_stopped = stop_requested()
            if is_stopped or saves:
                save(number)
            if is_stopped and number < config.rounds:
                raise SystemExit(f"stopped by SIGTERM after round {number}; the same command goes on")


# Learn.


def learn(
    config: Config, task: Task, learner: Learner, collected: Collected, number: int, clock: Clock
) -> tuple[Learner, Metrics]:
    """The learner after a round, and what there is to tell of both."""
    round_, layout = collected.round, Layout(config.tokens_per_batch, config.fsdp)
    trees, credit = give_credit(config.method, round_, kappa=config.kappa, lam=config.lam, leave_one_out=config.leave_one_out)
    segments, examples = training_records(trees, credit)
    measures, has_critic = measure_round(round_, len(trees)), learner.critic is not None
    if has_critic:
        measures |= measure_critic(trees, credit)
    if collected.exact is not None:
        measures |= measure_values(round_, trees, credit, collected.exact, critic=has_critic)
    metrics: Metrics = summarize(measures) | {"staleness": number - 1 - collected.version}
    clock.lap("credit")

    is_warm_up = has_critic and number <= config.warmup_rounds
    if has_critic:
        examples = outcome_examples(round_) if is_warm_up else examples
        batches = critic_batches(examples, read=task.read, **layout.options()) if examples else None
        learner, figures = update_critic(learner, over_processes(batches, CriticBatch, layout), epochs=config.epochs)
        metrics |= figures | summarize(measure_batches("critic", batches, updates=config.epochs))
        clock.lap("critic")
    if not is_warm_up:
        stale = {"max_staleness": metrics["staleness"], "weighting": config.weighting}
        rows = actor_batches(segments, **stale, **layout.options()) if segments else None
        packed = over_processes(rows, ActorBatch, layout, by_problem=config.weighting == "segment")
        loss = ActorLoss(temperature=config.temperature, clip=config.clip, kl=config.kl)
        learner, figures = update_actor(learner, packed, loss, epochs=config.epochs)
        metrics |= figures | summarize(measure_batches("actor", rows, updates=config.epochs))
        clock.lap("actor")
    return learner, metrics


def update_critic(learner: Learner, packed: Packed[CriticBatch], *, epochs: int) -> tuple[Learner, Metrics]:
    """Some updates of the critic on one batch."""
    critic, optimizer = learner.critic, learner.critic_optimizer
    assert critic is not None
    assert optimizer is not None
    reports = []
    for _ in range(epochs):
        critic, optimizer, report = update(critic, optimizer, packed, CriticLoss())
        reports.append(report)
    return replace(learner, critic=critic, critic_optimizer=optimizer), told("critic", reports)


def update_actor(learner: Learner, packed: Packed[ActorBatch], loss: ActorLoss, *, epochs: int) -> tuple[Learner, Metrics]:
    """Some updates of the actor on one batch, held near the reference where there is a penalty."""
    actor, optimizer = learner.actor, learner.actor_optimizer
    if loss.kl:
        reference = without_adapters(actor) if learner.reference is None else learner.reference
        packed = packed.map(lambda batch: loss.add_reference_logprobs(batch, reference))
    reports = []
    for _ in range(epochs):
        actor, optimizer, report = update(actor, optimizer, packed, loss)
        reports.append(report)
    return replace(learner, actor=actor, actor_optimizer=optimizer), told("actor", reports)


def told(name: str, reports: list[UpdateReport]) -> Metrics:
    """What the last update reports, but the first one's loss and distance from the sampler. NonFiniteError stops the run."""
    figures = [report.fetch() for report in reports]
    metrics = figures[-1] | {"loss": figures[0]["loss"]}
    if name == "actor":
        metrics["behaviour_kl_before"] = figures[0]["behaviour_kl"]
    return {f"{name}_{key}": value for key, value in metrics.items()}


# Tell.


def show(config: Config, log: MetricsLog, number: int, metrics: Metrics) -> None:
    """One line in metrics.jsonl, and one to read."""
    log.write(number, metrics)
    names = {
        "success": "success",
        "reward": "reward",
        "tokens_generated": "tokens",
        "error_refined": "error",
        "actor_entropy": "entropy",
    }
    numbers = ", ".join(f"{short} {metrics[name]:.4g}" for name, short in names.items() if name in metrics)
    seconds = sum(value for name, value in metrics.items() if name.startswith("seconds_"))
    if jax.process_index() == 0:
        console.print(
            f"round {number}/{config.rounds}: {numbers} ({seconds:.1f} s)", highlight=False, markup=False, soft_wrap=True
        )


@dataclass
class Clock:
    """Seconds that each phase of a round took."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"seconds_{phase}"], self._last = now - self._last, now


def is_due(number: int, interval: int, config: Config) -> bool:
    """Whether something that is done every few rounds is due after this one; after the last everything is."""
    return number % interval == 0 or number == config.rounds


if __name__ == "__main__":
    try:
        main(parse(Config))
    except (
        ValueError, OSError, ImportError, SamplerError, GraderFailure, JournalError, AllAttemptsFailed,
        CheckpointError, FailedSomewhereError, NonFiniteError,
    ) as error:  # fmt: skip
        raise SystemExit(f"train: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on where it was") from None
