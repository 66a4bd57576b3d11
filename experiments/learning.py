"""Does it learn? Many seeds of one method on `detour`, batched on the device, with exact values beside every estimate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from simulation import Critic, Growth, Task, continue_from, grow, plant, probe, root_only, uniform, value_refinement
from train_models import make_tx, tiny_decoder

from focus_jax import Backup, backup, grpo_advantages, leave_one_out_advantages, segment_advantages, vineppo_advantages
from focus_jax.losses import policy_loss, value_loss
from focus_jax.models import Decoder, ValueModel
from focus_jax.tasks.detour import ACTIONS, LEVELS, Level, Problem, demonstrations, exact_values, make_search

REPLY_IDS = np.frombuffer(ACTIONS.encode(), np.uint8).astype(np.int32)
VOCAB_SIZE = 260  # of the byte tokenizer


@dataclass(frozen=True)
class Config:
    """One method on `detour`."""

    method: Literal["focus", "grpo", "vineppo", "actor-critic"] = "focus"
    allocation: Literal["refinement", "uniform", "root"] = "refinement"
    leave_one_out: bool = False
    exact: bool = False
    """Credit by the exact values, which no method knows: how far better credit could take it."""
    kappa: float = 1.0
    num_roots: int = 2
    critic: Literal["partial", "full"] = "partial"
    level: str = "long"
    num_seeds: int = 10
    first_seed: int = 0
    num_problems: int = 16
    rollouts: int = 4
    """Budget of a problem, in episodes of full length."""
    segment: int = 4
    tokens: int = 100_000
    """Replies for each seed."""
    epochs: int = 4
    critic_epochs: int = 4
    from_policy: bool = False
    """The critic starts from the policy's weights."""
    actor_lr: float = 1e-3
    critic_lr: float = 3e-3
    warmup: int = 2
    hidden: int = 32
    layers: int = 2
    start: float = 0.075
    """Share of searches solved after the warm start."""
    noise: float = 0.6
    """Share of replies at random in its demonstrations."""


Params = Any


@dataclass(frozen=True)
class Models:
    """Actor and critic as functions of their parameters."""

    actor: Any
    critic: Any

    def logprobs(self, params: Params, text: jax.Array) -> jax.Array:
        """Pages uint8 [R, 7] to log-probabilities [R, 5] of the four replies, and of anything else."""
        prompt = jnp.pad(text.astype(jnp.int32), ((0, 0), (0, 1)), constant_values=ord(">"))
        model = nnx.merge(self.actor, params)
        every = jax.nn.log_softmax(model.logits(model(prompt)[:, -1]))
        others = jnp.where(jnp.zeros(VOCAB_SIZE, bool).at[REPLY_IDS].set(True), -jnp.inf, every)
        return jnp.concatenate([every[:, REPLY_IDS], jax.nn.logsumexp(others, -1, keepdims=True)], -1)

    def values(self, params: Params, prompts: jax.Array) -> jax.Array:
        """Prompts int32 [R, T] to values [R]."""
        model = nnx.merge(self.critic, params)
        return model.output(model.head(model.backbone(prompts)[:, -1]))


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

    text: np.ndarray
    page: np.ndarray
    reply: np.ndarray
    old_logprobs: np.ndarray
    advantages: np.ndarray
    token_weights: np.ndarray
    prompts: np.ndarray
    targets: np.ndarray
    state_weights: np.ndarray


def compact(problems: Problems, lessons: Lessons, prompts: np.ndarray) -> Rows:
    """Weights: mean over an edge's replies, then a problem's edges, then problems; and over a problem's states, then problems."""
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
    return Rows(*(pad(parts) for parts in zip(*rows, strict=True)))


