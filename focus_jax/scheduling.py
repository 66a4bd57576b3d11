"""Where one more continuation teaches the critic most: evidence, its expected benefit, and the picks that follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from focus_jax.backup import refine
from focus_jax.trees import Array, as_array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OutcomeStats:
    """What was observed from each state so far: a count, a mean and squared deviations of returns (Welford).

    One finished continuation is one observation at the state it started from and one at each new state it created;
    strict ancestors of its start get nothing. Outcomes of different policy versions do not belong in one ledger.

    Attributes:
        count: int32 [..., N], N, the number of observed returns.
        mean: float32 [..., N], their mean; 0 where there are none.
        m2: float32 [..., N], the sum of their squared deviations from the mean.
        pending: int32 [..., N], P, the number of continuations in flight.

    Source: project page, "Backup details".
    """

    count: Array
    mean: Array
    m2: Array
    pending: Array

    @classmethod
    def zeros(cls, shape: int | tuple[int, ...]) -> OutcomeStats:
        """No evidence yet, for states of this shape."""
        count, mean = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        return cls(count=count, mean=mean, m2=mean, pending=count)

    @jax.jit
    def record(self, returns: Array, where: Array) -> OutcomeStats:
        """Add one observation to each state of `where`; delivering the same outcome twice counts it twice.

        Args:
            returns: float32 [..., N], discounted suffix returns; ignored outside `where`.
            where: bool [..., N], the states that observed one.

        Returns:
            The statistics with those observations; `pending` is left as it is.

        Raises:
            ValueError: shapes disagree.
            TypeError: a dtype is of the wrong kind.

        Example:
            >>> stats = OutcomeStats.zeros(2)
            >>> for outcome in (0.0, 1.0):
            ...     stats = stats.record(jnp.full(2, outcome), jnp.array([True, False]))
            >>> print(stats.count, stats.mean, stats.m2)
            [2 0] [0.5 0. ] [0.5 0. ]
        """
        old = _as_stats(self, jnp.shape(self.count))
        returns = as_array("returns", returns, old.count.shape, jnp.float32)
        where = as_array("where", where, old.count.shape, jnp.bool_)
        count = old.count + where.astype(jnp.int32)
        share = 1 / jnp.maximum(count, 1).astype(jnp.float32)
        surprise = jnp.where(where, returns - old.mean, 0)
        m2 = old.m2 + surprise**2 * (old.count.astype(jnp.float32) * share)
        return OutcomeStats(count=count, mean=old.mean + surprise * share, m2=m2, pending=old.pending)


Model = Callable[..., tuple[jax.Array, jax.Array]]
Rule = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


@jax.jit
def beta_bernoulli(values: Array, stats: OutcomeStats, *, kappa: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Squared error of the critic and variance of the outcome, for returns in [0, 1].

        mu = (kappa * V + N * mean) / (kappa + N)
        e2 = (V - mu)^2 + mu * (1 - mu) / (kappa + N + 1),   s2 = mu * (1 - mu)

    Where V or returns stray outside [0, 1], mu is clipped into it for mu * (1 - mu): a variance is never negative.

    Args:
        values: float32 [..., N], the critic's V.
        stats: what was observed, [..., N].
        kappa: how many observations the critic's prediction counts for; above 0.

    Returns:
        e2 and s2, each float32 [..., N].

    Example:
        >>> e2, s2 = beta_bernoulli(jnp.array([0.5]), OutcomeStats.zeros(1), kappa=1.0)
        >>> print(e2, s2)
        [0.125] [0.25]

    Source: arXiv 2610.35801; project page, "Choose where another rollout is useful".
    """
    critic = as_array("values", values, jnp.shape(stats.count), jnp.float32)
    posterior, count = refine(critic, stats.mean, stats.count, kappa=kappa), stats.count.astype(jnp.float32)
    inside = jnp.clip(posterior, 0, 1)
    variance = inside * (1 - inside)
    return (critic - posterior) ** 2 + variance / (kappa + count + 1), variance


