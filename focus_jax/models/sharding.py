"""Where parameters and activations live on a mesh with the axes `fsdp` and `tensor`."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

Axis = str | None
Tree = TypeVar("Tree")


def make_mesh(fsdp: int, tensor: int = 1) -> jax.sharding.Mesh:
    """A mesh of `fsdp` x `tensor` devices.

    Parameters are split over both axes, batches over `fsdp`, heads and the MLP's width over `tensor`.

    Example:
        >>> import jax
        >>> with jax.set_mesh(make_mesh(1, 1)):
        ...     pass  # models built here are split over it
    """
    available = len(jax.devices())
    if fsdp * tensor > available or fsdp < 1 or tensor < 1:
        raise ValueError(f"expected a mesh of at most {available} devices, got fsdp {fsdp} x tensor {tensor}")
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), axis_types=(auto, auto), devices=jax.devices()[: fsdp * tensor])


def spec(shape: tuple[int, ...], axes: tuple[Axis, ...]) -> PartitionSpec:
    """`axes` without those the mesh lacks or that do not divide the dimension."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return PartitionSpec(
        *(axis if axis in sizes and size % sizes[axis] == 0 else None for size, axis in zip(shape, axes, strict=True))
    )


def param(value: jax.Array, *axes: Axis, kind: type[nnx.Param[jax.Array]] = nnx.Param) -> nnx.Param[jax.Array]:
    """A parameter that knows how it is split; placed accordingly where a mesh is set (`jax.set_mesh`)."""
    if jax.sharding.get_abstract_mesh().empty:
        return kind(value, out_sharding=axes, eager_sharding=False)
    return kind(value, out_sharding=spec(value.shape, axes), eager_sharding=True)


def constrain(x: jax.Array, *axes: Axis) -> jax.Array:
    """Split an activation over the mesh; without a mesh, nothing."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(x.shape, axes))


def keep_sharded(tree: Tree) -> Tree:
    """Split every parameter, gradient and moment in a tree of `nnx.Variable`s as its parameter is, the rest not at all.

    For use inside jit: left to itself, a compiler may swap the axes of a gradient, and then of the updated parameter.
    """

    def keep(variable: nnx.Variable[jax.Array]) -> nnx.Variable[jax.Array]:
        value = variable[...]
        return variable.replace(constrain(value, *_axes(variable, value.ndim)))

    return jax.tree.map(keep, tree, is_leaf=lambda node: isinstance(node, nnx.Variable))


def abstract(tree: Tree) -> Tree:
    """Shapes and dtypes (`jax.eval_shape`) of `nnx.Variable`s, with where each would live on the mesh that is set.

    What `jit(...).lower` takes to compile for arrays that are never made.
    """
    mesh = jax.sharding.get_mesh()

    def place(variable: nnx.Variable[jax.Array]) -> nnx.Variable[jax.Array]:
        value = variable.get_value()
        sharding = jax.sharding.NamedSharding(mesh, spec(value.shape, _axes(variable, value.ndim)))
        leaf: Any = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        return variable.replace(leaf)

    return jax.tree.map(place, tree, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _axes(variable: nnx.Variable[jax.Array], num_axes: int) -> tuple[Axis, ...]:
    """How the variable is annotated; moments that are not shaped like their parameter are not split."""
    axes = tuple(variable.get_metadata().get("out_sharding") or ())
    return axes if len(axes) == num_axes else (None,) * num_axes


def shard_rows(batch: Tree) -> Tree:
    """Put a batch on the mesh that is set, its leading axis split over `fsdp`; without a mesh, on the device."""
    if jax.sharding.get_abstract_mesh().empty:
        return jax.tree.map(jnp.asarray, batch)
    mesh = jax.sharding.get_mesh()

    def put(x: Any) -> jax.Array:
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec(x.shape[:1], ("fsdp",))))

    return jax.tree.map(put, batch)


def mesh_of(tree: Any) -> jax.sharding.Mesh | None:
    """The mesh that the arrays of a model are split over, or None where they live on one device."""
    meshes = (getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh)), None)


def normal(key: jax.Array, shape: tuple[int, ...], stddev: float = 0.02) -> jax.Array:
    """Initial weights, float32."""
    return stddev * jax.random.normal(key, shape, jnp.float32)
