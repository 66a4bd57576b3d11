"""The options of `train.py`, and which numbers mean nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Config:
    """How a run trains."""

    method: Literal["focus", "grpo", "vineppo"] = "focus"
    task: Literal["detour", "math"] = "detour"
    level: str = "short"
    """Of detour: short, medium, long or longest."""
    data: Path | None = None
    """Of math: JSONL file of problems (MATH-500 or GSM8K format) instead of the built-in ones."""
    num_examples: int = 4
    """Of math: solved examples in the opening."""
    step_tokens: int = 64
    """Of math: most tokens of one step of a solution."""
    max_steps: int = 8
    """Of math."""
    branch_every: int = 4
    """Of detour: replies from one branch point to the next."""

    model: Path | None = None
    """Hugging Face folder of the policy, and of the critic's backbone; a tiny random decoder where there is none."""
    lora_rank: int = 0
    """Train adapters of this rank on a model's weights; 0 trains all of them."""
    hidden: int = 32
    """Width of a tiny decoder."""
    layers: int = 2
    imitation_steps: int = 300
    """Of detour with a tiny decoder: updates on an erring expert's replies before the first round."""
    imitation_noise: float = 0.3
    """How often the expert replies at random."""

    rounds: int = 40
    num_problems: int = 32
    """Problems of a round, over all processes."""
    budget: int = 96
    """Generated tokens per problem and round; what a round leaves is added to the next one's, at most once over."""
    num_roots: int = 2
    """Of focus: independent rollouts before value refinement."""
    kappa: float = 1.0
    """Weight of the critic's prediction, in observations."""
    leave_one_out: bool = False
    """Judge each segment against a baseline without its own outcome."""
    lam: float = 0.0
    """How much of the following segments' credit flows back."""
    temperature: float = 1.0
    """Of the policy while it collects."""
    num_workers: int = 64
    """Continuations in flight. With 1, a run that was killed goes on bit for bit."""
    prompt_cache: int = 0
    """MiB for what prompts have in common; 0 keeps replies bit for bit the same whatever was asked before."""
    overlap: bool = False
    """Collect the next round while this one is learned from: its policy is then one update old."""

    epochs: int = 4
    """Updates on the batch of a round."""
    warmup_rounds: int = 2
    """Of focus: first rounds that train the critic alone, on outcomes."""
    actor_lr: float = 1e-3
    critic_lr: float = 3e-3
    schedule: Literal["constant", "cosine"] = "constant"
    """Of both learning rates."""
    lr_warmup: int = 0
    """Updates over which the learning rates rise from 0."""
    clip: float = 0.2
    kl: float = 0.0
    """Weight of the penalty for leaving the initial policy."""
    weighting: Literal["segment", "token"] = "segment"
    tokens_per_batch: int = 4096
    """Positions in a micro-batch, of every process."""
    fsdp: int = 1
    """Devices that parameters and rows are split over."""
    tensor: int = 1
    """Devices that heads and the MLP's width are split over."""

    evaluate_every: int = 4
    """Rounds; and before the first."""
    evaluate_problems: int = 64
    """Held-out problems."""
    checkpoint_every: int = 10
    """Rounds."""
    keep: int = 3
    """Checkpoints."""
    seed: int = 0
    run_folder: Path = Path("runs/train")
    """The same command again goes on where it stopped."""

    coordinator: str | None = None
    """Address of the first process, host:port, where there are several."""
    num_processes: int = 1
    process_id: int = 0


FREE = ("run_folder", "num_workers", "keep", "coordinator", "num_processes", "process_id")
"""Options that may change when a run is gone on with."""


def check(config: Config) -> None:
    """Refuse what means nothing, by the name of its option, before anything is started."""
    positive: tuple[str, ...] = (
        "step_tokens",
        "max_steps",
        "branch_every",
        "hidden",
        "layers",
        "rounds",
        "num_problems",
        "budget",
        "num_roots",
    )
    positive += ("num_workers", "epochs", "tokens_per_batch", "fsdp", "tensor", "evaluate_every", "evaluate_problems")
    positive += ("checkpoint_every", "keep", "num_processes")
    natural = ("num_examples", "lora_rank", "imitation_steps", "prompt_cache", "warmup_rounds", "lr_warmup", "seed", "process_id")
    for names, least in ((positive, 1), (natural, 0)):
        for name in names:
            _expect(config, name, getattr(config, name) >= least, f"at least {least}")
    for name in ("kappa", "temperature", "actor_lr", "critic_lr", "clip"):
        _expect(config, name, 0 < getattr(config, name) < math.inf, "a finite number above 0")
    for name in ("lam", "imitation_noise"):
        _expect(config, name, 0 <= getattr(config, name) <= 1, "a number in [0, 1]")
    _expect(config, "kl", 0 <= config.kl < math.inf, "a finite number of at least 0")
    _expect(config, "lam", not (config.leave_one_out and config.lam), "0 with --leave-one-out")
    _expect(config, "lora_rank", not (config.lora_rank and config.model is None), "0 without --model")
    _expect(config, "data", config.data is None or config.task == "math", "none with --task detour")
    _expect(
        config,
        "method",
        config.method == "focus" or not (config.lam or config.leave_one_out),
        "focus with --lam or --leave-one-out",
    )
    _expect(config, "process_id", config.process_id < config.num_processes, "one below --num-processes")
    several = config.num_processes > 1
    _expect(config, "coordinator", (config.coordinator is not None) == several, "an address exactly with several processes")
    _expect(config, "num_problems", config.num_problems >= config.num_processes, "at least one for every process")
    _expect(config, "fsdp", config.fsdp % config.num_processes == 0, "a multiple of --num-processes")
    _expect(config, "overlap", not (several and config.overlap), "False with several processes")


def _expect(config: Config, name: str, holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"--{name.replace('_', '-')}: expected {what}, got {getattr(config, name)}")
