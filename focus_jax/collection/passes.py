"""Who gets the next continuation: allocation rules, and the passes that give each rule a budget of its own.

A collection round is a list of passes, one after the other. Source: project page, "Choose where another rollout is
useful" and "Put the pieces together"; arXiv 2610.35801.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from focus_jax.agents.describe import describe
from focus_jax.collection.budget import Budget
from focus_jax.collection.evidence import Frontier
from focus_jax.scheduling import OutcomeStats, benefit, benefit_slope, beta_bernoulli

# (index into the frontier, score that bought it); in the order bought.
Choice = tuple[int, float]

_NO_CAP = 1 << 30  # continuations in flight from one node; one more still fits an int32


class Rule(Protocol):
    """Chooses up to `num` candidates of a frontier, best first.

    Choosing several at once must give what choosing one at a time would, each choice raising the candidate's pending
    count. Fewer choices than asked for means that nothing else is worth buying now. A rule with an attribute `window` finds
    the token entropy over windows of that size in the frontier; outcomes of one with `is_probe = True` are read and discarded.
    """

    def __call__(self, frontier: Frontier, num: int, *, max_pending: int) -> list[Choice]: ...


@dataclass(frozen=True)
class RootRollouts:
    """Independent rollouts from the roots, round robin over the trees: `num` from each, or without end (None)."""

    num: int | None = None

    def __post_init__(self) -> None:
        _check_at_least_one(self, "num")

    def __call__(self, frontier: Frontier, num: int, *, max_pending: int) -> list[Choice]:
        taken = _taken(frontier)
        score = np.where((frontier.node == 0) & (taken < (self.num or np.inf)), -taken, -np.inf)
        limit = None if self.num is None else self.num - taken
        return _greedy(score, num, _room(frontier, max_pending, limit), step=-1.0)


@dataclass(frozen=True)
class Uniform:
    """The candidate with the fewest outcomes and continuations in flight; ties go to the lower tree, then node."""

    def __call__(self, frontier: Frontier, num: int, *, max_pending: int) -> list[Choice]:
        return _greedy(-_taken(frontier), num, _room(frontier, max_pending), step=-1.0)


@dataclass(frozen=True)
class Random:
    """A candidate drawn uniformly, from a stream fixed by `seed` and the number of launches before."""

    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"Random: `seed` must be at least 0, got {self.seed}")

    def __call__(self, frontier: Frontier, num: int, *, max_pending: int) -> list[Choice]:
        room = _room(frontier, max_pending)
        choices: list[Choice] = []
        for k in range(num):
            free = np.flatnonzero(room > 0)
            if not len(free):
                break
            draw = np.random.default_rng((self.seed, frontier.decision + k))
            pick = int(free[draw.integers(len(free))])
            room[pick] -= 1
            choices.append((pick, 1.0))
        return choices


@dataclass(frozen=True)
class TokenEntropy:
    """The candidate whose outgoing edges hold the most uncertain run of `window` task tokens.

    An edge's score is its largest mean of -p log p over windows of consecutive task tokens, a node's score the mean
    over its edges; a node without scored edges comes first.
    """

    window: int = 8

    def __post_init__(self) -> None:
        _check_at_least_one(self, "window")

    def __call__(self, frontier: Frontier, num: int, *, max_pending: int) -> list[Choice]:
        return _greedy(frontier.entropy, num, _room(frontier, max_pending))


@dataclass(frozen=True)
class ValueRefinement:
    """The candidate where one more outcome is estimated to cut the squared error of the blended value most.

    Only a positive benefit is bought.

    Args:
        kappa: weight of the critic's prediction, in observations; above 0.
        model: outcome model, `beta_bernoulli` for returns in [0, 1] or `normal`.
        rule: `benefit_slope`, as in the paper, or `benefit_step`.
    """

    kappa: float = 1.0
    model: Callable[..., Any] = beta_bernoulli
    rule: Callable[..., Any] = benefit_slope

    def __post_init__(self) -> None:
        if not 0 < self.kappa < np.inf:
            raise ValueError(f"ValueRefinement: `kappa` must be a finite number above 0, got {self.kappa}")

    def __call__(self, frontier: Frontier, num: int, *, max_pending: int) -> list[Choice]:
        stats = frontier.stats
        columns = np.zeros((5, _bucket(len(frontier))), np.float32)
        for column, content in zip(columns, (frontier.value, stats.count, stats.mean, stats.m2, stats.pending), strict=True):
            column[: len(frontier)] = content
        pending = columns[4, : len(frontier)]
        choices: list[Choice] = []
        # Workers come free one at a time; `allocate` takes many at once, but they would all wait while it compiles.
        while len(choices) < num and len(frontier):
            gains = np.asarray(_benefits(columns, np.float32(self.kappa), self.model, self.rule))[: len(frontier)]
            gains = np.where((gains > 0) & (pending < max_pending), gains, 0)
            pick = int(np.argmax(gains))
            if gains[pick] == 0:
                break
            choices.append((pick, float(gains[pick])))
            pending[pick] += 1
        return choices


@partial(jax.jit, static_argnums=(2, 3))
def _benefits(columns: jax.Array, kappa: jax.Array, model: Callable[..., Any], rule: Callable[..., Any]) -> jax.Array:
    """`benefit` of what stands in one array: most of what a small call costs goes to the number of arrays that cross over."""
    value, count, mean, m2, pending = columns
    stats = OutcomeStats(count.astype(jnp.int32), mean, m2, pending.astype(jnp.int32))
    return benefit(value, stats, kappa=kappa, model=model, rule=rule)


@dataclass(frozen=True)
class Probes:
    """VinePPO's Monte Carlo probes: `num` extra continuations from every nonterminal state, discarded once read."""

    num: int = 1
    is_probe: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_at_least_one(self, "num")

    def __call__(self, frontier: Frontier, num: int, *, max_pending: int) -> list[Choice]:
        missing = self.num - frontier.probes - np.asarray(frontier.stats.pending)
        score = np.where(missing > 0, 0.0, -np.inf)
        return _greedy(score, num, _room(frontier, max_pending, missing))


