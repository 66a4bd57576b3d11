"""Flax NNX decoders with the numbers of the published checkpoints."""

from focus_jax.models.check import check_length, check_tokenizer, check_tokens
from focus_jax.models.checkpoint import CheckpointError, checkpoint_name, parameter_path
from focus_jax.models.config import ConfigError, DeltaConfig, ModelConfig
from focus_jax.models.critic import FlaxCritic, ValueModel, is_value_head, last_values, linear, segment_ends, without_head
from focus_jax.models.decoder import Cache, Decoder, empty_cache, segment_positions
from focus_jax.models.decoding import for_decoding
from focus_jax.models.engine import ContinuousBatch, Request
from focus_jax.models.generation import Generation, generate
from focus_jax.models.lora import LoRALinear, add_lora, merge_lora, save_peft
from focus_jax.models.save import save_hf
from focus_jax.models.scoring import TokenScores, score, token_logprobs
from focus_jax.models.sharding import make_mesh
from focus_jax.models.weights import load_hf

__all__ = [
    "Cache",
    "CheckpointError",
    "ConfigError",
    "ContinuousBatch",
    "Decoder",
    "DeltaConfig",
    "FlaxCritic",
    "Generation",
    "LoRALinear",
    "ModelConfig",
    "Request",
    "TokenScores",
    "ValueModel",
    "add_lora",
    "check_length",
    "check_tokenizer",
    "check_tokens",
    "checkpoint_name",
    "empty_cache",
    "for_decoding",
    "generate",
    "is_value_head",
    "last_values",
    "linear",
    "load_hf",
    "make_mesh",
    "merge_lora",
    "parameter_path",
    "save_hf",
    "save_peft",
    "score",
    "segment_ends",
    "segment_positions",
    "token_logprobs",
    "without_head",
]
