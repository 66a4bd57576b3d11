"""Writing a decoder as a checkpoint folder that transformers and the serving engines load."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from focus_jax.models.checkpoint import (
    DTYPES,
    EMBEDDING,
    INDEX,
    NESTED,
    WEIGHTS,
    CheckpointError,
    StoredTensor,
    grouped,
    is_text,
    open_safetensors,
    plain_name,
    stored_slices,
    stored_tensors,
)
from focus_jax.models.config import ModelConfig
from focus_jax.models.decoder import Decoder

# What stands beside the weights of a source and goes along with them.
CARRIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*"),
    *("generation_config.json", "*processor_config.json", "LICENSE*"),
)
# What a folder may hold and still be replaced.
REPLACEABLE = (*CARRIED, "config.json", "model*.safetensors", INDEX, "README.md", ".gitattributes")
# The decay of the delta layers, exp(A_log) softplus(. + dt_bias), is off by up to a percent where these are bfloat16.
FLOAT32 = ("A_log", "dt_bias")


def save_hf(
    model: Decoder,
    folder: Path | str,
    *,
    dtype: DTypeLike | None = None,
    like: Path | str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a decoder as a checkpoint folder.

    Everything is written beside `folder` and moved there once it is complete and on the disk. Who opens `folder` finds the
    checkpoint that was there, for an instant none, or the new one; never a part.

    Args:
        model: a plain decoder; merge adapters first.
        folder: where to: new, empty, or holding a checkpoint, which is replaced.
        dtype: of the stored tensors: float32 (the default; nothing is lost), bfloat16 or float16. `A_log` and `dt_bias`
            stay float32, and so does what `like` stores wider than its embedding.
        like: the checkpoint that the model started from. Its config.json, tokenizer, chat template, generation settings,
            licence, way of naming, vision tower and prediction layers are carried over, so that what loads the one loads the
            other.
        max_shard_bytes: a larger checkpoint is cut into several files; the host holds one of them at a time.

    Raises:
        CheckpointError: parameters a checkpoint has no place for, or that are not finite; `like` has another shape;
            `folder` holds something else. What `folder` held is still there.
        TypeError: no decoder.

    Example:
        >>> import os, tempfile, jax
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_hf(Decoder(config, key=jax.random.key(0)), f"{folder}/tiny", dtype="bfloat16")
        ...     sorted(os.listdir(f"{folder}/tiny"))
        ['config.json', 'model.safetensors']
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"expected a Decoder, got {type(model).__name__}; a checkpoint has no place for more")
    if max_shard_bytes < 1:
        raise ValueError(f"`max_shard_bytes`: expected at least 1, got {max_shard_bytes}")
    kept = jnp.dtype(jnp.float32 if dtype is None else dtype)
    if kept not in map(jnp.dtype, DTYPES.values()):
        raise ValueError(f"`dtype`: expected float32, bfloat16 or float16, got {kept}")
    folder, source = Path(folder).resolve(), None if like is None else Path(like)
    _check_replaceable(folder)
    entries = _entries(model, kept)
    fields = model.config.to_hf()
    if source is not None:
        entries = _as_in(source, model.config, entries)
        fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    beside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    beside.mkdir(parents=True)
    try:
        _write_tensors(beside, entries, max_shard_bytes)
        _write_json(beside / "config.json", _with_dtype(fields, kept.name))
        for file in [] if source is None else sorted(source.iterdir()):
            if file.is_file() and _matches(file.name, CARRIED):
                shutil.copyfile(file, beside / file.name)
                _sync(beside / file.name)
        _sync(beside)
        _move(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@dataclass(frozen=True)
class _Entry:
    """A tensor to be written; `fetch(dtype)` brings its numbers to the host when its file's turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[np.dtype], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _entries(model: Decoder, dtype: np.dtype) -> list[_Entry]:
    """The decoder's own tensors: embedding, layer by layer, norm, head."""
    values = _parameters(model)
    expected = _parameters(nnx.eval_shape(lambda: Decoder(model.config, key=jax.random.key(0))))
    if odd := values.keys() ^ expected.keys():
        raise CheckpointError(
            f"a {model.config.family} checkpoint has no place for, or lacks: {grouped(odd)}; "
            "give the plain decoder, adapters merged and blocks stacked"
        )
    entries = []
    for path, value in values.items():
        if value.shape != expected[path].shape:
            raise CheckpointError(f"{path}: expected the shape {expected[path].shape}, got {value.shape}")
        if not value.is_fully_addressable:
            raise CheckpointError(f"{path}: other hosts hold parts of it; gather it first (jax.experimental.multihost_utils)")
        kept = np.dtype(np.float32) if path.endswith(FLOAT32) else dtype
        for name, block in stored_slices(path, value.shape, model.config):
            shape = value.shape if block is None else value.shape[1:]
            entries.append(_Entry(name, shape, kept, partial(_fetch, name, value, block)))
    return sorted(entries, key=lambda entry: _place(entry.name))


