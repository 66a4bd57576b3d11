"""One update of a real language model on a round it sampled itself, through a real server."""

import asyncio

import jax
import numpy as np
import optax
import pytest
from checkpoints import smollm2_folder
from flax import nnx

from focus_jax.agents import Agent, ChatRenderer, SamplingParams
from focus_jax.collection import (
    Budget,
    ConstantCritic,
    Pass,
    RootRollouts,
    ValueRefinement,
    collect,
    focus_credit,
    training_records,
)
from focus_jax.models import add_lora, load_hf
from focus_jax.sampling.llama_cpp import LlamaCppSampler, smollm2_path
from focus_jax.tasks.grading import Grader
from focus_jax.tasks.math import FINAL_REQUEST, STOP, MathEnvironment, builtin_problems
from focus_jax.training import ActorLoss, actor_batches, make_optimizer, update

TEMPERATURE = 0.7


async def small_round(num_problems=3):
    with Grader(num_workers=1) as grader, LlamaCppSampler.start(smollm2_path(), num_parallel=4) as sampler:
        agent = Agent(
            sampler,
            ChatRenderer(sampler.tokenizer),
            SamplingParams(max_tokens=32, temperature=TEMPERATURE, stop=STOP),
            max_turns=4,
            max_tokens=128,
            final_request=FINAL_REQUEST,
            final_tokens=32,
        )
        passes = [Pass(RootRollouts(2), Budget(continuations=2)), Pass(ValueRefinement(), Budget(continuations=2))]
        problems = {p.id: p for p in builtin_problems()[:num_problems]}
        return await collect(agent, ConstantCritic(0.5), problems, passes, make_environment=lambda: MathEnvironment(grader))


@pytest.mark.slow
def test_credited_segments_become_more_likely_and_blamed_ones_less():
    round_ = asyncio.run(small_round())
    assert not round_.errors
    trees = round_.grown
    records, _ = training_records(trees, focus_credit(trees))
    packed = actor_batches(records, tokens_per_batch=1024, buckets=(512, 1024))
    loss = ActorLoss(temperature=TEMPERATURE)
    model = add_lora(load_hf(smollm2_folder(), remat=jax.checkpoint_policies.nothing_saveable), rank=8, key=jax.random.key(0))
    packed = packed.map(lambda batch: loss.add_old_logprobs(batch, model))
    model, _, report = update(model, make_optimizer(model, optax.adam(3e-4), nnx.LoRAParam), packed, loss)
    metrics = report.fetch()
    print(f"{len(records)} segments, {packed.num_tokens} tokens in {len(packed.batches)} batches, {packed.padding:.0%} padding")
    print({name: round(value, 4) for name, value in metrics.items()})
    assert metrics["num_tokens"] == round_.tokens()
    assert abs(metrics["behaviour_kl"]) < 0.05  # a server with 4-bit weights and 8-bit activations
    assert metrics["clip_share"] == 0

    change = {}
    for name, sign in (("credited", 1), ("blamed", -1)):
        changes, weights = [], []
        for batch in packed.batches:
            where = batch.mask & (np.sign(batch.advantages) == sign)
            after = loss.add_old_logprobs(batch, model).old_logprobs
            changes.append(np.asarray(after - batch.old_logprobs)[where])
            weights.append(batch.weights[where])
        change[name] = np.average(np.concatenate(changes), weights=np.concatenate(weights))
    print("mean change of a token's log-probability:", {name: round(float(value), 4) for name, value in change.items()})
    assert change["credited"] > 0.001
    assert change["blamed"] < -0.001
