"""A sampler in this process: a Flax decoder behind continuous batching, in a thread of its own."""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from focus_jax.agents.sampler import ContextLengthError, Sample, SamplerError, SamplingParams
from focus_jax.agents.tokenizer import Tokenizer
from focus_jax.models.check import check_decoder, check_length, check_tokenizer
from focus_jax.models.decoder import Decoder
from focus_jax.models.engine import ContinuousBatch, Reply, Request, check_stop_ids
from focus_jax.sampling.stops import StopFinder

_MEBIBYTE = 2**20
_CLOSED = "the sampler is closed; make another"


class FlaxSampler:
    """A `Sampler` over a Flax decoder. Many calls may be in flight; they decode together, as slots become free.

    What a sample holds: `ids` exactly as drawn; `logprobs` under the distribution drawn from: at temperature T those of
    logits / T, at temperature 0 (greedy) those of temperature 1, with `top_p < 1` renormalised over the nucleus (do not
    train on such samples: the trainer's distribution has no nucleus). A sample depends on its prompt, params and weights
    alone, whatever else is in flight. States at the end of prompts and replies are kept, and a prompt that begins with one
    is read from there on. It may be used from several event loops.

    Args:
        model: the decoder; the sampler holds its weights once more (see `for_decoding`).
        tokenizer: of the model; its `eos_ids` end replies.
        num_slots: replies decoded together; further calls wait.
        context_length: tokens (prompt + reply) each call can hold, at most the model's `max_positions`.
        name: of the policy, by which a journal tells it from another; its family and size unless given.
        policy_version: version of the weights that samples are tagged with.
        prompt_cache_mib: memory for states to go on from.
        num_steps: tokens decoded between two looks at what waits. A reply that a stop string ends, or that is cancelled,
            holds its slot until then.

    Raises:
        ValueError: a number out of range, or a tokenizer with more tokens, or end-of-turn ids, than the model has.

    Example:
        async with FlaxSampler(load_hf(folder), HFTokenizer(folder)) as sampler:
            sample = await sampler.sample(prompt_ids, SamplingParams(max_tokens=64, seed=1))
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        num_slots: int = 8,
        context_length: int = 2048,
        name: str | None = None,
        policy_version: int = 0,
        prompt_cache_mib: int = 1024,
        num_steps: int = 8,
    ) -> None:
        check_decoder(model)
        check_tokenizer(model.config, tokenizer.vocab_size)
        check_stop_ids(model.config, tokenizer.eos_ids)
        check_length(model.config, context_length)
        config = model.config
        self.context_length = context_length
        self.tokenizer = tokenizer
        self.model = name or f"flax-{config.family}-{config.num_layers}x{config.hidden_size}"
        self._vocab_size = config.vocab_size
        make_batch = partial(
            ContinuousBatch,
            num_slots=num_slots,
            context_length=context_length,
            num_steps=num_steps,
            prefix_bytes=prompt_cache_mib * _MEBIBYTE,
        )
        self._worker = _Worker(make_batch, model, tokenizer, policy_version)
        self._finalizer = weakref.finalize(self, self._worker.close)

    def __repr__(self) -> str:
        return f"FlaxSampler({self.model!r}, context_length={self.context_length}, policy_version={self.policy_version})"

    @property
    def policy_version(self) -> int:
        """Version of the weights that samples are tagged with."""
        return self._worker.policy_version

    async def sample(self, prompt_ids: np.ndarray, params: SamplingParams) -> Sample:
        """Sample one reply to `prompt_ids` (int32 [T]); `params.max_tokens` is cut to what the context leaves.

        Cancelling the call frees its slot.

        Raises:
            ContextLengthError: the prompt fills the context; nothing was generated.
            SamplerError: the prompt is no list of the model's ids, the model's scores are not finite, or decoding failed.
        """
        prompt = np.asarray(prompt_ids)
        if prompt.ndim != 1 or not len(prompt):
            raise SamplerError(f"`prompt_ids`: expected at least one token [T], got shape {list(prompt.shape)}")
        if not np.issubdtype(prompt.dtype, np.integer) or prompt.min() < 0 or prompt.max() >= self._vocab_size:
            raise SamplerError(
                f"`prompt_ids`: expected ids in [0, {self._vocab_size}), got {prompt.dtype} {prompt.min()} to {prompt.max()}"
            )
        room = self.context_length - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, the context holds {self.context_length}: no room for a reply; "
                "shorten the context or make the sampler with a longer one"
            )
        request = Request(
            prompt=prompt.astype(np.int32),
            max_tokens=min(params.max_tokens, room),
            seed=params.seed % 2**32,
            temperature=params.temperature,
            top_p=params.top_p,
            stop_ids=tuple(sorted(self.tokenizer.eos_ids)),
        )
        call = _Call(request, StopFinder(params.stop, self._worker.decode), Future())
        self._worker.put(call)
        return await asyncio.wrap_future(call.future)

    async def publish(self, model: Decoder, version: int) -> None:
        """Replace the weights. Replies being generated are finished with the old ones, every later token comes from the new.

        Calls that wait for a slot wait on, and are answered with the new weights; each sample thus has one version. States
        kept to go on from are dropped: they belong to the old weights. Nothing is compiled again. Returns when the new
        weights are in place.

        Args:
            model: of the same shape as the one before, on the same mesh.
            version: that samples are tagged with from now on.

        Raises:
            ValueError: a model of another shape, dtype or mesh; the old one stays, as with every error.
            SamplerError: the sampler is closed.
        """
        publication = _Publication(model, version, Future())
        self._worker.put(publication)
        await asyncio.wrap_future(publication.future)

    def close(self) -> None:
        """Stop the thread. Calls in flight get a SamplerError."""
        self._finalizer()

    def __enter__(self) -> FlaxSampler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> FlaxSampler:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Call:
    """A reply somebody waits for."""

    request: Request
    stops: StopFinder
    future: Future[Sample]


@dataclass(frozen=True)
class _Publication:
    """Weights somebody wants in place."""

    model: Decoder
    version: int
    future: Future[None]


class _Worker:
    """The thread that decodes, and its inbox. It does not know its sampler, so that a forgotten sampler can go."""

    def __init__(
        self, make_batch: Callable[[Decoder], ContinuousBatch], model: Decoder, tokenizer: Tokenizer, policy_version: int
    ) -> None:
        self.policy_version = policy_version
        self._make_batch = make_batch
        self._batch = make_batch(model)
        self._tokenizer = tokenizer
        self._inbox: deque[_Call | _Publication] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._calls: dict[int, _Call] = {}
        self._publication: _Publication | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="flax-sampler")
        self._thread.start()

    def put(self, item: _Call | _Publication) -> None:
        """Hand something to the thread."""
        with self._wake:
            if self._closed:
                raise SamplerError(_CLOSED)
            self._inbox.append(item)
            self._wake.notify()

    def close(self) -> None:
        """Stop, and wait until the thread has."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; the model may have rows for more tokens than the tokenizer, which have none."""
        return self._tokenizer.decode([i for i in ids if i < self._tokenizer.vocab_size])

    def _run(self) -> None:
        try:
            while self._receive():
                try:
                    self._turn()
                except Exception as error:
                    self._fail_all(error)
                    # A failed step may have used up the slots.
                    self._batch = self._make_batch(self._batch.model)
        finally:
            with self._wake:
                self._closed = True
            self._fail_all(SamplerError(_CLOSED))

    def _receive(self) -> bool:
        """Take what came, waiting only where there is nothing to do; False once closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._inbox or self._calls or self._publication)
            if self._closed:
                return False
            # What comes after new weights waits for them.
            while self._inbox and self._publication is None:
                item = self._inbox.popleft()
                if isinstance(item, _Publication):
                    self._publication = item
                else:
                    self._calls[self._batch.submit(item.request)] = item
        return True

    def _turn(self) -> None:
        """Some tokens for everybody."""
        for handle, call in list(self._calls.items()):
            if call.future.cancelled():
                self._drop(handle)
        if self._publication is not None and not self._batch.num_active:
            self._publish(self._publication)
        for handle, reply in self._batch.step(admit=self._publication is None).items():
            try:
                self._answer(handle, self._calls[handle], reply)
            except Exception as error:
                self._settle(self._calls[handle].future, error=_failed(error, len(reply.ids)))
                self._drop(handle)

    def _answer(self, handle: int, call: _Call, reply: Reply) -> None:
        """Resolve a call whose reply has ended."""
        ids, ended = reply.ids, reply.finish_reason == "stop"
        found = call.stops.find(ids[:-1] if ended else ids)
        if found is None and reply.finish_reason is None and not math.isnan(reply.logprobs[-1]):
            return
        if np.isnan(reply.logprobs).any():
            raise SamplerError("the model's scores are not finite; look at its weights")
        length, stop = found or (len(ids), None)
        text = self.decode(ids[: length - ended] if stop is None else ids[:length])
        sample = Sample(
            ids=np.array(ids[:length], np.int32),
            logprobs=np.array(reply.logprobs[:length], np.float32),
            text=text if stop is None else text.partition(stop)[0],
            finish_reason="stop" if ended or stop is not None else "length",
            policy_version=self.policy_version,
            stop=stop,
        )
        self._drop(handle)
        self._settle(call.future, sample)

    def _publish(self, publication: _Publication) -> None:
        self._publication = None
        try:
            self._batch.publish(publication.model)
        except Exception as error:
            self._settle(publication.future, error=error)
            return
        self.policy_version = publication.version
        self._settle(publication.future)

    def _drop(self, handle: int) -> None:
        """Nobody waits for this one any more."""
        del self._calls[handle]
        self._batch.cancel(handle)

    def _fail_all(self, error: Exception) -> None:
        """Everybody who waits hears of it."""
        with self._wake:
            waiting: list[_Call | _Publication] = [*self._calls.values(), *self._inbox]
            self._inbox.clear()
        self._calls.clear()
        if self._publication is not None:
            waiting.append(self._publication)
            self._publication = None
        for item in waiting:
            self._settle(item.future, error=_failed(error, 0))

    @staticmethod
    def _settle(future: Future[Any], result: Sample | None = None, *, error: Exception | None = None) -> None:
        """Answer who still waits."""
        if future.set_running_or_notify_cancel():
            future.set_exception(error) if error is not None else future.set_result(result)


def _failed(error: Exception, num_tokens: int) -> SamplerError:
    """The error as every sampler raises it."""
    if isinstance(error, SamplerError):
        return SamplerError(str(error), num_tokens=max(error.num_tokens, num_tokens))
    failure = SamplerError(f"decoding failed: {type(error).__name__}: {error}", num_tokens=num_tokens)
    failure.__cause__ = error
    return failure
