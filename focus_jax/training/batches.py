"""From records to batches of tokens: few rows, every sampled token trained once, a short list of shapes.

A record is trained in any row that begins with its tokens: what comes after cannot reach it. So a chain of segments is one
row, and where a tree branches, every branch has a row in which what an earlier one trains is only conditioning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar

import jax
import numpy as np

from focus_jax.collection import CriticExample, Round, SegmentRecord

Batch = TypeVar("Batch", bound="ActorBatch | CriticBatch")

# Servers write minus infinity as some very negative number. Nothing that was drawn is that unlikely: it is unknown.
LEAST_LOGPROB = -1000.0
# What float32 log-probabilities of certain tokens may exceed 0 by.
ROUNDING = 1e-3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ActorBatch:
    """Rows of tokens with the credit of those the policy sampled.

    Attributes:
        tokens: int32 [B, T].
        segment_ids: int32 [B, T]: 0 is padding, a run of equal positive numbers one sequence.
        mask: bool [B, T], the tokens to learn from.
        old_logprobs: float32 [B, T], the sampler's, NaN where unknown; anything outside the mask.
        advantages: float32 [B, T].
        weights: float32 [B, T], of each token in the mean.
        sampler_logprobs: float32 [B, T], the sampler's, where `old_logprobs` are the trainer's own
            (`ActorLoss.add_old_logprobs`).
        reference_logprobs: float32 [B, T], of a reference policy (`ActorLoss.add_reference_logprobs`).
    """

    tokens: jax.Array
    segment_ids: jax.Array
    mask: jax.Array
    old_logprobs: jax.Array
    advantages: jax.Array
    weights: jax.Array
    sampler_logprobs: jax.Array | None = None
    reference_logprobs: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CriticBatch:
    """Rows of tokens with targets at the last token of each state's context.

    Attributes:
        tokens: int32 [B, T].
        segment_ids: int32 [B, T], as in `ActorBatch`.
        mask: bool [B, T], where there is a target.
        targets: float32 [B, T], anything outside the mask.
        weights: float32 [B, T], of each target in the mean.
        old_values: float32 [B, T], the values before the update (`CriticLoss.add_old_values`).
    """

    tokens: jax.Array
    segment_ids: jax.Array
    mask: jax.Array
    targets: jax.Array
    weights: jax.Array
    old_values: jax.Array | None = None


@dataclass(frozen=True)
class Packed(Generic[Batch]):
    """The batches of one update.

    Attributes:
        batches: micro-batches; those of one length have one shape.
        problems: the problems in each.
    """

    batches: tuple[Batch, ...]
    problems: tuple[tuple[str, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the model runs over, padding left out."""
        return sum(int(np.count_nonzero(batch.segment_ids)) for batch in self.batches)

    @property
    def padding(self) -> float:
        """Share of the positions that hold nothing."""
        return 1 - self.num_tokens / sum(batch.tokens.size for batch in self.batches)

    def map(self, change: Callable[[Batch], Batch]) -> Packed[Batch]:
        """The same with `change` applied to every batch."""
        return replace(self, batches=tuple(map(change, self.batches)))


