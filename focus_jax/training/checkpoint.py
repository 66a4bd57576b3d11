"""Everything a training run needs to go on, saved together or not at all, and verified before it is used.

A step is a folder named by its number: orbax writes the arrays to `state/` in the background, beside our own
`manifest/manifest.json`. The folder gets its name once it is complete; until then the process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import operator
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from focus_jax.training.fingerprint import fingerprint
from focus_jax.training.manifest import Leaf, is_key, leaves_of, make_manifest, mismatches, numbers, plain, read_manifest
from focus_jax.training.processes import FailedSomewhereError, anywhere, everywhere, one_line

Tree = TypeVar("Tree")

_LEFTOVERS = ("*.orbax-checkpoint-tmp*", "*.deleted")  # saves and deletions that were cut short


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, none is fit for use, or it belongs to another model or run."""


@dataclass(frozen=True)
class Restored(Generic[Tree]):
    """What `Checkpoints.restore` found.

    Attributes:
        step: of the checkpoint.
        state: a tree like the one asked for.
        info: the plain data saved with it.
        damaged: newer steps that were passed over -> why.
    """

    step: int
    state: Tree
    info: dict[str, Any]
    damaged: dict[int, str] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run, in one folder.

    With several processes all of them make the same calls, on a file system they share, and every array spans all of them.

    Args:
        folder: where; made by the first `save`.
        keep: so many of the newest steps stay, and for the time of a save one more.

    Raises:
        ValueError: `keep` is below 1.

    Example:
        >>> import tempfile
        >>> state = {"weights": jnp.arange(3.0), "key": jax.random.key(0)}
        >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        ...     checkpoints.save(7, state, {"cursor": 128})
        ...     found = checkpoints.restore(state)
        >>> found.step, found.state["weights"], found.info
        (7, Array([0., 1., 2.], dtype=float32), {'cursor': 128})
    """

    def __init__(self, folder: Path | str, *, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep: expected at least 1 step, got {keep}")
        self.folder = Path(folder).absolute()
        self._keep = keep
        items = {"state": ocp.StandardCheckpointHandler(), "manifest": ocp.JsonCheckpointHandler(filename="manifest.json")}
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**items))
        self._lock: IO[bytes] | None = None
        self._saving: int | None = None
        self._damaged: list[int] = []

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the save that is running, whose error comes out here, and let others write to the folder."""
        try:
            self.wait()
        finally:
            self._orbax.close()
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def steps(self) -> list[int]:
        """The steps that are complete, whole or not, oldest first."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def save(self, step: int, state: Any, info: Mapping[str, Any]) -> None:
        """Save a step in the background; on return the arrays may be changed or given away.

        Waits for the save before; if that failed, its error comes out here and nothing new is saved.

        Args:
            step: its number, above those of all steps in the folder.
            state: any tree of arrays: models, optimizers, typed keys. Their paths are their names on disk.
            info: plain data (what JSON gives back as it is): cursors, settings, what the data are.

        Raises:
            CheckpointError: this save cannot begin or the last one failed; another process saves to the folder.
            TypeError: `state` holds something that is no array.
            ValueError: `info` is no plain data; `step` is negative.
        """
        self.wait()
        if isinstance(step, bool) or (step := operator.index(step)) < 0:
            raise ValueError(f"step: expected a number from 0 on, got {step}")
        leaves, info = leaves_of(state), plain(info)
        with _explained(f"step {step} cannot be saved in {self.folder}, steps before it stay"):
            everywhere(lambda: self._prepare(step) if jax.process_index() == 0 else None)
            manifest = make_manifest(step, info, leaves)
            arrays = {name: numbers(leaf) for name, leaf in leaves.items() if leaf.size}  # orbax takes no empty ones
            args = ocp.args.Composite(state=ocp.args.StandardSave(arrays), manifest=ocp.args.JsonSave(manifest))
            self._orbax.save(self.folder / str(step), args=args)
        self._saving = step

    def wait(self) -> None:
        """Wait for the save that is running; its error comes out here."""
        step, self._saving = self._saving, None
        with _explained(f"step {step} was not saved in {self.folder}, steps before it stay"):
            self._orbax.wait_until_finished()
        if self._lock is not None:
            for old in self.steps()[: -self._keep]:
                gone = (self.folder / str(old)).rename(self.folder / f"{old}.deleted")  # half a folder must not pass for a step
                shutil.rmtree(gone)

    def restore(self, like: Tree) -> Restored[Tree] | None:
        """The newest step that is whole.

        Every array is compared with its fingerprint. A step that is incomplete or altered is passed over with a warning and
        stays where it is, until the next `save` sets it aside under another name.

        Args:
            like: the tree to fill, as a fresh run has it: arrays, or `jax.ShapeDtypeStruct`s with shardings, which take no
                memory (`jax.eval_shape`, `focus_jax.models.sharding.abstract`). Any mesh will do.

        Returns:
            None where nothing has been saved.

        Raises:
            CheckpointError: no step is whole; the newest whole one has other arrays than `like`; the folder holds
                something else.
        """
        self.wait()
        wanted, damaged = leaves_of(like), dict[int, str]()
        anywhere(False)  # the first process may be deleting old steps still
        self._check_folder()
        for step in reversed(self.steps()):
            try:
                values, info = self._load(step, wanted)
            except FailedSomewhereError as error:
                damaged[step] = str(error)
                continue
            if damaged:
                warnings.warn(f"{self.folder}: going on from step {step}: {_list(damaged)}", stacklevel=2)
            self._damaged = list(damaged)
            return Restored(step, jax.tree.unflatten(jax.tree.structure(like), values), info, damaged)
        if damaged:
            raise CheckpointError(f"{self.folder}: no step is whole: {_list(damaged)}; start anew in another folder")
        return None

    def _check_folder(self) -> None:
        """Refuse what holds no checkpoints but something else."""
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: expected a folder of checkpoints, got a file")
        if self.folder.exists() and not self.steps():
            ours = {path for pattern in (".lock", *_LEFTOVERS, "*.damaged.*") for path in self.folder.glob(pattern)}
            if others := sorted(path.name for path in {*self.folder.iterdir()} - ours):
                raise CheckpointError(f"{self.folder}: expected folders named by their steps, got {', '.join(others[:5])}")

    def _prepare(self, step: int) -> None:
        """Make the folder ready for a step, or say what speaks against it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = _lock(self.folder / ".lock")
        for leftover in [path for pattern in _LEFTOVERS for path in self.folder.glob(pattern)]:
            shutil.rmtree(leftover)
        while self._damaged:
            bad = self._damaged.pop()
            (self.folder / str(bad)).rename(self.folder / f"{bad}.damaged.{time.time_ns()}")
        if (newest := max(self.steps(), default=-1)) >= step:
            raise CheckpointError(f"step {newest} is there already; restore it first, or use another folder")

    def _load(self, step: int, wanted: Mapping[str, Leaf]) -> tuple[list[Leaf], dict[str, Any]]:
        """The arrays of a step where `wanted` has them, and its plain data; FailedSomewhereError where it is damaged."""
        folder = self.folder / str(step)
        manifest = everywhere(lambda: read_manifest(folder / "manifest" / "manifest.json", step))
        entries = manifest["leaves"]
        if wrong := mismatches(wanted, entries):
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(f"{folder} is of another model or optimizer: {'; '.join(wrong[:5])}{more}")
        targets = {name: _target(leaf) for name, leaf in wanted.items() if leaf.size}
        args = ocp.args.Composite(state=ocp.args.StandardRestore(targets))
        arrays = everywhere(lambda: self._orbax.restore(folder, args=args)["state"])
        altered = [name for name, array in arrays.items() if fingerprint(array) != entries[name]["fingerprint"]]
        if altered:
            raise FailedSomewhereError(f"{len(altered)} arrays are not what was saved: {', '.join(altered[:5])}")
        return [_place(arrays.pop(name, None), leaf, entries[name].get("impl")) for name, leaf in wanted.items()], manifest[
            "info"
        ]


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to go on with other data, another model or other settings than a run began with.

    Args:
        saved: names -> digests, numbers or texts, out of `Restored.info`.
        current: the same of the run that wants to go on.

    Raises:
        CheckpointError: names every difference, with both sides.

    Example:
        >>> check_identity({"dataset": "5f0c"}, {"dataset": "5f0c"})
        >>> try:
        ...     check_identity({"dataset": "5f0c"}, {"dataset": "77aa"})
        ... except CheckpointError as error:
        ...     print(error)
        the checkpoint is of another run: dataset was '5f0c', now '77aa'; give it what it had, or use another folder
    """
    names = sorted(saved.keys() | current.keys())
    pairs = [(name, repr(saved.get(name)), repr(current.get(name))) for name in names]
    if different := ", ".join(f"{name} was {then}, now {now}" for name, then, now in pairs if then != now):
        raise CheckpointError(f"the checkpoint is of another run: {different}; give it what it had, or use another folder")


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Put what an error means before it."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what}: {one_line(error)}") from error


def _lock(path: Path) -> IO[bytes]:
    """Held until it is closed or the process ends, however it does."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CheckpointError("another process saves there; give every run a folder of its own") from None
    return file


def _target(leaf: Leaf) -> Leaf:
    """What orbax is asked for."""
    if isinstance(leaf, np.ndarray):
        return leaf
    data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _place(value: Leaf, like: Leaf, impl: str | None) -> Leaf:
    """A restored array as `like` has it."""
    if value is None:
        return (np if isinstance(like, np.ndarray) else jnp).zeros(like.shape, like.dtype)
    committed = like.committed if isinstance(like, jax.Array) else getattr(like, "sharding", True) is not None
    if not committed:  # orbax commits arrays to their device, for which a step would be compiled once more
        value = jnp.asarray(np.asarray(value))
    return value if impl is None else jax.random.wrap_key_data(value, impl=impl)


def _list(damaged: Mapping[int, str]) -> str:
    return "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