def _parameters(model: Decoder) -> dict[str, Any]:
    return {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}


def _fetch(name: str, value: jax.Array, block: int | None, dtype: np.dtype) -> np.ndarray:
    part = (value if block is None else value[block]).astype(dtype)
    if not jnp.isfinite(part).all():
        raise CheckpointError(f"{name}: holds numbers that are not finite in {dtype}; nothing was saved")
    return np.ascontiguousarray(part)


def _place(name: str) -> tuple[bool, int, str]:
    """Sorts the embedding first, then the layers by number, then the rest."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return name != EMBEDDING, int(layer[1]) if layer else 10**9, name


def _as_in(source: Path, config: ModelConfig, entries: list[_Entry]) -> list[_Entry]:
    """The entries with the source's names and wider dtypes, followed by what else the source stores."""
    if (theirs := ModelConfig.load(source)) != config:
        raise CheckpointError(f"`like`: expected a checkpoint of the model's shape,\n  {config}\ngot\n  {theirs}")
    stored = stored_tensors(source)
    wide = {plain_name(name) for name, tensor in stored.items() if tensor.dtype == "F32"}
    # A source that is float32 throughout says nothing about single tensors.
    wide = set() if EMBEDDING in wide else wide
    prefix = NESTED if any(name.startswith(NESTED) for name in stored) else "model."
    own = [
        replace(
            entry,
            name=re.sub(r"^model\.", prefix, entry.name),
            dtype=np.dtype(np.float32) if entry.name in wide else entry.dtype,
        )
        for entry in entries
    ]
    return [*own, *(_copied(tensor) for name, tensor in stored.items() if not is_text(name))]


def _copied(tensor: StoredTensor) -> _Entry:
    def fetch(dtype: np.dtype) -> np.ndarray:
        with open_safetensors(tensor.file) as file:
            return file.get_tensor(tensor.name)

    return _Entry(tensor.name, tensor.shape, np.dtype(DTYPES[tensor.dtype]), fetch)


def _write_tensors(folder: Path, entries: list[_Entry], max_shard_bytes: int) -> None:
    """One file, or several with an index."""
    from safetensors.numpy import save_file

    shards: list[list[_Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(e.num_bytes for e in shards[-1]) + entry.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [WEIGHTS]
    for name, shard in zip(names, shards, strict=True):
        save_file({entry.name: entry.fetch(entry.dtype) for entry in shard}, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(folder.stat().st_mode & 0o666)  # the library's files are for their owner alone
        _sync(folder / name)
    if len(shards) > 1:
        places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        size = sum(entry.num_bytes for entry in entries)
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": places})


def _with_dtype(fields: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The fields of a config.json that say what the tensors are stored in, to transformers 5 and 4."""
    fields = {**fields, "dtype": dtype, "torch_dtype": dtype}
    if isinstance(inner := fields.get("text_config"), dict):
        fields["text_config"] = {name: dtype if name in ("dtype", "torch_dtype") else value for name, value in inner.items()}
    return fields


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    _sync(file)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _check_replaceable(folder: Path) -> None:
    """Nothing but a checkpoint may be lost."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder, found a file")
    inside = sorted(folder.iterdir())
    strange = [path.name for path in inside if path.is_dir() or not _matches(path.name, REPLACEABLE)]
    if strange or (inside and not (folder / "config.json").exists()):
        found = ", ".join(strange) or "no config.json"
        raise CheckpointError(f"{folder}: expected a new folder, or one that holds a checkpoint alone, found {found}")


def _move(new: Path, folder: Path) -> None:
    """Put the folder `new` in the place of `folder`; interrupted in between, the earlier one lies beside it."""
    old = new.with_name(f"{new.name}.old")
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
