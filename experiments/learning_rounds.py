"""One round of the learning experiment on many seeds: trees, credit, and the updates of critic and actor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from learning_config import Config
from learning_models import Params, make_models, over_seeds
from simulation import Critic, Growth, Task, continue_from, grow, plant, probe, root_only, uniform, value_refinement
from train_models import make_tx

from focus_jax import Backup, backup, grpo_advantages, leave_one_out_advantages, segment_advantages, vineppo_advantages
from focus_jax.losses import policy_loss, value_loss
from focus_jax.tasks.detour import LEVELS, Level, Problem, exact_values, make_search


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Learner:
    """Parameters and optimizer states, stacked over the seeds."""

    actor: Params
    critic: Params
    actor_state: Any
    critic_state: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problems:
    """The searches of a round: seeds x problems x pages."""

    text: jax.Array
    next: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lessons:
    """What is learned from a round; all [seeds, problems, nodes], or one more axis for an edge's replies."""

    pages: jax.Array
    replies: jax.Array
    given: jax.Array
    old_logprobs: jax.Array
    advantages: jax.Array
    page: jax.Array
    time: jax.Array
    targets: jax.Array
    has_target: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What is learned from a round without its gaps: U pages seen, N replies, C states with a target; [seeds, ...] each."""

    text: jax.Array
    page: jax.Array
    reply: jax.Array
    old_logprobs: jax.Array
    advantages: jax.Array
    token_weights: jax.Array
    prompts: jax.Array
    targets: jax.Array
    state_weights: jax.Array


def compact(problems: Problems, lessons: Lessons, prompts: np.ndarray) -> Rows:
    """Weights: mean over an edge's replies, then a problem's edges, then problems; and over a problem's states, then problems.

    They add up to the number of problems that have any; the losses divide by that.
    """
    num_problems, num_pages, _ = problems.text.shape[1:]
    lessons = jax.tree.map(np.asarray, lessons)
    replies = lessons.given.sum(-1)
    token_weights = lessons.given / np.maximum(replies, 1)[..., None] / np.maximum((replies > 0).sum(-1), 1)[..., None, None]
    state_weights = lessons.has_target / np.maximum(lessons.has_target.sum(-1), 1)[..., None]
    every_page = lessons.pages + num_pages * np.arange(num_problems)[:, None, None]
    rows = []
    for seed, (given, has_target) in enumerate(zip(lessons.given, lessons.has_target, strict=True)):
        seen, page = np.unique(every_page[seed][given], return_inverse=True)
        text = np.asarray(problems.text[seed]).reshape(-1, problems.text.shape[-1])[seen]
        advantages = np.broadcast_to(lessons.advantages[seed][..., None], given.shape)[given]
        tokens = (page, lessons.replies[seed][given], lessons.old_logprobs[seed][given], advantages, token_weights[seed][given])
        states = (prompts[seed][has_target], lessons.targets[seed][has_target], state_weights[seed][has_target])
        rows.append((text, *tokens, *states))
    return Rows(*(jnp.asarray(pad(parts)) for parts in zip(*rows, strict=True)))


def pad(parts: Sequence[np.ndarray], step: int = 512) -> np.ndarray:
    """Arrays of different lengths, zeros behind them up to a multiple of `step`, stacked."""
    length = -(-max(1, *map(len, parts)) // step) * step
    stacked = np.zeros((len(parts), length, *parts[0].shape[1:]), parts[0].dtype)
    for row, part in zip(stacked, parts, strict=True):
        row[: len(part)] = part
    return stacked if stacked.dtype != np.float64 else stacked.astype(np.float32)


class Experiment:
    """One method on many seeds."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.level: Level = LEVELS[config.level]
        self.budget = config.rollouts * self.level.max_steps
        self.capacity = -(-3 * self.budget // (2 * config.segment))
        one = make_search(Problem(self.level, 0))
        self.places = jnp.stack([jnp.asarray(one.hops), jnp.asarray(one.wrong)], -1)
        self.seeds = np.arange(config.first_seed, config.first_seed + config.num_seeds)
        self.actor_tx, self.critic_tx = make_tx("constant", config.actor_lr), make_tx("constant", config.critic_lr)
        self.models, actor, critic = make_models(config.hidden, config.layers, self.seeds)
        self.learner = Learner(actor, critic, jax.vmap(self.actor_tx.init)(actor), jax.vmap(self.critic_tx.init)(critic))
        self.collect = jax.jit(self._collect, static_argnames="warm")
        self.prompts = jax.jit(lambda p, x: jax.vmap(self.critic_prompts)(p.text, x.page, x.time))
        self.learn = jax.jit(self._learn, donate_argnums=0, static_argnames="actor")

    def problems(self, number: int) -> Problems:
        """Fresh searches for round `number` of every seed."""
        count = self.config.num_problems
        first = [(int(seed) * 100_000 + number) * count for seed in self.seeds]
        searches = [[make_search(Problem(self.level, f + i)) for i in range(count)] for f in first]
        text = np.stack([[s.text for s in row] for row in searches])
        stay = np.arange(self.level.num_pages)[:, None]
        following = np.stack([[np.concatenate([s.next, stay], 1) for s in row] for row in searches])
        return Problems(jnp.asarray(text), jnp.asarray(following, jnp.int32))

    def critic_prompts(self, text: jax.Array, page: jax.Array, time: jax.Array) -> jax.Array:
        """What the critic reads: the page, the steps left, and, if it may know, right and wrong hops.

        Pages [P, S, 7], and places and times [P, M], to prompts [P, M, T].
        """
        at = page % text.shape[1]
        shown = text[jnp.arange(len(text))[:, None], at].astype(jnp.int32)
        left = self.level.max_steps - time
        numbers = [left // 10, left % 10]
        if self.config.critic == "full":
            numbers += [self.places[at, 0], self.places[at, 1]]
        digits = jnp.stack(numbers, -1) + ord("0")
        return jnp.concatenate([shown, jnp.full_like(digits[..., :1], ord(">")), digits], -1)

    def rows(self, problems: Problems, lessons: Lessons) -> Rows:
        """What there is to learn, without gaps."""
        return compact(problems, lessons, np.asarray(self.prompts(problems, lessons)))

    def exact(self, actor: Params, problems: Problems) -> jax.Array:
        """Exact values [P, steps + 1, S + 1] of one seed's policy on its problems."""
        num, pages, _ = problems.text.shape
        probs = jnp.exp(self.models.logprobs(actor, problems.text.reshape(num * pages, -1))).reshape(num, pages, -1)
        return jax.vmap(partial(exact_values, max_steps=self.level.max_steps))(problems.next[..., :4], probs[..., :4])

    def _collect(
        self, learner: Learner, problems: Problems, budget: jax.Array, *, warm: bool, key: jax.Array
    ) -> tuple[Lessons, dict[str, jax.Array]]:
        """Grow trees with policy and critic fixed; what there is to learn from them, and figures [seeds] beside exact values."""
        num_seeds, num_problems, num_pages, _ = problems.text.shape
        pages = problems.text.reshape(num_seeds, num_problems * num_pages, -1)
        logprobs = over_seeds(self.models.logprobs)(learner.actor, pages)
        logprobs = logprobs.reshape(num_seeds * num_problems, num_pages, -1)
        text, following = (x.reshape(num_seeds * num_problems, *x.shape[2:]) for x in (problems.text, problems.next))
        task = Task(following, jnp.exp(logprobs))

        def critic(page: jax.Array, time: jax.Array) -> jax.Array:
            prompts = self.critic_prompts(text, page, time)
            rows = prompts.reshape(num_seeds, -1, prompts.shape[-1])
            return over_seeds(self.models.values)(learner.critic, rows).reshape(page.shape)

        growth, probed, mc = self._grow(task, critic, jnp.repeat(budget, num_problems), key)
        advantages, refined, targets = self._credit(growth, mc)
        rows = jnp.arange(len(text))[:, None]
        exact = jax.vmap(partial(exact_values, max_steps=self.level.max_steps))(task.next[..., :4], task.probs[..., :4])
        truth = jnp.where(growth.terminal, 0, exact[rows, growth.time, growth.page])
        true_advantages = segment_advantages(growth.trees, truth)
        if self.config.exact:
            advantages = true_advantages
        open_ = growth.mask & ~growth.terminal
        has_target = targets.num_children > 0
        goals, observed = targets.target, jnp.asarray(growth.stats.mean)
        if warm or self.config.method == "actor-critic":
            goals, has_target = observed, open_ & (growth.stats.count > 0)

        def mean(x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
            x = x.reshape(num_seeds, -1)
            mask = jnp.ones(x.shape, bool) if mask is None else mask.reshape(num_seeds, -1)
            return jnp.sum(jnp.where(mask, x, 0), -1) / jnp.sum(mask, -1, dtype=jnp.float32)

        edges = growth.mask.at[:, 0].set(False).reshape(num_seeds, -1)
        credit, true_credit = (x.reshape(num_seeds, -1) for x in (advantages, true_advantages))
        figures = {
            "success": mean(exact[:, 0, 0]),
            "tokens": jnp.sum((growth.spent + probed).reshape(num_seeds, -1), -1),
            "critic_error": mean((growth.value - truth) ** 2, open_),
            "refined_error": mean((refined - truth) ** 2, open_),
            "outcome_error": mean((observed - truth) ** 2, open_),
            "spread": mean(truth**2, open_) - mean(truth, open_) ** 2,
            "correlation": correlation(credit, true_credit, edges),
            "rank_correlation": correlation(ranks(credit, edges), ranks(true_credit, edges), edges),
        }
        old = logprobs[rows[..., None], growth.pages, growth.replies]
        actor = (growth.pages, growth.replies, growth.given, old, advantages)
        lessons = Lessons(*actor, growth.page, growth.time, goals, has_target)
        return jax.tree.map(lambda x: x.reshape(num_seeds, num_problems, *x.shape[1:]), lessons), figures

    def _grow(self, task: Task, critic: Critic, budget: jax.Array, key: jax.Array) -> tuple[Growth, jax.Array, jax.Array]:
        """Trees, replies spent on probes, and the probes' values."""
        config = self.config
        growth = plant(task, critic, num_nodes=self.capacity, segment=config.segment)
        first, second = jax.random.split(key)
        step = partial(grow, task=task, budget=budget, critic=critic, max_steps=self.level.max_steps)
        if config.method == "vineppo":
            return self._vineppo(growth, task, budget, critic, first)
        if config.method == "focus" and config.allocation != "root":

            def roots(growth: Growth) -> jax.Array:
                return jnp.where(growth.stats.count < config.num_roots, root_only(growth), 0)

            growth = step(growth, rule=roots, key=first)
            growth = step(growth, rule=uniform if config.allocation == "uniform" else value_refinement(config.kappa), key=second)
        else:
            growth = step(growth, rule=root_only, key=first)
        return growth, jnp.zeros_like(budget), jnp.zeros_like(growth.value)

    def _credit(self, growth: Growth, mc: jax.Array) -> tuple[jax.Array, jax.Array, Backup]:
        """Advantages, the values they are differences of, and the backup."""
        config, trees = self.config, growth.trees
        result = backup(trees, growth.value, kappa=config.kappa)
        if config.method == "grpo":
            at_ends = grpo_advantages(growth.stats.mean, growth.terminal & growth.mask)
            of_rollout = jnp.take_along_axis(at_ends, growth.leaf, 1)
            return jnp.where(trees.mask, of_rollout, 0).at[:, 0].set(0), growth.value, result
        if config.method == "vineppo":
            return vineppo_advantages(trees, mc), mc, result
        if config.method == "actor-critic":
            return segment_advantages(trees, growth.value), growth.value, result
        if config.leave_one_out:
            credit = leave_one_out_advantages(trees, growth.value, result.refined, kappa=config.kappa)
            return credit, result.refined, result
        return segment_advantages(trees, result.refined), result.refined, result

    def _vineppo(
        self, growth: Growth, task: Task, budget: jax.Array, critic: Critic, key: jax.Array
    ) -> tuple[Growth, jax.Array, jax.Array]:
        """Root rollouts, each with probes from every state it visits, until the budget is spent."""
        index = jnp.arange(growth.value.shape[1])[None]
        start = jnp.zeros(len(budget), jnp.int32)

        def body(carry: tuple[Growth, jax.Array, jax.Array, jax.Array]) -> tuple[Growth, jax.Array, jax.Array, jax.Array]:
            growth, extra, mc, key = carry
            key, one, two = jax.random.split(key, 3)
            active = growth.spent + extra < budget
            first = jnp.where(growth.num_nodes == 1, 0, growth.num_nodes)  # the root is probed once, with the first rollout
            growth = continue_from(growth, task, start, active, critic=critic, max_steps=self.level.max_steps, key=one)
            probed = (index >= first[:, None]) & growth.mask & ~growth.terminal & active[:, None]
            returns, cost = probe(task, growth.page, growth.time, probed, max_steps=self.level.max_steps, key=two)
            return growth, extra + jnp.sum(jnp.where(probed, cost, 0), -1), jnp.where(probed, returns, mc), key

        carry = (growth, 0 * start, jnp.zeros(growth.value.shape), key)
        growth, extra, mc, _ = jax.lax.while_loop(lambda c: jnp.any(c[0].spent + c[1] < budget), body, carry)
        return growth, extra, mc

    def _learn(self, learner: Learner, rows: Rows, actor: bool) -> Learner:
        return over_seeds(partial(self._learn_one, actor=actor))(learner, rows)

    def actor_loss(self, params: Params, rows: Rows) -> jax.Array:
        """Of one seed's policy."""
        logprobs = self.models.logprobs(params, rows.text)[rows.page, rows.reply]
        has_weight = rows.token_weights > 0
        total, weight = policy_loss(logprobs, rows.old_logprobs, rows.advantages, has_weight, weights=rows.token_weights)
        return total / jnp.maximum(weight, 1e-6)  # a round whose budget was spent before has nothing

    def _learn_one(self, learner: Learner, rows: Rows, *, actor: bool) -> Learner:
        def critic_loss(params: Params) -> jax.Array:
            values = self.models.values(params, rows.prompts)
            total, weight = value_loss(values, rows.targets, rows.state_weights > 0, weights=rows.state_weights)
            return total / weight

        def epochs(loss: Any, tx: Any, params: Params, state: Any, length: int) -> tuple[Params, Any]:
            def step(carry: tuple[Params, Any], _: None) -> tuple[tuple[Params, Any], None]:
                params, state = carry
                with jax.numpy_dtype_promotion("standard"):
                    change, state = tx.update(jax.grad(loss)(params), state, params)
                return (optax.apply_updates(params, change), state), None

            return jax.lax.scan(step, (params, state), length=length)[0]

        critic, critic_state = learner.critic, learner.critic_state
        if self.config.method in ("focus", "actor-critic"):
            critic, critic_state = epochs(critic_loss, self.critic_tx, critic, critic_state, self.config.critic_epochs)
        policy, policy_state = learner.actor, learner.actor_state
        if actor:
            policy, policy_state = epochs(
                partial(self.actor_loss, rows=rows), self.actor_tx, policy, policy_state, self.config.epochs
            )
        return Learner(policy, critic, policy_state, critic_state)


def correlation(x: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    """Pearson's, along the last axis."""
    count = jnp.sum(mask, -1, keepdims=True, dtype=jnp.float32)
    center = lambda a: jnp.where(mask, a - jnp.sum(jnp.where(mask, a, 0), -1, keepdims=True) / count, 0)  # noqa: E731
    x, y = center(x), center(y)
    return jnp.sum(x * y, -1) / jnp.sqrt(jnp.sum(x**2, -1) * jnp.sum(y**2, -1) + 1e-20)


def ranks(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Places along the last axis among those in the mask, ties sharing theirs."""
    ordered = jnp.sort(jnp.where(mask, x, jnp.inf), -1)
    place = jax.vmap(lambda row, at: jnp.searchsorted(row, at, side="left") + jnp.searchsorted(row, at, side="right"))
    return place(ordered, x).astype(jnp.float32) / 2
