"""GRPO steps of TRL, timed: `python grpo_trl.py JSON`, by an interpreter that has TRL; see `training.py`.

Natural settings for a CPU: the whole batch in one pass, no gradient checkpointing, no reference model, PyTorch's own attention,
transformers' `generate` with its dynamic cache.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main(setting: dict[str, Any]) -> None:
    """Train, and print the seconds of every step."""
    torch.set_num_threads(setting["num_threads"])
    steps: list[dict[str, float]] = []

    class Timed(GRPOTrainer):
        """The trainer, with a clock around what comes before the update."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            steps.append({"sample": time.perf_counter() - start, "num_tokens": int(batch["completion_mask"].sum())})
            return batch

    class Clock(TrainerCallback):
        """Whole steps, from the end of one to the end of the next."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.last = time.perf_counter(), time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            now = time.perf_counter(), time.process_time()
            steps[-1]["whole"], steps[-1]["cpu"] = now[0] - self.last[0], now[1] - self.last[1]
            steps[-1]["update"] = steps[-1]["whole"] - steps[-1]["sample"]
            self.last = now

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(np.mean(np.array(ids) % 2 == 0)) for ids in completion_ids]

    texts = [" ".join(f"t{i}" for i in prompt) for prompts in setting["prompts"] for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=setting["num_prompts"] * setting["num_generations"],
            gradient_accumulation_steps=1,
            num_generations=setting["num_generations"],
            max_completion_length=setting["completion_length"],
            max_steps=len(setting["prompts"]),
            learning_rate=setting["learning_rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            temperature=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="grpo",
            gradient_checkpointing=False,
            shuffle_dataset=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
            dataloader_pin_memory=False,
        )
        trainer = Timed(
            model=setting["folder"],
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=AutoTokenizer.from_pretrained(setting["folder"]),
            callbacks=[Clock()],
        )
        before = [weight.detach().clone() for weight in trainer.model.parameters()]
        trainer.train()
    after = trainer.model.parameters()
    assert all(weight.dtype == torch.float32 for weight in before)
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True)), "weights that were not trained"
    print(json.dumps(steps))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
