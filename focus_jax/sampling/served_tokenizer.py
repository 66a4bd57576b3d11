"""The tokenizer inside a llama.cpp server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import httpx

from focus_jax.agents.sampler import SamplerError
from focus_jax.sampling.engine import read_field, read_ids
from focus_jax.sampling.tokenizers import check_ids

# Names under which models end a turn; the server is asked about each, so one too many does no harm.
_END_NAMES = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
    "<eos>",
)
_NAME_IN_TEMPLATE = re.compile(r"<[^<>\s'\"{}]{1,40}>")
_HINT = "expected the answer of a llama.cpp server"
_TEXTS_KEPT = 4096


class ServedTokenizer:
    """A `Tokenizer` that asks a llama.cpp server (`/tokenize`, `/detokenize`, `/props`). Texts seen before are not asked again.

    A model without a chat template cannot be told from one with ChatML: the server makes that up. Added tokens that the
    model's file does not call control tokens are read as tokens in any text.

    Which ids end a turn is found out by trying: a candidate is forced as the first token, and ends the reply or does not.

    Args:
        base_url: root of the server's address.
        api_key: the server's key, if it wants one.
        timeout: seconds one question may take.

    Raises:
        SamplerError: the server cannot be reached or is no llama.cpp server.

    Example:
        with LlamaCppSampler.start(smollm2_path()) as sampler:
            sampler.tokenizer.encode("Hello")
    """

    blocking = True  # agents call it beside the event loop

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float = 60.0):
        self._base_url = base_url
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout,
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=base_url.startswith("https"),
            trust_env=False,
        )
        self._encode = lru_cache(maxsize=_TEXTS_KEPT)(self._ask_encode)
        try:
            props = self._ask("/props")
            models = read_field(self._ask("/v1/models"), "data", list, _HINT)
            facts = read_field(models[0] if models else {}, "meta", dict, _HINT)
            self.vocab_size: int = read_field(facts, "n_vocab", int, _HINT)
            self.bos_token: str | None = read_field(props, "bos_token", str, _HINT) or None
            self.eos_token: str | None = read_field(props, "eos_token", str, _HINT) or None
            self.chat_template: str | None = read_field(props, "chat_template", str, _HINT) or None
            self.bos_id: int | None = self._single(self.bos_token)
            with_bos = self._ask("/tokenize", {"content": "a", "add_special": True})
            self.adds_bos: bool = read_field(with_bos, "tokens", list, _HINT)[:1] == [self.bos_id]
            self.eos_ids: frozenset[int] = self._find_ends()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"ServedTokenizer({self._base_url!r}, vocab_size={self.vocab_size}, eos_ids={sorted(self.eos_ids)})"

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`, without BOS or EOS; see `Tokenizer.encode`."""
        return list(self._encode(text, special)) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens by their names; see `Tokenizer.decode`."""
        tokens = check_ids(ids, self.vocab_size)
        text: str = read_field(self._ask("/detokenize", {"tokens": tokens}), "content", str, _HINT) if tokens else ""
        return text

    def close(self) -> None:
        """Close the client."""
        self._client.close()

    def _ask_encode(self, text: str, special: bool) -> tuple[int, ...]:
        body = self._ask("/tokenize", {"content": text, "add_special": False, "parse_special": special})
        return tuple(read_ids(read_field(body, "tokens", list, _HINT), self.vocab_size).tolist())

    def _single(self, name: str | None) -> int | None:
        """The id of a special token, None where the name is not one token."""
        ids = self.encode(name, special=True) if name else []
        return ids[0] if len(ids) == 1 else None

    def _find_ends(self) -> frozenset[int]:
        """Every id that ends a reply."""
        names = {*_END_NAMES, *_NAME_IN_TEMPLATE.findall(self.chat_template or ""), self.eos_token}
        candidates = {i for i in map(self._single, names) if i is not None}
        plain = self.encode("a")
        return frozenset(i for i in candidates if self._ends(plain, i))

    def _ends(self, prompt: list[int], candidate: int) -> bool:
        forced = {
            "prompt": prompt,
            "n_predict": 2,
            "logit_bias": [[candidate, 1e4]],
            "temperature": 0,
            "samplers": ["temperature"],
        }
        body = self._ask("/completion", forced)
        return body.get("stop_type") == "eos" and body.get("tokens_predicted") == 1

    def _ask(self, path: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        url = self._base_url + path
        try:
            response = self._client.get(url) if payload is None else self._client.post(url, json=payload)
            response.raise_for_status()
            body = response.json()
        except httpx.HTTPStatusError as error:
            raise SamplerError(f"{url}: the server answered {error.response.status_code}; {_HINT}") from None
        except httpx.HTTPError as error:
            raise SamplerError(f"{url}: {error or type(error).__name__}; is the llama.cpp server running?") from None
        except ValueError:
            raise SamplerError(f"{url}: the answer is not JSON; {_HINT}") from None
        if not isinstance(body, dict):
            raise SamplerError(f"{url}: the answer is not a JSON object; {_HINT}")
        return body
