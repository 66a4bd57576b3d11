"""A sampler for any OpenAI-compatible server that takes and gives token ids: vLLM, llama.cpp."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from focus_jax.agents.sampler import ContextLengthError, Sample, SamplerError, SamplingParams
from focus_jax.agents.tokenizer import Tokenizer
from focus_jax.sampling.connect import check_tokenizer, choose_model, connect_engine
from focus_jax.sampling.engine import Engine
from focus_jax.sampling.served_tokenizer import ServedTokenizer
from focus_jax.sampling.transport import JsonClient, Limits, read_api_key, read_base_url

_CONNECTING = Limits(deadline=120.0, max_retries=1, backoff=0.2)


class OpenAISampler:
    """A `Sampler` over HTTP. Make one with `await OpenAISampler.connect(...)`; many calls may be in flight.

    What a sample holds: `ids` exactly as sampled; `logprobs` under the distribution sampled from: at temperature T
    those of logits / T, at temperature 0 (greedy) those of temperature 1, with `top_p < 1` renormalised over the nucleus
    (do not train on such samples: the trainer's distribution has no nucleus). A log-probability the server gives as null,
    NaN, infinite or -9999 is NaN. One the server leaves out is asked for again (llama.cpp) or the sample is refused.
    Seeds are passed on as they are: the same seed, prompt and server state give the same sample while it is the only
    request in flight; a retried call keeps its seed.

    Attributes:
        context_length: most tokens (prompt + reply) one call can hold.
        tokenizer: the served model's tokenizer.
        model: name of the served model.
        policy_version: version of the weights that samples are tagged with.
    """

    def __init__(
        self, client: JsonClient, engine: Engine, tokenizer: Tokenizer, *, policy_version: int = 0, owns_tokenizer: bool = False
    ):
        self.context_length = engine.context_length
        self.model = engine.model
        self.tokenizer = tokenizer
        self.policy_version = policy_version
        self._client = client
        self._engine = engine
        self._owns_tokenizer = owns_tokenizer

    def __repr__(self) -> str:
        return f"OpenAISampler({self._client.base_url!r}, model={self.model!r}, context_length={self.context_length})"

    @classmethod
    async def connect(
        cls,
        base_url: str,
        *,
        model: str | None = None,
        tokenizer: Tokenizer | None = None,
        api_key_env: str | None = None,
        limits: Limits | None = None,
        keep_alive: bool = False,
        policy_version: int = 0,
    ) -> OpenAISampler:
        """Connect, ask for tiny samples, and refuse a server that lacks what training needs.

        Args:
            base_url: address, with or without "/v1".
            model: name of the served model; needed only where several are served.
            tokenizer: of the served model; a llama.cpp server's own is used where none is given.
            api_key_env: name of the environment variable that holds the key, if the server wants one.
            limits: deadline, retries and most requests in flight of each call.
            keep_alive: keep connections open between calls; worth it for a server far away.
            policy_version: version that samples are tagged with.

        Raises:
            SamplerError: no server there, or it lacks something; the message names what and how to start it.

        Example:
            sampler = await OpenAISampler.connect("http://127.0.0.1:8000", tokenizer=HFTokenizer("models/Qwen3.5-0.8B"))
            sample = await sampler.sample(prompt_ids, SamplingParams(max_tokens=64, seed=1))
        """
        url, key = read_base_url(base_url), read_api_key(api_key_env)
        probe = JsonClient(url, api_key=key, limits=_CONNECTING)
        try:
            entry = await choose_model(probe, model)
            engine = await connect_engine(probe, entry, tokenizer)
            if tokenizer is not None:
                await check_tokenizer(probe, engine, tokenizer)
        finally:
            await probe.close()
        own = await asyncio.to_thread(ServedTokenizer, url, api_key=key) if tokenizer is None else tokenizer
        client = JsonClient(url, api_key=key, limits=limits, keep_alive=keep_alive)
        return cls(client, engine, own, policy_version=policy_version, owns_tokenizer=tokenizer is None)

    async def sample(self, prompt_ids: np.ndarray, params: SamplingParams) -> Sample:
        """Sample one reply to `prompt_ids` (int32 [T]); `params.max_tokens` is cut to what the context leaves.

        Raises:
            ContextLengthError: the prompt fills the context; no request was made.
            SamplerError: the server failed or its answer cannot be trusted.
        """
        prompt = self._check_prompt(prompt_ids)
        room = self.context_length - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, the context holds {self.context_length}: no room for a reply; "
                "shorten the context or serve the model with a longer one"
            )
        version = self.policy_version
        asked = replace(params, max_tokens=min(params.max_tokens, room))
        reply = await self._engine.reply(self._client, prompt, asked)
        if len(reply.ids) > asked.max_tokens or (not len(reply.ids) and reply.finish_reason != "abort"):
            raise SamplerError(
                f"the server generated {len(reply.ids)} tokens, asked for were 1 to {asked.max_tokens}", num_tokens=len(reply.ids)
            )
        return Sample(reply.ids, reply.logprobs, reply.text, reply.finish_reason, version, reply.stop)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
        if self._owns_tokenizer and isinstance(self.tokenizer, ServedTokenizer):
            self.tokenizer.close()

    async def __aenter__(self) -> OpenAISampler:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _check_prompt(self, prompt_ids: np.ndarray) -> list[int]:
        prompt = [int(i) for i in prompt_ids]
        limit = self._engine.vocab_size or 2**31
        if not prompt:
            raise SamplerError("`prompt_ids`: expected at least one token, got none")
        if min(prompt) < 0 or max(prompt) >= limit:
            raise SamplerError(f"`prompt_ids`: expected ids in [0, {limit}), got {min(prompt)} to {max(prompt)}")
        return prompt
