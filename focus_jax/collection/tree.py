"""The rollout tree on the host: nodes are resumable states, edges are segments, parents come before children."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from focus_jax.agents import Segment, State


@dataclass(frozen=True)
class Continuation:
    """What one finished attempt found: a chain of segments from its starting node to the end of the episode.

    Attributes:
        segments: the edges, in order; all but the last lead to an open state.
        states: the state each segment led to.
        values: the critic's prediction at each state; 0 at a terminal one.
        prices: the most tokens that a continuation from each state can generate, what a launch from there reserves.
    """

    segments: tuple[Segment, ...]
    states: tuple[State, ...]
    values: tuple[float, ...]
    prices: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = [len(self.segments), len(self.states), len(self.values), len(self.prices)]
        if not self.segments or len(set(lengths)) > 1:
            raise ValueError(f"Continuation: expected at least one segment with a state, value and price each, got {lengths}")
        if self.segments[-1].status == "open" or any(s.status != "open" for s in self.segments[:-1]):
            raise ValueError(
                "Continuation: expected open segments up to a last one that ends the episode, got statuses "
                f"{[s.status for s in self.segments]}"
            )

    def suffix_returns(self, gamma: float) -> list[float]:
        """Discounted return from the starting node and from every new node: G_i = R_{i+1} + gamma^d_{i+1} G_{i+1}.

        The tail is 0 after a terminal state and the critic's prediction where the episode was cut off.
        """
        tail = 0.0 if self.segments[-1].status == "terminal" else self.values[-1]
        returns = [tail]
        for segment in reversed(self.segments):
            returns.append(segment.reward + gamma**segment.num_steps * returns[-1])
        return returns[::-1]


@dataclass(frozen=True)
class Node:
    """What one node adds to its parent; the context is a walk from the root (`HostTree.state`)."""

    parent: int
    segment: Segment | None
    environment: bytes
    num_turns: int
    num_tokens: int
    resumable: bool
    value: float
    attempt: int


class HostTree:
    """A growing rollout tree of one problem.

    It has the four node sequences that `focus_jax.pack` takes: `parent`, `reward`, `steps`, `terminal`.

    Args:
        problem: the problem's id.
        root: the state right after the environment's reset.
        value: the critic's prediction there.

    Source: project page, "Put the pieces together" and "Backup details".
    """

    def __init__(self, problem: str, root: State, value: float):
        self.problem = problem
        self._context = root.context
        self._seed_length = root.seed_length
        self.nodes = [Node(0, None, root.environment, root.num_turns, root.num_tokens, root.resumable, value, -1)]

    def __len__(self) -> int:
        return len(self.nodes)

    def add(self, start: int, continuation: Continuation, attempt: int) -> list[int]:
        """Hang a continuation under node `start`; returns the indices of the new nodes, in order.

        Raises:
            ValueError: `start` is not a node, or not one that an episode can go on from.
        """
        if not 0 <= start < len(self.nodes):
            raise ValueError(f"tree of problem {self.problem!r}: expected a node below {len(self.nodes)}, got {start}")
        if self.status(start) != "open":
            raise ValueError(f"tree of problem {self.problem!r}: node {start} is {self.status(start)}, nothing continues there")
        first = len(self.nodes)
        parent = start
        for segment, state, value in zip(continuation.segments, continuation.states, continuation.values, strict=True):
            self.nodes.append(
                Node(parent, segment, state.environment, state.num_turns, state.num_tokens, state.resumable, value, attempt)
            )
            parent = len(self.nodes) - 1
        return list(range(first, len(self.nodes)))

    def status(self, node: int) -> str:
        """ "open", "terminal" or "cut_off"; the root is open."""
        segment = self.nodes[node].segment
        return "open" if segment is None else segment.status

    def is_candidate(self, node: int) -> bool:
        """Whether another continuation may start here."""
        return self.status(node) == "open" and self.nodes[node].resumable

    def path(self, node: int) -> Iterator[int]:
        """Node indices from `node` up to the root."""
        while True:
            yield node
            if node == 0:
                return
            node = self.nodes[node].parent

    def context(self, node: int) -> np.ndarray:
        """int32 [T]: the token ids the policy sees at `node`."""
        parts: list[np.ndarray] = []
        for i in self.path(node):
            segment = self.nodes[i].segment
            if segment is None:
                parts.append(self._context)
            elif segment.resets:
                last = segment.resets[-1]
                parts += [segment.token_ids[last.position :], last.context]
                break
            else:
                parts.append(segment.token_ids)
        return np.concatenate(parts[::-1])

    def state(self, node: int) -> State:
        """The resumable state at `node`."""
        n = self.nodes[node]
        context = self.context(node)
        context.flags.writeable = False
        return State(context, self._seed_length, n.environment, n.num_turns, n.num_tokens, n.resumable)

    @property
    def parent(self) -> np.ndarray:
        """int32 [N]; the root holds 0."""
        return np.array([n.parent for n in self.nodes], np.int32)

    @property
    def reward(self) -> np.ndarray:
        """float32 [N], on the edge entering each node."""
        return np.array([n.segment.reward if n.segment else 0.0 for n in self.nodes], np.float32)

    @property
    def steps(self) -> np.ndarray:
        """int32 [N], task transitions of the edge entering each node."""
        return np.array([n.segment.num_steps if n.segment else 0 for n in self.nodes], np.int32)

    @property
    def terminal(self) -> np.ndarray:
        """bool [N]."""
        return np.array([self.status(i) == "terminal" for i in range(len(self.nodes))], bool)

    @property
    def values(self) -> np.ndarray:
        """float32 [N], the critic's predictions."""
        return np.array([n.value for n in self.nodes], np.float32)

    @property
    def depth(self) -> np.ndarray:
        """int32 [N], edges from the root."""
        depth = np.zeros(len(self.nodes), np.int32)
        for i, n in enumerate(self.nodes[1:], 1):
            depth[i] = depth[n.parent] + 1
        return depth
