"""What an update lowers: losses of a model on a batch, as values that compare equal where they compute the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from focus_jax.losses import MAX_LOG_RATIO, kl_penalty, policy_loss, value_loss
from focus_jax.models.critic import ValueModel
from focus_jax.models.decoder import Decoder
from focus_jax.models.scoring import score
from focus_jax.models.sharding import shard_rows
from focus_jax.training.batches import ActorBatch, CriticBatch

Sums = dict[str, jax.Array | tuple[jax.Array, jax.Array]]
"""What adds up over micro-batches: a pair of a weighted sum and its weight, for a mean, or a plain sum."""


@dataclass(frozen=True)
class ActorLoss:
    """Clipped surrogate (`focus_jax.losses.policy_loss`), and a penalty for leaving a reference policy where `kl` is above 0.

    Attributes:
        temperature: the sampler's; its log-probabilities are of logits / temperature.
        clip: how far the probability ratio may fall below 1, or rise above it, before it pulls no further.
        clip_high: how far above 1; None: as `clip`.
        max_importance: largest importance weight, where the batch has the sampler's log-probabilities beside the trainer's own.
        kl: weight of the penalty; the batch needs `reference_logprobs`.

    Example:
        >>> ActorLoss(clip=0.2) == ActorLoss()  # so both are compiled once
        True

    Source: project page, "Give the recovery its own learning signal".
    """

    temperature: float = 1.0
    clip: float = 0.2
    clip_high: float | None = None
    max_importance: float = 2.0
    kl: float = 0.0

    def __post_init__(self) -> None:
        high = self.clip if self.clip_high is None else self.clip_high
        for name, number in (("clip", self.clip), ("clip_high", high), ("max_importance", self.max_importance)):
            if not number > 0:
                raise ValueError(f"ActorLoss: `{name}`: expected a number above 0, got {number}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"ActorLoss: `temperature`: expected a finite number above 0, got {self.temperature}")
        if not 0 <= self.kl < math.inf:
            raise ValueError(f"ActorLoss: `kl`: expected a finite number of at least 0, got {self.kl}")

    def __call__(self, model: Decoder, batch: ActorBatch) -> tuple[jax.Array, jax.Array, Sums]:
        """The weighted sum of the loss, the weight in it, and what else is of interest."""
        scores = score(model, batch.tokens, batch.segment_ids, batch.mask, temperature=self.temperature)
        logprobs, mask, weights = scores.logprobs, batch.mask, jnp.where(batch.mask, batch.weights, 0)
        total, weight = policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            weights=weights,
            clip=self.clip,
            clip_high=self.clip_high,
            sampler_logprobs=batch.sampler_logprobs,
            max_importance=self.max_importance,
        )
        sums = {"entropy": (jnp.sum(scores.entropy * weights), weight)} | self._distances(jax.lax.stop_gradient(logprobs), batch)
        if batch.reference_logprobs is not None:
            penalty, _ = kl_penalty(logprobs, batch.reference_logprobs, mask, weights=weights)
            total += self.kl * penalty
            sums["kl"] = (penalty, weight)
        elif self.kl:
            raise ValueError("expected `reference_logprobs` in the batch, as `kl` is above 0; see `add_reference_logprobs`")
        return total, weight, sums

    def _distances(self, logprobs: jax.Array, batch: ActorBatch) -> Sums:
        """How far the policy is from the one that sampled, and how often the clip holds it; unknown tokens left out."""
        sampled = batch.old_logprobs if batch.sampler_logprobs is None else batch.sampler_logprobs
        known = batch.mask & jnp.isfinite(sampled)
        d = _difference(logprobs, sampled, known)
        weights = jnp.where(known, batch.weights, 0)
        ratio = jnp.exp(_difference(logprobs, batch.old_logprobs, batch.mask & jnp.isfinite(batch.old_logprobs)))
        high = self.clip if self.clip_high is None else self.clip_high
        clipped = jnp.where(batch.advantages > 0, ratio > 1 + high, (batch.advantages < 0) & (ratio < 1 - self.clip))
        num_tokens = _count(batch.mask)
        return {
            "behaviour_kl": (jnp.sum((jnp.expm1(d) - d) * weights), jnp.sum(weights)),
            "clip_share": (_count(clipped & batch.mask), num_tokens),
            "num_tokens": num_tokens,
            "num_unknown": _count(batch.mask & ~known),
        }

    def add_reference_logprobs(self, batch: ActorBatch, reference: Decoder) -> ActorBatch:
        """The batch with the log-probabilities of a reference policy, for `kl`; call under the reference's mesh.

        With adapters the reference may be the model itself without them, `without_adapters(model)`.
        """
        return replace(batch, reference_logprobs=self._logprobs(reference, batch))

    def add_old_logprobs(self, batch: ActorBatch, model: Decoder) -> ActorBatch:
        """The batch with the trainer's own log-probabilities as the old ones, and the sampler's beside them.

        For samplers that compute a little differently from the trainer: the ratio then starts at exactly 1, and the loss is
        weighed by min(exp(old - sampler logprob), max_importance). Call it with the model before the first update.
        """
        sampled = batch.old_logprobs if batch.sampler_logprobs is None else batch.sampler_logprobs
        return replace(batch, old_logprobs=self._logprobs(model, batch), sampler_logprobs=sampled)

    def _logprobs(self, model: Decoder, batch: ActorBatch) -> jax.Array:
        tokens, segment_ids = shard_rows((batch.tokens, batch.segment_ids))
        return _logprobs(model, tokens, segment_ids, self.temperature)


@dataclass(frozen=True)
class CriticLoss:
    """Squared error on fixed targets (`focus_jax.losses.value_loss`).

    Attributes:
        clip: how far from the batch's `old_values` a value may move and still earn; None: anywhere.

    Source: project page, "Backup details".
    """

    clip: float | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"CriticLoss: `clip`: expected a number above 0, or None, got {self.clip}")

    def __call__(self, model: ValueModel, batch: CriticBatch) -> tuple[jax.Array, jax.Array, Sums]:
        """The weighted sum of the loss, the weight in it, and what else is of interest."""
        values = model(batch.tokens, batch.segment_ids)
        if self.clip is not None and batch.old_values is None:
            raise ValueError("expected `old_values` in the batch, as `clip` is given; see `add_old_values`")
        old_values = None if self.clip is None else batch.old_values
        total, weight = value_loss(
            values, batch.targets, batch.mask, weights=batch.weights, old_values=old_values, clip=self.clip
        )
        mean = jnp.sum(jnp.where(batch.mask, values * batch.weights, 0))
        return total, weight, {"value": (mean, weight), "num_states": _count(batch.mask)}

    def add_old_values(self, batch: CriticBatch, model: ValueModel) -> CriticBatch:
        """The batch with the model's present values, for `clip`; call it before the first update."""
        return replace(batch, old_values=_values(model, *shard_rows((batch.tokens, batch.segment_ids))))


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.float32)


def _difference(logprobs: jax.Array, other: jax.Array, known: jax.Array) -> jax.Array:
    return jnp.clip(jnp.where(known, logprobs - jnp.where(known, other, 0), 0), -MAX_LOG_RATIO, MAX_LOG_RATIO)


@partial(jax.jit, static_argnames="temperature")
def _logprobs(model: Decoder, tokens: jax.Array, segment_ids: jax.Array, temperature: float) -> jax.Array:
    return score(model, tokens, segment_ids, temperature=temperature).logprobs


@jax.jit
def _values(model: ValueModel, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
    return model(tokens, segment_ids)
