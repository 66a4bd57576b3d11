"""Low-rank adapters: train a small addition to chosen projections instead of all weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from focus_jax.models.checkpoint import checkpoint_name, grouped
from focus_jax.models.decoder import Decoder
from focus_jax.models.layers import Linear, matmul_transposed
from focus_jax.models.sharding import normal, param

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MODULE = TypeVar("MODULE", bound=nnx.Module)


class LoRALinear(nnx.Module):
    """y = base(x) + alpha / rank * x A^T B^T; B starts at 0, so that it starts as `base`.

    Only A [blocks, rank, in] and B [blocks, out, rank] are `nnx.LoRAParam`, which is how optimizers tell them from the rest.
    """

    def __init__(self, base: Linear, *, rank: int, alpha: float, key: jax.Array) -> None:
        blocks, out_size, in_size = base.weight.shape
        _, out_axis, in_axis = base.weight.get_metadata("out_sharding")
        self.base = base
        self.lora_a = param(normal(key, (blocks, rank, in_size), in_size**-0.5), None, None, in_axis, kind=nnx.LoRAParam)
        self.lora_b = param(jnp.zeros((blocks, out_size, rank)), None, out_axis, None, kind=nnx.LoRAParam)
        self.rank = rank
        self.alpha = alpha

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.base.dtype
        low = matmul_transposed(x.astype(dtype), self.lora_a[...].astype(dtype))
        return self.base(x) + self.alpha / self.rank * matmul_transposed(low, self.lora_b[...].astype(dtype))

    def merged(self) -> Linear:
        """One linear map that does the same: W + alpha / rank * B A."""
        linear = nnx.clone(self.base)
        delta = jnp.einsum("nor,nri->noi", self.lora_b[...], self.lora_a[...], precision="highest")
        linear.weight[...] = linear.weight[...] + self.alpha / self.rank * delta
        return linear


def add_lora(model: MODULE, *, targets: Sequence[str] = ATTENTION, rank: int = 16, alpha: float = 32.0, key: jax.Array) -> MODULE:
    """A model with an adapter on every projection called one of `targets`; it computes what `model` does until trained.

    Args:
        model: a `Decoder`, or a critic over one; it is left as it is, the new one shares its arrays.
        targets: attribute names of `Linear` maps, as in the checkpoints ("q_proj", "down_proj", "in_proj_qkv", ...).
        rank: of the addition.
        alpha: the addition is scaled by alpha / rank.
        key: typed PRNG key.

    Raises:
        ValueError: no target or one the model does not have, a rank or alpha that scales nothing, or a model that has
            adapters already or comes from `for_decoding`.

    Example:
        >>> import jax
        >>> from focus_jax.models import Decoder, ModelConfig
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> model = add_lora(Decoder(config, key=jax.random.key(0)), rank=4, key=jax.random.key(1))
        >>> sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))  # beside 164,288
        5120

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685), section 4.1.
    """
    if rank < 1:
        raise ValueError(f"`rank`: expected at least 1, got {rank}")
    if not 0 < alpha < math.inf:
        raise ValueError(f"`alpha`: expected a finite number > 0, got {alpha}")
    if isinstance(targets, str) or not targets:
        raise ValueError(f"`targets`: expected names of projections, such as ('q_proj', 'v_proj'), got {targets!r}")
    if any(True for _ in _adapters(model)):
        raise ValueError("the model has adapters already; merge them first (`merge_lora`)")
    decoder: Any = getattr(model, "backbone", model)
    if isinstance(decoder.blocks, nnx.List):
        raise ValueError("expected a model as it was built or loaded, got one laid out for decoding (`for_decoding`)")
    model = nnx.clone(model)
    found = [(parent, name, child) for parent, name, child in _children(model) if isinstance(child, Linear)]
    if unknown := sorted(set(targets) - {name for _, name, _ in found}):
        names = sorted({name for _, name, _ in found})
        raise ValueError(f"`targets`: the model has no projection {', '.join(unknown)}; it has {', '.join(names)}")
    chosen = [(parent, name, child) for parent, name, child in found if name in targets]
    for (parent, name, child), k in zip(chosen, jax.random.split(key, len(chosen)), strict=True):
        setattr(parent, name, LoRALinear(child, rank=rank, alpha=alpha, key=k))
    return model


def merge_lora(model: MODULE) -> MODULE:
    """The model without adapters that computes the same; what `save_hf` and a serving engine's reload take.

    `model` is left as it is. Without adapters it is returned in a copy that shares its arrays.
    """
    model = nnx.clone(model)
    for parent, name, child in list(_children(model)):
        if isinstance(child, LoRALinear):
            setattr(parent, name, child.merged())
    return model


def save_peft(model: Decoder, folder: Path | str, *, base_model: str) -> None:
    """Write the adapters of an actor in the format of the `peft` library, which vLLM loads too.

    Args:
        model: a decoder with adapters.
        folder: gets adapter_config.json and adapter_model.safetensors; those that were there stay until all is written.
        base_model: name or folder of the checkpoint that the adapters belong to.

    Raises:
        ValueError: the model has no adapters, or their numbers are not finite.
        TypeError: no decoder.
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"expected a Decoder, got {type(model).__name__}; the format has no place for a critic's head")
    tensors: dict[str, np.ndarray] = {}
    names = set()
    layer: LoRALinear | None = None
    for path, layer in _adapters(model):
        names.add(path.rpartition(".")[2])
        for block, (a, b) in enumerate(zip(np.asarray(layer.lora_a[...]), np.asarray(layer.lora_b[...]), strict=True)):
            module = f"base_model.model.{checkpoint_name(path, block, model.config)}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    if layer is None:
        raise ValueError("expected a model with adapters (`add_lora`), got one without; `save_hf` saves whole models")
    if wrong := [name for name, value in tensors.items() if not np.isfinite(value).all()]:
        raise ValueError(f"expected finite numbers in the adapters, got others in {grouped(wrong)}; nothing was written")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_model),
        "r": layer.rank,
        "lora_alpha": layer.alpha,
        "target_modules": sorted(names),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    _write(Path(folder), tensors, config)


def _children(model: nnx.Module) -> Iterator[tuple[nnx.Module, str, nnx.Module]]:
    """Every module in the model with its parent and the parent's name for it."""
    for _, parent in nnx.iter_modules(model):
        for name, child in nnx.iter_children(parent):
            yield parent, str(name), child


def _adapters(model: nnx.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Every adapter with its path from the model down."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, LoRALinear):
            yield ".".join(map(str, path)), module


def _write(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, object]) -> None:
    """The configuration last, so that a folder which has one is complete."""
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise ImportError("writing adapters needs the package `safetensors`; install focus_jax[hf]") from None
    folder.mkdir(parents=True, exist_ok=True)
    new, last = folder / "adapter_model.new", folder / "adapter_config.json"
    try:
        save_file(tensors, new, metadata={"format": "pt"})
        new.chmod(folder.stat().st_mode & 0o666)  # the library's files are for their owner alone
        last.unlink(missing_ok=True)
        os.replace(new, folder / "adapter_model.safetensors")
    finally:
        new.unlink(missing_ok=True)
    last.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