@jax.jit
def normal(values: Array, stats: OutcomeStats, *, kappa: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Squared error of the critic and variance of the outcome, for returns of any range.

        mu = (kappa * V + N * mean) / (kappa + N)
        sg = max(sample variance, 1e-3) where N >= 2, else 0.25
        e2 = (V - mu)^2 + sg / (kappa + N),   s2 = sg * (1 + 1 / (kappa + N))

    Args:
        values: float32 [..., N], the critic's V.
        stats: what was observed, [..., N].
        kappa: how many observations the critic's prediction counts for; above 0.

    Returns:
        e2 and s2, each float32 [..., N].

    Example:
        >>> e2, s2 = normal(jnp.array([3.0]), OutcomeStats.zeros(1), kappa=1.0)
        >>> print(e2, s2)
        [0.25] [0.5]

    Source: arXiv 2610.35801; project page, "Choose where another rollout is useful".
    """
    critic = as_array("values", values, jnp.shape(stats.count), jnp.float32)
    posterior, count = refine(critic, stats.mean, stats.count, kappa=kappa), stats.count.astype(jnp.float32)
    sample = jnp.where(count >= 2, jnp.maximum(stats.m2 / jnp.maximum(count - 1, 1), 1e-3), 0.25)
    return (critic - posterior) ** 2 + sample / (kappa + count), sample * (1 + 1 / (kappa + count))


def benefit_slope(e2: jax.Array, s2: jax.Array, num: jax.Array, kappa: jax.Array | float) -> jax.Array:
    """Slope of the error of a blend of `num` outcomes with the critic, -dMSE/dn.

        MSE(n) = (kappa^2 * e2 + n * s2) / (kappa + n)^2
        -dMSE/dn = (2 * kappa^2 * e2 + (n - kappa) * s2) / (kappa + n)^3

    Args:
        e2: float32 [...], squared error of the critic.
        s2: float32 [...], variance of one outcome.
        num: float32 [...], n, outcomes observed and in flight.
        kappa: how many observations the critic's prediction counts for; above 0.

    Returns:
        float32 [...]; can be negative where n < kappa.

    Example:
        >>> print(benefit_slope(jnp.array(0.25), jnp.array(0.25), jnp.array(1.0), 1.0))
        0.0625

    Source: arXiv 2610.35801; project page, "Choose where another rollout is useful".
    """
    return (2 * kappa**2 * e2 + (num - kappa) * s2) / (kappa + num) ** 3


def benefit_step(e2: jax.Array, s2: jax.Array, num: jax.Array, kappa: jax.Array | float) -> jax.Array:
    """Drop of the same error with one whole outcome more, MSE(n) - MSE(n + 1).

    Args:
        e2: float32 [...], squared error of the critic.
        s2: float32 [...], variance of one outcome.
        num: float32 [...], n, outcomes observed and in flight.
        kappa: how many observations the critic's prediction counts for; above 0.

    Returns:
        float32 [...]; can be negative where n is small.

    Example:
        >>> print(benefit_step(jnp.array(0.25), jnp.array(0.25), jnp.array(1.0), 1.0).round(6))
        0.041667

    Source: an option beside the paper's rule.
    """
    total = kappa + num
    # On one denominator, as the difference of two nearly equal errors would lose most of its digits.
    return ((kappa**2 * e2 + num * s2) * (2 * total + 1) - s2 * total**2) / (total * (total + 1)) ** 2


@partial(jax.jit, static_argnames=("model", "rule"))
def benefit(
    values: Array,
    stats: OutcomeStats,
    *,
    kappa: ArrayLike = 1.0,
    model: Model = beta_bernoulli,
    rule: Rule = benefit_slope,
) -> jax.Array:
    """How much one more continuation from each state is expected to lower the error of its value.

    Continuations in flight count as outcomes already (n = N + P) and enter nowhere else.

    Args:
        values: float32 [..., N], the critic's V.
        stats: what was observed and is in flight, [..., N].
        kappa: how many observations the critic's prediction counts for; above 0.
        model: (values, stats, *, kappa) -> (e2, s2); `beta_bernoulli` or `normal`, or your own.
        rule: (e2, s2, n, kappa) -> benefit; `benefit_slope` or `benefit_step`, or your own.

    Returns:
        float32 [..., N]; negative where another outcome is expected to do harm.

    Raises:
        ValueError, TypeError: a shape, or a dtype, that does not fit.

    Example:
        >>> stats = OutcomeStats.zeros(2).record(jnp.zeros(2), jnp.array([False, True]))
        >>> print(benefit(jnp.array([0.5, 0.5]), stats))
        [0.      0.03125]

    Source: arXiv 2610.35801; project page, "Choose where another rollout is useful".
    """
    kappa = jnp.asarray(kappa, jnp.float32)
    e2, s2, n = _error_variance_number(values, stats, kappa, model)
    return rule(e2, s2, n, kappa)


class Allocation(NamedTuple):
    """Picks in order, each [num].

    Attributes:
        index: int32, position over all leading axes and N flattened; -1 where nothing with a positive benefit is left.
        benefit: float32, benefit of the pick at its turn; 0 where the index is -1.
    """

    index: jax.Array  # type: ignore[assignment]  # nobody asks a result where a value stands in it
    benefit: jax.Array


@partial(jax.jit, static_argnames=("num", "model", "rule", "max_pending"))
def allocate(
    values: Array,
    stats: OutcomeStats,
    candidates: Array,
    num: int,
    *,
    kappa: ArrayLike = 1.0,
    model: Model = beta_bernoulli,
    rule: Rule = benefit_slope,
    max_pending: int = 1,
) -> Allocation:
    """Choose states for `num` more continuations, jointly over a whole batch of trees.

    Gives what choosing one at a time would give, in the same order: the highest benefit first, the lower tree and then
    the lower node among equals, with the pending count raised by one after each choice. Only positive benefits are bought.

    Args:
        values: float32 [..., N], the critic's V.
        stats: what was observed and is in flight, [..., N].
        candidates: bool [..., N], the states that may be continued (resumable, not terminal, not cut off).
        num: how many to choose; a Python integer, as it fixes a shape.
        kappa: how many observations the critic's prediction counts for; above 0.
        model: (values, stats, *, kappa) -> (e2, s2), as in `benefit`.
        rule: (e2, s2, n, kappa) -> benefit, as in `benefit`.
        max_pending: cap on the continuations in flight from one state, those in flight now included; at least 1.

    Returns:
        The picks and their benefits.

    Raises:
        ValueError: shapes disagree, `num` is negative or `max_pending` is below 1.
        TypeError: a dtype is of the wrong kind.

    Example:
        >>> stats = OutcomeStats.zeros(3).record(jnp.array([1.0, 0.0, 0.0]), jnp.array([True, True, False]))
        >>> print(allocate(jnp.full(3, 0.8), stats, jnp.ones(3, bool), 3).index)
        [ 1  0 -1]

    Source: project page, "Choose where another rollout is useful".
    """
    if num < 0 or max_pending < 1:
        raise ValueError(f"expected `num` >= 0 and `max_pending` >= 1, got {num} and {max_pending}")
    kappa = jnp.asarray(kappa, jnp.float32)
    e2, s2, n = _error_variance_number(values, stats, kappa, model)
    candidates = as_array("candidates", candidates, e2.shape, jnp.bool_)
    room = jnp.where(candidates, min(max_pending, 2**31 - 1) - jnp.asarray(stats.pending, jnp.int32), 0)

    # As a state is picked again and again its benefit may fall and rise; a later pick waits for the earlier ones, so what
    # orders it is the least benefit so far. Choosing one at a time is sorting by that (descending, then state, then turn):
    # once all above some level are taken, no state offers more than the level; the lowest one that offers it is taken,
    # and goes on offering it or more until its least benefit falls below, and only then does the next one get its turn.
    first = _positive(rule(e2, s2, n, kappa), room > 0)
    level, index = _top(first.reshape(-1), num)
    if max_pending == 1:
        bought = level
    else:
        # A state enters with its first benefit, so none but the `num` highest of those can take part.
        index, room = jnp.sort(index), jnp.where(first > 0, room, 0)
        turn = jnp.arange(min(max_pending, num), dtype=jnp.int32)[None, :]
        e2, s2, n, room = (x.reshape(-1)[index][:, None] for x in (e2, s2, n, room))
        series = _positive(rule(e2, s2, n + turn.astype(jnp.float32), kappa), turn < room)
        level, place = _top(lax.cummin(series, axis=1).reshape(-1), num)
        index, bought = index[place // turn.size], series.reshape(-1)[place]
    found = level > 0
    missing = (0, num - level.size)
    return Allocation(
        index=jnp.pad(jnp.where(found, index, -1), missing, constant_values=-1),
        benefit=jnp.pad(jnp.where(found, bought, 0), missing),
    )


@partial(jax.jit, static_argnames="window")
def token_entropy(logprobs: Array, mask: Array, *, window: int = 8) -> jax.Array:
    """How unsure the policy was along a segment: the highest windowed mean of -p log p over its task tokens.

    Windows run over `window` consecutive task tokens, skipping whatever lies between them; a segment with fewer has one
    window, one with none scores 0. A log-probability of NaN is unknown and left out.

    Args:
        logprobs: float32 [..., T], log p of each sampled token.
        mask: bool [..., T], True at task tokens.
        window: length of a window, in tokens; at least 1.

    Returns:
        float32 [...].

    Raises:
        ValueError: shapes disagree or `window` is below 1.
        TypeError: a dtype is of the wrong kind.

    Example:
        >>> logprobs = jnp.log(jnp.array([1.0, 0.5, 0.5, 0.25]))
        >>> print(token_entropy(logprobs, jnp.array([True, True, True, False]), window=2).round(4))
        0.3466

    Source: arXiv 2610.35801.
    """
    if window < 1:
        raise ValueError(f"`window`: expected 1 or more, got {window}")
    logprobs = as_array("logprobs", logprobs, None, jnp.float32)
    valid = as_array("mask", mask, logprobs.shape, jnp.bool_) & ~jnp.isnan(logprobs)
    certain = ~valid | (logprobs == -jnp.inf)  # p log p is 0 at p = 0
    log_p = jnp.where(certain, 0, logprobs)
    surprise = jnp.where(certain, 0, -jnp.exp(log_p) * log_p)

    order = jnp.argsort(~valid, axis=-1, stable=True)
    consecutive = jnp.take_along_axis(surprise, order, axis=-1)
    count = jnp.sum(valid, axis=-1, dtype=jnp.int32)
    leading = (1,) * (logprobs.ndim - 1)
    padding = ((0, 0),) * len(leading) + ((0, window - 1),)
    sums = lax.reduce_window(consecutive, 0.0, lax.add, (*leading, window), (*leading, 1), padding)
    start = lax.broadcasted_iota(jnp.int32, sums.shape, sums.ndim - 1)
    last = jnp.expand_dims(jnp.maximum(count - window, 0), -1)
    highest = jnp.max(sums, axis=-1, where=start <= last, initial=0)
    return highest / jnp.clip(count, 1, window).astype(jnp.float32)


def _as_stats(stats: OutcomeStats, shape: tuple[int, ...]) -> OutcomeStats:
    return OutcomeStats(
        count=as_array("stats.count", stats.count, shape, jnp.int32),
        mean=as_array("stats.mean", stats.mean, shape, jnp.float32),
        m2=as_array("stats.m2", stats.m2, shape, jnp.float32),
        pending=as_array("stats.pending", stats.pending, shape, jnp.int32),
    )


def _error_variance_number(
    values: Array, stats: OutcomeStats, kappa: jax.Array, model: Model
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """e2, s2 and n = N + P."""
    values = as_array("values", values, None, jnp.float32)
    stats = _as_stats(stats, values.shape)
    e2, s2 = (as_array("model's result", x, values.shape, jnp.float32) for x in model(values, stats, kappa=kappa))
    return e2, s2, jnp.add(stats.count, stats.pending).astype(jnp.float32)


def _positive(benefits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Benefits that may be bought; -inf for all others, so that none of them is."""
    return jnp.where(allowed & (benefits > 0), benefits, -jnp.inf)


def _top(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of x [M] (all, where M < k) with their indices; the lower index first among equals."""
    k = min(k, x.size)
    width = 2 ** round(math.log2(x.size / max(k, 1)) / 2) if k else 1
    if width < 8:
        return lax.top_k(x, k)
    # An element among the k largest lies in one of the k blocks with the largest maxima, ties going to lower blocks.
    blocks = jnp.pad(x, (0, -x.size % width), constant_values=-jnp.inf).reshape(-1, width)
    _, chosen = lax.top_k(jnp.max(blocks, axis=1), k)
    chosen = jnp.sort(chosen)
    top, place = lax.top_k(blocks[chosen].reshape(-1), k)
    return top, chosen[place // width] * width + place % width
