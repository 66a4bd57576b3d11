"""GRPO steps of Tunix, timed: `python grpo_tunix.py JSON`, by an interpreter that has Tunix; see `training.py`.

Natural settings for a CPU: its own Qwen3 without rematerialisation, the vanilla rollout with a cache just long enough, the
sampler's short cut for the whole vocabulary (`top_p=1`), the whole batch in one pass, no reference model.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig


def main(setting: dict[str, Any]) -> None:
    """Train, and print the seconds of every step."""
    config = json.loads((Path(setting["folder"]) / "config.json").read_text())
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model_config = qwen3.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        use_tied_embedding=True,
    )
    with mesh:
        actor = params.create_model_from_safe_tensors(setting["folder"], model_config, mesh, dtype=jnp.float32)
    tokenizer = AutoTokenizer.from_pretrained(setting["folder"])
    length = setting["prompt_length"] + setting["completion_length"]
    cluster = rl_cluster.RLCluster(
        actor=actor,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: mesh for role in (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)},
            rollout_engine="vanilla",
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(1.0), optax.adamw(setting["learning_rate"], weight_decay=0.0)
                ),
                max_steps=len(setting["prompts"]),
                eval_every_n_steps=10**6,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=setting["completion_length"],
                max_prompt_length=setting["prompt_length"],
                kv_cache_size=length,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=[tokenizer.eos_token_id],
            ),
        ),
    )
    steps: list[dict[str, float]] = []
    starts: list[tuple[float, float]] = []

    class Timed(GRPOLearner):
        """The learner, with a clock around what comes before the update."""

        def _generate_and_compute_advantage(self, *args: Any, **kwargs: Any) -> Any:
            jax.block_until_ready(nnx.state(self.rl_cluster.actor_trainer.model))  # the update before ends here
            starts.append((time.perf_counter(), time.process_time()))
            example = jax.block_until_ready(super()._generate_and_compute_advantage(*args, **kwargs))
            steps.append({"sample": time.perf_counter() - starts[-1][0], "num_tokens": int(example.completion_mask.sum())})
            return example

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(np.mean([int(word[1:]) % 2 == 0 for word in text.split()])) for text in completions]

    learner = Timed(
        rl_cluster=cluster,
        reward_fns=lambda prompts, completions, **kwargs: reward(completions),
        algo_config=GRPOConfig(num_generations=setting["num_generations"], num_iterations=1, beta=0.0, epsilon=0.2),
    )
    before = jax.tree.map(jnp.copy, nnx.state(cluster.actor_trainer.model, nnx.Param))
    texts = [[" ".join(f"t{i}" for i in prompt) for prompt in prompts] for prompts in setting["prompts"]]
    learner.train([{"prompts": np.array(batch)} for batch in texts])
    after = jax.block_until_ready(nnx.state(cluster.actor_trainer.model, nnx.Param))
    starts.append((time.perf_counter(), time.process_time()))
    for step, start, end in zip(steps, starts, starts[1:], strict=False):
        step["whole"], step["cpu"] = end[0] - start[0], end[1] - start[1]
        step["update"] = step["whole"] - step["sample"]
    same = jax.tree.map(lambda a, b: a.dtype == jnp.float32 and bool((a == b).all()), before, after)
    assert not any(jax.tree.leaves(same)), "weights that were not trained"
    print(json.dumps(steps))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