@dataclass(frozen=True)
class Recorded:
    """Stands for the rule of a finished round."""

    window: int | None
    is_probe: bool

    def __call__(self, frontier: Frontier, num: int, *, max_pending: int) -> list[Choice]:
        raise ValueError("a replayed round chooses nothing; collect into its journal to go on")


@dataclass(frozen=True)
class Pass:
    """An allocation rule and what it may spend.

    Args:
        rule: who gets the next continuation.
        budget: spent per problem, or once over all problems when the collection shares it.
        max_pending: most continuations in flight from one node; None takes what suits the rule: as many as wished
            for independent root rollouts and probes, else 1.
        max_attempts: launches, failed ones included; None allows twice the continuations of the budget, or as many as
            it has tokens, so that a policy that generates nothing comes to an end.
    """

    rule: Rule
    budget: Budget
    max_pending: int | None = None
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rule, type) or not callable(self.rule):
            raise ValueError(f"Pass: `rule` must be a rule such as Uniform(), got {self.rule!r}")
        _check_at_least_one(self, "max_pending", "max_attempts")

    @property
    def is_probe(self) -> bool:
        """Whether outcomes are read and discarded instead of growing the tree."""
        return getattr(self.rule, "is_probe", False)

    @property
    def window(self) -> int | None:
        """Window of the token entropy, where the rule uses it."""
        return getattr(self.rule, "window", None)

    @property
    def pending_limit(self) -> int:
        """The cap on continuations in flight from one node, the rule's own where none was given."""
        if self.max_pending is not None:
            return min(self.max_pending, _NO_CAP)
        return _NO_CAP if isinstance(self.rule, (RootRollouts, Probes)) else 1

    @property
    def attempt_limit(self) -> int:
        """The cap on launches."""
        if self.max_attempts is not None:
            return self.max_attempts
        return self.budget.tokens or 0 if self.budget.continuations is None else 2 * self.budget.continuations

    def describe(self) -> dict[str, Any]:
        """Plain data that tells this pass from another, for the journal."""
        return describe(self) | {"window": self.window, "is_probe": self.is_probe}

    @staticmethod
    def recorded(description: dict[str, Any]) -> Pass:
        """The pass a journal tells of: its budget and limits, with a rule that chooses nothing any more."""
        budget = Budget(description["budget"]["continuations"], description["budget"]["tokens"])
        rule = Recorded(description["window"], description["is_probe"])
        return Pass(rule, budget, description["max_pending"], description["max_attempts"])


def _check_at_least_one(settings: object, *names: str) -> None:
    for name in names:
        number = getattr(settings, name)
        if number is not None and not (isinstance(number, int) and number >= 1):
            raise ValueError(f"{type(settings).__name__}: `{name}` must be a whole number of at least 1, got {number!r}")


def _taken(frontier: Frontier) -> np.ndarray:
    return np.asarray(frontier.stats.count + frontier.stats.pending, np.float64)


def _room(frontier: Frontier, max_pending: int, limit: np.ndarray | None = None) -> np.ndarray:
    """How many more continuations each candidate may take now."""
    room = max_pending - np.asarray(frontier.stats.pending, np.int64)
    return room if limit is None else np.minimum(room, limit)


def _greedy(score: np.ndarray, num: int, room: np.ndarray, step: float = 0.0) -> list[Choice]:
    """The highest score first, the lower index among equals; `step` is added to a candidate's score when chosen."""
    score, room = np.array(score, np.float64), np.array(room)
    choices: list[Choice] = []
    score[room <= 0] = -np.inf
    for _ in range(num if len(score) else 0):
        pick = int(np.argmax(score))
        if score[pick] == -np.inf:
            break
        choices.append((pick, float(score[pick])))
        score[pick] += step
        room[pick] -= 1
        if room[pick] <= 0:
            score[pick] = -np.inf
    return choices


def _bucket(size: int) -> int:
    """The next of a few sizes, so that little is compiled while the trees grow."""
    bucket = 4096
    while bucket < size:
        bucket *= 4
    return bucket
