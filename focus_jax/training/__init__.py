"""From batches of tokens to updated models."""

from focus_jax.training.steps import ActorBatch, CriticBatch, actor_step, critic_step, make_optimizer

__all__ = ["ActorBatch", "CriticBatch", "actor_step", "critic_step", "make_optimizer"]
