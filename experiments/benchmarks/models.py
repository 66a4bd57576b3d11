"""How fast the Flax models train and generate, beside transformers and torch with the same weights."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.figures import Figure, in_turns, show
from benchmarks.generation import generation_figures
from benchmarks.scoring_memory import scoring_memory
from focus_jax.models import Decoder, load_hf, score


@dataclass(frozen=True)
class Models:
    """Training speed, generation and memory of the models; ratios are of medians over interleaved rounds."""

    smollm2: Path = Path("runs/smollm2")
    """Folder with SmolLM2-135M-Instruct in the hub's form; see docs/models.md for the line that makes it."""
    batch: int = 4
    length: int = 128
    rounds: int = 3
    output: Path | None = None
    """Also write the figures to this JSON file."""


def main(config: Models) -> None:
    """Run the benchmark and print its table."""
    if not config.smollm2.is_dir():
        raise SystemExit(f"{config.smollm2}: no such folder; docs/models.md has the lines that make it, or give --smollm2 FOLDER")
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = {"Qwen3 4 x 512": small_qwen3(Path(folder)), "SmolLM2-135M": config.smollm2}
        for name, checkpoint in checkpoints.items():
            model, oracle = load_hf(checkpoint), load_oracle(checkpoint)
            figures += training_figures(name, model, oracle, config)
            figures += generation_figures(name, model, oracle)
    figures += memory_figures()
    show(f"models: {config.batch} x {config.length} tokens, float32", figures, config, output=config.output)


def training_figures(name: str, model: Decoder, oracle: Any, config: Models) -> list[Figure]:
    """Tokens per second of the mean token loss with the gradients of all parameters."""
    import torch

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, (config.batch, config.length))
    ids, labels = jnp.asarray(tokens), torch.tensor(tokens)

    @jax.jit
    def ours(model: Decoder, ids: jax.Array) -> Any:
        def loss(model: Decoder) -> jax.Array:
            return -jnp.mean(score(model, ids).logprobs[:, 1:])

        return jax.value_and_grad(loss)(model)

    def theirs() -> float:
        oracle.zero_grad()
        loss = oracle(labels, labels=labels).loss
        loss.backward()
        return loss.item()

    np.testing.assert_allclose(ours(model, ids)[0], theirs(), rtol=1e-4)
    contestants: dict[str, Callable[[], Any]] = {"focus_jax": lambda: ours(model, ids), "torch": theirs}
    times = in_turns(contestants, config.rounds)
    speed = {contestant: tokens.size / seconds for contestant, seconds in times.items()}
    return [
        *(Figure(f"{name}, forward + backward, {who}", value, "tokens/s") for who, value in speed.items()),
        Figure(f"{name}, forward + backward, focus_jax / torch", speed["focus_jax"] / speed["torch"], "x", "at least", 1.0),
    ]


def memory_figures() -> list[Figure]:
    """Temporary memory of a loss with its gradient, 4,096 tokens and 248,320 entries of the vocabulary."""
    shares = {name: value for name, value in scoring_memory().items() if name.endswith("share, %")}
    return [Figure(f"scoring, {name}", value, "of dense", "at most", 2.0) for name, value in shares.items()]


def small_qwen3(folder: Path) -> Path:
    """A random Qwen3 of 4 layers and hidden size 512, saved as a checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32768,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load_oracle(folder: Path) -> Any:
    """The same checkpoint in transformers, float32, on all cores."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
