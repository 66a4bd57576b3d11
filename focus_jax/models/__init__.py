"""Flax NNX decoders with the numbers of the published checkpoints."""

from focus_jax.models.check import check_length, check_tokenizer, check_tokens
from focus_jax.models.config import ConfigError, DeltaConfig, ModelConfig
from focus_jax.models.critic import FlaxCritic, ValueModel, is_value_head, last_values, linear, segment_ends, without_head
from focus_jax.models.decoder import Cache, Decoder, empty_cache, segment_positions
from focus_jax.models.sharding import make_mesh

__all__ = [
    "Cache",
    "ConfigError",
    "Decoder",
    "DeltaConfig",
    "FlaxCritic",
    "ModelConfig",
    "ValueModel",
    "check_length",
    "check_tokenizer",
    "check_tokens",
    "empty_cache",
    "is_value_head",
    "last_values",
    "linear",
    "make_mesh",
    "segment_ends",
    "segment_positions",
    "without_head",
]
