"""Who gets the next continuation: allocation rules, and the passes that give each rule a budget of its own.

A collection round is a list of passes, one after the other. Source: project page, "Choose where another rollout is
useful" and "Put the pieces together"; arXiv 2610.35801.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Protocol

import numpy as np

from focus_jax.agents.describe import describe
from focus_jax.collection.budget import Budget
from focus_jax.collection.evidence import Frontier
from focus_jax.scheduling import OutcomeStats, allocate, benefit_slope, beta_bernoulli

# (index into the frontier, score that bought it); in the order bought.
Choice = tuple[int, float]

_NO_CAP = 1 << 30  # continuations in flight from one node; one more still fits an int32


class Rule(Protocol):
    """Chooses up to `num` candidates of a frontier, best first.

    Choosing several at once must give what choosing one at a time would, each choice raising the candidate's pending
    count. Fewer choices than asked for means that nothing else is worth buying now.
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
        num = min(num, len(frontier) * max_pending)
        if not num:
            return []
        size = _bucket(len(frontier), 4096)
        value = _pad(frontier.value, size)
        stats = OutcomeStats(*(_pad(getattr(frontier.stats, f.name), size) for f in fields(OutcomeStats)))
        candidates = np.arange(size) < len(frontier)
        # Asking for more and dropping the rest is the same as asking for `num`: choices are made in order.
        asked = _bucket(num, 64)
        found = allocate(
            value,
            stats,
            candidates,
            num=asked,
            kappa=np.float32(self.kappa),
            model=self.model,
            rule=self.rule,
            max_pending=max_pending,
        )
        index, score = np.asarray(found.index), np.asarray(found.benefit)
        return [(int(i), float(s)) for i, s in zip(index[:num], score[:num], strict=True) if i >= 0]


@dataclass(frozen=True)
class Probes:
    """VinePPO's Monte Carlo probes: `num` extra continuations from every nonterminal state, discarded once read."""

    num: int = 1

    def __post_init__(self) -> None:
        _check_at_least_one(self, "num")

    def __call__(self, frontier: Frontier, num: int, *, max_pending: int) -> list[Choice]:
        missing = self.num - frontier.probes - np.asarray(frontier.stats.pending)
        score = np.where(missing > 0, 0.0, -np.inf)
        return _greedy(score, num, _room(frontier, max_pending, missing))


@dataclass(frozen=True)
class Recorded:
    """Stands for the rule of a finished round."""

    name: str
    window: int | None = None

    def __call__(self, frontier: Frontier, num: int, *, max_pending: int) -> list[Choice]:
        raise ValueError(f"a replayed round chooses nothing; collect with the rule {self.name} to go on")


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
    def name(self) -> str:
        """The rule's name."""
        return self.rule.name if isinstance(self.rule, Recorded) else name_of(self.rule)

    @property
    def is_probe(self) -> bool:
        """Whether outcomes are read and discarded instead of growing the tree."""
        return self.name == Probes.__name__

    @property
    def window(self) -> int | None:
        """Window of the token entropy, where the rule uses it."""
        return self.rule.window if isinstance(self.rule, (TokenEntropy, Recorded)) else None

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
        knobs: dict[str, Any] = {f.name: getattr(self.rule, f.name) for f in fields(self.rule)} if is_dataclass(self.rule) else {}
        return {
            "rule": self.name,
            "knobs": {k: name_of(v) if callable(v) else describe(v) for k, v in knobs.items()},
            "budget": asdict(self.budget),
            "max_pending": self.max_pending,
            "max_attempts": self.max_attempts,
        }

    @staticmethod
    def recorded(description: dict[str, Any]) -> Pass:
        """The pass a journal tells of: its budget and limits, with a rule that chooses nothing any more."""
        rule = Recorded(description["rule"], description["knobs"].get("window"))
        return Pass(rule, Budget(**description["budget"]), description["max_pending"], description["max_attempts"])


def name_of(thing: object) -> str:
    """Name of a function, or of an object's class, that is the same in every run.

    Raises:
        ValueError: there is none: a lambda, or a partial of a function.
    """
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    name = str(named.__qualname__)
    if "<lambda>" in name or name == "partial":
        raise ValueError(
            f"expected a named function or a frozen dataclass, so that a journal can tell it from another, got {thing!r}"
        )
    return name


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


def _bucket(size: int, smallest: int) -> int:
    """The next of smallest, 4 * smallest, 16 * smallest, ...: few compilations while the trees grow."""
    while smallest < size:
        smallest *= 4
    return smallest


def _pad(array: Any, size: int) -> np.ndarray:
    padded = np.zeros(size, array.dtype)
    padded[: len(array)] = array
    return padded
