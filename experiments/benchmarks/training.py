"""How fast whole GRPO steps are, beside Tunix and TRL: the same checkpoint, the same prompts, the same number of trained tokens.

Each trainer runs by its own interpreter, in a process of its own (`trainers/`), so that no thread of one is there while another
is timed. They take turns. A step samples the replies, scores them, and updates all parameters once, in float32.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.figures import Figure, show

TRAINERS = Path(__file__).parent / "trainers"
Steps = Sequence[Mapping[str, float]]
"""Of one process: seconds `whole`, `sample` (replies and credit), `update`, `cpu` (all threads), and `num_tokens` trained."""


@dataclass(frozen=True)
class Training:
    """Whole GRPO steps beside other trainers; without their interpreters, this package alone."""

    tunix: Path | None = None
    """Python of a virtual environment with google-tunix."""
    trl: Path | None = None
    """Python of a virtual environment with trl."""
    trl_threads: int = os.cpu_count() or 1
    """Threads of torch. Beside other load they wait for each other so long that one alone is faster."""
    num_prompts: int = 4
    num_generations: int = 8
    prompt_length: int = 64
    completion_length: int = 64
    hidden_size: int = 256
    num_layers: int = 4
    vocab_size: int = 4096
    warm_up: int = 2
    """Steps of each process that are not timed; they compile."""
    steps: int = 4
    """Steps of each process that are."""
    rounds: int = 3
    """Processes of each trainer."""
    output: Path | None = None
    """Also write the figures to this JSON file."""


def main(config: Training) -> None:
    """Run the benchmark and print its table."""
    pythons = {"focus_jax": Path(sys.executable), "tunix": config.tunix, "trl": config.trl}
    contestants = {name: python for name, python in pythons.items() if python is not None}
    for python in contestants.values():
        if not python.exists():
            raise SystemExit(f"{python}: expected the interpreter of a virtual environment, such as peers/trl/bin/python")
    processes: dict[str, list[Steps]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(config, Path(folder))
        setting = json.dumps(make_setting(config, folder))
        turns = [name for _ in range(config.rounds) for name in contestants]
        for name in track(turns, description="Training"):
            processes[name].append(run(contestants[name], TRAINERS / f"grpo_{name}.py", setting))
    num_tokens = config.num_prompts * config.num_generations * config.completion_length
    title = f"training: {num_tokens} tokens a step, {config.num_layers} x {config.hidden_size}, float32"
    show(title, figures(processes, num_tokens, config.warm_up), config, output=config.output)


def make_setting(config: Training, folder: str) -> dict[str, Any]:
    """What every trainer is told."""
    shape = (config.warm_up + config.steps, config.num_prompts, config.prompt_length)
    names = ("num_generations", "num_prompts", "prompt_length", "completion_length")
    sizes = {name: value for name, value in asdict(config).items() if name in names}
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, shape).tolist()
    return {"folder": folder, "num_threads": config.trl_threads, "learning_rate": 1e-4, "prompts": prompts, **sizes}


def figures(processes: Mapping[str, Sequence[Steps]], num_tokens: int, warm_up: int) -> list[Figure]:
    """Medians over all timed steps of all processes, and how many times faster than each of the others this package is.

    Raises:
        ValueError: a step trained another number of tokens than it should have.
    """
    trained = {name: {int(step["num_tokens"]) for steps in parts for step in steps} for name, parts in processes.items()}
    if wrong := {name: counts for name, counts in trained.items() if counts != {num_tokens}}:
        raise ValueError(f"expected {num_tokens} trained tokens in every step of every trainer, got {wrong}")

    def median(name: str, what: str) -> float:
        return statistics.median(step[what] for steps in processes[name] for step in steps[warm_up:])

    rows = []
    for name, parts in processes.items():
        rows.append(Figure(f"whole step, {name}", median(name, "whole"), "s"))
        rows.append(Figure(f"replies and their credit, {name}", median(name, "sample"), "s"))
        rows.append(Figure(f"update, {name}", median(name, "update"), "s"))
        rows.append(Figure(f"CPU time of a step, all threads, {name}", median(name, "cpu"), "s"))
        rows.append(Figure(f"trained tokens, {name}", num_tokens / median(name, "whole"), "tokens/s"))
        first = statistics.median(sum(step["whole"] for step in steps[:warm_up]) for steps in parts)
        rows.append(Figure(f"first {warm_up} steps, compilation included, {name}", first, "s"))
    for peer in (name for name in processes if name != "focus_jax"):
        for what, label in (("whole", "whole step"), ("update", "update"), ("cpu", "CPU time of a step")):
            target = ("at least", 1.5) if what == "whole" else ()
            rows.append(Figure(f"{label}, {peer} / focus_jax", median(peer, what) / median("focus_jax", what), "x", *target))
    return rows


def run(python: Path, script: Path, setting: str) -> Steps:
    """The steps of one process."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # What `keep_freed_memory` does for our scripts, for every trainer.
    environment |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "2147483647", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
    process = subprocess.run([python, script, setting], env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{script.name} failed:\n{process.stderr[-4000:]}")
    steps: Steps = json.loads(process.stdout.splitlines()[-1])
    return steps


def save_checkpoint(config: Training, folder: Path) -> None:
    """A random Qwen3 with a tokenizer whose words are t0, t1, ...; replies never end, because the model has no id for that."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    model = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.hidden_size // 64,
        num_key_value_heads=max(config.hidden_size // 128, 1),
        head_dim=64,
        max_position_embeddings=config.prompt_length + config.completion_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(model).save_pretrained(folder)
    words = {f"t{i}": i for i in range(config.vocab_size)} | {"<end>": config.vocab_size}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", padding_side="left")
    fast.save_pretrained(folder)
