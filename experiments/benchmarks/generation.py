"""How fast replies are generated, beside transformers' `generate` with the same weights, and what a shared prefix saves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.figures import Figure, in_turns
from focus_jax.models import ContinuousBatch, Decoder, Request, for_decoding, generate


def generation_figures(name: str, model: Decoder, oracle: Any, *, rounds: int = 2) -> list[Figure]:
    """Speed of both, first-call time, and the gain of reuse, with their targets."""
    model = for_decoding(model)
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (8, 64))
    start = time.perf_counter()
    generate(model, prompts, max_tokens=64, seeds=range(8))
    first = time.perf_counter() - start
    speed = generation_speed(model, oracle, rounds=rounds)
    figures = [Figure(f"{name}, generation of 8, {who}", value, "tokens/s") for who, value in speed.items()]
    ratio = speed["focus_jax"] / max(value for who, value in speed.items() if who != "focus_jax")
    gain = prefix_gain(model, rounds=rounds)
    return [
        *figures,
        Figure(f"{name}, generation of 8, focus_jax / the faster of transformers", ratio, "x", "at least", 2.0),
        Figure(f"{name}, generation of 8, first call, compilation included", first, "s"),
        Figure(f"{name}, four continuations of 512 tokens, reuse / none", gain, "x", "at least", 2.0),
    ]


def generation_speed(
    model: Decoder, oracle: Any, *, batch: int = 8, length: int = 64, max_tokens: int = 64, rounds: int = 2
) -> dict[str, float]:
    """Generated tokens per second of `generate` here and in transformers: `batch` prompts of `length` random tokens.

    Both sample at temperature 1 from the whole vocabulary and never stop early. Reading the prompts is counted in both.
    torch is given one thread and then every core: beside the slightest other load, its threads wait for each other so long
    that one alone is several times faster.
    """
    import torch

    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, length))
    ids = torch.tensor(prompts)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None, "pad_token_id": 0}

    def theirs(num_threads: int) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            with torch.inference_mode():
                reply = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **sampling)
        finally:
            torch.set_num_threads(before)
        assert reply.shape[1] == length + max_tokens
        return reply

    model = for_decoding(model)
    contestants: dict[str, Callable[[], Any]] = {
        "focus_jax": lambda: generate(model, prompts, max_tokens=max_tokens, seeds=range(batch)).ids,
        **{f"transformers, {n} threads": partial(theirs, n) for n in sorted({1, os.cpu_count() or 1})},
    }
    times = in_turns(contestants, rounds)
    return {who: batch * max_tokens / seconds for who, seconds in times.items()}


def prefix_gain(model: Decoder, *, length: int = 512, max_tokens: int = 16, rounds: int = 2) -> float:
    """How many times faster four continuations of a state of `length` tokens are when it is read once."""
    model = for_decoding(model)
    state = np.random.default_rng(0).integers(0, model.config.vocab_size, length).astype(np.int32)

    def continue_four(prefix_bytes: int) -> Callable[[], None]:
        batch = ContinuousBatch(model, num_slots=4, context_length=length + max_tokens, prefix_bytes=prefix_bytes)

        def run() -> None:
            batch.prefixes.clear()
            for seed in range(4):
                batch.submit(Request(state, max_tokens, seed))
            while batch.num_waiting or batch.num_active:
                batch.step()

        return run

    times = in_turns({"without": continue_four(0), "with": continue_four(2**30)}, rounds)
    return times["without"] / times["with"]
