"""What `train.py` trains: policy, critic and their optimizers, fresh or from a model folder, and the copies that act."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from train_batches import Layout, over_processes

from focus_jax.agents import State
from focus_jax.collection import SegmentRecord
from focus_jax.models import Decoder, FlaxCritic, ModelConfig, ValueModel, add_lora, is_value_head, load_hf, without_head
from focus_jax.models.config import LayerType
from focus_jax.models.sharding import mesh_of
from focus_jax.training import ActorBatch, ActorLoss, actor_batches, make_optimizer, update

Tree = TypeVar("Tree")
Schedule = Literal["constant", "cosine"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Learner:
    """All that a run learns, what a checkpoint holds.

    Attributes:
        actor: the policy.
        actor_optimizer: its optimizer.
        critic: with a backbone of its own; None for methods without one.
        critic_optimizer: its optimizer.
        reference: the policy as it was at first, where there is a penalty for leaving it and no adapters to take off.
    """

    actor: Decoder
    actor_optimizer: nnx.Optimizer[Decoder]
    critic: ValueModel | None = None
    critic_optimizer: nnx.Optimizer[ValueModel] | None = None
    reference: Decoder | None = None


def tiny_decoder(hidden: int, layers: int, *, vocab_size: int, max_positions: int, key: jax.Array) -> Decoder:
    """A random decoder small enough for any machine."""
    if hidden % 4:
        raise ValueError(f"--hidden: expected a multiple of 4, got {hidden}")
    kinds: tuple[LayerType, ...] = tuple("full_attention" for _ in range(layers))
    shape = ModelConfig("qwen3", vocab_size, hidden, 2 * hidden, 2, 2, hidden // 2, kinds, tied=True, max_positions=max_positions)
    return _random_decoder(shape, key)


@partial(jax.jit, static_argnums=0)
def _random_decoder(shape: ModelConfig, key: jax.Array) -> Decoder:
    return Decoder(shape, key=key)


def load_policy(folder: Path, *, lora_rank: int, key: jax.Array) -> Decoder:
    """The decoder of a model folder, with adapters where their rank is above 0."""
    model = load_hf(folder)
    return add_lora(model, rank=lora_rank, key=key) if lora_rank else model


def critic_over(backbone: Decoder, *, lora_rank: int, key: jax.Array) -> ValueModel:
    """A critic with this backbone for its own; with adapters, these and the head are what it learns."""
    critic = ValueModel(without_head(backbone))
    return add_lora(critic, rank=lora_rank, key=key) if lora_rank else critic


def adapters_and_head(path: tuple[object, ...], value: object) -> bool:
    """What a critic with adapters trains."""
    return isinstance(value, nnx.LoRAParam) or is_value_head(path, value)


@lru_cache  # an equal run in the same process has the same one, and compiles nothing anew
def make_tx(kind: Schedule, rate: float, *, warmup: int = 0, updates: int = 1) -> optax.GradientTransformation:
    """Adam after cutting the gradient's norm to 1, as in the paper; the rate by the number of updates.

    It rises from 0 over `warmup` of them, then stays, or falls to a tenth along a cosine.
    """
    start = 0.0 if warmup else rate
    if kind == "constant":
        schedule = optax.warmup_constant_schedule(start, rate, warmup)
    else:
        schedule = optax.warmup_cosine_decay_schedule(start, rate, warmup, max(updates, warmup + 1), 0.1 * rate)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, 0.9, 0.95))


def imitate(actor: Decoder, prompts: np.ndarray, replies: np.ndarray, *, steps: int, rows: int, fsdp: int, seed: int) -> Decoder:
    """The policy after some updates on single-token replies of somebody else, drawn with replacement.

    Imitation is the actor's own update with advantage 1 where no log-probability of a sampler is known.
    """
    optimizer = make_optimizer(actor, make_tx("constant", 3e-3))
    there, unknown, version = np.ones(1, bool), np.full(1, np.nan, np.float32), np.zeros(1, np.int32)
    draw = np.random.default_rng((seed, jax.process_index()))
    rows //= jax.process_count()
    layout = Layout(-(-rows // (128 // (prompts.shape[1] + 1))) * 128, fsdp)
    report = None
    for pick in draw.integers(len(prompts), size=(steps, rows)):
        records = [
            SegmentRecord(f"{i}", 1, prompts[at], replies[at : at + 1], there, unknown, version, 1.0) for i, at in enumerate(pick)
        ]
        packed = over_processes(actor_batches(records, **layout.options()), ActorBatch, layout)
        actor, optimizer, report = update(actor, optimizer, packed, ActorLoss())
    if report is not None:
        report.fetch()
    return actor


@dataclass(frozen=True)
class ReadingCritic:
    """The collector's critic, of what `read` makes of a state instead of its context."""

    critic: FlaxCritic
    read: Callable[[State], np.ndarray]

    async def score(self, states: Sequence[State]) -> np.ndarray:
        return await self.critic.score([_Reading(self.read(state)) for state in states])


@dataclass(frozen=True)
class _Reading:
    context: np.ndarray


def acting_copy(model: Tree) -> Tree:
    """The model for this process to act with while the original is trained: updates take over the buffers they are given.

    With several processes each gets all of it on one of its devices, since they act apart; alone, it stays split as it is.
    """
    if jax.process_count() == 1:
        return jax.tree.map(jnp.copy, model)

    mesh = mesh_of(model)
    return jax.tree.map(lambda x: jnp.copy(x.addressable_data(0)), model if mesh is None else _unsplit(mesh)(model))


@lru_cache
def _unsplit(mesh: jax.sharding.Mesh) -> Callable[[Tree], Tree]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
