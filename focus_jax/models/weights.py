"""Reading a published checkpoint into a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from focus_jax.models.checkpoint import (
    DTYPES,
    EMBEDDING,
    HEAD,
    NESTED,
    PIECE,
    CheckpointError,
    StoredTensor,
    grouped,
    is_text,
    parameter_path,
    plain_name,
    stored_slices,
    stored_tensors,
)
from focus_jax.models.config import ModelConfig
from focus_jax.models.decoder import Decoder


def load_hf(
    folder: Path | str,
    *,
    mesh: jax.sharding.Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
    remat: Callable[..., bool] | None = jax.checkpoint_policies.dots_saveable,
) -> Decoder:
    """A decoder with the parameters of a checkpoint folder, float32 whatever they are stored in.

    Names and shapes are compared before any number is read. Tensors are read one at a time, each device's part straight
    from the file; beside the device copy, the host holds one tensor.

    A checkpoint that is tied may still store its head: one equal to the embedding is passed over, another is an error.

    Args:
        folder: holds config.json, and model.safetensors or model.safetensors.index.json with its shards.
        mesh: parameters are split over it; by default over the mesh that is set (`jax.set_mesh`), if any.
        dtype: of the computation.
        remat: see `Decoder`.

    Raises:
        ConfigError: config.json is missing, broken, or not supported.
        CheckpointError: files that are missing or broken; else every missing, unexpected or mis-shaped tensor at once; else
            every tensor whose numbers are not finite.
        ValueError: a mesh without the axes `fsdp` and `tensor`, or a `dtype` that is none of a computation.

    Example:
        >>> import tempfile, jax
        >>> from focus_jax.models import save_hf
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_hf(Decoder(config, key=jax.random.key(0)), f"{folder}/tiny")
        ...     load_hf(f"{folder}/tiny")(jax.numpy.array([[1, 2, 3]])).shape
        (1, 3, 64)
    """
    if mesh is not None and (not {"fsdp", "tensor"} & set(mesh.axis_names) or mesh.explicit_axes):
        raise ValueError(f"`mesh`: expected axes fsdp and tensor of type Auto (`make_mesh`), got {mesh}")
    config = ModelConfig.load(folder)
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        abstract = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, remat=remat, key=jax.random.key(0)))
        graph, state = nnx.split(abstract)
        variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
        source = match_tensors(folder, config, {path: variable.shape for path, variable in variables.items()})
        arrays = _read_all(source, variables, config)
    flat = [(path, variable.replace(arrays[".".join(map(str, path))])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def match_tensors(folder: Path | str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """The tensors that a decoder reads from `folder`, by the names of `checkpoint_name`.

    Args:
        folder: the checkpoint's.
        config: the decoder's.
        shapes: of the decoder's parameters, by path.

    Raises:
        CheckpointError: damaged files; else every missing, unexpected or mis-shaped tensor at once.
    """
    stored = {name: tensor for name, tensor in stored_tensors(folder).items() if is_text(name)}
    plain = {name: plain_name(name) for name in stored}
    tensors = {plain[name]: tensor for name, tensor in stored.items()}
    expected = {
        name: shape if block is None else shape[1:]
        for path, shape in shapes.items()
        for name, block in stored_slices(path, shape, config)
    }
    if config.tied and HEAD in tensors:
        expected[HEAD] = expected[EMBEDDING]
        tensors.setdefault(EMBEDDING, tensors[HEAD])
    problems = []
    if twice := {name for name, short in plain.items() if short != name and short in stored}:
        problems.append(f"there both with and without {NESTED!r}: {grouped(twice)}")
    if missing := expected.keys() - tensors.keys():
        problems.append(f"missing: {grouped(missing)}")
        if HEAD in missing:
            problems.append("(config.json says the head is not the embedding; if it is, set `tie_word_embeddings` to true)")
    if extra := tensors.keys() - expected.keys():
        problems.append(f"unexpected: {grouped(extra)}")
    for name in sorted(expected.keys() & tensors.keys()):
        if tensors[name].shape != expected[name]:
            problems.append(f"{name}: expected the shape {expected[name]}, got {tensors[name].shape}")
        if tensors[name].dtype not in DTYPES:
            problems.append(f"{name}: expected one of {', '.join(DTYPES)}, got {tensors[name].dtype}; save it dequantised")
    if problems:
        raise CheckpointError("\n  ".join([f"{folder}: the tensors are not those its config.json asks for:", *problems]))
    if config.tied and HEAD in tensors:
        _check_equal(folder, tensors[EMBEDDING], tensors.pop(HEAD))
    return tensors


def _read_all(source: Mapping[str, StoredTensor], variables: Mapping[str, Any], config: ModelConfig) -> dict[str, jax.Array]:
    """Every parameter by path, file by file; numbers that are not finite are an error."""
    shardings = {path: _sharding(variable) for path, variable in variables.items()}
    arrays: dict[str, jax.Array] = {}
    wrong = []
    for name, tensor in sorted(source.items(), key=lambda item: (item[1].file, item[0])):
        path, block = parameter_path(name, config)
        shape, sharding = variables[path].shape, shardings[path]
        if len(shape) == len(tensor.shape):
            arrays[path], finite = _widen(_read(tensor, sharding))
        else:
            if path not in arrays:
                arrays[path] = jnp.zeros(shape, jnp.float32, device=sharding)
            arrays[path], finite = _put(arrays[path], _read(tensor, _without_first_axis(sharding)), block)
        # Nothing of a tensor stays on the host when the next one is read.
        arrays[path].block_until_ready()
        wrong += [] if finite else [name]
    if wrong:
        raise CheckpointError(f"{tensor.file.parent}: these tensors hold numbers that are not finite: {grouped(wrong)}")
    return arrays


def _sharding(variable: Any) -> Sharding:
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
    return NamedSharding(mesh, PartitionSpec(*variable.get_metadata("out_sharding")))


def _without_first_axis(sharding: Sharding) -> Sharding:
    """Of one slice of a stack, whose blocks no mesh axis splits."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])) if isinstance(sharding, NamedSharding) else sharding


def _read(tensor: StoredTensor, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(tensor.shape, sharding, tensor.read, dtype=DTYPES[tensor.dtype])


@jax.jit
def _widen(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x.astype(jnp.float32), jnp.isfinite(x).all()


@partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, x: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.lax.dynamic_update_index_in_dim(stack, x.astype(stack.dtype), block, 0), jnp.isfinite(x).all()


def _check_equal(folder: Path | str, embedding: StoredTensor, head: StoredTensor) -> None:
    """A stored head that a tied model would silently lose."""
    step = max(1, PIECE // (4 * embedding.shape[1]))
    for first in range(0, embedding.shape[0], step):
        rows = (slice(first, first + step), slice(None))
        if not np.array_equal(embedding.read(rows).astype(np.float32), head.read(rows).astype(np.float32), equal_nan=True):
            raise CheckpointError(
                f"{folder}: config.json says the head is the embedding (`tie_word_embeddings`), but {head.name} differs "
                f"from {embedding.name}; set the flag to false to keep both, or remove the head"
            )
