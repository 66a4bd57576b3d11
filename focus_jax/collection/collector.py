"""Grows rollout trees: launches continuations where the passes buy them, and takes in what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import operator
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from focus_jax.agents import Agent, AttemptFailure, Environment, SamplerError, Segment, State, classify_failure, derive_seed
from focus_jax.agents.describe import describe
from focus_jax.agents.environment import call_environment
from focus_jax.agents.threads import run_environment
from focus_jax.collection.critic import Critic
from focus_jax.collection.evidence import Frontier
from focus_jax.collection.journal import Journal, JournalError, Launch, Outcome, Root
from focus_jax.collection.passes import Choice, Pass
from focus_jax.collection.round import INTERRUPTED, Round
from focus_jax.collection.tree import Continuation


@dataclass(frozen=True)
class Progress:
    """What a display is told when something has changed: the round, attempts in flight, the last score bought."""

    round: Round
    in_flight: int
    score: float


async def collect(
    agent: Agent,
    critic: Critic,
    tasks: Mapping[str, Any],
    passes: Sequence[Pass],
    *,
    make_environment: Callable[[], Environment],
    num_workers: int = 8,
    seed: int = 0,
    journal: Path | str | None = None,
    shared_budget: bool = False,
    attempt_timeout: float = 600.0,
    max_failures: int = 3,
    policy_version: int = 0,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Round:
    """Grow a rollout tree for every task under the budgets of the passes, policy and critic fixed.

    Each continuation starts from a copy of a node's state and runs to the end of its episode. What it found enters the
    tree whole or, when the sampler, the environment, the grader or time failed it, not at all: the failure is recorded,
    its tokens are charged, and no reward is invented. Calling again with the same journal goes on where it stopped.

    Args:
        agent: the acting policy and how it takes turns.
        critic: predicts the value of every new state.
        tasks: problem id, a text -> what `Environment.reset` takes.
        passes: allocation rules with their budgets, one after the other.
        make_environment: a fresh environment; called once per attempt, in a thread unless it (a class, say) has an
            attribute `blocking = False`.
        num_workers: most continuations in flight.
        seed: fixes, with tree, node and attempt, the seed of every reply; give every round of a training run its own.
        journal: SQLite file of the round, or None to keep it in memory.
        shared_budget: one budget per pass over all problems, instead of one per pass and problem.
        attempt_timeout: seconds after which an attempt counts as failed by time; the reply in flight then is not charged.
        max_failures: so many failures in a row end a problem; the others go on. Attempts that were in flight together
            count once, and calling again with the same journal gives the problem another chance.
        policy_version: version of the acting weights; a sample of another version fails its attempt.
        report: told of outcomes, together with the launches that follow them.

    Returns:
        The round: trees, evidence, failures and ledgers.

    Raises:
        ValueError: no tasks or passes, an id that is no text, a bad number, a rule that chooses what it may not.
        TypeError: a critic, task or rule that could not be told from another in the journal.
        JournalError: the journal is in use, cannot be written, or belongs to another run.
        AllAttemptsFailed: not one attempt on any problem finished.

    Source: project page, "Put the pieces together".
    """
    if not tasks:
        raise ValueError("`tasks`: expected at least one problem, got none")
    _check_ids(tasks)
    if not (isinstance(num_workers, int) and num_workers >= 1):
        raise ValueError(f"`num_workers`: expected a whole number of at least 1, got {num_workers!r}")
    if not (attempt_timeout > 0 and max_failures >= 1):
        raise ValueError(f"expected `attempt_timeout` > 0 and `max_failures` >= 1, got {attempt_timeout} and {max_failures}")
    round_ = Round(passes, tuple(tasks), gamma=agent.gamma, shared_budget=shared_budget, max_failures=max_failures)
    settings = {
        "seed": seed,
        "gamma": agent.gamma,
        "shared_budget": shared_budget,
        "max_failures": max_failures,
        "policy_version": policy_version,
        "passes": [p.describe() for p in passes],
        "problems": list(tasks),
        "tasks": _digest(tasks),
        "agent": agent.describe(),
        "critic": describe(critic),
    }
    book = Journal(journal, settings)
    try:
        collector = _Collector(
            agent, critic, tasks, make_environment, num_workers, seed, attempt_timeout, policy_version, report, round_, book
        )
        await collector.run()
    finally:
        book.close()
    finished = any(ledger.continuations for ledgers in round_.ledgers for ledger in ledgers)
    if not finished and (round_.failures or round_.errors):
        causes = [f"{f.kind}: {f.message}" for f in round_.failures] or list(round_.errors.values())
        raise AllAttemptsFailed(f"no attempt on any problem finished; the first failure: {causes[0]}")
    if not round_.num_attempts:
        cheapest = min(round_.price(i, 0) for i in range(len(tasks)))
        warnings.warn(
            f"the passes bought no continuation: a token budget must hold a whole one (up to {cheapest} tokens here), and "
            "ValueRefinement finds nothing to gain at roots without outcomes; start with RootRollouts",
            RuntimeWarning,
            stacklevel=2,
        )
    return round_


class AllAttemptsFailed(Exception):
    """Nothing succeeded: most likely a server, a sandbox or a grader is down."""


@dataclass
class _Collector:
    agent: Agent
    critic: Critic
    tasks: Mapping[str, Any]
    make_environment: Callable[[], Environment]
    num_workers: int
    seed: int
    attempt_timeout: float
    policy_version: int
    report: Callable[[Progress], None]
    round: Round
    journal: Journal
    attempts: set[asyncio.Task[Outcome]] = field(default_factory=set)
    ended: asyncio.Queue[asyncio.Task[Outcome]] = field(default_factory=asyncio.Queue)
    error: BaseException | None = None
    score: float = math.nan

    async def run(self) -> None:
        self._resume()
        await self._start_problems()
        try:
            self._advance([])
            while self.attempts:
                self._advance(await self._outcomes())
        finally:
            await self._drain()
        self.round.conclude()

    def _resume(self) -> None:
        """Take in the journal of an earlier run; what was in flight when it ended is launched again."""
        self.round.load(self.journal)
        self.round.revive()
        self._record(
            [Outcome(attempt, INTERRUPTED, "the process ended before it did", 0, None) for attempt in self.round.launches]
        )

    async def _start_problems(self) -> None:
        """Start what is not in the journal yet, several at a time; the order of the journal is that of the tasks."""
        known = {root.problem for root in self.journal.roots() if not root.retry}
        waiting = [(i, name, task) for i, (name, task) in enumerate(self.tasks.items()) if i not in known]
        for first in range(0, len(waiting), self.num_workers):
            batch = waiting[first : first + self.num_workers]
            roots = await asyncio.gather(*(self._root(*problem) for problem in batch))
            self.journal.add_roots(roots)
            for root in roots:
                self.round.start(root)

    async def _root(self, problem: int, name: str, task: Any) -> Root:
        try:
            async with asyncio.timeout(self.attempt_timeout), self._environment() as environment:
                state = await self.agent.start(environment, task)
                value = (await self._values([state]))[0]
        except ValueError as error:  # the opening does not fit the context, or the chat template refuses it
            return Root(problem, name, None, error=f"could not start: {error}")
        except Exception as error:
            failure = self._classify(error)
            if failure is None:
                raise
            return Root(problem, name, None, error=f"could not start, {failure.kind}: {failure}", retry=True)
        if not state.resumable:
            return Root(problem, name, None, error="could not start: the environment's state cannot be copied")
        return Root(problem, name, state, value, self.agent.max_generated(state))

    @contextlib.asynccontextmanager
    async def _environment(self) -> AsyncIterator[Environment]:
        """A fresh environment, closed afterwards where it can be; a hanging one must hold nobody up."""
        environment = await run_environment(self.make_environment, call_environment, "make_environment", self.make_environment)
        try:
            yield environment
        finally:
            if (close := getattr(environment, "close", None)) is not None:
                threading.Thread(target=close, daemon=True, name="close-environment").start()

    def _classify(self, error: BaseException) -> AttemptFailure | None:
        """Who failed, or None for a programming error."""
        if isinstance(error, TimeoutError):
            return AttemptFailure("time", f"not over after {self.attempt_timeout:g} s")
        return classify_failure(error) if isinstance(error, Exception) else None

    def _advance(self, outcomes: list[Outcome]) -> None:
        """Take in how attempts ended, and launch what is worth its price now; what is not written down never starts."""
        launches: list[Launch] = []
        try:
            for outcome in outcomes:
                self.round.settle(outcome)
            launches = self._choose() if self.error is None else []
        finally:
            self.journal.write(outcomes, launches)
        if self.error is not None:
            raise self.error
        for launch in launches:
            self.attempts.add(task := asyncio.create_task(self._attempt(launch)))
            task.add_done_callback(self.ended.put_nowait)
            self.score = launch.score
        self.report(Progress(self.round, len(self.round.launches), self.score))

    def _choose(self) -> list[Launch]:
        """Work for the free workers, pass by pass; a group with nothing left to buy and nothing in flight moves on."""
        launches: list[Launch] = []
        for index in range(len(self.round.passes)):
            if self.round.is_at(index):
                launches += self._buy(index)
                if len(self.round.launches) == self.num_workers:
                    break
                self.round.move_on(index)
        return launches

    def _buy(self, index: int) -> list[Launch]:
        """What the rule of pass `index` chooses, until the workers are busy or nothing more is worth its price."""
        rule, limit = self.round.passes[index].rule, self.round.passes[index].pending_limit
        launches: list[Launch] = []
        while (free := self.num_workers - len(self.round.launches)) > 0:
            frontier = self.round.frontier(index)
            choices = rule(frontier, free, max_pending=limit) if len(frontier) else []
            choices = _check_choices(choices, frontier, free, limit)
            bought = self._take(index, frontier, choices)
            launches += bought
            if len(bought) == len(choices) < free:
                break
        return launches

    def _take(self, index: int, frontier: Frontier, choices: list[Choice]) -> list[Launch]:
        """The choices, in order, up to the first that the budget no longer holds."""
        launches = []
        for candidate, score in choices:
            problem, node = int(frontier.tree[candidate]), int(frontier.node[candidate])
            if not self.round.affords(index, problem, node):
                break
            number = self.round.number(problem, node)
            launch = Launch(
                self.round.num_attempts,
                problem,
                node,
                index,
                number,
                derive_seed(self.seed, problem, node, number),
                self.policy_version,
                self.round.price(problem, node),
                score,
            )
            self.round.launch(launch)
            launches.append(launch)
        return launches

    async def _attempt(self, launch: Launch) -> Outcome:
        """Run a launch and tell how it ended; what is nobody's failure but a mistake in a program ends the run."""
        spent: list[int] = []
        try:
            continuation = await self._continue(launch, lambda num_tokens: spent.append(int(num_tokens)))
            return Outcome(launch.attempt, "finished", None, sum(spent), continuation)
        except BaseException as error:
            if (failure := self._classify(error)) is not None:
                return Outcome(launch.attempt, failure.kind, failure.message, sum(spent), None)
            self.error = self.error or error
            return Outcome(launch.attempt, INTERRUPTED, repr(error), sum(spent), None)

    async def _continue(self, launch: Launch, charge: Callable[[int], None]) -> Continuation:
        """One continuation from a copy of its node's state to the end of its episode."""
        state = self.round.tree(launch.problem).state(launch.node)
        segments: list[Segment] = []
        states: list[State] = []
        async with asyncio.timeout(self.attempt_timeout), self._environment() as environment:
            while not segments or segments[-1].status == "open":
                seed = derive_seed(launch.seed, len(segments))
                segment, state = await self.agent.segment(environment, state, seed=seed, charge=charge)
                self._check_version(segment)
                segments.append(segment)
                states.append(state)
            alive = [s for s, g in zip(states, segments, strict=True) if g.status != "terminal"]
            values = await self._values(alive)
        values += [0.0] * (len(states) - len(values))  # only the last state can be terminal
        prices = tuple(self.agent.max_generated(s) for s in states)
        return Continuation(tuple(segments), tuple(states), tuple(values), prices)

    def _check_version(self, segment: Segment) -> None:
        """Outcomes of different policy versions never share a round."""
        versions = segment.versions[segment.generated]
        other = versions[versions != self.policy_version]
        if len(other):
            raise SamplerError(
                f"expected samples of policy version {self.policy_version}, got {int(other[0])}; "
                "pass `policy_version` to match the sampler, and publish only between rounds"
            )

    async def _values(self, states: list[State]) -> list[float]:
        try:
            values = np.asarray(await self.critic.score(states), np.float64) if states else np.zeros(0)
        except Exception as error:
            raise AttemptFailure("critic", f"{type(error).__name__}: {error}") from error
        if values.shape != (len(states),) or not np.isfinite(values).all():
            raise AttemptFailure("critic", f"expected {len(states)} finite values, got {values!r}")
        return values.tolist()

    async def _outcomes(self) -> list[Outcome]:
        """Of one attempt or more, as soon as there are any."""
        attempts = [await self.ended.get()]
        while not self.ended.empty():
            attempts.append(self.ended.get_nowait())
        outcomes = [attempt.result() for attempt in attempts]
        self.attempts.difference_update(attempts)
        return outcomes

    async def _drain(self) -> None:
        """Stop what is still in flight (an error or Ctrl-C ends the run) and charge what it generated."""
        for attempt in self.attempts:
            attempt.cancel()
        await asyncio.gather(*self.attempts, return_exceptions=True)
        with contextlib.suppress(JournalError):  # where the journal is what broke, the first error says so
            self._record([a.result() for a in self.attempts if not a.cancelled() and a.exception() is None])

    def _record(self, outcomes: list[Outcome]) -> None:
        self.journal.write(outcomes, [])
        for outcome in outcomes:
            self.round.settle(outcome)


