"""Replies from a script or a function, so that every branch of a rollout tree can be inspected without a model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from focus_jax.agents.sampler import ContextLengthError, Sample, SamplerError, SamplingParams
from focus_jax.agents.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reply:
    """One scripted reply.

    Attributes:
        text: what the policy says, stop strings included where it would go on.
        ended: True when it ends its own turn after `text`; False leaves the reply open, as a token limit does.
        logprobs: log-probability of each token of `text` (and of the end-of-turn token), or None for the sampler's constant.
    """

    text: str
    ended: bool = True
    logprobs: Sequence[float] | None = None


ReplyFunction = Callable[[np.ndarray, SamplingParams], "str | Reply"]


class ScriptedSampler:
    """A `Sampler` that answers what it was told to.

    Args:
        script: a function of the prompt ids (int32 [T]) and the params (seed included); or a list of replies, used up in
            the order of the calls; or a dict from text to reply, where the key that occurs last in the prompt wins.
        tokenizer: turns replies into ids; the end of a turn is the id of its `eos_token`.
        context_length: most tokens (prompt + reply) one call can hold.
        logprob: log-probability of every token a reply gives none for.
        policy_version: version that samples are tagged with.

    Example:
        >>> from focus_jax.sampling.tokenizers import ByteTokenizer
        >>> sampler = ScriptedSampler({"2+3": "2+3=5\\nDone"}, ByteTokenizer())
        >>> prompt = np.array(ByteTokenizer().encode("What is 2+3?"), np.int32)
        >>> sample = asyncio.run(sampler.sample(prompt, SamplingParams(stop=("\\n",))))
        >>> sample.text, sample.stop, len(sample.ids)
        ('2+3=5', '\\n', 6)
    """

    def __init__(
        self,
        script: ReplyFunction | Sequence[str | Reply] | Mapping[str, str | Reply],
        tokenizer: Tokenizer,
        *,
        context_length: int = 4096,
        logprob: float = -1.0,
        policy_version: int = 0,
    ):
        if isinstance(script, str):
            raise TypeError("`script`: expected a function, a list or a dict of replies, got one string; write [reply]")
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.policy_version = policy_version
        self._logprob = logprob
        if isinstance(script, Mapping):
            self._reply = _from_dict(script, tokenizer)
        else:
            self._reply = script if callable(script) else _from_list(script)

    async def sample(self, prompt_ids: np.ndarray, params: SamplingParams) -> Sample:
        """The scripted reply to `prompt_ids`; see `Sampler.sample`.

        Raises:
            ContextLengthError: the prompt fills the context.
            SamplerError: the script holds no reply to this call.
        """
        await asyncio.sleep(0)
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise ContextLengthError(f"the prompt has {len(prompt_ids)} tokens, the context holds {self.context_length}")
        reply = self._reply(prompt_ids, params)
        reply = reply if isinstance(reply, Reply) else Reply(reply)
        return self._finish(reply, params, min(params.max_tokens, room))

    def _finish(self, reply: Reply, params: SamplingParams, max_tokens: int) -> Sample:
        """Cut a reply where a server would: at the first stop string, at its end, or at the token limit."""
        ids, text, stop, reason = self.tokenizer.encode(reply.text), reply.text, None, "length"
        found = [(reply.text.index(s), s) for s in params.stop if s in reply.text]
        if found:
            start, stop = min(found)
            # The token in which the stop string ends is the last one sampled.
            length = next(n for n in range(1, len(ids) + 1) if len(self.tokenizer.decode(ids[:n])) >= start + len(stop))
            ids, text, reason = ids[:length], reply.text[:start], "stop"
        elif reply.ended:
            ids, reason = [*ids, self._end_id()], "stop"
        if len(ids) > max_tokens:
            ids, stop, reason = ids[:max_tokens], None, "length"
            text = self.tokenizer.decode(ids)
        logprobs = [self._logprob] * len(ids) if reply.logprobs is None else list(reply.logprobs[: len(ids)])
        return Sample(
            ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            text=text,
            finish_reason="stop" if reason == "stop" else "length",
            policy_version=self.policy_version,
            stop=stop,
        )

    def _end_id(self) -> int:
        ids = self.tokenizer.encode(self.tokenizer.eos_token or "", special=True)
        if len(ids) != 1:
            raise SamplerError("the tokenizer names no end-of-turn token (`eos_token`), so a scripted reply cannot end its turn")
        return ids[0]


def _from_list(replies: Sequence[str | Reply]) -> ReplyFunction:
    """The replies one after another."""
    num_calls = itertools.count()

    def reply(prompt_ids: np.ndarray, params: SamplingParams) -> str | Reply:
        call = next(num_calls)
        if call >= len(replies):
            raise SamplerError(f"the script has {len(replies)} replies, this is call {call + 1}")
        return replies[call]

    return reply


def _from_dict(replies: Mapping[str, str | Reply], tokenizer: Tokenizer) -> ReplyFunction:
    """The reply whose key ends last in the prompt; the longer key where two end together."""

    def reply(prompt_ids: np.ndarray, params: SamplingParams) -> str | Reply:
        prompt = tokenizer.decode(prompt_ids.tolist())
        found = [key for key in replies if key in prompt]
        if not found:
            raise SamplerError(f"no key of the script occurs in the prompt, which ends {prompt[-80:]!r}")
        return replies[max(found, key=lambda key: (prompt.rindex(key) + len(key), len(key)))]

    return reply