def pad(parts: Sequence[np.ndarray], step: int = 256) -> np.ndarray:
    """Arrays of different lengths, zeros behind them up to a multiple of `step`, stacked."""
    length = -(-max(map(len, parts)) // step) * step
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

        def make(key: jax.Array) -> tuple[tuple[Any, Params], tuple[Any, Params]]:
            actor, critic = jax.random.split(key)
            sizes = {"vocab_size": VOCAB_SIZE, "max_positions": 32}
            actor, critic = (widen(tiny_decoder(config.hidden, config.layers, **sizes, key=key)) for key in (actor, critic))
            return nnx.split(actor), nnx.split(ValueModel(critic))

        (actor, _), (critic, _) = make(jax.random.key(0))
        self.models = Models(actor, critic)
        self.seeds = np.arange(config.first_seed, config.first_seed + config.num_seeds)
        self.actor_tx, self.critic_tx = make_tx("constant", config.actor_lr), make_tx("constant", config.critic_lr)

        def fresh(seed: jax.Array) -> Learner:
            (_, actor), (_, critic) = make(jax.random.key(seed))
            return Learner(actor, critic, self.actor_tx.init(actor), self.critic_tx.init(critic))

        self.learner = jax.jit(jax.vmap(fresh))(self.seeds)
        self.collect = jax.jit(self._collect, static_argnames="warm")
        self.prompts = jax.jit(lambda p, x: jax.vmap(self.critic_prompts)(p.text, x.page, x.time))
        self.learn = jax.jit(self._learn, donate_argnums=0, static_argnames="actor")

    def over_seeds(self, f: Any) -> Any:
        """`f` for one seed after the other: on CPUs three times as fast as all at once."""
        return lambda *arguments: jax.lax.map(lambda x: f(*x), arguments)

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

    def imitate(self, success: float, noise: float, *, chunk: int = 10, rows: int = 256, most: int = 300) -> None:
        """Warm start on noisy demonstrations, for each seed until its policy solves a share `success` of other searches."""
        tx = optax.adam(3e-3, 0.9, 0.95)
        others = self.problems(99_999)

        def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
            problems = [Problem(self.level, 10**9 + seed * 1000 + i) for i in range(128)]
            pages, replies = demonstrations(problems, noise=noise, seed=seed)
            pick = np.random.default_rng(seed).integers(len(pages), size=(most, chunk, rows))
            return pages[pick], np.searchsorted(np.sort(REPLY_IDS), replies[pick]).astype(np.int32)

        pages, replies = (np.stack(x) for x in zip(*(data(int(s)) for s in self.seeds), strict=True))

        def train(actor: Params, state: Any, done: jax.Array, pages: jax.Array, replies: jax.Array) -> tuple[Params, Any]:
            def step(carry: tuple[Params, Any], batch: tuple[jax.Array, jax.Array]) -> tuple[tuple[Params, Any], None]:
                actor, state = carry

                def loss(actor: Params) -> jax.Array:
                    return -jnp.mean(self.models.logprobs(actor, batch[0])[jnp.arange(rows), batch[1]])

                with jax.numpy_dtype_promotion("standard"):
                    change, state = tx.update(jax.grad(loss)(actor), state, actor)
                return (optax.apply_updates(actor, change), state), None

            new = jax.lax.scan(step, (actor, state), (pages, replies))[0]
            return jax.tree.map(lambda a, b: jnp.where(done, a, b), (actor, state), new)

        def solved(actor: Params, problems: Problems) -> jax.Array:
            return jnp.mean(self.exact(actor, problems)[:, 0, 0])

        train, solved = jax.jit(self.over_seeds(train)), jax.jit(self.over_seeds(solved))
        actor, state = self.learner.actor, jax.vmap(tx.init)(self.learner.actor)
        done = np.zeros(len(self.seeds), bool)
        for k in range(most):
            share = np.asarray(solved(actor, others))
            done |= share >= success
            if done.all():
                break
            actor, state = train(actor, state, jnp.asarray(done), pages[:, k], replies[:, k])
        print(f"imitation: {k * chunk} steps, solved {share.round(3)}", flush=True)
        self.learner = replace(self.learner, actor=actor)

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
        logprobs = self.over_seeds(self.models.logprobs)(learner.actor, pages)
        logprobs = logprobs.reshape(num_seeds * num_problems, num_pages, -1)
        text, following = (x.reshape(num_seeds * num_problems, *x.shape[2:]) for x in (problems.text, problems.next))
        task = Task(following, jnp.exp(logprobs))

        def critic(page: jax.Array, time: jax.Array) -> jax.Array:
            prompts = self.critic_prompts(text, page, time)
            rows = prompts.reshape(num_seeds, -1, prompts.shape[-1])
            return self.over_seeds(self.models.values)(learner.critic, rows).reshape(page.shape)

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

        edges = growth.mask.at[:, 0].set(False)
        by_seed = (x.reshape(num_seeds, -1) for x in (advantages, true_advantages, edges))
        figures = {
            "success": mean(exact[:, 0, 0]),
            "tokens": jnp.sum((growth.spent + probed).reshape(num_seeds, -1), -1),
            "critic_error": mean((growth.value - truth) ** 2, open_),
            "refined_error": mean((refined - truth) ** 2, open_),
            "outcome_error": mean((observed - truth) ** 2, open_),
            "correlation": correlation(*by_seed),
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
        index = jnp.arange(growth.value.shape[1])
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
        return self.over_seeds(partial(self._learn_one, actor=actor))(learner, rows)

    def _learn_one(self, learner: Learner, rows: Rows, *, actor: bool) -> Learner:
        def critic_loss(params: Params) -> jax.Array:
            values = self.models.values(params, rows.prompts)
            total, weight = value_loss(values, rows.targets, rows.state_weights > 0, weights=rows.state_weights)
            return total / weight

        def actor_loss(params: Params) -> jax.Array:
            logprobs = self.models.logprobs(params, rows.text)[rows.page, rows.reply]
            total, weight = policy_loss(
                logprobs, rows.old_logprobs, rows.advantages, rows.token_weights > 0, weights=rows.token_weights
            )
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
            policy, policy_state = epochs(actor_loss, self.actor_tx, policy, policy_state, self.config.epochs)
        return Learner(policy, critic, policy_state, critic_state)


def widen(decoder: Decoder) -> Decoder:
    """Weights of standard deviation 1 / sqrt(width) instead of the 0.02 that suits wide models; changed in place."""
    for path, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        if not any("norm" in str(name) for name in path):
            variable[...] = variable[...] * (50 / decoder.config.hidden_size**0.5)
    return decoder


def correlation(x: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    """Pearson's, along the last axis."""
    count = jnp.sum(mask, -1, keepdims=True)
    center = lambda a: jnp.where(mask, a - jnp.sum(jnp.where(mask, a, 0), -1, keepdims=True) / count, 0)  # noqa: E731
    x, y = center(x), center(y)
    return jnp.sum(x * y, -1) / jnp.sqrt(jnp.sum(x**2, -1) * jnp.sum(y**2, -1) + 1e-20)


def run(config: Config, start: Params = None) -> dict[str, np.ndarray]:
    """Figures of every round, [rounds, seeds] each, "at" so many replies; `start` stands for the warm start's policies."""
    experiment = Experiment(config)
    if start is None:
        experiment.imitate(config.start, config.noise)
    else:
        experiment.learner = replace(experiment.learner, actor=jax.tree.map(jnp.array, start))
    if config.from_policy:
        critic = experiment.learner.critic
        critic["backbone"] = jax.tree.map(jnp.array, experiment.learner.actor)
        experiment.learner = replace(experiment.learner, critic=critic)
    carry = np.zeros(config.num_seeds)
    spent = np.zeros(config.num_seeds)
    history: list[dict[str, np.ndarray]] = []
    number = 0
    while spent.min() < config.tokens:
        beginning = time.perf_counter()
        problems = experiment.problems(number)
        budget = experiment.budget + (carry / config.num_problems).astype(np.int32)
        keys = jax.random.key(1000 + number)
        warm = config.method in ("focus", "actor-critic") and number < config.warmup
        lessons, metrics = experiment.collect(experiment.learner, problems, jnp.asarray(budget, jnp.int32), warm=warm, key=keys)
        rows = compact(problems, lessons, np.asarray(experiment.prompts(problems, lessons)))
        metrics = {k: np.asarray(v) for k, v in metrics.items()}
        middle = time.perf_counter()
        experiment.learner = jax.block_until_ready(experiment.learn(experiment.learner, rows, actor=not warm))
        end = time.perf_counter()
        carry += experiment.budget * config.num_problems - metrics["tokens"]
        history.append({"at": spent.copy(), **metrics})
        spent += metrics["tokens"]
        if number % 10 == 0:
            means = " ".join(f"{k} {v.mean():.3f}" for k, v in metrics.items())
            print(f"{number} {spent.mean():.0f} {means} | {middle - beginning:.2f} {end - middle:.2f} s", flush=True)
        number += 1
    return {k: np.stack([h[k] for h in history]) for k in history[0]}


if __name__ == "__main__":
    import tyro

    run(tyro.cli(Config))