def _check_ids(tasks: Mapping[str, Any]) -> None:
    for name in tasks:
        # A lone surrogate, as in the name of a file that is not UTF-8, can be stored nowhere.
        if not isinstance(name, str) or name.encode(errors="ignore").decode() != name:
            raise ValueError(f"`tasks`: expected ids that are valid text, got {name!r}")


def _check_choices(choices: list[Choice], frontier: Frontier, num: int, max_pending: int) -> list[Choice]:
    """A rule chooses at most `num` candidates of the frontier, and none beyond the cap on continuations in flight."""
    try:
        choices = [(operator.index(index), float(score)) for index, score in choices]
    except (TypeError, ValueError) as error:
        raise ValueError(f"the rule answered {choices!r}, expected a list of (candidate, score): {error}") from error
    chosen = Counter(index for index, _ in choices)
    if len(choices) > num:
        raise ValueError(f"the rule chose {len(choices)} candidates, expected at most {num}")
    for index, times in chosen.items():
        if not 0 <= index < len(frontier):
            raise ValueError(f"the rule chose candidate {index}, expected one of 0 to {len(frontier) - 1}")
        if frontier.stats.pending[index] + times > max_pending:
            raise ValueError(f"the rule chose candidate {index} {times} times, beyond `max_pending` of {max_pending}")
    return choices


def _digest(tasks: Mapping[str, Any]) -> str:
    """Tells one set of problems from another, so that a journal is not continued with other data."""
    return hashlib.blake2b(json.dumps(describe(tasks)).encode(), digest_size=8).hexdigest()
