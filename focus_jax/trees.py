"""Rollout trees as padded arrays: the one place where ragged host trees become a batch a device can work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Array = jax.Array | np.ndarray

BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RolloutTrees:
    """A padded batch of rollout trees: nodes are states, and the edge entering a node is a segment.

    Attributes:
        parent: int32 [..., N], `parent[i] < i` for i > 0; the root (index 0) and padding hold 0.
        reward: float32 [..., N], R of the edge entering each node; the root's is ignored.
        steps: int32 [..., N], d, the task transitions of that edge (context management counts 0).
        terminal: bool [..., N], True where the episode is over: the remaining value is 0.
        mask: bool [..., N], True where there is a node; padding comes last.

    Source: project page, "Backup details".
    """

    parent: Array
    reward: Array
    steps: Array
    terminal: Array
    mask: Array


_DTYPES = {"parent": jnp.int32, "reward": jnp.float32, "steps": jnp.int32, "terminal": jnp.bool_, "mask": jnp.bool_}


class HostTree(Protocol):
    """One tree without padding: four 1-D sequences with an entry per node, parents before children.

    The root's parent may be written 0 or -1.
    """

    @property
    def parent(self) -> Any: ...
    @property
    def reward(self) -> Any: ...
    @property
    def steps(self) -> Any: ...
    @property
    def terminal(self) -> Any: ...


def pack(
    trees: Sequence[HostTree], *, buckets: Sequence[int] = BUCKETS, **arrays: Sequence[ArrayLike]
) -> tuple[RolloutTrees, dict[str, jax.Array]]:
    """Pad ragged host trees, and per-node arrays beside them, to one batch and check it.

    N is the smallest bucket that holds the largest tree, so a jitted function compiles at most once per bucket for a
    given number of trees. The number of trees is left as it is: results have a row for each tree given.

    Args:
        trees: B host trees; anything with 1-D `parent`, `reward`, `steps` and `terminal`.
        buckets: sizes N may take.
        **arrays: further per-node data, one 1-D array per tree, packed the same way (padding holds 0).

    Returns:
        The batch [B, N], and a dict with each further array as float32, int32 or bool [B, N].

    Raises:
        ValueError: a tree is empty, too large or malformed (see `validate`), or an array does not fit its tree.
        TypeError: an entry is of the wrong kind, such as a fractional parent.

    Example:
        >>> from types import SimpleNamespace
        >>> tree = SimpleNamespace(parent=[0, 0, 0], reward=[0, 0, 1], steps=[0, 1, 1], terminal=[False, True, True])
        >>> trees, packed = pack([tree], values=[[0.8, 0.0, 0.0]])
        >>> trees.parent.shape, packed["values"].dtype
        ((1, 16), dtype('float32'))
    """
    if not trees:
        raise ValueError("expected at least one tree, got an empty sequence")
    sizes = [len(tree.parent) for tree in trees]
    for index, (tree, size) in enumerate(zip(trees, sizes, strict=True)):
        if size == 0:
            raise ValueError(f"tree {index} is empty: expected at least a root")
        if not np.all(getattr(tree, "mask", True)):
            raise ValueError(f"tree {index} is padded already: expected only real nodes; drop those where `mask` is False")
    largest = int(np.argmax(sizes))
    fitting = [bucket for bucket in buckets if bucket >= sizes[largest]]
    if not fitting:
        raise ValueError(
            f"tree {largest} has {sizes[largest]} nodes and the largest bucket holds {max(buckets)}: pass larger `buckets`"
        )
    width = min(fitting)

    parent = _stack("parent", [tree.parent for tree in trees], sizes, width, kinds="iu")
    parent[:, 0] = np.where(parent[:, 0] == -1, 0, parent[:, 0])
    batch = RolloutTrees(
        parent=parent,
        reward=_stack("reward", [tree.reward for tree in trees], sizes, width, kinds="fiu", dtype=np.float32),
        steps=_stack("steps", [tree.steps for tree in trees], sizes, width, kinds="iu"),
        terminal=_stack("terminal", [tree.terminal for tree in trees], sizes, width, kinds="b"),
        mask=np.arange(width) < np.array(sizes)[:, None],
    )
    validate(batch)
    packed = {name: _stack(name, rows, sizes, width) for name, rows in arrays.items()}
    return jax.tree.map(jnp.asarray, (batch, packed))


def validate(trees: RolloutTrees) -> None:
    """Check on the host what no kernel checks on the device: that every tree of a batch is a tree, with sane numbers.

    Args:
        trees: a batch with any leading shape.

    Raises:
        ValueError: naming the tree and the node, where a tree is empty, has padding before a node, a second root, a
            parent that does not come before its child, a reward that is not finite, negative steps, or a child of a
            terminal node.

    Example:
        >>> trees = RolloutTrees(parent=np.array([0, 2, 0], np.int32), reward=np.zeros(3, np.float32),
        ...     steps=np.ones(3, np.int32), terminal=np.zeros(3, bool), mask=np.ones(3, bool))
        >>> validate(trees)
        Traceback (most recent call last):
            ...
        ValueError: tree 0, node 1: its parent is node 2; expected one that comes before it
    """
    _check_trees(trees)
    leading = trees.mask.shape[:-1]
    parent, reward, steps, terminal, mask = (
        np.asarray(leaf).reshape(-1, leaf.shape[-1])
        for leaf in (trees.parent, trees.reward, trees.steps, trees.terminal, trees.mask)
    )
    node = np.arange(mask.shape[1])
    below_terminal = np.take_along_axis(terminal, np.clip(parent, 0, node), axis=1) & (node > 0)

    def refuse(wrong: np.ndarray, problem: str) -> None:
        if not wrong.any():
            return
        tree, i = np.argwhere(wrong)[0]
        name = tree if len(leading) < 2 else tuple(int(k) for k in np.unravel_index(tree, leading))
        text = problem.format(parent=parent[tree, i], reward=reward[tree, i], steps=steps[tree, i])
        raise ValueError(f"tree {name}, node {i}: {text}")

    refuse(~mask[:, :1], "there is no root; expected at least one real node in every tree")
    refuse(mask & ~np.logical_and.accumulate(mask, axis=1), "a real node after padding; expected padding last")
    refuse(~mask & (parent != 0), "padding whose parent is {parent}; expected 0")
    refuse(mask & (node == 0) & (parent != 0), "a root whose parent is {parent}; expected 0")
    refuse(mask & (node > 0) & ((parent < 0) | (parent == node)), "a second root (its parent is {parent}); expected one root")
    refuse(mask & (parent > node), "its parent is node {parent}; expected one that comes before it")
    refuse(mask & ~np.isfinite(reward), "its reward is {reward}; expected a finite number (a failed attempt is no node)")
    refuse(mask & (steps < 0), "its steps are {steps}; expected 0 or more")
    refuse(mask & below_terminal, "a child of the terminal node {parent}; expected terminal nodes to have no children")


def as_trees(trees: RolloutTrees) -> RolloutTrees:
    """The batch as device arrays; raises unless all five have the shape [..., N] and are of the right kind."""
    _check_trees(trees)
    return RolloutTrees(**{name: jnp.asarray(getattr(trees, name), dtype) for name, dtype in _DTYPES.items()})


def as_array(name: str, array: Any, shape: tuple[int, ...] | None, dtype: Any) -> jax.Array:
    """The array in this dtype; raises unless it has this shape (None: any) and is of this kind."""
    _check_array(name, array, shape, dtype)
    return jnp.asarray(array, dtype)


def _check_trees(trees: RolloutTrees) -> None:
    shape = jnp.shape(trees.parent)
    if not shape or shape[-1] == 0:
        raise ValueError(f"`trees.parent`: expected shape (..., N) with N >= 1, got {shape}")
    for name, dtype in _DTYPES.items():
        _check_array(f"trees.{name}", getattr(trees, name), shape, dtype)


def _check_array(name: str, array: Any, shape: tuple[int, ...] | None, dtype: Any) -> None:
    kind = {jnp.float32: jnp.floating, jnp.int32: jnp.integer, jnp.bool_: jnp.bool_}[dtype]
    wanted = jnp.dtype(dtype).name
    if not hasattr(array, "dtype"):
        raise TypeError(f"`{name}`: expected an array of {wanted}, got {type(array).__name__}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"`{name}`: expected shape {shape}, got {array.shape}")
    if not jnp.issubdtype(array.dtype, kind):
        raise TypeError(f"`{name}`: expected {wanted}, got {array.dtype}")


def _stack(name: str, rows: Sequence[Any], sizes: list[int], width: int, *, kinds: str = "fiub", dtype: Any = None) -> np.ndarray:
    """Rows of these sizes, padded with 0 to [len(sizes), width]."""
    if len(rows) != len(sizes):
        raise ValueError(f"`{name}`: expected {len(sizes)} arrays, one per tree, got {len(rows)}")
    rows = [np.asarray(row) for row in rows]
    for index, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        if row.shape != (size,):
            raise ValueError(f"tree {index}: `{name}`: expected shape ({size},), got {row.shape}")
        if row.dtype.kind not in kinds:
            wanted = " or ".join({"f": "float", "i": "integer", "b": "bool"}[kind] for kind in kinds if kind != "u")
            raise TypeError(f"tree {index}: `{name}`: expected {wanted} entries, got {row.dtype}")
    if dtype is None:
        dtype = {"f": np.float32, "b": np.bool_}.get(np.result_type(*rows).kind, np.int32)
    stacked = np.zeros((len(rows), width), dtype)
    for index, row in enumerate(rows):
        with np.errstate(over="ignore"):  # becomes inf, which validate names
            stacked[index, : len(row)] = row
        if dtype is np.int32 and not np.array_equal(stacked[index, : len(row)], row):
            raise ValueError(f"tree {index}: `{name}`: expected numbers that fit 32 bits, got {row[np.argmax(np.abs(row))]}")
    return stacked
