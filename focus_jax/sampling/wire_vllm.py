"""vLLM's `/v1/completions`, and any server that knows its `return_token_ids`.

Everything that acts on the distribution is sent with each request, because vLLM otherwise takes it from the model's
`generation_config.json`. Log-probabilities come in one of two modes, told apart when connecting: "processed" (those of the
distribution sampled from; start vLLM with `--logprobs-mode processed_logprobs`) or "raw" (temperature 1, no nucleus; the
default), which refuses any other temperature or nucleus than the ones it is right for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from focus_jax.agents.sampler import SamplerError, SamplingParams
from focus_jax.sampling.engine import Answer, answer_limit, read_field, read_ids, read_logprob
from focus_jax.sampling.transport import JsonClient, StatusError

_PATH = "/v1/completions"
_ODD = "expected the answer of an OpenAI-compatible /v1/completions"


@dataclass(frozen=True)
class Vllm:
    """A vLLM server; see `Engine`.

    Attributes:
        processed: the log-probabilities are those of the distribution sampled from, at any temperature and nucleus.
    """

    model: str
    context_length: int
    vocab_size: int | None
    processed: bool

    async def reply(self, client: JsonClient, prompt: list[int], params: SamplingParams) -> Answer:
        """Sample one reply; see `Engine.reply`."""
        if not self.processed and params.temperature != 0 and (params.temperature != 1 or params.top_p != 1):
            raise SamplerError(
                "this server's log-probabilities are those of temperature 1 without a nucleus, "
                f"asked for were temperature {params.temperature:g} and top_p {params.top_p:g}; "
                "start it with `--logprobs-mode processed_logprobs`"
            )
        body = await client.post(_PATH, self.request(prompt, params), max_bytes=answer_limit(prompt, params.max_tokens))
        choice = read_choice(body)
        ids = read_ids(
            read_field(
                choice, "token_ids", list, "training needs the sampled ids (`return_token_ids`); use vLLM 0.10.2 or later"
            ),
            self.vocab_size,
        )
        try:
            _check_prompt(choice, prompt)
            logprobs = _read_logprobs(choice, len(ids))
            stop = choice.get("stop_reason")
            return Answer(
                ids=ids,
                logprobs=logprobs,
                text=read_field(choice, "text", str, _ODD),
                finish_reason={"stop": "stop", "length": "length"}.get(choice.get("finish_reason"), "abort"),  # type: ignore[arg-type]
                stop=stop if isinstance(stop, str) else None,
            )
        except SamplerError as error:
            error.num_tokens = len(ids)
            raise

    async def encode(self, client: JsonClient, text: str) -> list[int] | None:
        """The server's ids of `text`, or None where it has no /tokenize; see `Engine.encode`."""
        try:
            body = await client.post("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        except StatusError as error:
            if error.status in (404, 405):
                return None
            raise
        return read_ids(read_field(body, "tokens", list, "expected the answer of vLLM's /tokenize"), self.vocab_size).tolist()

    def request(self, prompt: list[int], params: SamplingParams, *, num_listed: int = 1) -> dict[str, Any]:
        """Body of a request for one reply; `num_listed` of the most likely tokens are listed at each position."""
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "stop": list(params.stop),
            "logprobs": num_listed,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "n": 1,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }


def read_choice(body: Any) -> dict[str, Any]:
    """The one choice of an answer."""
    choices = read_field(body, "choices", list, _ODD)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise SamplerError(f"the server's answer: expected one choice, got {len(choices)}")
    return choices[0]


def read_top_logprobs(body: Any) -> dict[str, float]:
    """The log-probabilities listed at the first position, by token name."""
    logprobs = read_field(read_choice(body), "logprobs", dict, "training needs log-probabilities (`logprobs`)")
    top = read_field(logprobs, "top_logprobs", list, _ODD)
    return {name: read_logprob(value) for name, value in top[0].items()} if top and isinstance(top[0], dict) else {}


def _read_logprobs(choice: dict[str, Any], num_ids: int) -> np.ndarray:
    if not num_ids:
        return np.zeros(0, np.float32)
    logprobs = read_field(
        choice, "logprobs", dict, "training needs log-probabilities, which the request field `logprobs` asks for"
    )
    values = read_field(logprobs, "token_logprobs", list, "which the request field `logprobs` asks for")
    if len(values) != num_ids:
        raise SamplerError(f"the server sent {num_ids} ids but {len(values)} log-probabilities; do not train on it")
    return np.array([read_logprob(value) for value in values], np.float32)


def _check_prompt(choice: dict[str, Any], prompt: list[int]) -> None:
    """The server must have read the very tokens it was sent, no BOS added."""
    seen = choice.get("prompt_token_ids")
    if seen is not None and seen != prompt:
        raise SamplerError(
            f"the server read another prompt than it was sent ({len(prompt)} tokens): it must take token ids as they are"
        )
