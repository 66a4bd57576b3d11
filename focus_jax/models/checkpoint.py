"""What published checkpoints call their tensors, and what the files of one hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from focus_jax.models.config import ModelConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES: dict[str, Any] = {"F32": np.float32, "BF16": jnp.bfloat16, "F16": np.float16}
# How the vision + text classes name what the text classes call `model.`.
NESTED = "model.language_model."
# Bytes read from a file at a time.
PIECE = 32 * 2**20


# Vision tower, multi-token prediction, and the rotary frequencies that very old checkpoints store.
_OTHERS = re.compile(r"(model\.)?(visual|mtp)\..*|.*\.rotary_emb\.inv_freq")


class CheckpointError(ValueError):
    """Files of a checkpoint that are missing or broken, or tensors that do not fit the model."""


def checkpoint_name(path: str, block: int, config: ModelConfig) -> str:
    """What a checkpoint calls slice `block` of a decoder's parameter, or a module in it.

    Args:
        path: attribute names from the decoder down, joined by dots.
        block: which slice of a parameter that is stacked over the blocks; 0 for all others.
        config: the decoder's.

    Example:
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> checkpoint_name("blocks.layers.0.mlp.up_proj.weight", 1, config)
        'model.layers.1.mlp.up_proj.weight'
        >>> checkpoint_name("blocks.layers.0.self_attn.q_proj", 1, config)
        'model.layers.1.self_attn.q_proj'
    """
    if path in ("embed_tokens", "lm_head"):
        return EMBEDDING if path == "embed_tokens" else HEAD
    if match := re.fullmatch(r"blocks\.layers\.(\d+)\.(.+)", path):
        return f"model.layers.{block * len(config.block) + int(match[1])}.{match[2]}"
    return f"model.{path}"


def parameter_path(name: str, config: ModelConfig) -> tuple[str, int]:
    """The inverse of `checkpoint_name`: path from the decoder down, and slice.

    Raises:
        CheckpointError: no part of a decoder is called that.

    Example:
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> parameter_path("model.layers.1.mlp.up_proj.weight", config)
        ('blocks.layers.0.mlp.up_proj.weight', 1)
    """
    if name in (EMBEDDING, HEAD):
        return "embed_tokens" if name == EMBEDDING else "lm_head", 0
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        block, layer = divmod(int(match[1]), len(config.block))
        return f"blocks.layers.{layer}.{match[2]}", block
    if name.startswith("model."):
        return name.removeprefix("model."), 0
    raise CheckpointError(f"{name!r} is no name of a decoder's tensor; those start with 'model.' or are {HEAD!r}")


def stored_slices(path: str, shape: tuple[int, ...], config: ModelConfig) -> list[tuple[str, int | None]]:
    """Name and block of every tensor that a decoder's parameter is stored as; the block is None where it is not stacked.

    Example:
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> stored_slices("embed_tokens", (512, 64), config)
        [('model.embed_tokens.weight', None)]
        >>> stored_slices("norm.weight", (1, 64), config)
        [('model.norm.weight', 0)]
    """
    if path in ("embed_tokens", "lm_head"):
        return [(checkpoint_name(path, 0, config), None)]
    return [(checkpoint_name(path, block, config), block) for block in range(shape[0])]


def plain_name(name: str) -> str:
    """A tensor's name in the text classes' style, from either style.

    Example:
        >>> plain_name("model.language_model.norm.weight")
        'model.norm.weight'
    """
    return f"model.{name.removeprefix(NESTED)}" if name.startswith(NESTED) else name


def is_text(name: str) -> bool:
    """Whether a tensor belongs to the decoder, not to a vision tower or a multi-token prediction layer.

    Example:
        >>> is_text("model.visual.pos_embed.weight")
        False
    """
    return not _OTHERS.fullmatch(name)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, described by the header of the file it lies in.

    Attributes:
        file: the file.
        name: its name there.
        shape: its shape.
        dtype: as the format spells it, "BF16" say.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (max(1, int(bits[0]) // 8) if bits else 1)

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or the part of it that `index` cuts out, one slice per axis; in the dtype it is stored in."""
        index = (slice(None),) * len(self.shape) if index is None else index
        rows, *rest = (slice(*s.indices(size)) for s, size in zip(index, self.shape, strict=True))
        shape = tuple(len(range(s.start, s.stop)) for s in (rows, *rest))
        out = _aligned(shape, np.dtype(DTYPES[self.dtype]))
        step = max(1, PIECE // max(1, out.itemsize * math.prod(self.shape[1:])))
        for first in range(0, shape[0], step):
            last = min(first + step, shape[0])
            # A file opened anew leaves no pages of earlier pieces mapped.
            with open_safetensors(self.file) as file:
                out[first:last] = file.get_slice(self.name)[(slice(rows.start + first, rows.start + last), *rest)]
        return out


def stored_tensors(folder: Path | str) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder by name, from the headers of its files.

    Raises:
        CheckpointError: no safetensors; a shard that is missing or broken; an index that disagrees with its shards.
    """
    folder = Path(folder)
    index = _read_index(folder)
    problems: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    for file in sorted({folder / name for name in index.values()}):
        try:
            with open_safetensors(file) as opened:
                views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
                found = {n: StoredTensor(file, n, tuple(v.get_shape()), v.get_dtype()) for n, v in views.items()}
        except FileNotFoundError:
            problems.append(f"{file.name} is missing; copy it from where the others came from")
            continue
        except Exception as error:
            if type(error).__name__ != "SafetensorError" and not isinstance(error, OSError):
                raise
            problems.append(f"{file.name} cannot be read, is it complete? ({error})")
            continue
        if twice := found.keys() & tensors.keys():
            problems.append(f"{file.name} repeats tensors of another shard: {grouped(twice)}")
        if absent := {name for name, place in index.items() if place == file.name} - found.keys() - {""}:
            problems.append(f"{file.name} lacks tensors that {INDEX} promises: {grouped(absent)}")
        tensors |= found
    if problems:
        raise CheckpointError("\n  ".join([f"{folder}: the checkpoint's files are damaged:", *problems]))
    return tensors


def open_safetensors(file: Path) -> Any:
    """An open file of the `safetensors` library."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError("reading a checkpoint needs the package `safetensors`; install focus_jax[hf]") from None
    return safe_open(file, "numpy")


def grouped(names: Iterable[str]) -> str:
    """Names in order, those that differ only by the layer's number as one: 'model.layers.{0,1}.mlp.up_proj.weight'."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?\.layers\.)(\d+)(\..*)", name)
        groups.setdefault((match[1], match[3]) if match else (name, ""), []).extend([int(match[2])] if match else [])
    written = []
    for (before, after), numbers in groups.items():
        layers = ",".join(map(str, sorted(numbers)))
        written.append(f"{before}{f'{{{layers}}}' if len(numbers) > 1 else layers}{after}")
    return ", ".join(sorted(written))


def _read_index(folder: Path) -> dict[str, str]:
    """File of every tensor that the index names; without an index, the one file under no name."""
    if (folder / WEIGHTS).exists():
        return {"": WEIGHTS}
    try:
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(place, str) and Path(place).name == place for place in places.values()):
            raise ValueError("expected plain file names")
    except FileNotFoundError:
        others = sorted(path.name for pattern in ("*.bin", "*.gguf", "*.safetensors") for path in folder.glob(pattern))
        hint = "give the folder that holds a model's *.safetensors"
        if others:
            hint = f"there is only {', '.join(others)}: load it with transformers and call `save_pretrained`"
        raise CheckpointError(f"{folder}: expected {WEIGHTS} or {INDEX}, found neither; {hint}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX}: expected a `weight_map` from tensors to files: {error!r}") from error
    return dict(places)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that the CPU backend takes over as it is."""
    size = dtype.itemsize * math.prod(shape)
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
