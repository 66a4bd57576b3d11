"""A value for every token of a context, and the front that scores the states of many workers in a few calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from focus_jax.models.check import check_tokens
from focus_jax.models.decoder import Decoder
from focus_jax.models.layers import like
from focus_jax.models.sharding import mesh_of, param

Output = Callable[[jax.Array], jax.Array]


def linear(x: jax.Array) -> jax.Array:
    """The output for returns of any size: x itself."""
    return x


class ValueModel(nnx.Module):
    """V = output(w . h + b) at every token, h the decoder's hidden state there.

    A fresh one answers `prior` everywhere: w is 0 and output(b) is the prior. The value of a state is that of the last
    token of its context (`segment_ends`, `last_values`).

    The backbone may be the actor's own decoder. Then a critic step moves the actor too, unless it trains the head alone:
    `nnx.Optimizer(critic, tx, wrt=is_value_head)` has gradients and moments of `head` only. A backbone of its own needs
    no output head: `ValueModel(without_head(nnx.clone(actor)))`.

    Args:
        backbone: tokens to hidden states.
        prior: what a fresh critic answers; in (0, 1) with sigmoid.
        output: `jax.nn.sigmoid` for returns in [0, 1], or `linear`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from focus_jax.models import Decoder, ModelConfig
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
        >>> critic = ValueModel(Decoder(config, key=jax.random.key(0)), prior=0.25)
        >>> critic(jnp.array([[1, 2, 3]])).round(6).tolist()
        [[0.25, 0.25, 0.25]]

    Source: project page, "Train the critic"; arXiv 2610.35801.
    """

    def __init__(self, backbone: Decoder, *, prior: float = 0.5, output: Output = jax.nn.sigmoid) -> None:
        if output not in (jax.nn.sigmoid, linear):
            raise ValueError(f"ValueModel: `output`: expected jax.nn.sigmoid or focus_jax.models.linear, got {output!r}")
        bounded = output is jax.nn.sigmoid
        if not (0 < prior < 1 if bounded else math.isfinite(prior)):
            raise ValueError(f"ValueModel: `prior`: expected {'one in (0, 1)' if bounded else 'a finite one'}, got {prior}")
        self.backbone = backbone
        self.head = ValueHead(backbone.config.hidden_size, math.log(prior / (1 - prior)) if bounded else prior)
        self.output = output

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Values float32 [B, T] of int32 tokens [B, T]; `segment_ids` as in `Decoder`; at padding finite, meaningless."""
        return self.output(self.head(self.backbone(tokens, segment_ids)))


class ValueHead(nnx.Module):
    """w . h + b in float32, with w = 0 at first."""

    def __init__(self, size: int, bias: float) -> None:
        self.weight = param(jnp.zeros(size), "fsdp")
        self.bias = param(jnp.full((), bias, jnp.float32))

    def __call__(self, hidden: jax.Array) -> jax.Array:
        # Not a matrix product: those drop to half precision on accelerators unless told otherwise.
        return jnp.sum(hidden.astype(jnp.float32) * like(self.weight[...], hidden), -1) + self.bias[...]


def is_value_head(path: tuple[object, ...], value: object) -> bool:
    """The parameters of the head alone, as a filter for `nnx.Optimizer(..., wrt=is_value_head)`."""
    return bool(path) and path[0] == "head" and isinstance(value, nnx.Param)


def without_head(decoder: Decoder) -> Decoder:
    """The same decoder, changed in place, without an untied output head, which a critic would carry along for nothing."""
    decoder.lm_head = None
    decoder.config = replace(decoder.config, tied=True)
    return decoder


def segment_ends(segment_ids: jax.Array) -> jax.Array:
    """True at the last token of every segment: int32 [..., T] -> bool [..., T].

    Example:
        >>> import jax.numpy as jnp
        >>> segment_ends(jnp.array([0, 1, 1, 2, 2, 0])).astype(int).tolist()
        [0, 0, 1, 0, 1, 0]
    """
    following = jnp.concatenate([segment_ids[..., 1:], jnp.zeros_like(segment_ids[..., :1])], -1)
    return (segment_ids > 0) & (segment_ids != following)


