"""The shape of a decoder, read from a checkpoint's own config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Family = Literal["llama", "qwen2", "qwen3", "qwen3_5"]
LayerType = Literal["full_attention", "linear_attention"]

# What `model_type` in config.json may say, and the family it stands for.
MODEL_TYPES: dict[str, Family] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5": "qwen3_5",
}

# What transformers' classes fill in where a config.json leaves a field out; None is worked out from the others.
DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
    "qwen2": {"num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    "qwen3_5": {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25},
}


class ConfigError(ValueError):
    """A config.json that is missing, broken, or asks for something this implementation does not do."""


@dataclass(frozen=True)
class DeltaConfig:
    """Sizes of the gated delta layers of Qwen3.5.

    Attributes:
        num_key_heads: heads of queries and keys; each serves `num_value_heads / num_key_heads` value heads.
        num_value_heads: heads of values, each with its own state [key_dim, value_dim].
        key_dim: size of a query and of a key.
        value_dim: size of a value.
        kernel_size: taps of the causal depthwise convolution over queries, keys and values.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            heads = f"{self.num_value_heads}, {self.num_key_heads}"
            raise ConfigError(f"expected `num_value_heads` to be a multiple of `num_key_heads`, got {heads}")

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder; everything a forward pass needs to know beside its parameters.

    Attributes:
        family: which published architecture.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream, D.
        intermediate_size: width of the MLP.
        num_heads: query heads of the attention layers, H.
        num_kv_heads: key and value heads, K; each serves H / K query heads.
        head_dim: size of a head, independent of D / H.
        layer_types: kind of every layer, first to last.
        tied: the output head is the embedding.
        max_positions: longest sequence the checkpoint was made for.
        rope_theta: base of the rotary embedding.
        partial_rotary: share of a head's dimensions, the leading ones, that is rotated; the rest passes through.
        norm_eps: epsilon of every RMS norm.
        qkv_bias: queries, keys and values have a bias.
        out_bias: the attention's output projection has one.
        delta: sizes of the linear attention layers, if there are any.

    Example:
        >>> config = ModelConfig.from_hf({
        ...     "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        ...     "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5,
        ...     "rope_theta": 100000, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        ... })
        >>> config.num_layers, config.head_dim, config.num_blocks
        (30, 64, 30)
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_types: tuple[LayerType, ...]
    tied: bool = False
    max_positions: int = 32768
    rope_theta: float = 1e4
    partial_rotary: float = 1.0
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    out_bias: bool = False
    delta: DeltaConfig | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_positions")
        for name in (*sizes, "num_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}`: expected at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"expected `num_heads` to be a multiple of `num_kv_heads`, got {self.num_heads}, {self.num_kv_heads}"
            )
        if not 0 < self.rope_theta < math.inf:
            raise ConfigError(f"`rope_theta`: expected a finite number > 0, got {self.rope_theta}")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"`partial_rotary` {self.partial_rotary} of a head of {self.head_dim} leaves no even number of dimensions"
            )
        if ("linear_attention" in self.layer_types) != (self.delta is not None):
            raise ConfigError(
                f"expected `delta` for linear attention layers, and only for those, got {self.layer_types}, {self.delta}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary)

    @property
    def block(self) -> tuple[LayerType, ...]:
        """Kinds of the shortest run of layers that, repeated, gives the whole decoder: one layer, or Qwen3.5's four."""
        for size in range(1, self.num_layers + 1):
            block = self.layer_types[:size]
            if self.num_layers % size == 0 and block * (self.num_layers // size) == self.layer_types:
                return block
        raise AssertionError("unreachable: all layers together are a block")

    @property
    def num_blocks(self) -> int:
        return self.num_layers // len(self.block)

    @staticmethod
    def load(folder: Path | str) -> ModelConfig:
        """Read `folder`/config.json.

        Raises:
            ConfigError: there is none, it is not JSON, or it is not supported.
        """
        path = Path(folder) / "config.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"expected a config.json in {folder}, found none; give the folder that holds a model's *.safetensors"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
        try:
            return ModelConfig.from_hf(fields)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @staticmethod
    def from_hf(fields: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a config.json, in the spelling of transformers 4 or 5.

        Raises:
            ConfigError: an architecture or option that is not supported, named; a field that is missing or wrong.
        """
        if not isinstance(fields, Mapping):
            raise ConfigError(f"expected an object, got {type(fields).__name__}")
        model_type = fields.get("model_type")
        family = MODEL_TYPES.get(str(model_type))
        if family is None:
            raise ConfigError(f"`model_type` {model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
        if isinstance(text := fields.get("text_config"), Mapping):  # the vision + text class, whose own word goes first
            own = ("tie_word_embeddings", "quantization_config")
            fields = {**text, **{name: fields[name] for name in own if fields.get(name) is not None}}
        read = _Fields({**DEFAULTS[family], **fields})
        _refuse_unsupported(read, family)
        hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
        if not read.get("head_dim") and not DEFAULTS[family]["head_dim"] and hidden % heads:
            raise ConfigError(f"expected `head_dim`, or `hidden_size` a multiple of `num_attention_heads`, got {hidden}, {heads}")
        rope = read.rope()
        layer_types = _layer_types(read, family)
        bias = read.flag("attention_bias")
        return ModelConfig(
            family=family,
            vocab_size=read.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.size("intermediate_size"),
            num_heads=heads,
            num_kv_heads=read.size("num_key_value_heads", heads),
            head_dim=read.size("head_dim", DEFAULTS[family]["head_dim"] or hidden // heads),
            layer_types=layer_types,
            tied=read.flag("tie_word_embeddings"),
            max_positions=read.size("max_position_embeddings"),
            rope_theta=_Fields(rope).number("rope_theta", read.number("rope_theta", 10000.0)),
            partial_rotary=_Fields(rope).number("partial_rotary_factor", read.number("partial_rotary_factor", 1.0)),
            norm_eps=read.number("rms_norm_eps", 1e-6),
            qkv_bias=True if family == "qwen2" else bias,
            out_bias=False if family == "qwen2" else bias,
            delta=_delta(read) if "linear_attention" in layer_types else None,
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json that says the same, in the spellings of transformers 4 and 5 at once.

        Example:
            >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2, tied=True)
            >>> ModelConfig.from_hf(config.to_hf()) == config
            True
        """
        names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_5": "Qwen3_5"}
        fields: dict[str, Any] = {
            "architectures": [f"{names[self.family]}ForCausalLM"],
            "model_type": "qwen3_5_text" if self.family == "qwen3_5" else self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "use_cache": True,
            # Left out, they are what the class makes of them, which need not be this model's.
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if self.family != "qwen2":
            fields["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            fields["mlp_bias"] = False
        else:
            fields["layer_types"] = list(self.layer_types)
        if self.family in ("qwen2", "qwen3"):
            fields["use_sliding_window"] = False
        if self.partial_rotary != 1.0 or self.family == "qwen3_5":
            fields["partial_rotary_factor"] = fields["rope_parameters"]["partial_rotary_factor"] = self.partial_rotary
        if self.delta is not None:
            fields |= {
                "linear_num_key_heads": self.delta.num_key_heads,
                "linear_num_value_heads": self.delta.num_value_heads,
                "linear_key_head_dim": self.delta.key_dim,
                "linear_value_head_dim": self.delta.value_dim,
                "linear_conv_kernel_dim": self.delta.kernel_size,
            }
        return fields


class _Fields:
    """Typed access to the fields of a config.json."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.get = fields.get

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"`{name}`: expected a positive whole number, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise ConfigError(f"`{name}`: expected a finite number >= 0, got {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name) or False
        if not isinstance(value, bool):
            raise ConfigError(f"`{name}`: expected true or false, got {value!r}")
        return value

    def rope(self) -> Mapping[str, Any]:
        rope = self.get("rope_scaling") or self.get("rope_parameters") or {}
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            raise ConfigError(f"expected the rotary embedding's parameters, the same for all layers, got {rope!r}")
        return rope


def _refuse_unsupported(read: _Fields, family: Family) -> None:
    """Name every option that would change the numbers and is not implemented."""
    rope = read.rope()
    kind = rope.get("rope_type") or rope.get("type") or "default"
    problems = []
    if kind not in ("default", "mrope"):  # for text, mrope's three position rows are one and the same
        problems.append(f"rope type {kind!r} (supported: 'default')")
    if read.get("rope_interleaved"):
        problems.append("`rope_interleaved`")
    partial = rope.get("partial_rotary_factor") or read.get("partial_rotary_factor") or 1
    if family != "qwen3_5" and partial != 1:
        problems.append(f"`partial_rotary_factor` {partial} with `model_type` {family!r}")
    if _has_sliding_window(read, family):
        problems.append("sliding-window attention")
    if any(read.get(name) for name in ("num_experts", "num_local_experts", "moe_intermediate_size")):
        problems.append("mixture of experts")
    if (act := read.get("hidden_act") or "silu") not in ("silu", "swish"):
        problems.append(f"`hidden_act` {act!r} (supported: 'silu')")
    if read.get("mlp_bias"):
        problems.append("`mlp_bias`")
    if read.get("attn_output_gate") is False:
        problems.append("`attn_output_gate` false")
    if read.get("quantization_config"):
        problems.append("quantised weights (`quantization_config`); save the model dequantised first")
    if problems:
        raise ConfigError(f"not supported: {'; '.join(problems)}")


def _has_sliding_window(read: _Fields, family: Family) -> bool:
    """Whether any layer is one; older configs say so by its number, with the window and first layer of the Qwen classes."""
    if (types := read.get("layer_types")) is not None:
        return isinstance(types, list | tuple) and "sliding_attention" in types
    if family not in ("qwen2", "qwen3") or not read.get("use_sliding_window"):
        return False
    first = read.number("max_window_layers", 28)
    return read.get("sliding_window", 4096) is not None and first < read.size("num_hidden_layers")


def _layer_types(read: _Fields, family: Family) -> tuple[LayerType, ...]:
    num_layers = read.size("num_hidden_layers")
    types = read.get("layer_types")
    if types is None:
        every = read.size("full_attention_interval", 4) if family == "qwen3_5" else 1
        types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    allowed = ("full_attention", "linear_attention") if family == "qwen3_5" else ("full_attention",)
    if not isinstance(types, list | tuple) or len(types) != num_layers or not all(kind in allowed for kind in types):
        raise ConfigError(f"`layer_types`: expected {num_layers} of {', '.join(allowed)}, got {types!r}")
    return tuple(types)


def _delta(read: _Fields) -> DeltaConfig:
    return DeltaConfig(
        num_key_heads=read.size("linear_num_key_heads", 16),
        num_value_heads=read.size("linear_num_value_heads", 32),
        key_dim=read.size("linear_key_head_dim", 128),
        value_dim=read.size("linear_value_head_dim", 128),
        kernel_size=read.size("linear_conv_kernel_dim", 4),
    )
