"""Does it learn? Many seeds of one method on `detour`, batched on the device, with exact values beside every estimate."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from simulation import Critic, Growth, Rule, Task, grow, plant, probe, root_only, uniform, value_refinement

from focus_jax import backup, grpo_advantages, leave_one_out_advantages, segment_advantages, vineppo_advantages
from focus_jax.losses import policy_loss, value_loss
from focus_jax.models import Decoder, ModelConfig, ValueModel
from focus_jax.tasks.detour import ACTIONS, LEVELS, Level, Problem, demonstrations, exact_values, make_search

REPLY_IDS = np.frombuffer(ACTIONS.encode(), np.uint8).astype(np.int32)
VOCAB_SIZE = 260  # of the byte tokenizer


@dataclass(frozen=True)
class Config:
    method: Literal["focus", "grpo", "vineppo", "actor-critic"] = "focus"
    allocation: Literal["refinement", "uniform", "root"] = "refinement"
    leave_one_out: bool = False
    kappa: float = 1.0
    num_roots: int = 2
    critic: Literal["partial", "full"] = "partial"
    level: str = "long"
    num_seeds: int = 10
    first_seed: int = 0
    num_problems: int = 8
    rollouts: int = 8
    """Budget of a problem, in episodes of full length."""
    segment: int = 4
    tokens: int = 100_000
    """Replies for each seed."""
    epochs: int = 4
    actor_lr: float = 3e-3
    critic_lr: float = 3e-3
    warmup: int = 2
    hidden: int = 32
    layers: int = 2
    imitation_steps: int = 60
    noise: float = 0.5
    vmap: bool = True


@dataclass(frozen=True)
class Models:
    """Actor and critic as functions of their parameters; those of many seeds are stacked."""

    actor: Any
    critic: Any

    def logprobs(self, params: Any, text: jax.Array) -> jax.Array:
        """Pages uint8 [R, 7] to log-probabilities [R, 5] of the four replies, and of any other."""
        prompt = jnp.pad(text.astype(jnp.int32), ((0, 0), (0, 1)), constant_values=ord(">"))
        model = nnx.merge(self.actor, params)
        every = jax.nn.log_softmax(model.logits(model(prompt)[:, -1]))
        four = every[:, REPLY_IDS]
        other = jnp.where(jnp.zeros(VOCAB_SIZE, bool).at[REPLY_IDS].set(True), -jnp.inf, every)
        return jnp.concatenate([four, jax.nn.logsumexp(other, -1, keepdims=True)], -1)

    def values(self, params: Any, prompt: jax.Array) -> jax.Array:
        """Prompts int32 [R, T] to values [R]."""
        model = nnx.merge(self.critic, params)
        hidden = model.backbone(prompt)[:, -1]
        return model.output(model.head(hidden))


def make_models(config: Config, key: jax.Array) -> tuple[Models, Any, Any]:
    shape = ModelConfig("qwen3", VOCAB_SIZE, config.hidden, 2 * config.hidden, config.layers, 2, config.hidden // 2, ("full_attention",) * config.layers, tied=True, max_positions=32)
    keys = jax.random.split(key, (config.num_seeds, 2))

    def make(keys):
        actor = Decoder(shape, key=keys[0])
        critic = ValueModel(Decoder(shape, key=keys[1]))
        return nnx.split(actor), nnx.split(critic)

    (actor, _), (critic, _) = make(keys[0])
    a, c = jax.vmap(lambda k: tuple(s for _, s in make(k)))(keys)
    return Models(actor, critic), a, c