def last_values(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The value at the last token of every row: [B, T] -> [B]; 0 for a row of padding alone.

    Example:
        >>> import jax.numpy as jnp
        >>> last_values(jnp.array([[0.1, 0.2, 0.3]]), jnp.array([[1, 1, 0]])).tolist()
        [0.20000000298023224]
    """
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[-1]), segment_ids.shape)
    last = jnp.max(jnp.where(segment_ids > 0, index, -1), -1)
    return jnp.sum(jnp.where(index == last[..., None], values, 0), -1)


class Scorable(Protocol):
    """A state, as far as a critic that reads tokens is concerned."""

    @property
    def context(self) -> np.ndarray:
        """int32 [T], what the policy sees next."""
        ...


@dataclass(eq=False)
class _Request:
    """One caller's contexts, and the future that gets their values."""

    contexts: list[np.ndarray]
    future: asyncio.Future[np.ndarray]
    values: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.values = np.zeros(len(self.contexts), np.float32)


class FlaxCritic:
    """The collector's critic over a `ValueModel`: callers that ask at the same time share calls of the model.

    Contexts are right-padded to the next of a few lengths, and batches to a power of two, so that there is at most one
    compilation for each pair of them, whatever the weights. The model runs in a thread, beside the event loop.

    Args:
        model: gives the values.
        version: tells these weights from others in a journal, a number or a name.
        buckets: lengths to pad to, increasing; the last is the longest context taken. Default: powers of two from 128 up
            to the backbone's `max_positions`.
        max_batch: most rows in a call, a power of two.
        max_tokens: most tokens in a call, padding included, as long as a single row fits.

    Example:
        >>> import asyncio, jax, numpy as np
        >>> from types import SimpleNamespace
        >>> from focus_jax.models import Decoder, ModelConfig
        >>> config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2, max_positions=256)
        >>> critic = FlaxCritic(ValueModel(Decoder(config, key=jax.random.key(0))), version=0)
        >>> state = SimpleNamespace(context=np.array([1, 2, 3], np.int32))
        >>> asyncio.run(critic.score([state, state])).tolist()
        [0.5, 0.5]
    """

    def __init__(
        self,
        model: ValueModel,
        *,
        version: int | str,
        buckets: Sequence[int] | None = None,
        max_batch: int = 64,
        max_tokens: int = 65536,
    ) -> None:
        limit = model.backbone.config.max_positions
        sizes = tuple(buckets) if buckets is not None else _powers_of_two(min(128, limit), limit)
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)) or sizes[-1] > limit:
            raise ValueError(f"FlaxCritic: `buckets`: expected increasing lengths from 1 to {limit} (max_positions), got {sizes}")
        if max_batch < 1 or max_batch & (max_batch - 1):
            raise ValueError(f"FlaxCritic: `max_batch`: expected a power of two, got {max_batch}")
        self.model, self.version = model, version
        self.buckets, self.max_batch, self.max_tokens = sizes, max_batch, max_tokens
        self._waiting: list[_Request] = []
        self._turns: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        config, output = self.model.backbone.config, self.model.output
        shape = f"{config.family}, layers={config.num_layers}, hidden_size={config.hidden_size}, {self.model.backbone.dtype}"
        return f"FlaxCritic({shape}, output={output.__name__}, version={self.version!r})"

    def publish(self, model: ValueModel, *, version: int | str) -> None:
        """Go on with other weights, from the next call on; publish between rounds, whose journals name one version."""
        if model.backbone.config != self.model.backbone.config:
            raise ValueError(f"FlaxCritic: expected a model of {self.model.backbone.config}, got {model.backbone.config}")
        self.model, self.version = model, version

    async def score(self, states: Sequence[Scorable]) -> np.ndarray:
        """Values at the last token of each state's context.

        Args:
            states: whatever has a `context`, int32 [T] with T at least 1.

        Returns:
            float32 [len(states)]; a state's value does not depend on who else asks.

        Raises:
            ValueError: a context that is empty, too long, or has ids outside the vocabulary; nothing is computed then.
            FloatingPointError: the model's values are not finite.
        """
        contexts = [self._checked(state.context) for state in states]
        if not contexts:
            return np.zeros(0, np.float32)
        loop = asyncio.get_running_loop()
        if self._turns is not None and self._turns.get_loop() is not loop:  # left behind by a loop that was closed
            self._waiting, self._turns = [], None
        request = _Request(contexts, loop.create_future())
        self._waiting.append(request)
        if self._turns is None or self._turns.done():
            self._turns = loop.create_task(self._take_turns())
        return await request.future

    def _checked(self, context: np.ndarray) -> np.ndarray:
        limit = self.buckets[-1]
        if context.ndim != 1 or not 1 <= len(context) <= limit:
            raise ValueError(
                f"expected a context of 1 to {limit} tokens, the longest this critic takes, got {context.size}; "
                "raise its `buckets` (up to the backbone's max_positions) or let the agent manage its context earlier"
            )
        check_tokens(self.model.backbone.config, context)
        return np.asarray(context, np.int32)

    async def _take_turns(self) -> None:
        """Serve everybody who waits, again and again until nobody does."""
        while self._waiting:
            await asyncio.sleep(0)  # whoever asks in the same turn of the loop comes along
            requests, self._waiting = self._waiting, []
            try:
                await self._serve([request for request in requests if not request.future.done()])
            finally:
                for request in requests:
                    request.future.cancel()  # those still open: the loop is going down

    async def _serve(self, requests: list[_Request]) -> None:
        model = self.model
        rows = [(request, i) for request in requests for i in range(len(request.contexts))]
        rows.sort(key=lambda row: len(row[0].contexts[row[1]]))
        for length, members in itertools.groupby(rows, lambda row: self._bucket(len(row[0].contexts[row[1]]))):
            most = min(self.max_batch, _floor_power(max(1, self.max_tokens // length)))
            bucket = list(members)
            for first in range(0, len(bucket), most):
                batch = [row for row in bucket[first : first + most] if not row[0].future.done()]  # cancelled or failed
                if not batch:
                    continue
                try:
                    values = await asyncio.to_thread(_values, model, [r.contexts[i] for r, i in batch], length)
                except Exception as error:
                    for request, _ in batch:
                        if not request.future.done():
                            request.future.set_exception(error)
                    continue
                for (request, i), value in zip(batch, values, strict=True):
                    request.values[i] = value
        for request in requests:
            if not request.future.done():
                request.future.set_result(request.values)

    def _bucket(self, length: int) -> int:
        return next(size for size in self.buckets if size >= length)


def _values(model: ValueModel, contexts: list[np.ndarray], length: int) -> np.ndarray:
    """Values of the contexts, padded to `length` tokens and a power of two of rows."""
    size = 1 << (len(contexts) - 1).bit_length()
    tokens, last = np.zeros((size, length), np.int32), np.zeros(size, np.int32)
    for row, context in enumerate(contexts):
        tokens[row, : len(context)] = context
        last[row] = len(context) - 1
    mesh = mesh_of(model)  # a thread starts without the caller's mesh
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        values = np.asarray(_values_at(model, tokens, last))[: len(contexts)]
    if not np.isfinite(values).all():
        raise FloatingPointError("the critic's values are not finite; look at its weights")
    return values


@jax.jit
def _values_at(model: ValueModel, tokens: jax.Array, index: jax.Array) -> jax.Array:
    """Values [B] at one position per row. What follows a position cannot reach it, so padding needs no segment ids."""
    hidden = model.backbone(tokens)
    return model.output(model.head(jnp.take_along_axis(hidden, index[:, None, None], axis=1)[:, 0]))


def _powers_of_two(first: int, limit: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ... and `limit` at the end."""
    sizes = [first]
    while sizes[-1] < limit:
        sizes.append(min(2 * sizes[-1], limit))
    return tuple(sizes)


def _floor_power(number: int) -> int:
    """The largest power of two up to `number`."""
    return 1 << (number.bit_length() - 1)
