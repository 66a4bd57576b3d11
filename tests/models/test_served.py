"""Our log-probabilities beside those of a real server, for the same ids of the same weights."""

import asyncio

import gguf
import jax
import numpy as np
import pytest
from checkpoints import smollm2_folder
from gguf.quants import dequantize

from focus_jax.agents import SamplingParams
from focus_jax.models import load_hf, score
from focus_jax.sampling.llama_cpp import LlamaCppSampler, smollm2_path


def write_float32(source, target):
    """The GGUF file with every tensor dequantised, and everything else as it is."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            writer.add_key_value(
                field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_smollm2s_logprobs_are_those_of_llama_cpp(tmp_path):
    write_float32(smollm2_path(), tmp_path / "smollm2-f32.gguf")
    prompts = ("The capital of France is", "Q: What is 17 + 25?\nA:")

    async def collect(sampler):
        for seed, prompt in enumerate(prompts):
            ids = np.array(sampler.tokenizer.encode(prompt), np.int32)
            yield ids, await sampler.sample(ids, SamplingParams(max_tokens=24, temperature=1.0, seed=seed))

    async def replies(sampler):
        return [pair async for pair in collect(sampler)]

    with LlamaCppSampler.start(
        tmp_path / "smollm2-f32.gguf", context_length=256, num_parallel=1, exact_attention=True
    ) as sampler:
        samples = asyncio.run(replies(sampler))

    model = load_hf(smollm2_folder())
    scorer = jax.jit(lambda model, tokens, segments: score(model, tokens, segments).logprobs)
    for ids, sample in samples:
        tokens, segments = np.zeros((1, 64), np.int32), np.zeros((1, 64), np.int32)
        total = len(ids) + len(sample.ids)
        tokens[0, :total], segments[0, :total] = np.concatenate([ids, sample.ids]), 1
        ours = np.asarray(scorer(model, tokens, segments))[0, len(ids) : total]
        assert len(sample.ids) > 5
        np.testing.assert_allclose(ours, sample.logprobs, atol=1e-3)
