"""Rollout trees of many problems grown at once on the device, for tasks whose policy is a table over pages.

`grow` does what the collector does with one worker for each tree: it continues from one state of every tree at a time, and
chooses the next when the outcome is known. States are branch points, `segment` replies apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from focus_jax.scheduling import OutcomeStats, benefit
from focus_jax.trees import RolloutTrees


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Task:
    """B problems as tables over S pages and A outcomes of a reply; "page" S is the goal.

    Attributes:
        next: int32 [B, S, A], where each outcome leads.
        probs: float32 [B, S, A], the policy; each row sums to 1.
    """

    next: jax.Array
    probs: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Growth:
    """B trees of at most N nodes while they grow; node 0 is the root, nodes from `num_nodes` on are still empty.

    Attributes:
        num_nodes: int32 [B].
        spent: int32 [B], replies so far.
        parent: int32 [B, N].
        page: int32 [B, N], where the agent stands.
        time: int32 [B, N], replies up to here.
        terminal: bool [B, N], the episode is over: at the goal, or out of steps.
        reward: float32 [B, N], on the edge entering the node.
        leaf: int32 [B, N], the last node of the continuation that made this one.
        value: float32 [B, N], the critic's prediction; 0 at terminal nodes.
        stats: observed outcomes, [B, N] each.
        pages: int32 [B, N, K], pages of the edge's replies.
        replies: int32 [B, N, K], which outcome each had.
        given: bool [B, N, K], whether there was a reply at all.
    """

    num_nodes: jax.Array
    spent: jax.Array
    parent: jax.Array
    page: jax.Array
    time: jax.Array
    terminal: jax.Array
    reward: jax.Array
    leaf: jax.Array
    value: jax.Array
    stats: OutcomeStats
    pages: jax.Array
    replies: jax.Array
    given: jax.Array

    @property
    def mask(self) -> jax.Array:
        """bool [B, N], True at nodes."""
        return jnp.arange(self.parent.shape[1])[None] < self.num_nodes[:, None]

    @property
    def trees(self) -> RolloutTrees:
        """The same trees for the pure functions."""
        return RolloutTrees(self.parent, self.reward, jnp.sum(self.given, -1, dtype=jnp.int32), self.terminal, self.mask)


# Scores of all nodes [B, N], from which the best candidate above 0 is continued.
Rule = Callable[[Growth], jax.Array]
# Pages and times [B, M] to predicted values [B, M].
Critic = Callable[[jax.Array, jax.Array], jax.Array]


def root_only(growth: Growth) -> jax.Array:
    """Independent rollouts."""
    return jnp.zeros(growth.value.shape).at[:, 0].set(1)


def uniform(growth: Growth) -> jax.Array:
    """The state with the fewest outcomes."""
    return 1 / (1 + jnp.asarray(growth.stats.count, jnp.float32))


def value_refinement(kappa: float = 1.0) -> Rule:
    """FOCUS: where one more outcome is expected to cut the squared error of the blended value most; `kappa` as in `backup`."""
    return lambda growth: benefit(growth.value, growth.stats, kappa=kappa)


def plant(task: Task, critic: Critic, *, num_nodes: int, segment: int) -> Growth:
    """Trees that are roots alone, with room for `num_nodes`."""
    num_trees = len(task.next)
    number = jnp.zeros((num_trees, num_nodes), jnp.int32)
    real, flag = number.astype(jnp.float32), number.astype(bool)
    edges = jnp.zeros((num_trees, num_nodes, segment), jnp.int32)
    value = real.at[:, :1].set(critic(number[:, :1], number[:, :1]))
    ones, stats = jnp.ones(num_trees, jnp.int32), OutcomeStats.zeros(number.shape)
    return Growth(ones, 0 * ones, number, number, number, flag, real, number, value, stats, edges, edges, edges.astype(bool))


def grow(growth: Growth, task: Task, budget: jax.Array, *, rule: Rule, critic: Critic, max_steps: int, key: jax.Array) -> Growth:
    """Continue from what `rule` scores highest until nothing above 0 is affordable in any tree.

    Args:
        growth: trees to go on with.
        task: their problems and policy.
        budget: int32 [B], most replies each tree may hold; a continuation is launched only if its worst case fits.
        rule: scores the nodes.
        critic: values of new states.
        max_steps: replies in an episode.
        key: typed PRNG key.
    """

    def choose(growth: Growth) -> tuple[jax.Array, jax.Array]:
        capacity, segment = growth.replies.shape[1:]
        worst = max_steps - growth.time
        room = growth.num_nodes[:, None] + -(-worst // segment) <= capacity
        candidate = growth.mask & ~growth.terminal & room & (growth.spent[:, None] + worst <= budget[:, None])
        score = jnp.where(candidate, rule(growth), 0)
        return jnp.argmax(score, -1), jnp.max(score, -1) > 0

    def body(carry: tuple[Growth, jax.Array, jax.Array, jax.Array]) -> tuple[Growth, jax.Array, jax.Array, jax.Array]:
        growth, key, start, active = carry
        key, now = jax.random.split(key)
        growth = continue_from(growth, task, start, active, critic=critic, max_steps=max_steps, key=now)
        return growth, key, *choose(growth)

    return jax.lax.while_loop(lambda carry: jnp.any(carry[3]), body, (growth, key, *choose(growth)))[0]


def continue_from(
    growth: Growth, task: Task, start: jax.Array, active: jax.Array, *, critic: Critic, max_steps: int, key: jax.Array
) -> Growth:
    """One continuation from node `start` [B] of every `active` [B] tree, to the end of its episode."""
    first = growth.num_nodes
    goal = task.next.shape[1]
    rows = jnp.arange(len(start))
    capacity, segment = growth.replies.shape[1:]

    def one_segment(carry: tuple[Growth, jax.Array, jax.Array, jax.Array]) -> tuple[Growth, jax.Array, jax.Array, jax.Array]:
        growth, node, running, key = carry
        key, now = jax.random.split(key)
        draws = jax.random.uniform(now, (segment, len(start)))
        page, time = growth.page[rows, node], growth.time[rows, node]
        pages, replies, given = [], [], []
        going = running
        for k in range(segment):
            reply = draw(task.probs[rows, page % goal], draws[k])
            pages.append(page % goal)
            replies.append(reply)
            given.append(going)
            page = jnp.where(going, task.next[rows, page % goal, reply], page)
            time = time + going.astype(jnp.int32)
            going = going & (page < goal) & (time < max_steps)
        new = jnp.where(running, growth.num_nodes, capacity)  # out of range: dropped
        write = partial(_write, rows=rows, new=new)
        growth = replace(
            growth,
            num_nodes=growth.num_nodes + running.astype(jnp.int32),
            spent=growth.spent + sum(g.astype(jnp.int32) for g in given),
            parent=write(growth.parent, node),
            page=write(growth.page, page),
            time=write(growth.time, time),
            terminal=write(growth.terminal, ~going),
            reward=write(growth.reward, jnp.where(page == goal, 1.0, 0.0)),
            pages=write(growth.pages, jnp.stack(pages, -1)),
            replies=write(growth.replies, jnp.stack(replies, -1)),
            given=write(growth.given, jnp.stack(given, -1)),
        )
        return growth, jnp.where(running, new, node), going, key

    growth, last, _, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[2]), one_segment, (growth, start, active, key))
    # New nodes stand in a row: values, evidence, and where their continuation ended.
    index = jnp.arange(capacity)[None]
    new = (index >= first[:, None]) & growth.mask
    observed = (new | (index == start[:, None])) & active[:, None]
    outcome = growth.reward[rows, last][:, None]
    most = -(-max_steps // segment)
    slots = first[:, None] + jnp.arange(most)[None]
    at = jnp.minimum(slots, capacity - 1)
    predicted = critic(growth.page[rows[:, None], at], growth.time[rows[:, None], at])
    value = growth.value.at[rows[:, None], jnp.where(slots < growth.num_nodes[:, None], slots, capacity)].set(
        predicted, mode="drop"
    )
    return replace(
        growth,
        value=jnp.where(growth.terminal, 0, value),
        stats=growth.stats.record(jnp.broadcast_to(outcome, value.shape), observed),
        leaf=jnp.where(new, last[:, None], growth.leaf),
    )


def draw(probs: jax.Array, uniform: jax.Array) -> jax.Array:
    """Outcomes [...] of probabilities [..., A] and uniform numbers [...]."""
    return jnp.sum(uniform[..., None] >= jnp.cumsum(probs, -1)[..., :-1], -1, dtype=jnp.int32)


def probe(
    task: Task, page: jax.Array, time: jax.Array, active: jax.Array, *, max_steps: int, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Play on from pages [B, M] to the end, keeping only the return [B, M] and the replies it took, int32 [B, M]."""
    goal = task.next.shape[1]
    rows = jnp.arange(len(page))[:, None]

    def step(carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        page, now, going, key = carry
        key, this = jax.random.split(key)
        reply = draw(task.probs[rows, page % goal], jax.random.uniform(this, page.shape))
        page = jnp.where(going, task.next[rows, page % goal, reply], page)
        now = now + going.astype(jnp.int32)
        return page, now, going & (page < goal) & (now < max_steps), key

    page, end, *_ = jax.lax.while_loop(lambda carry: jnp.any(carry[2]), step, (page, time, active, key))
    return jnp.where(page == goal, 1.0, 0.0), end - time


def _write(array: jax.Array, content: jax.Array, *, rows: jax.Array, new: jax.Array) -> jax.Array:
    """Node `new` of every tree; nothing where it is out of range."""
    return array.at[rows, new].set(content.astype(array.dtype), mode="drop")
