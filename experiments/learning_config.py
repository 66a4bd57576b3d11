"""Options of the learning experiment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from focus_jax.tasks.detour import LEVELS


@dataclass(frozen=True)
class Config:
    """One method on many seeds of `detour`."""

    method: Literal["focus", "grpo", "vineppo", "actor-critic"] = "focus"
    allocation: Literal["refinement", "uniform", "root"] = "refinement"
    """Where FOCUS spends what its first root rollouts leave."""
    leave_one_out: bool = False
    exact: bool = False
    """Credit by the exact values, which no method knows: how far better credit could take it."""
    kappa: float = 1.0
    num_roots: int = 2
    critic: Literal["partial", "full"] = "partial"
    """What it reads beside the replies left: the page, or right and wrong hops too."""
    level: str = "long"
    num_seeds: int = 10
    first_seed: int = 0
    tokens: int = 100_000
    """Replies for each seed; each is one token."""
    num_problems: int = 8
    rollouts: int = 4
    """Budget of a problem, in episodes of full length."""
    segment: int = 4
    """Replies between branch points."""
    epochs: int = 4
    critic_epochs: int = 8
    actor_lr: float = 1e-3
    critic_lr: float = 3e-3
    warmup: int = 2
    """Rounds that train the critic alone, on outcomes; their replies count."""
    hidden: int = 32
    layers: int = 2
    success: float = 0.075
    """Share of searches solved after the warm start."""
    noise: float = 0.6
    """Share of replies at random in its demonstrations."""
    start: Path | None = None
    """File with the policies of a warm start; one that is not there yet is written."""
    run_folder: Path = Path("runs/learning")


def check(config: Config) -> None:
    """Refuse what cannot be run."""
    if config.level not in LEVELS:
        raise SystemExit(f"--level: expected one of {', '.join(LEVELS)}, got {config.level}")
    for name, least in _LEAST.items():
        if (value := getattr(config, name)) < least:
            raise SystemExit(f"--{name.replace('_', '-')}: expected at least {least}, got {value}")
    for name in ("kappa", "actor_lr", "critic_lr"):
        if not 0 < (value := getattr(config, name)) < float("inf"):
            raise SystemExit(f"--{name.replace('_', '-')}: expected a number above 0, got {value}")
    for name in ("success", "noise"):
        if not 0 <= (value := getattr(config, name)) <= 1:
            raise SystemExit(f"--{name}: expected a share from 0 to 1, got {value}")
    if config.method != "focus" and (config.allocation != "refinement" or config.leave_one_out):
        raise SystemExit(f"--allocation and --leave-one-out are FOCUS's; {config.method} has none")


_LEAST = {
    "num_roots": 1,
    "num_seeds": 1,
    "first_seed": 0,
    "tokens": 1,
    "num_problems": 1,
    "rollouts": 1,
    "segment": 1,
    "epochs": 1,
    "critic_epochs": 1,
    "warmup": 0,
    "layers": 1,
    "hidden": 4,
}
