"""llama.cpp's server: its native `/completion`, and the log-probabilities it leaves out.

What its answers hold (measured):
- `tokens` are the ids exactly as sampled, the end-of-turn id and the token holding a stop string included.
- `completion_probabilities` has no entry for a token after which the text ends inside a UTF-8 character, and after a stop
  string none for the last tokens, as many as that string has. Those positions are asked for again, one by one: the prompt
  grown by the ids before it, one token, the most likely tokens listed. Such requests generate nothing that is charged.
- `logprob` is that of temperature 1 whatever the temperature. It is therefore used at temperature 1 without a nucleus (and
  for greedy replies, which have no distribution of their own); otherwise `post_sampling_probs` gives the probability
  after the sampler chain, renormalised over the nucleus when `top_p < 1`. At temperature 1 the two agree to about 1e-4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from focus_jax.agents.sampler import SamplerError, SamplingParams
from focus_jax.sampling.engine import Answer, answer_limit, read_field, read_ids, read_logprob
from focus_jax.sampling.transport import JsonClient

_PATH = "/completion"
_FIELDS = ("content", "tokens", "tokens_predicted", "tokens_evaluated", "completion_probabilities", "stop_type", "stopping_word")
_FIRST_LOOK = 256  # most likely tokens listed before the whole vocabulary is
_FORCE = 1e4  # a bias no logit outweighs
_NO_LOGPROBS = "the server sends no log-probabilities (`completion_probabilities`) although `n_probs` asks for them"
_TRIES = 8
_OLD = "this server speaks another dialect; use a llama.cpp server of 2025 or later"


@dataclass(frozen=True)
class LlamaCpp:
    """A llama.cpp server; see `Engine`.

    Attributes:
        plain_id: a token that is whole text by itself; forcing it makes the server list probabilities.
    """

    model: str
    context_length: int
    vocab_size: int
    plain_id: int

    async def reply(self, client: JsonClient, prompt: list[int], params: SamplingParams) -> Answer:
        """Sample one reply; see `Engine.reply`."""
        body = await client.post(_PATH, self.request(prompt, params), max_bytes=answer_limit(prompt, params.max_tokens))
        ids = read_ids(read_field(body, "tokens", list, f"`return_tokens` was asked for; {_OLD}"), self.vocab_size)
        try:
            logprobs, missing = self._read_logprobs(body, ids, _is_raw(params))
            self._check_counts(body, len(prompt), len(ids))
            for position in missing:
                logprobs[position] = await self._rescore(client, prompt + ids[:position].tolist(), int(ids[position]), params)
        except SamplerError as error:
            error.num_tokens = len(ids)
            raise
        end = body.get("stop_type")
        return Answer(
            ids=ids,
            logprobs=logprobs.astype(np.float32),
            text=read_field(body, "content", str, _OLD),
            finish_reason={"eos": "stop", "word": "stop", "limit": "length"}.get(end, "abort"),  # type: ignore[arg-type]
            stop=read_field(body, "stopping_word", str, _OLD) if end == "word" else None,
        )

    async def encode(self, client: JsonClient, text: str) -> list[int]:
        """The server's ids of `text`; see `Engine.encode`."""
        body = await client.post("/tokenize", {"content": text, "add_special": False, "parse_special": False})
        return read_ids(read_field(body, "tokens", list, _OLD), self.vocab_size).tolist()

    def request(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        num_listed: int = 1,
        force: int | None = None,
        bias: float = _FORCE,
    ) -> dict[str, Any]:
        """Body of a request for one reply.

        Args:
            prompt: token ids.
            params: how to sample.
            num_listed: how many of the most likely tokens each position lists.
            force: id whose logit is raised by `bias`; by default so far that it is sampled for certain.
        """
        nucleus = params.top_p < 1 and params.temperature > 0
        return {
            "prompt": prompt,
            "n_predict": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            # Only these act on the distribution; without a nucleus, top-k over everything is the fastest way to sort it.
            "samplers": ["temperature"] if _is_raw(params) else ["temperature", "top_p" if nucleus else "top_k"],
            "top_k": self.vocab_size,
            "seed": params.seed,
            "stop": list(params.stop),
            "cache_prompt": True,
            "return_tokens": True,
            "n_probs": num_listed,
            "post_sampling_probs": not _is_raw(params),
            "logit_bias": [] if force is None else [[force, bias]],
            "response_fields": list(_FIELDS),
        }

    def _read_logprobs(self, body: Any, ids: np.ndarray, raw: bool) -> tuple[np.ndarray, list[int]]:
        """Log-probability of each id (NaN where none was told), and the positions to ask for again."""
        if not len(ids):
            return np.zeros(0), []
        # The list itself is left out when no token has an entry; asking again tells that from a server that has none.
        entries = body.get("completion_probabilities") or []
        if not isinstance(entries, list):
            raise SamplerError(_NO_LOGPROBS)
        told = read_ids([read_field(e, "id", int, _OLD) for e in entries], self.vocab_size).tolist()
        positions = match(told, ids.tolist())
        if positions is None:
            raise SamplerError("the server's log-probabilities are for other tokens than the ones it sampled; do not train on it")
        logprobs, known = np.full(len(ids), np.nan), set()
        for entry, position in zip(entries, positions, strict=True):
            if position is not None:
                logprobs[position] = read_entry(entry, raw)
                known.add(position)
        return logprobs, [i for i in range(len(ids)) if i not in known]

    def _check_counts(self, body: Any, num_prompt: int, num_ids: int) -> None:
        predicted = read_field(body, "tokens_predicted", int, _OLD)
        evaluated = read_field(body, "tokens_evaluated", int, _OLD)
        if predicted != num_ids:
            raise SamplerError(f"the server generated {predicted} tokens but sent {num_ids} ids")
        if evaluated != num_prompt:
            raise SamplerError(
                f"the server read a prompt of {evaluated} tokens, {num_prompt} were sent; it must not add or drop any"
            )

    async def _rescore(self, client: JsonClient, prefix: list[int], token: int, params: SamplingParams) -> float:
        """Log-probability of `token` after `prefix` under the distribution of `params`."""
        raw = _is_raw(params)
        one = replace(params, max_tokens=1, stop=())
        listed = await self.list_tokens(client, prefix, one, _FIRST_LOOK, self.plain_id if raw else None)
        if token in listed:
            return listed[token]
        if not raw and params.top_p < 1:
            return math.nan
        at_one = replace(one, temperature=1.0)
        if not raw:
            listed = await self.list_tokens(client, prefix, at_one, _FIRST_LOOK, self.plain_id)
        if token not in listed:
            listed = await self.list_tokens(client, prefix, at_one, self.vocab_size, self.plain_id)
        logprob = listed.get(token, math.nan)
        if math.isnan(logprob) or self.plain_id not in listed:
            return math.nan
        return logprob if raw else logprob / one.temperature - await self._log_normalizer(client, prefix, one, listed)

    async def _log_normalizer(
        self, client: JsonClient, prefix: list[int], params: SamplingParams, listed: dict[int, float]
    ) -> float:
        """log sum over the vocabulary of p^(1/T), p at temperature 1.

        Read off how likely the plain token becomes under a bias that makes it the likely one, which lists it for certain:
        P = e^((p+b)/T) / (Z - e^(p/T) + e^((p+b)/T)) in logarithms of p, solved for Z.
        """
        t, plain = params.temperature, listed[self.plain_id]
        rough = float(np.logaddexp.reduce(np.array(list(listed.values())) / t))
        bias = t * (rough + math.log(100)) - plain
        for seed in range(_TRIES):
            biased = await self.list_tokens(client, prefix, replace(params, seed=seed), 1, self.plain_id, bias)
            if self.plain_id in biased:
                return (plain + bias) / t + math.log(math.expm1(-biased[self.plain_id]) + math.exp(-bias / t))
        return math.nan

    async def list_tokens(
        self,
        client: JsonClient,
        prefix: list[int],
        params: SamplingParams,
        num_listed: int,
        force: int | None = None,
        bias: float = _FORCE,
    ) -> dict[int, float]:
        """Log-probabilities of the most likely tokens after `prefix`, and of the sampled one; empty when that has no entry.

        A forced token (one with enough `bias`) always has one.
        """
        request = self.request(prefix, params, num_listed=min(num_listed, self.vocab_size), force=force, bias=bias)
        body = await client.post(_PATH, request, max_bytes=answer_limit(prefix, num_listed))
        entries = body.get("completion_probabilities") if isinstance(body, dict) else None
        if not isinstance(entries, list) or not entries:
            if bias == _FORCE and force is not None:
                raise SamplerError(_NO_LOGPROBS)
            return {}
        raw = _is_raw(params)
        top = read_field(entries[0], "top_logprobs" if raw else "top_probs", list, _OLD)
        logprobs = {read_field(e, "id", int, _OLD): read_entry(e, raw) for e in [entries[0], *top]}
        return {token: value for token, value in logprobs.items() if not math.isnan(value)}


