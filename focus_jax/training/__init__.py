"""From a round's records to updated models."""

from focus_jax.training.batches import ActorBatch, CriticBatch, Packed, actor_batches, critic_batches, outcome_examples
from focus_jax.training.objectives import ActorLoss, CriticLoss
from focus_jax.training.steps import (
    NonFiniteError,
    UpdateReport,
    actor_step,
    critic_step,
    make_optimizer,
    update,
    without_adapters,
)

__all__ = [
    "ActorBatch",
    "ActorLoss",
    "CriticBatch",
    "CriticLoss",
    "NonFiniteError",
    "Packed",
    "UpdateReport",
    "actor_batches",
    "actor_step",
    "critic_batches",
    "critic_step",
    "make_optimizer",
    "outcome_examples",
    "update",
    "without_adapters",
]
