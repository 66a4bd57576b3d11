"""Records made by hand, and the parts that tests of batches and of steps share."""

import functools

import numpy as np
from simulated import collect_letters

from focus_jax.agents import State
from focus_jax.collection import CriticExample, SegmentRecord, focus_credit, training_records


def make_record(prompt, reply, node=1, problem="p", *, generated=None, advantage=1.0, **fields):
    """A segment of letters; `generated` marks those the policy sampled with x, all of them unless given."""
    there = np.array([c == "x" for c in generated or "x" * len(reply)])
    columns = {"logprobs": np.where(there, -0.5, 0).astype(np.float32), "versions": np.where(there, 0, -1).astype(np.int32)}
    return SegmentRecord(problem, node, to_ids(prompt), to_ids(reply), there, **{**columns, **fields}, advantage=advantage)


def make_example(context, node=0, problem="p", *, target=0.5):
    return CriticExample(problem, node, State(to_ids(context), 0, b""), target, 1)


def to_ids(text):
    return np.array([ord(c) for c in text], np.int32)


@functools.cache
def letter_round():
    """Branching trees of five problems, grown by a simulated agent."""
    return collect_letters(seed=3)


@functools.cache
def letter_records():
    """Segment records and critic examples of these trees; log-probabilities are made up, some of them unknown."""
    trees = letter_round().grown
    return training_records(trees, focus_credit(trees))


def sequences(batch):
    """Every sequence of a batch, as (row, slice) pairs."""
    for row, numbers in enumerate(batch.segment_ids):
        for number in range(1, numbers.max() + 1):
            where = np.flatnonzero(numbers == number)
            yield row, slice(where[0], where[-1] + 1)


def trained(packed, field="weights"):
    """Per problem text of every sequence -> trained part marked; only for single-problem checks by eye."""
    rows = []
    for batch in packed.batches:
        for row, here in sequences(batch):
            text = "".join(map(chr, batch.tokens[row, here]))
            rows.append((text, "".join(".x"[int(m)] for m in batch.mask[row, here])))
    return sorted(rows)