def actor_batches(
    records: Sequence[SegmentRecord],
    *,
    weighting: Literal["segment", "token"] = "segment",
    tokens_per_batch: int = 32768,
    buckets: Sequence[int] | None = None,
    row_multiple: int = 1,
    max_staleness: int = 0,
) -> Packed[ActorBatch]:
    """Lay segment records out as batches in which every sampled token is trained exactly once.

    What follows the last trained token of a row is dropped. A token's weight is an absolute number, however the rows are cut
    into batches: by segment 1 / (sampled tokens of the segment * segments of the problem * problems), where the records of
    one segment count together; by token 1.

    Args:
        records: of `training_records`.
        weighting: "segment": the mean over the tokens of a segment, then over the segments of a problem, then over problems;
            "token": every token counts the same.
        tokens_per_batch: positions in a batch; a batch of length T has `tokens_per_batch // T` rows, at least one.
        buckets: lengths of rows, increasing. Default: powers of two from 128 up to `tokens_per_batch`.
        row_multiple: the number of rows is a multiple of this, the size of the mesh's axis `fsdp`.
        max_staleness: how many policy versions a token may be behind the newest one in the records.

    Returns:
        Batches of numpy arrays; shorter rows fill up longer ones (first-fit decreasing).

    Raises:
        ValueError: no records, a number out of range, a row longer than the longest bucket, tokens of too old a policy
            version, or a record that means nothing; problem and node are named.

    Example:
        >>> ids, there = np.array([5, 6], np.int32), np.ones(2, bool)
        >>> first = SegmentRecord("p", 1, ids, np.array([7, 8]), there, np.zeros(2), np.zeros(2, int), 0.5)
        >>> second = SegmentRecord("p", 2, np.array([5, 6, 7, 8]), np.array([9]), there[:1], np.zeros(1), np.zeros(1, int), -0.5)
        >>> batch = actor_batches([first, second], tokens_per_batch=8).batches[0]
        >>> batch.tokens.tolist(), batch.advantages.tolist(), batch.weights.tolist()
        ([[5, 6, 7, 8, 9, 0, 0, 0]], [[0.0, 0.0, 0.5, 0.5, -0.5, 0.0, 0.0, 0.0]], [[0.0, 0.0, 0.25, 0.25, 0.5, 0.0, 0.0, 0.0]])

    Source: project page, "Give the recovery its own learning signal"; arXiv 2610.35801.
    """
    if weighting not in ("segment", "token"):
        raise ValueError(f"`weighting`: expected 'segment' or 'token', got {weighting!r}")
    if max_staleness < 0:
        raise ValueError(f"`max_staleness`: expected at least 0, got {max_staleness}")
    for record in records:
        _check_record(record)
    _check_versions(records, max_staleness)
    sampled: Counter[tuple[str, int]] = Counter()
    for record in records:
        sampled[record.problem, record.node] += int(record.generated.sum())
    segments = Counter(problem for problem, _ in sampled)
    items = []
    for record in records:
        at = np.flatnonzero(record.generated)
        weight = 1 / (sampled[record.problem, record.node] * segments[record.problem] * len(segments))
        logprobs = np.where(record.logprobs[at] > LEAST_LOGPROB, record.logprobs[at], np.nan)
        values = {
            "old_logprobs": logprobs,
            "advantages": record.advantage,
            "weights": weight if weighting == "segment" else 1.0,
        }
        ids = np.concatenate([record.prompt_ids, record.token_ids[: at[-1] + 1]]).astype(np.int32)
        items.append(_Item(record.problem, record.node, ids, len(record.prompt_ids) + at, values))
    return _pack(ActorBatch, items, tokens_per_batch, buckets, row_multiple)


def read_context(state: Any) -> np.ndarray:
    """What a critic reads by default: the context that the policy sees."""
    return state.context


def critic_batches(
    examples: Sequence[CriticExample],
    *,
    read: Callable[[Any], np.ndarray] = read_context,
    tokens_per_batch: int = 32768,
    buckets: Sequence[int] | None = None,
    row_multiple: int = 1,
) -> Packed[CriticBatch]:
    """Lay critic examples out as batches, each target at the last token of its state's context.

    A state whose context begins another one's is trained in that row. Weights are absolute, 1 / (states of the problem *
    problems): the mean over the states of a problem, then over problems.

    Args:
        examples: of `training_records`, or `outcome_examples` to warm a critic up.
        read: a state to the token ids the critic reads, int32 [T]; give the collector's critic the same.
        tokens_per_batch: as in `actor_batches`.
        buckets: as in `actor_batches`.
        row_multiple: as in `actor_batches`.

    Returns:
        Batches of numpy arrays.

    Raises:
        ValueError: no examples, a number out of range, a context longer than the longest bucket or empty, or a target that is
            not finite; problem and node are named.

    Example:
        >>> from types import SimpleNamespace
        >>> states = [SimpleNamespace(context=np.array(ids, np.int32)) for ids in ([5, 6], [5, 6, 7])]
        >>> examples = [CriticExample("p", i, state, 0.5 * i, 1) for i, state in enumerate(states)]
        >>> batch = critic_batches(examples, tokens_per_batch=4).batches[0]
        >>> batch.tokens.tolist(), batch.mask.astype(int).tolist(), batch.targets.tolist()
        ([[5, 6, 7, 0]], [[0, 1, 1, 0]], [[0.0, 0.0, 0.5, 0.0]])

    Source: project page, "Backup details"; arXiv 2610.35801.
    """
    states = Counter(example.problem for example in examples)
    items = []
    for example in examples:
        where = f"problem {example.problem!r}, node {example.node}"
        ids = np.asarray(read(example.state))
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise ValueError(f"{where}: expected `read` to answer integers [T], at least one, got {ids.dtype} {ids.shape}")
        if not np.isfinite(example.target):
            raise ValueError(f"{where}: expected a finite target, got {example.target}")
        weight = 1 / (states[example.problem] * len(states))
        at = np.array([len(ids) - 1])
        items.append(
            _Item(example.problem, example.node, ids.astype(np.int32), at, {"targets": example.target, "weights": weight})
        )
    return _pack(CriticBatch, items, tokens_per_batch, buckets, row_multiple)


