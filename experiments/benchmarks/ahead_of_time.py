"""Compile the full Qwen3.5-9B's actor and critic steps for meshes of fake devices; nothing of the model is allocated."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, show

# The published sizes, as a config.json says them.
QWEN3_5_9B = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
GIB = 2**30


@dataclass(frozen=True)
class AheadOfTime:
    """Lower and compile the steps of Qwen3.5-9B on fake CPU devices; report bytes per device and seconds."""

    fsdp: tuple[int, ...] = (4, 16)
    """Sizes of the axis that splits parameters and rows."""
    tensor: tuple[int, ...] = (2, 4)
    """Sizes of the axis that splits heads, width and vocabulary, one for each of `fsdp`."""
    length: int = 32768
    """Tokens in a row; every group of devices along `fsdp` has one row."""
    layers: int = 32
    """A multiple of 4; fewer compile a part of the model."""
    steps: tuple[str, ...] = ("actor", "critic")
    output: Path | None = None
    """Also write the figures to this JSON file."""


def main(config: AheadOfTime) -> None:
    """Compile every step for every mesh, each in a process of its own, and print the table."""
    figures = []
    for fsdp, tensor in zip(config.fsdp, config.tensor, strict=True):
        for step in config.steps:
            case = {"fsdp": fsdp, "tensor": tensor, "step": step, "length": config.length, "layers": config.layers}
            name = f"{step}, {fsdp} x {tensor} devices"
            for figure, (value, unit) in run_apart(case).items():
                figures.append(Figure(f"{name}: {figure}", value, unit))
    show("Qwen3.5-9B, ahead of time", figures, config, output=config.output)


def run_apart(case: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """`compile_step` in a process with as many fake devices as it needs."""
    flags = [
        f"--xla_force_host_platform_device_count={case['fsdp'] * case['tensor']}",
        # As accelerators do: order operations by the memory they need, and recompute a layer no sooner than its gradient is due.
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
        "--xla_disable_hlo_passes=cse_barrier_expander",
    ]
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "benchmarks.ahead_of_time", json.dumps(case)]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def compile_step(fsdp: int, tensor: int, step: str, length: int, layers: int) -> dict[str, tuple[float, str]]:
    """Lower and compile one step; bytes are those of one device."""
    import jax
    import jax.numpy as jnp
    import optax

    from focus_jax.models import Decoder, ModelConfig, ValueModel, make_mesh, without_head
    from focus_jax.models.sharding import abstract
    from focus_jax.training import ActorBatch, CriticBatch, actor_step, critic_step, make_optimizer

    shape = ModelConfig.from_hf({**QWEN3_5_9B, "num_hidden_layers": layers})

    def actor() -> Decoder:
        return Decoder(shape, dtype=jnp.bfloat16, remat=jax.checkpoint_policies.nothing_saveable, key=jax.random.key(0))

    def critic() -> ValueModel:
        return ValueModel(without_head(actor()))

    build: Callable[[], Any] = {"actor": actor, "critic": critic}[step]
    batch_type: Any = {"actor": ActorBatch, "critic": CriticBatch}[step]
    function: Any = {"actor": actor_step, "critic": critic_step}[step]
    with jax.set_mesh(make_mesh(fsdp, tensor)):
        model = abstract(jax.eval_shape(build))
        optimizer = abstract(jax.eval_shape(lambda model: make_optimizer(model, optax.adamw(1e-6, 0.9, 0.95)), model))
        fields = {"tokens": jnp.int32, "segment_ids": jnp.int32, "mask": jnp.bool_}
        needed = [name for name, field in batch_type.__dataclass_fields__.items() if field.default is MISSING]
        fields |= {name: jnp.float32 for name in needed if name not in fields}
        rows = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.sharding.PartitionSpec("fsdp"))
        batch = batch_type(**{k: jax.ShapeDtypeStruct((fsdp, length), v, sharding=rows) for k, v in fields.items()})
        start = time.perf_counter()
        lowered = function.lower(model, optimizer, batch)
        middle, spent = time.perf_counter(), time.process_time()
        compiled = lowered.compile()
        end, spent = time.perf_counter(), time.process_time() - spent
    memory = compiled.memory_analysis()
    return {
        "parameters": (bytes_on_one_device(model) / GIB, "GiB"),
        "optimizer": (bytes_on_one_device(optimizer) / GIB, "GiB"),
        "arguments": (memory.argument_size_in_bytes / GIB, "GiB"),
        "results not in place of arguments": ((memory.output_size_in_bytes - memory.alias_size_in_bytes) / GIB, "GiB"),
        "gradients, activations, gathered weights": (memory.temp_size_in_bytes / GIB, "GiB"),
        "tracing and lowering": (middle - start, "s"),
        "compilation": (end - middle, "s"),
        "compilation, CPU time": (spent, "s"),
    }


def bytes_on_one_device(tree: Any) -> int:
    """Of abstract arrays with shardings."""
    import jax

    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


if __name__ == "__main__":
    print(json.dumps(compile_step(**json.loads(sys.argv[1]))))
