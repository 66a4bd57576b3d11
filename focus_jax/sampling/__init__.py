"""What generates: samplers that answer prompts of token ids with sampled ids and their log-probabilities.

Scripted replies need nothing; the HTTP samplers need `pip install 'focus_jax[sampling]'` and are imported from their
own modules (`focus_jax.sampling.openai`, `focus_jax.sampling.llama_cpp`).
"""

from focus_jax.agents.sampler import ContextLengthError, Sample, Sampler, SamplerError, SamplingParams
from focus_jax.sampling.scripted import Reply, ScriptedSampler
from focus_jax.sampling.tokenizers import ByteTokenizer, HFTokenizer

__all__ = [
    "ByteTokenizer",
    "ContextLengthError",
    "HFTokenizer",
    "Reply",
    "Sample",
    "Sampler",
    "SamplerError",
    "SamplingParams",
    "ScriptedSampler",
]
