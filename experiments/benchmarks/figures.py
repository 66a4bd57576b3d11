"""Measured numbers beside their targets, and fair turns for those that are compared."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One measured number beside its target; "at least" and "at most" say which side is good."""

    name: str
    value: float
    unit: str
    bound: str = ""
    target: float | None = None

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.bound == "at least" else self.value <= self.target


def show(title: str, figures: Sequence[Figure], config: Any, *, output: Path | None = None) -> None:
    """Print the figures as a table, with the machine they belong to; also write them to a JSON file."""
    console = Console()
    setting = machine()
    table = Table("figure", "measured", "target", "", title=title)
    for figure in figures:
        target = "" if figure.target is None else f"{figure.bound} {figure.target:g}"
        met = {None: "", True: "[green]met", False: "[red]MISSED"}[figure.met]
        table.add_row(figure.name, f"{figure.value:,.2f} {figure.unit}", target, met)
    console.print(table)
    console.print("  ".join(f"{name} {value}" for name, value in setting.items()), highlight=False)
    if output is not None:
        flags = {name: value for name, value in asdict(config).items() if name != "output"}
        rows = [asdict(figure) | {"met": figure.met} for figure in figures]
        report = {"config": flags, "machine": setting, "figures": rows}
        output.write_text(json.dumps(report, indent=1, default=str) + "\n")


def in_turns(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taking turns so that a slow spell of the machine hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, f in contestants.items():
            jax.block_until_ready(f())  # untimed: the memory and the caches of the one before
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(f())
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> dict[str, str]:
    """Hardware and versions the numbers belong to."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    versions = {}
    for name in ("jax", "jaxlib", "flax", "numpy", "numba", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "missing"
    return {"processor": processor, "cores": str(os.cpu_count()), "python": platform.python_version(), **versions}