def outcome_examples(round_: Round) -> list[CriticExample]:
    """Critic examples of a round with the mean observed outcome of each state for a target, to warm a critic up.

    An outcome is the discounted return of one continuation from the state on; unlike the mean child return G, it holds no
    predictions of the critic, but for continuations that were cut off. States are those a continuation started from or came
    by, terminal ones left out.

    Args:
        round_: a round, or one that `replay` read from its journal.

    Source: project page, "Train the critic"; arXiv 2610.35801.
    """
    examples = []
    for problem, tree in enumerate(round_.trees):
        if tree is not None:
            stats = round_.stats(problem)
            num_children = np.bincount(tree.parent[1:], minlength=len(tree))
            for node in np.flatnonzero(np.asarray(stats.count) > 0).tolist():
                if tree.status(node) == "open":
                    target, children = float(stats.mean[node]), int(num_children[node])
                    examples.append(CriticExample(tree.problem, node, tree.state(node), target, children))
    return examples


@dataclass(frozen=True)
class _Item:
    """Tokens up to the last position to train at, and numbers for those positions."""

    problem: str
    node: int
    ids: np.ndarray
    at: np.ndarray
    values: dict[str, Any]
    key: tuple[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.problem, self.ids.tobytes()))

    def begins(self, other: _Item) -> bool:
        """Whether the other one of this problem starts with these tokens."""
        return self.problem == other.problem and other.key[1].startswith(self.key[1])


@dataclass
class _Row:
    """One sequence, and what is trained in it."""

    longest: _Item
    members: list[_Item] = field(default_factory=list)
    taken: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.taken = np.zeros(len(self), bool)

    def __len__(self) -> int:
        return len(self.longest.ids)

    def add(self, item: _Item) -> None:
        self.members.append(item)
        self.taken[item.at] = True


@dataclass
class _Shelf:
    """A row of a batch while it is filled."""

    room: int
    rows: list[_Row] = field(default_factory=list)


def _rows(items: Sequence[_Item]) -> list[_Row]:
    """Few rows in which every item is trained once.

    In descending order all that begin with an item's tokens come right before it: the last rows are the ones to look at.
    """
    rows: list[_Row] = []
    for item in sorted(items, key=lambda item: item.key, reverse=True):
        row = _row_for(item, rows)
        if row is None:
            row = _Row(item)
            rows.append(row)
        row.add(item)
    return rows


def _row_for(item: _Item, rows: list[_Row]) -> _Row | None:
    """A row that begins with the item's tokens and trains none of them yet."""
    for row in reversed(rows):
        if not item.begins(row.longest):
            return None
        if not row.taken[item.at].any():
            return row
    return None


def _pack(
    kind: type[Batch], items: Sequence[_Item], tokens_per_batch: int, buckets: Sequence[int] | None, row_multiple: int
) -> Packed[Batch]:
    if not items:
        raise ValueError("expected at least one record to train on, got none")
    if min(tokens_per_batch, row_multiple) < 1:
        raise ValueError(
            f"expected `tokens_per_batch` and `row_multiple` of at least 1, got {tokens_per_batch} and {row_multiple}"
        )
    lengths = _powers_of_two(128, tokens_per_batch) if buckets is None else tuple(buckets)
    if not lengths or lengths[0] < 1 or any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(f"`buckets`: expected increasing lengths of at least 1, got {lengths}")
    filled = _first_fit(_rows(items), lengths, tokens_per_batch, row_multiple)
    names = tuple(items[0].values)
    batches = tuple(_lay_out(kind, names, length, shelves) for length, shelves in filled)
    problems = tuple(tuple(sorted({row.longest.problem for shelf in shelves for row in shelf.rows})) for _, shelves in filled)
    return Packed(batches, problems)


