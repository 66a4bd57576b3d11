"""Batches of one update from the records of all processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from focus_jax.training import ActorBatch, CriticBatch, Packed


@dataclass(frozen=True)
class Layout:
    """How rows are laid out: alike in every process.

    Attributes:
        tokens_per_batch: positions in a process's part of a batch.
        fsdp: size of the mesh's axis.
    """

    tokens_per_batch: int
    fsdp: int

    @property
    def buckets(self) -> tuple[int, ...]:
        """Lengths of rows: powers of two from 128 up to the whole batch."""
        powers = [1 << n for n in range(7, self.tokens_per_batch.bit_length()) if 1 << n < self.tokens_per_batch]
        return (*powers, self.tokens_per_batch)

    @property
    def row_multiple(self) -> int:
        """What the rows of a process are a multiple of."""
        return max(1, self.fsdp // jax.process_count())

    def options(self) -> dict[str, Any]:
        """For `actor_batches` and `critic_batches`."""
        return {"tokens_per_batch": self.tokens_per_batch, "buckets": self.buckets, "row_multiple": self.row_multiple}

    def num_rows(self, length: int) -> int:
        """Rows of a process's part of a batch."""
        return max(1, self.tokens_per_batch // (length * self.row_multiple)) * self.row_multiple


def over_processes(packed: Packed[Any] | None, kind: type, layout: Layout, *, by_problem: bool = True) -> Packed[Any]:
    """One update's batches over the mesh that is set, each made of one part from every process.

    All bring the same number of batches of each length: those that have fewer add empty ones, which carry no weight.

    Args:
        packed: what this process has to train on; None: nothing.
        kind: `ActorBatch` or `CriticBatch`.
        layout: that of `packed`.
        by_problem: whether weights are shares of this process's problems; they become shares of all that there are.
    """
    if jax.process_count() == 1:
        if packed is None:
            raise ValueError("expected records to train on, got none")
        return packed
    batches: Sequence[Any] = () if packed is None else packed.batches
    names = () if packed is None else packed.problems
    num_problems = len({problem for batch in names for problem in batch})
    counts = [sum(b.tokens.shape[1] == length for b in batches) for length in layout.buckets]
    everywhere = np.asarray(multihost_utils.process_allgather(np.array([num_problems, *counts])))
    scale = np.float32(num_problems / max(1, everywhere[:, 0].sum()) if by_problem else 1)
    everywhere = everywhere[:, 1:]
    if not everywhere.any():
        raise ValueError("expected records to train on in some process, got none in any")
    parts, problems = [], []
    for length, most in zip(layout.buckets, everywhere.max(0).tolist(), strict=True):
        mine = [(b, p) for b, p in zip(batches, names, strict=True) if b.tokens.shape[1] == length]
        empty = _empty(kind, (layout.num_rows(length), length))
        for batch, problem in mine + [(empty, ())] * (most - len(mine)):
            parts.append(_global(replace(batch, weights=batch.weights * scale)))
            problems.append(problem)
    return Packed(tuple(parts), tuple(problems))


def _empty(kind: type, shape: tuple[int, int]) -> Any:
    types = {"tokens": np.int32, "segment_ids": np.int32, "mask": bool, "weights": np.float32}
    more = {ActorBatch: ("old_logprobs", "advantages"), CriticBatch: ("targets",)}[kind]
    return kind(**{name: np.zeros(shape, dtype) for name, dtype in (types | dict.fromkeys(more, np.float32)).items()})


def _global(batch: Any) -> Any:
    rows = NamedSharding(jax.sharding.get_mesh(), PartitionSpec("fsdp"))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), batch)
