"""The state of one collection round: trees, evidence and budgets, changed by one launch or outcome at a time.

The collector drives it forwards; `replay` drives it from a journal. Both go through the same few methods, so that a
replayed round equals the one that was collected.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from focus_jax.collection.budget import Ledger
from focus_jax.collection.evidence import Evidence, Frontier
from focus_jax.collection.journal import Journal, JournalError, Launch, Outcome, Root, read_journal
from focus_jax.collection.passes import Pass
from focus_jax.collection.tree import HostTree
from focus_jax.scheduling import OutcomeStats

# An attempt that the end of the process cut short says nothing about the problem: it is launched again, same seed.
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Failure:
    """A failed attempt: who failed and how. Never a reward, never a child, never an outcome."""

    problem: str
    node: int
    kind: str
    message: str
    tokens: int


class Round:
    """Trees, evidence and ledgers of one collection round.

    Args:
        passes: allocation rules with their budgets, one after the other.
        problems: ids of the problems.
        gamma: discount per task transition.
        shared_budget: one budget per pass over all problems, instead of one per pass and problem.
        max_failures: so many failed attempts in a row end a problem.

    Attributes:
        trees: one per problem; None where the problem could not start.
        evidence: what the scheduler knows.
        failures: failed attempts, in the order in which they ended.
        errors: why problems ended early, by id.
        launches: attempts in flight, by number.
        cursor: int [num_groups], the pass each group of problems is at.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        problems: Sequence[str],
        *,
        gamma: float = 1.0,
        shared_budget: bool = False,
        max_failures: int = 3,
    ):
        if not passes:
            raise ValueError("`passes`: expected at least one pass, got none")
        self.passes = tuple(passes)
        self.problems = tuple(problems)
        self.gamma = gamma
        self.max_failures = max_failures
        windows = {p.window for p in passes if p.window is not None}
        if len(windows) > 1:
            raise ValueError(f"`passes`: expected one token-entropy window in a round, got {sorted(windows)}")
        self.evidence = Evidence(len(problems), gamma=gamma, window=min(windows, default=None))
        self.trees: list[HostTree | None] = [None] * len(problems)
        self.failures: list[Failure] = []
        self.errors: dict[str, str] = {}
        self.launches: dict[int, Launch] = {}
        self.num_attempts = 0
        # Problems in one group share budgets and move from pass to pass together.
        self.group = np.zeros(len(problems), np.int64) if shared_budget else np.arange(len(problems))
        num_groups = 1 if shared_budget else len(problems)
        self.ledgers = [[Ledger(p.budget) for p in self.passes] for _ in range(num_groups)]
        self.cursor = np.zeros(num_groups, np.int64)
        self.alive = np.zeros(len(problems), bool)
        self.in_flight = np.zeros(num_groups, np.int64)
        # Per node: how many attempt numbers were given out, and those that an interruption gave back.
        self._numbers: Counter[tuple[int, int]] = Counter()
        self._returned: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self._failed_in_a_row = np.zeros(len(problems), np.int64)
        self._counted = np.zeros(len(problems), np.int64)

    def start(self, root: Root) -> None:
        """Take in a problem's root, or why it has none."""
        if root.state is None:
            self.errors[root.id] = root.error or "no reason recorded"
            return
        self.errors.pop(root.id, None)
        tree = HostTree(root.id, root.state, root.value)
        self.trees[root.problem] = tree
        self.evidence.add_root(root.problem, root.value, candidate=tree.is_candidate(0), price=root.price)
        self.alive[root.problem] = True

    def load(self, journal: Journal) -> None:
        """Take in all that a journal holds.

        Raises:
            JournalError: its rows do not fit together.
        """
        try:
            self._take_in(journal)
        except (LookupError, ValueError, TypeError, AssertionError) as error:
            raise JournalError(
                f"the journal is damaged, its rows do not fit together ({type(error).__name__}: {error}); "
                "put a copy of it back, or name a new file"
            ) from error

    def _take_in(self, journal: Journal) -> None:
        for root in journal.roots():
            self.start(root)
        launches = journal.launches()
        for outcome in journal.outcomes():
            for launch in launches[self.num_attempts : outcome.num_launched]:
                self.launch(launch)
            self.settle(outcome)
        for launch in launches[self.num_attempts :]:
            self.launch(launch)

    def revive(self) -> None:
        """Give problems that failed another chance: whatever broke may have been mended since."""
        for problem, tree in enumerate(self.trees):
            if tree is not None and not self.alive[problem]:
                self.alive[problem] = True
                self.errors.pop(self.problems[problem], None)
        self._failed_in_a_row[:] = 0

    def conclude(self) -> None:
        """Say why problems ended without a single outcome where nothing has said so yet."""
        last = {failure.problem: failure for failure in self.failures}
        for problem, name in enumerate(self.problems):
            if name in last and name not in self.errors and not self.evidence.nodes["count"][problem].any():
                self.errors[name] = f"no attempt finished, the last failed in the {last[name].kind}: {last[name].message}"

    def number(self, problem: int, node: int) -> int:
        """Number of the next attempt from this node: one that an interruption gave back, else a new one."""
        return min(self._returned[problem, node], default=self._numbers[problem, node])

    def launch(self, launch: Launch) -> None:
        """An attempt starts: reserve its tokens, count it as pending."""
        group = self.group[launch.problem]
        self.ledgers[group][launch.pass_index].reserve(launch.reserved)
        self.cursor[group] = max(self.cursor[group], launch.pass_index)
        self.in_flight[group] += 1
        self.evidence.nodes["pending"][launch.problem, launch.node] += 1
        returned = self._returned[launch.problem, launch.node]
        if launch.number in returned:
            returned.remove(launch.number)
        else:
            self._numbers[launch.problem, launch.node] += 1
        self.launches[launch.attempt] = launch
        self.num_attempts = max(self.num_attempts, launch.attempt + 1)

    def settle(self, outcome: Outcome) -> None:
        """An attempt ended: release its reservation, charge its tokens, and take in what it found."""
        launch = self.launches.pop(outcome.attempt)
        problem, node = launch.problem, launch.node
        group = self.group[problem]
        self.evidence.nodes["pending"][problem, node] -= 1
        self.in_flight[group] -= 1
        ledger = self.ledgers[group][launch.pass_index]
        ledger.settle(launch.reserved, tokens=outcome.tokens, finished=outcome.continuation is not None)
        if outcome.continuation is not None:
            self._failed_in_a_row[problem] = 0
            if self.passes[launch.pass_index].is_probe:
                self.evidence.record_probe(problem, node, outcome.continuation)
            else:
                self.tree(problem).add(node, outcome.continuation, outcome.attempt)
                self.evidence.record(problem, node, outcome.continuation)
        elif outcome.kind == INTERRUPTED:
            ledger.num_launched -= 1
            self._returned[problem, node].add(launch.number)
        else:
            self._fail(launch, outcome)

    def tree(self, problem: int) -> HostTree:
        """The tree of a problem that started."""
        tree = self.trees[problem]
        assert tree is not None, f"problem {self.problems[problem]!r} has no tree"
        return tree

    @property
    def grown(self) -> list[HostTree]:
        """The trees of all problems that started, in their order; what credit is computed from."""
        return [tree for tree in self.trees if tree is not None]

    def stats(self, problem: int) -> OutcomeStats:
        """The observed outcomes of each node of a tree, [N] each: the scheduler's count, mean, m2 and pending."""
        num_nodes = len(self.tree(problem))
        count, mean, m2, pending = (self.evidence.nodes[name][problem, :num_nodes] for name in ("count", "mean", "m2", "pending"))
        return OutcomeStats(count=count, mean=mean.astype(np.float32), m2=m2.astype(np.float32), pending=pending)

    def mc_values(self) -> list[np.ndarray]:
        """Mean return of the probes from each node of the grown trees, float32 [N] each, for `vineppo_credit`.

        A terminal node is worth 0, one that was cut off the critic's prediction; NaN where no probe came back.
        """
        values = []
        for problem, tree in enumerate(self.trees):
            if tree is not None:
                probes, mean = (self.evidence.nodes[name][problem, : len(tree)] for name in ("probes", "probe_mean"))
                status = np.array([tree.status(node) for node in range(len(tree))])
                unprobed = np.where(status == "terminal", 0, np.where(status == "cut_off", tree.values, np.nan))
                values.append(np.where(probes > 0, mean, unprobed).astype(np.float32))
        return values

    def price(self, problem: int, node: int) -> int:
        """Tokens a launch from this node reserves."""
        return int(self.evidence.nodes["price"][problem, node])

    def affords(self, pass_index: int, problem: int, node: int) -> bool:
        """Whether the pass still holds one more launch from this node."""
        return self.price(problem, node) <= self._purse(self.ledgers[self.group[problem]][pass_index], pass_index)

    def frontier(self, pass_index: int) -> Frontier:
        """Candidates of the pass: resumable, below the pending cap, affordable, of problems that are at this pass."""
        purses = np.array([self._purse(ledgers[pass_index], pass_index) for ledgers in self.ledgers])
        purses[self.cursor != pass_index] = -1
        purse = np.where(self.alive, purses[self.group], -1)
        decision = sum(ledgers[pass_index].num_launched for ledgers in self.ledgers)
        return self.evidence.frontier(purse, max_pending=self.passes[pass_index].pending_limit, decision=decision)

    def is_at(self, pass_index: int) -> bool:
        """Whether any group of problems is at this pass."""
        return bool((self.cursor == pass_index).any())

    def move_on(self, pass_index: int) -> None:
        """Groups at this pass with nothing in flight have had their say: on to the next pass."""
        self.cursor[(self.cursor == pass_index) & (self.in_flight == 0)] += 1

    def tokens(self) -> int:
        """Generated tokens charged so far, over all passes and problems."""
        return sum(ledger.tokens for ledgers in self.ledgers for ledger in ledgers)

    def _purse(self, ledger: Ledger, pass_index: int) -> float:
        """Tokens one more launch may reserve; -1 where no launch is left."""
        return ledger.free_tokens() if ledger.num_launched < self.passes[pass_index].attempt_limit else -1

    def _fail(self, launch: Launch, outcome: Outcome) -> None:
        problem, message = launch.problem, outcome.message or "no message"
        name = self.problems[problem]
        self.failures.append(Failure(name, launch.node, outcome.kind, message, outcome.tokens))
        # One outage fails all that is in flight: only an attempt launched after the last counted failure counts again.
        if launch.attempt >= self._counted[problem]:
            self._counted[problem] = self.num_attempts
            self._failed_in_a_row[problem] += 1
        if self._failed_in_a_row[problem] >= self.max_failures:
            self.alive[problem] = False
            self.errors[name] = (
                f"attempts failed {self._failed_in_a_row[problem]} times in a row, the last in the {outcome.kind}: {message}"
            )


def replay(path: Path | str) -> Round:
    """Rebuild a round from its journal: the same trees, evidence and budgets, bit for bit.

    Attempts still in flight at the end of the journal stay pending.

    Raises:
        JournalError: there is no journal at `path`, or it is damaged.
    """
    with read_journal(path) as journal:
        settings = journal.settings()
        round_ = Round(
            [Pass.recorded(p) for p in settings["passes"]],
            settings["problems"],
            gamma=settings["gamma"],
            shared_budget=settings["shared_budget"],
            max_failures=settings["max_failures"],
        )
        round_.load(journal)
    round_.conclude()
    return round_
