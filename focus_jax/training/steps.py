"""Updates of actor and critic: gradients of micro-batches are summed, divided by the summed weight, and applied once.

All weights are absolute, so it does not matter how the rows of an update are cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from focus_jax.models.critic import ValueModel
from focus_jax.models.decoder import Decoder
from focus_jax.models.sharding import keep_sharded, shard_rows
from focus_jax.training.batches import ActorBatch, CriticBatch, Packed
from focus_jax.training.objectives import ActorLoss, CriticLoss, Sums

Model = TypeVar("Model", bound=nnx.Module)
Answer = tuple[jax.Array, jax.Array, Sums]
"""Of a loss: the weighted sum, the sum of the weights, and sums of whatever else is of interest."""
Metrics = dict[str, jax.Array]


class NonFiniteError(ArithmeticError):
    """A loss or gradient that is not finite: the update was left out, model and optimizer are as they were."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Gathered:
    """What micro-batches have added up to: gradient and weight, and whether every number was finite."""

    gradient: nnx.State
    weight: jax.Array
    finite: jax.Array


@dataclass(frozen=True)
class UpdateReport:
    """What an update did, still on the device."""

    micro_batches: tuple[tuple[jax.Array, jax.Array, jax.Array, Sums], ...]
    gradient_norm: jax.Array
    problems: tuple[tuple[str, ...], ...]

    def fetch(self) -> dict[str, float]:
        """Wait for the update, the only time anything does, and read its metrics.

        Returns:
            loss, weight, gradient_norm (before the optimizer's clipping), and what the loss reports. Actor: entropy,
            behaviour_kl (estimated KL(sampler || policy)), clip_share (of the tokens), num_tokens, num_unknown (without the
            sampler's log-probability), kl where there is a reference. Critic: value (the mean prediction), num_states.

        Raises:
            NonFiniteError: the update was left out; the first micro-batch at fault is named with its problems. Model and
                optimizer that `update` returned are as before and may be used further.
        """
        micro_batches, norm = jax.device_get((self.micro_batches, self.gradient_norm))
        for i, (total, _, finite, _) in enumerate(micro_batches):
            if not finite:
                raise NonFiniteError(
                    f"micro-batch {i} of {len(micro_batches)} (problems {', '.join(map(repr, self.problems[i]))}): loss {total}, "
                    "which or whose gradient is not finite; the update was left out, model and optimizer are as they were. "
                    "Look at the parameters and at the batch's advantages, targets and weights"
                )
        if not np.isfinite(norm):
            raise NonFiniteError(f"the summed gradient's norm is {norm}; the update was left out, model and optimizer stay")
        total, weight, _, sums = jax.tree.map(lambda *parts: float(np.sum(parts, dtype=np.float64)), *micro_batches)
        named = _means(total, weight, sums, lambda a, b: a / b if b > 0 else 0.0)
        return named | {"weight": weight, "gradient_norm": float(norm)}


@partial(jax.jit, static_argnames=("tx", "wrt"))
def make_optimizer(model: Model, tx: optax.GradientTransformation, wrt: Any = nnx.Param) -> nnx.Optimizer[Model]:
    """The optimizer's first state, split over the mesh like the parameters it belongs to.

    Args:
        model: what will be trained; call under its mesh.
        tx: how.
        wrt: which parameters: all, `nnx.LoRAParam`, `focus_jax.models.is_value_head`, ...
    """
    return keep_sharded(nnx.Optimizer(model, tx, wrt=wrt))


def update(
    model: Model, optimizer: nnx.Optimizer[Model], packed: Packed[Any], loss: Callable[[Model, Any], Answer]
) -> tuple[Model, nnx.Optimizer[Model], UpdateReport]:
    """One update on the mean loss over micro-batches; nothing here waits for the device.

    Where any loss or gradient is not finite, or nothing carries weight, parameters and optimizer state stay bit for bit as
    they were. There is one compilation for each length of batch.

    Args:
        model: its trained parameters and the optimizer are taken over: go on with those returned. What the optimizer does not
            train is neither copied nor taken. Call under the model's mesh.
        optimizer: from `make_optimizer`.
        packed: from `actor_batches` or `critic_batches`.
        loss: `ActorLoss(...)` or `CriticLoss(...)`; or any hashable function of model and batch that answers a weighted sum,
            the weight in it, and a dict of pairs (weighted sum, weight) or plain sums to report.

    Returns:
        Model and optimizer after the update, and a report; read it with `report.fetch()`.

    Raises:
        ValueError: no batches, or a batch that lacks what the loss needs.

    Example:
        >>> from focus_jax.collection import SegmentRecord
        >>> from focus_jax.models import ModelConfig
        >>> from focus_jax.training import actor_batches
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> model = Decoder(config, key=jax.random.key(0))
        >>> reply, there = np.array([7, 8]), np.ones(2, bool)
        >>> record = SegmentRecord("p", 1, np.array([5, 6]), reply, there, np.full(2, np.nan), np.zeros(2, int), 0.5)
        >>> packed = actor_batches([record], tokens_per_batch=8)
        >>> model, optimizer, report = update(model, make_optimizer(model, optax.sgd(0.1)), packed, ActorLoss())
        >>> metrics = report.fetch()
        >>> metrics["loss"], metrics["num_tokens"], metrics["num_unknown"]
        (-0.5, 2.0, 2.0)
    """
    if not packed.batches:
        raise ValueError("`packed`: expected at least one batch, got none")
    graph, trained, rest = _split(model, optimizer.wrt)
    gathered = _nothing(trained)
    reports = []
    for batch in packed.batches:
        gathered, report = _gather(gathered, model, shard_rows(batch), loss, optimizer.wrt)
        reports.append(report)
    trained, optimizer, norm = _apply(trained, optimizer, gathered)
    return nnx.merge(graph, trained, rest), optimizer, UpdateReport(tuple(reports), norm, packed.problems)


