"""One update of the actor, one of the critic: plain functions under jit that take and return model and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from focus_jax.losses import policy_loss, value_loss
from focus_jax.models.critic import ValueModel
from focus_jax.models.decoder import Decoder
from focus_jax.models.scoring import score
from focus_jax.models.sharding import keep_sharded

Model = TypeVar("Model", bound=nnx.Module)
Metrics = dict[str, jax.Array]
Loss = Callable[[Model], tuple[jax.Array, jax.Array, Metrics]]
"""Of a model: the weighted sum of the losses, the sum of the weights, and sums of whatever else is of interest."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ActorBatch:
    """Rows of tokens with the credit of those the policy sampled.

    Attributes:
        tokens: int32 [B, T].
        segment_ids: int32 [B, T]: 0 is padding, a run of equal positive numbers one sequence.
        mask: bool [B, T], the tokens to learn from.
        old_logprobs: float32 [B, T], the sampler's; anything outside the mask.
        advantages: float32 [B, T].
        weights: float32 [B, T], of each token in the mean.
    """

    tokens: jax.Array
    segment_ids: jax.Array
    mask: jax.Array
    old_logprobs: jax.Array
    advantages: jax.Array
    weights: jax.Array


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
    """

    tokens: jax.Array
    segment_ids: jax.Array
    mask: jax.Array
    targets: jax.Array
    weights: jax.Array


@partial(jax.jit, static_argnames=("tx", "wrt"))
def make_optimizer(model: Model, tx: optax.GradientTransformation, wrt: Any = nnx.Param) -> nnx.Optimizer[Model]:
    """The optimizer's first state, split over the mesh like the parameters it belongs to.

    Args:
        model: what will be trained; call under its mesh.
        tx: how.
        wrt: which parameters: all, `nnx.LoRAParam`, `focus_jax.models.is_value_head`, ...
    """
    return keep_sharded(nnx.Optimizer(model, tx, wrt=wrt))


@partial(jax.jit, static_argnames=("temperature", "clip"), donate_argnums=(0, 1))
def actor_step(
    model: Decoder, optimizer: nnx.Optimizer[Decoder], batch: ActorBatch, *, temperature: float = 1.0, clip: float = 0.2
) -> tuple[Decoder, nnx.Optimizer[Decoder], Metrics]:
    """One clipped policy-gradient update.

    Args:
        model: the policy; its buffers are taken over, go on with the one returned. Call under its mesh.
        optimizer: from `make_optimizer`; taken over, too.
        batch: see `ActorBatch`.
        temperature: the sampler's.
        clip: how far the probability ratio may leave 1 before it pulls no further.

    Returns:
        Model and optimizer after the update, and float32 metrics: loss, entropy, gradient_norm, weight.
    """

    def loss(model: Decoder) -> tuple[jax.Array, jax.Array, Metrics]:
        scores = score(model, batch.tokens, batch.segment_ids, temperature=temperature)
        total, weight = policy_loss(
            scores.logprobs, batch.old_logprobs, batch.advantages, batch.mask, weights=batch.weights, clip=clip
        )
        return total, weight, {"entropy": jnp.sum(jnp.where(batch.mask, scores.entropy * batch.weights, 0))}

    return update(model, optimizer, loss)


@partial(jax.jit, donate_argnums=(0, 1))
def critic_step(
    model: ValueModel, optimizer: nnx.Optimizer[ValueModel], batch: CriticBatch
) -> tuple[ValueModel, nnx.Optimizer[ValueModel], Metrics]:
    """One update towards fixed targets by squared error; arguments and results as in `actor_step`."""

    def loss(model: ValueModel) -> tuple[jax.Array, jax.Array, Metrics]:
        values = model(batch.tokens, batch.segment_ids)
        total, weight = value_loss(values, batch.targets, batch.mask, weights=batch.weights)
        return total, weight, {"value": jnp.sum(jnp.where(batch.mask, values * batch.weights, 0))}

    return update(model, optimizer, loss)


def update(model: Model, optimizer: nnx.Optimizer[Model], loss: Loss[Model]) -> tuple[Model, nnx.Optimizer[Model], Metrics]:
    """Move the parameters that `optimizer` is for along the gradient of the mean loss; the sums of `loss` become means."""
    gradient, (total, weight, sums) = gradient_of(loss, model, optimizer.wrt)
    scale = jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)  # the mean of nothing is 0
    gradient = jax.tree.map(lambda g: g * scale, gradient)
    metrics = {name: value * scale for name, value in {"loss": total, **sums}.items()}
    metrics |= {"weight": weight, "gradient_norm": optax.tree.norm(gradient)}
    with jax.numpy_dtype_promotion("standard"):  # optimizers count steps in whole numbers
        optimizer.update(model, gradient)
    return keep_sharded(model), keep_sharded(optimizer), metrics


def gradient_of(loss: Loss[Model], model: Model, wrt: Any) -> tuple[nnx.State, tuple[jax.Array, jax.Array, Metrics]]:
    """Gradient of the summed loss for the parameters `wrt`, in float32 and split like them, and what `loss` answers.

    Sums, weights and gradients of several batches add up.
    """
    graph, *states = nnx.split(model, wrt, ...)
    trained, rest = states

    def total(trained: nnx.State) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Metrics]]:
        answer = loss(nnx.merge(graph, trained, rest))
        return answer[0], answer

    gradient, answer = jax.grad(total, has_aux=True)(trained)
    return keep_sharded(gradient), answer