def match(told: list[int], ids: list[int]) -> list[int | None] | None:
    """Where each of `told`, a subsequence of `ids`, stands in it; None where more than one place is possible.

    Returns:
        One position per entry of `told`, or None when it is no subsequence.

    Example:
        >>> match([7, 9], [7, 8, 9]), match([8], [8, 8]), match([1], [2])
        ([0, 2], [None], None)
    """
    first = _earliest(told, ids)
    last = _earliest(told[::-1], ids[::-1])
    if first is None or last is None:
        return None
    latest = [len(ids) - 1 - i for i in reversed(last)]
    return [a if a == b else None for a, b in zip(first, latest, strict=True)]


def _earliest(told: list[int], ids: list[int]) -> list[int] | None:
    positions, start = [], 0
    for token in told:
        try:
            positions.append(ids.index(token, start))
        except ValueError:
            return None
        start = positions[-1] + 1
    return positions


def read_entry(entry: dict[str, Any], raw: bool) -> float:
    """Log-probability in one entry of a list: `logprob`, or the logarithm of `prob`."""
    if raw:
        return read_logprob(entry.get("logprob"))
    prob = entry.get("prob")
    if not isinstance(prob, int | float) or isinstance(prob, bool) or not prob > 0:
        return math.nan
    return read_logprob(math.log(prob))


def _is_raw(params: SamplingParams) -> bool:
    """True where the distribution sampled from is the model's own, at temperature 1 (greedy has none of its own)."""
    return params.temperature == 0 or (params.temperature == 1 and params.top_p == 1)
