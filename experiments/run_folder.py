"""What every script shares: options from the command line or a TOML file, and the folder a run writes to."""

from __future__ import annotations

import difflib
import json
import os
import platform
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import tyro

Config = TypeVar("Config")


def parse(config: type[Config], arguments: list[str] | None = None) -> Config:
    """Options of a script: `--config FILE` holds flags you would have typed, and those you type win.

    Args:
        config: a flat frozen dataclass.
        arguments: the command line, that of the process where None.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    stored: dict[str, Any] = {}
    for flag in [a for a in arguments if a == "--config" or a.startswith("--config=")]:
        at = arguments.index(flag)
        name = flag.partition("=")[2] if "=" in flag else "".join(arguments[at + 1 : at + 2])
        if not name or name.startswith("--"):
            raise SystemExit("--config: expected the name of a TOML file, got none")
        del arguments[at : at + (1 if "=" in flag else 2)]
        stored |= _read_toml(Path(name), [f.name for f in fields(config)])  # type: ignore[arg-type]
    typed = [word for key, value in stored.items() for word in _as_flag(key, value)]
    return tyro.cli(config, args=typed + arguments, config=(tyro.conf.FlagConversionOff,))


def open_run(folder: Path, config: Any, *, free: Sequence[str] = ()) -> Path:
    """Make a run's folder and write down its options and the versions it runs with.

    Args:
        folder: the folder; one that is there is gone on with.
        config: the script's options.
        free: options that may change when a run is gone on with, since they do not shape its results.

    Raises:
        SystemExit: the folder cannot be written, or holds a run with other options.
    """
    options = {key: _toml(value) for key, value in asdict(config).items() if value is not None}
    path = folder / "config.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stored = {k: _toml(v) for k, v in tomllib.loads(path.read_text()).items()} if path.exists() else options
        changed = [k for k in sorted({*stored, *options}) if k not in free and stored.get(k) != options.get(k)]
        if changed:
            changes = "; ".join(
                f"{key}: {stored.get(key, 'not set')} there, {options.get(key, 'not set')} here" for key in changed
            )
            raise SystemExit(f"{folder} holds a run with other options ({changes}); go on with the same, or name another folder")
        _write(path, "".join(f"{key} = {value}\n" for key, value in options.items()))
        _write(folder / "environment.json", json.dumps(_environment(), indent=1) + "\n")
    except OSError as error:
        raise SystemExit(f"the run folder cannot be written: {error}") from error
    except ValueError as error:
        raise SystemExit(f"{path} is no valid TOML: {error}; mend it, or name another folder") from error
    return folder


def log_metrics(folder: Path, **metrics: Any) -> None:
    """Append one line to the run's metrics.jsonl, unless it is there already (the run was gone on with after its end)."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    # A line that a full disk cut short was not logged.
    whole = text[: text.rfind("\n") + 1]
    if not any({**json.loads(line), "time": None} == {**metrics, "time": None} for line in whole.splitlines()):
        _write(path, whole + json.dumps({"time": time.time(), **metrics}) + "\n")


def _write(path: Path, text: str) -> None:
    """All of the text or, where the disk is full or the process ends, what was there before."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _read_toml(path: Path, known: list[str]) -> dict[str, Any]:
    try:
        stored = tomllib.loads(path.read_text())
    except OSError as error:
        raise SystemExit(f"--config: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SystemExit(f"--config: {path} is no valid TOML: {error}") from error
    for key in stored:
        if key.replace("-", "_") not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise SystemExit(f"--config: {path} has the unknown option {key!r}; {hint}")
    return stored


def _as_flag(key: str, value: Any) -> list[str]:
    flag = f"--{key.replace('_', '-')}"
    # Joined, so that a text may begin with a dash.
    return [flag, *map(str, value)] if isinstance(value, list) else [f"{flag}={value}"]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(v) for v in value)}]"
    return json.dumps(str(value), ensure_ascii=False)


def _environment() -> dict[str, Any]:
    packages: dict[str, str | None] = {}
    for name in ("focus_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "xllamacpp", "math-verify"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {"python": platform.python_version(), "platform": platform.platform(), "packages": packages}