def _first_fit(
    rows: Sequence[_Row], lengths: tuple[int, ...], tokens_per_batch: int, row_multiple: int
) -> list[tuple[int, list[_Shelf]]]:
    """The longest rows first, each on the first shelf with room; a new batch, all its shelves empty, where there is none."""
    batches: list[tuple[int, list[_Shelf]]] = []
    for row in sorted(rows, key=len, reverse=True):
        shelf = next((shelf for _, shelves in batches for shelf in shelves if shelf.room >= len(row)), None)
        if shelf is None:
            length = next((length for length in lengths if length >= len(row)), None)
            if length is None:
                raise ValueError(
                    f"problem {row.longest.problem!r}, node {row.longest.node}: expected a row of at most {lengths[-1]} tokens, "
                    f"the longest bucket, got {len(row)}; raise `tokens_per_batch` or `buckets`, or let the agent manage its "
                    "context earlier"
                )
            num_rows = max(1, tokens_per_batch // (length * row_multiple)) * row_multiple
            shelves = [_Shelf(length) for _ in range(num_rows)]
            batches.append((length, shelves))
            shelf = shelves[0]
        shelf.rows.append(row)
        shelf.room -= len(row)
    return batches


def _lay_out(kind: type[Batch], names: Sequence[str], length: int, shelves: Sequence[_Shelf]) -> Batch:
    shape = (len(shelves), length)
    tokens, segment_ids, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
    columns = {name: np.zeros(shape, np.float32) for name in names}
    for i, shelf in enumerate(shelves):
        start = 0
        for number, row in enumerate(shelf.rows, 1):
            here = slice(start, start + len(row))
            tokens[i, here], segment_ids[i, here], mask[i, here] = row.longest.ids, number, row.taken
            for item in row.members:
                for name, value in item.values.items():
                    columns[name][i, start + item.at] = value
            start += len(row)
    fields: dict[str, Any] = {"tokens": tokens, "segment_ids": segment_ids, "mask": mask, **columns}
    return kind(**fields)


def _powers_of_two(first: int, limit: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ... below `limit`, and `limit` itself."""
    lengths = []
    while first < limit:
        lengths.append(first)
        first *= 2
    return (*lengths, limit)


def _check_record(record: SegmentRecord) -> None:
    """Refuse a record that means nothing."""
    where = f"problem {record.problem!r}, node {record.node}"
    lengths = {name: len(getattr(record, name)) for name in ("token_ids", "generated", "logprobs", "versions")}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: expected arrays of one length, got {lengths}")
    if not record.generated.any():
        raise ValueError(f"{where}: expected tokens that the policy sampled, got none; leave such a record out")
    if not len(record.prompt_ids) and record.generated[0]:
        raise ValueError(f"{where}: expected a prompt, as nothing predicts the first token of a row, got none")
    if not np.isfinite(record.advantage):
        raise ValueError(f"{where}: expected a finite advantage, got {record.advantage}")
    highest = np.nanmax(record.logprobs[record.generated], initial=-np.inf)
    if highest > ROUNDING:
        raise ValueError(f"{where}: expected log-probabilities, at most 0, NaN where unknown, got {highest}")


def _check_versions(records: Sequence[SegmentRecord], max_staleness: int) -> None:
    newest = max((int(record.versions[record.generated].max()) for record in records), default=0)
    for record in records:
        oldest = int(record.versions[record.generated].min())
        if oldest < newest - max_staleness:
            raise ValueError(
                f"problem {record.problem!r}, node {record.node}: expected tokens of policy versions "
                f"{newest - max_staleness} to {newest}, got {oldest}; collect anew, or allow it with `max_staleness`"
            )
