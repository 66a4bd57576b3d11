"""GRPO steps of this package, timed: `python grpo_focus_jax.py JSON`, with the JSON that `training.py` writes.

The prompts of a group are read once, by continuous batching; the replies become segment records, these batches, these an
update. After it the new weights are published to where the next replies come from.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from focus_jax.advantages import grpo_advantages
from focus_jax.collection import SegmentRecord
from focus_jax.models import ContinuousBatch, Request, load_hf
from focus_jax.models.engine import Reply
from focus_jax.training import ActorLoss, actor_batches, make_optimizer, update


def main(setting: dict[str, Any]) -> None:
    """Train, and print the seconds of every step."""
    actor = load_hf(setting["folder"])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(setting["learning_rate"], weight_decay=0.0))
    optimizer = make_optimizer(actor, tx)
    length = setting["prompt_length"] + setting["completion_length"]
    num_replies = setting["num_prompts"] * setting["num_generations"]
    slots = ContinuousBatch(
        actor, num_slots=num_replies, context_length=length, num_steps=setting["completion_length"], prefix_bytes=2**26
    )
    loss = ActorLoss(clip=0.2)
    before = jax.tree.map(jnp.copy, nnx.state(actor, nnx.Param))
    steps = []
    for number, prompts in enumerate(setting["prompts"]):
        start, cpu = time.perf_counter(), time.process_time()
        replies = list(sample(slots, prompts, setting, number))
        records = group_records(prompts, replies, number)
        sampled = time.perf_counter()
        packed = actor_batches(records, weighting="token", tokens_per_batch=num_replies * length, buckets=(length,))
        actor, optimizer, report = update(actor, optimizer, packed, loss)
        metrics = report.fetch()
        slots.publish(actor)
        jax.block_until_ready(slots.model)
        end = time.perf_counter()
        step = {"whole": end - start, "sample": sampled - start, "update": end - sampled, "cpu": time.process_time() - cpu}
        steps.append(step | {"num_tokens": int(metrics["num_tokens"])})
    same = jax.tree.map(lambda a, b: a.dtype == jnp.float32 and bool((a == b).all()), before, nnx.state(actor, nnx.Param))
    assert not any(jax.tree.leaves(same)), "weights that were not trained"
    print(json.dumps(steps))


def sample(
    slots: ContinuousBatch, prompts: Sequence[Sequence[int]], setting: dict[str, Any], number: int
) -> Iterator[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of the replies, prompt by prompt."""
    num_generations, max_tokens = setting["num_generations"], setting["completion_length"]
    handles = [
        slots.submit(Request(np.array(prompt, np.int32), max_tokens, seed=(number * len(prompts) + i) * num_generations + j))
        for i, prompt in enumerate(prompts)
        for j in range(num_generations)
    ]
    replies: dict[int, Reply] = {}
    while slots.num_waiting or slots.num_active:
        replies |= slots.step()
    for handle in handles:
        yield replies[handle].ids, replies[handle].logprobs


def reward(ids: Sequence[int]) -> float:
    """Share of the even ids."""
    return float(np.mean(np.array(ids) % 2 == 0))


def group_records(
    prompts: Sequence[Sequence[int]], replies: Sequence[tuple[list[int], list[float]]], number: int
) -> list[SegmentRecord]:
    """Every reply as a segment with its GRPO advantage."""
    returns = np.array([reward(ids) for ids, _ in replies], np.float32).reshape(len(prompts), -1)
    advantages = np.asarray(grpo_advantages(returns)).reshape(-1)
    num_generations = returns.shape[1]
    return [
        SegmentRecord(
            problem=f"p{i // num_generations}",
            node=i % num_generations + 1,
            prompt_ids=np.array(prompts[i // num_generations], np.int32),
            token_ids=np.array(ids, np.int32),
            generated=np.ones(len(ids), bool),
            logprobs=np.array(logprobs, np.float32),
            versions=np.full(len(ids), number),
            advantage=float(advantages[i]),
        )
        for i, (ids, logprobs) in enumerate(replies)
    ]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