@partial(jax.jit, static_argnames=("temperature", "clip"), donate_argnums=(0, 1))
def actor_step(
    model: Decoder, optimizer: nnx.Optimizer[Decoder], batch: ActorBatch, *, temperature: float = 1.0, clip: float = 0.2
) -> tuple[Decoder, nnx.Optimizer[Decoder], Metrics]:
    """`update` on a single batch of the actor, in one program.

    Args:
        model: the policy; all its buffers are taken over, go on with the one returned. Call under its mesh.
        optimizer: from `make_optimizer`; taken over, too.
        batch: see `ActorBatch`.
        temperature: as in `ActorLoss`.
        clip: as in `ActorLoss`.

    Returns:
        Model and optimizer after the update, both as before where loss or gradient is not finite, and the metrics of
        `UpdateReport.fetch`, float32.
    """
    return _step(model, optimizer, batch, ActorLoss(temperature=temperature, clip=clip))


@partial(jax.jit, donate_argnums=(0, 1))
def critic_step(
    model: ValueModel, optimizer: nnx.Optimizer[ValueModel], batch: CriticBatch
) -> tuple[ValueModel, nnx.Optimizer[ValueModel], Metrics]:
    """`update` on a single batch of the critic; arguments and results as in `actor_step`."""
    return _step(model, optimizer, batch, CriticLoss())


def without_adapters(model: Model) -> Model:
    """The model as it was before `add_lora`: a reference policy beside the one that is trained, sharing its weights."""
    graph, adapters, rest = _split(model, nnx.LoRAParam)
    return nnx.merge(graph, jax.tree.map(jnp.zeros_like, adapters), rest)


def gradient_of(
    loss: Callable[[Model], tuple[jax.Array, jax.Array, Any]], model: Model, wrt: Any
) -> tuple[nnx.State, tuple[jax.Array, jax.Array, Any]]:
    """Gradient of the summed loss for the parameters `wrt`, in float32 and split like them, and what `loss` answers.

    Sums, weights and gradients of several batches add up.
    """
    graph, trained, rest = _split(model, wrt)

    def total(trained: nnx.State) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Any]]:
        answer = loss(nnx.merge(graph, trained, rest))
        return answer[0], answer

    gradient, answer = jax.grad(total, has_aux=True)(trained)
    return keep_sharded(gradient), answer


def _split(model: Model, wrt: Any) -> tuple[nnx.GraphDef[Model], nnx.State, nnx.State]:
    graph, *states = nnx.split(model, wrt, ...)
    return graph, states[0], states[1]


@jax.jit
def _nothing(trained: nnx.State) -> _Gathered:
    return _Gathered(keep_sharded(jax.tree.map(jnp.zeros_like, trained)), jnp.zeros(()), jnp.array(True))


@partial(jax.jit, static_argnames=("loss", "wrt"), donate_argnums=0)
def _gather(
    gathered: _Gathered, model: Model, batch: Any, loss: Callable[[Model, Any], Answer], wrt: Any
) -> tuple[_Gathered, tuple[jax.Array, jax.Array, jax.Array, Sums]]:
    """Add a micro-batch: the sums so far, and what this one answered and whether it was finite."""
    gradient, (total, weight, sums) = gradient_of(lambda model: loss(model, batch), model, wrt)
    finite = _is_finite((total, weight, gradient))
    gradient = keep_sharded(jax.tree.map(jnp.add, gathered.gradient, gradient))
    return _Gathered(gradient, gathered.weight + weight, gathered.finite & finite), (total, weight, finite, sums)


def _move(
    trained: Any, optimizer: nnx.Optimizer[Model], gathered: _Gathered
) -> tuple[nnx.State, nnx.Optimizer[Model], jax.Array]:
    """Along the mean gradient, or not at all."""
    scale = jnp.where(gathered.weight > 0, 1 / jnp.where(gathered.weight > 0, gathered.weight, 1), 0)
    gradient = jax.tree.map(lambda g: g * scale, gathered.gradient)
    norm = optax.tree.norm(gradient)
    moves = gathered.finite & jnp.isfinite(norm) & (gathered.weight > 0)
    before = jax.tree.map(lambda x: x, (trained, optimizer))  # new variables around the same arrays
    with jax.numpy_dtype_promotion("standard"):  # optimizers count steps in whole numbers
        optimizer.update(trained, gradient)
    trained, optimizer = jax.tree.map(partial(jnp.where, moves), (trained, optimizer), before)
    return keep_sharded(trained), keep_sharded(optimizer), norm


_apply = jax.jit(_move, donate_argnums=(0, 1))


def _step(
    model: Model, optimizer: nnx.Optimizer[Model], batch: Any, loss: Callable[[Model, Any], Answer]
) -> tuple[Model, nnx.Optimizer[Model], Metrics]:
    gradient, (total, weight, sums) = gradient_of(lambda model: loss(model, batch), model, optimizer.wrt)
    graph, trained, rest = _split(model, optimizer.wrt)
    gathered = _Gathered(gradient, weight, _is_finite((total, weight, gradient)))
    trained, optimizer, norm = _move(trained, optimizer, gathered)
    named = _means(total, weight, sums, lambda a, b: jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0))
    return keep_sharded(nnx.merge(graph, trained, rest)), optimizer, named | {"weight": weight, "gradient_norm": norm}


def _means(total: Any, weight: Any, sums: dict[str, Any], divide: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """The mean loss, the mean of every pair, and the plain sums; the mean of nothing is 0."""
    reported = {name: divide(*value) if isinstance(value, tuple) else value for name, value in sums.items()}
    return {"loss": divide(total, weight), **reported}


def _is_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
