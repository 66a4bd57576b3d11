"""What a checkpoint says about itself: path, shape, dtype and fingerprint of every array, and the caller's plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from focus_jax.training.fingerprint import fingerprint

Leaf = Any  # a jax.Array, np.ndarray or jax.ShapeDtypeStruct

FORMAT = 1


def leaves_of(tree: Any) -> dict[str, Leaf]:
    """Name (path, joined by dots) -> array, in the order of the tree."""
    found: dict[str, Leaf] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            raise TypeError(f"state: expected arrays, got {type(leaf).__name__} at {name!r}; plain data go into `info`")
        if name in found:
            raise ValueError(f"state: two arrays are called {name!r}; rename one")
        found[name] = leaf
    return found


def is_key(leaf: Leaf) -> bool:
    """Whether it is made of typed PRNG keys."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def numbers(leaf: Leaf) -> Leaf:
    """What is saved of a leaf: of keys, the numbers they are made of."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def make_manifest(step: int, info: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """What `read_manifest` verifies; `info` as `plain` returned it."""

    def entry(leaf: Leaf) -> dict[str, Any]:
        impl = {"impl": jax.random.key_impl(leaf)} if is_key(leaf) else {}
        return {"shape": list(leaf.shape), "dtype": str(leaf.dtype), **impl, "fingerprint": fingerprint(numbers(leaf))}

    entries = {name: entry(leaf) for name, leaf in leaves.items()}
    return _seal({"format": FORMAT, "step": step, "info": info, "leaves": entries})


def read_manifest(path: Path, step: int) -> dict[str, Any]:
    """A step's manifest; ValueError says what is wrong with it."""
    try:
        manifest = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"it has no manifest ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"its manifest is no JSON ({error})") from error
    if not isinstance(manifest, dict) or _seal(manifest) != manifest:
        raise ValueError("its manifest does not match its own hash")
    if (found := (manifest.get("format"), manifest.get("step"))) != (FORMAT, step):
        raise ValueError(f"its manifest: expected format {FORMAT} and step {step}, got {found[0]} and {found[1]}")
    return manifest


def mismatches(wanted: Mapping[str, Leaf], entries: Mapping[str, Any]) -> list[str]:
    """Arrays that are missing, too many, or of another shape or dtype, each with what was expected and what is there."""
    expected = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in wanted.items()}
    got = {name: f"{entry['dtype']}{entry['shape']}" for name, entry in entries.items()}
    names = dict.fromkeys([*expected, *got])
    pairs = [(name, expected.get(name, "nothing"), got.get(name, "nothing")) for name in names]
    return [f"{name}: expected {right}, got {left}" for name, right, left in pairs if right != left]


def plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """`info` as JSON gives it back, or ValueError where that is something else."""
    try:
        copy = json.loads(json.dumps(dict(info), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"info: expected plain data (texts, finite numbers, lists, dicts): {error}") from error
    if copy != info:
        raise ValueError(f"info: expected what JSON gives back as it is; {dict(info)} comes back as {copy}")
    return copy


def _seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with the hash of all its other entries."""
    content = {key: value for key, value in manifest.items() if key != "hash"}
    text = json.dumps(content, sort_keys=True)
    return content | {"hash": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}
