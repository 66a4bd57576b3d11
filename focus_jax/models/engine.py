"""Continuous batching: requests enter whenever a row is free, while the others go on decoding."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Literal

import jax
import numpy as np

from focus_jax.models.check import check_decoder, check_length, check_tokens
from focus_jax.models.config import ModelConfig
from focus_jax.models.decoder import Decoder
from focus_jax.models.decoding import Settings, decode, empty_slots, for_decoding, place, prefill, resize, take
from focus_jax.models.prefixes import PrefixStore, Saved, shared_length
from focus_jax.models.sharding import mesh_of

_SMALLEST_CACHE = 128
_SMALLEST_PREFILL = 16


@dataclass(frozen=True)
class Request:
    """One reply to generate.

    Attributes:
        prompt: int32 [T], at least one token.
        max_tokens: most tokens of the reply, at least 1.
        seed: in [0, 2**32).
        temperature: 0 takes the most likely token.
        top_p: mass of the nucleus; 1 keeps everything.
        stop_ids: ids that end the reply; the one drawn is part of it.

    Raises:
        ValueError: a number out of range.
    """

    prompt: np.ndarray
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, Integral) or self.max_tokens < 1:
            raise ValueError(f"`max_tokens`: expected a whole number, at least 1, got {self.max_tokens}")
        if not isinstance(self.seed, Integral) or not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed`: expected a whole number in [0, 2**32), got {self.seed}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature`: expected a finite number >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p`: expected a number in (0, 1], got {self.top_p}")


@dataclass
class Reply:
    """What a request has got so far.

    Attributes:
        ids: as drawn.
        logprobs: of each id.
        finish_reason: None while it goes on.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None


@dataclass
class _Row:
    """A request in a slot. `length` is how many tokens the slot holds."""

    handle: int
    request: Request
    reply: Reply
    length: int

    @property
    def longest(self) -> int:
        return len(self.request.prompt) + self.request.max_tokens


class ContinuousBatch:
    """A fixed number of slots that decode together; each step admits what waits, then adds some tokens to every row.

    A reply depends on its own request alone: not on the other rows, their number, or when it was admitted (up to the last
    digits of the scores). Not safe to use from several threads at once.

    Args:
        model: the decoder, as built or from `for_decoding`.
        num_slots: rows.
        context_length: most tokens (prompt and reply) of a row, at most the model's `max_positions`.
        num_steps: tokens decoded between two looks at what waits. Fewer admit sooner; more cost less per token.
        prefill_tokens: most tokens of prompts read by one call.
        prefix_bytes: memory for states to go on from: each prompt's and each reply's end is kept, those unused for longest
            go. 0 keeps none.

    Raises:
        ValueError: a number out of range.
        TypeError: a model that is no decoder, such as a critic.

    Example:
        >>> import jax
        >>> from focus_jax.models import ModelConfig
        >>> config = ModelConfig("qwen3", 64, 32, 64, 2, 1, 16, ("full_attention",))
        >>> batch = ContinuousBatch(Decoder(config, key=jax.random.key(0)), num_slots=2, context_length=32)
        >>> handle = batch.submit(Request(np.array([1, 2, 3], np.int32), max_tokens=5, seed=0))
        >>> while batch.num_active or batch.num_waiting:
        ...     replies = batch.step()
        >>> len(replies[handle].ids), replies[handle].finish_reason
        (5, 'length')
    """

    def __init__(
        self,
        model: Decoder,
        *,
        num_slots: int,
        context_length: int,
        num_steps: int = 8,
        prefill_tokens: int = 512,
        prefix_bytes: int = 0,
    ) -> None:
        check_decoder(model)
        config = model.config
        check_length(config, context_length)
        for name, value, least in (
            ("num_slots", num_slots, 1),
            ("num_steps", num_steps, 1),
            ("prefill_tokens", prefill_tokens, _SMALLEST_PREFILL),
            ("context_length", context_length, 2),  # a prompt and a reply
            ("prefix_bytes", prefix_bytes, 0),
        ):
            if value < least:
                raise ValueError(f"`{name}`: expected at least {least}, got {value}")
        self._mesh = mesh_of(model)
        with self._on_mesh():
            self.model = for_decoding(model)
        self.config = config
        self.context_length = context_length
        self.num_steps = num_steps
        self.prefill_tokens = prefill_tokens
        self.prefixes = PrefixStore(prefix_bytes, can_cut="linear_attention" not in config.block)
        self.num_prefilled = 0  # tokens of prompts that had to be read
        self._rows: list[_Row | None] = [None] * num_slots
        self._waiting: deque[_Row] = deque()
        self._handles = itertools.count()
        self._size = self._bucket(1)
        with self._on_mesh():
            self._slots = empty_slots(self.model, num_slots, self._size)
            self._blank = empty_slots(self.model, 1, 1)
        shape = (num_slots,)
        self._settings = Settings(
            seed=np.zeros(shape, np.uint32),
            temperature=np.ones(shape, np.float32),
            top_p=np.ones(shape, np.float32),
            stop_ids=np.full((num_slots, 4), -1, np.int32),
            step=np.zeros(shape, np.int32),
            limit=np.zeros(shape, np.int32),
        )

    @property
    def num_active(self) -> int:
        """Requests in slots."""
        return sum(row is not None for row in self._rows)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    def submit(self, request: Request) -> int:
        """Queue a request; the number returned is its name in what `step` returns.

        Raises:
            ValueError: ids beyond the vocabulary, nothing to read, or more tokens than the context holds.
        """
        prompt = np.asarray(request.prompt)
        check_prompt(self.config, prompt)
        check_stop_ids(self.config, request.stop_ids)
        if request.max_tokens > self.context_length - len(prompt):
            raise ValueError(
                f"expected `max_tokens` of at most {self.context_length - len(prompt)}, what a prompt of "
                f"{len(prompt)} tokens leaves of {self.context_length}; got {request.max_tokens}"
            )
        handle = next(self._handles)
        self._waiting.append(_Row(handle, replace(request, prompt=prompt.astype(np.int32)), Reply(), 0))
        return handle

    def cancel(self, handle: int) -> None:
        """Drop a request wherever it stands; one that is not there is no error. What it has read is kept like any prefix."""
        self._waiting = deque(row for row in self._waiting if row.handle != handle)
        for slot, row in enumerate(self._rows):
            if row is not None and row.handle == handle:
                with self._on_mesh():
                    self._leave(slot, row)

    def step(self, *, admit: bool = True) -> dict[int, Reply]:
        """Admit what waits, decode `num_steps` tokens in every row, and return the replies so far of all that were in a slot.

        Finished ones appear for the last time, and their slots are free.

        Args:
            admit: False leaves what waits where it is, until the slots have drained.
        """
        with self._on_mesh():
            while admit and self._admit():
                pass
            if not self.num_active:
                return {}
            self._fit(max(min(row.length + self.num_steps, row.longest) for row in self._rows if row is not None))
            self._slots, ids, logprobs = decode(self.model, self._slots, self._settings, self.num_steps)
            return self._collect(np.asarray(ids), np.asarray(logprobs))

    def publish(self, model: Decoder) -> None:
        """Replace the weights; saved states are dropped, they belong to the old ones.

        Raises:
            ValueError: a model of another shape, dtype or mesh, or requests in slots.
        """
        before, new = ((m.config, m.dtype, mesh) for m, mesh in ((self.model, self._mesh), (model, mesh_of(model))))
        if new != before:
            raise ValueError(f"`model`: expected the shape, dtype and mesh of the one before,\n  {before}\ngot\n  {new}")
        if self.num_active:
            raise ValueError(f"{self.num_active} requests are still being decoded with the old weights; let them finish first")
        with self._on_mesh():
            self.model = for_decoding(model)
        self.prefixes.clear()

    def _on_mesh(self) -> contextlib.AbstractContextManager[object]:
        """The mesh the model lives on; a thread starts without the one its maker had set."""
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _collect(self, ids: np.ndarray, logprobs: np.ndarray) -> dict[int, Reply]:
        """Add what was drawn to the replies, and free the slots of those that ended."""
        replies = {}
        for slot, row in enumerate(self._rows):
            if row is None:
                continue
            reply, request = row.reply, row.request
            replies[row.handle] = reply
            for token, logprob in zip(ids[:, slot].tolist(), logprobs[:, slot].tolist(), strict=True):
                reply.ids.append(token)
                reply.logprobs.append(logprob)
                if token in request.stop_ids or len(reply.ids) == request.max_tokens:
                    reply.finish_reason = "stop" if token in request.stop_ids else "length"
                    break
            row.length = len(request.prompt) + len(reply.ids)
            self._settings.step[slot] = len(reply.ids)
            if reply.finish_reason is not None:
                self._leave(slot, row)
        return replies

    def _admit(self) -> bool:
        """Put waiting requests into free slots and read their prompts; whether any was."""
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        admitted: list[tuple[int, _Row, Saved | None, int]] = []
        later: list[_Row] = []
        while self._waiting and len(admitted) < len(free):
            row = self._waiting.popleft()
            prompt = row.request.prompt
            saved, spared = self.prefixes.find(prompt)
            # Prompts that begin alike: one is read now, the others go on from what it leaves.
            shared = max((self._shared(other.request.prompt, prompt) for _, other, _, _ in admitted), default=0)
            if shared > spared and shared >= _SMALLEST_PREFILL:
                later.append(row)
            else:
                admitted.append((free[len(admitted)], row, saved, spared))
        self._waiting.extendleft(reversed(later))
        if not admitted:
            return False
        lengths = [len(row.request.prompt) for _, row, _, _ in admitted]
        self._fit(max(lengths), [saved for _, _, saved, _ in admitted])
        for slot, row, saved, spared in admitted:
            self._enter(slot, row, saved, spared)
        self._read([(slot, row.request.prompt[spared:]) for slot, row, _, spared in admitted])
        for slot, row, _, _ in admitted:
            self._save(slot, row.request.prompt)
        return True

    def _shared(self, tokens: np.ndarray, prompt: np.ndarray) -> int:
        """Tokens of `prompt` that the state after `tokens` will spare, if it is kept."""
        return shared_length(tokens, prompt, can_cut=self.prefixes.can_cut) if self.prefixes.max_bytes else 0

    def _enter(self, slot: int, row: _Row, saved: Saved | None, spared: int) -> None:
        """Set a slot up for a request."""
        request, settings = row.request, self._settings
        source = self._blank if saved is None else saved.row
        self._slots = place(self._slots, source, np.int32(slot), np.int32(spared))
        row.length = len(request.prompt)
        self._rows[slot] = row
        missing = len(request.stop_ids) - settings.stop_ids.shape[1]
        if missing > 0:
            wider = np.pad(settings.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
            settings = self._settings = replace(settings, stop_ids=wider)
        settings.seed[slot] = request.seed
        settings.temperature[slot] = request.temperature
        settings.top_p[slot] = request.top_p
        settings.stop_ids[slot] = -1
        settings.stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
        settings.step[slot], settings.limit[slot] = 0, request.max_tokens

    def _read(self, parts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Prefill slots with tokens: several together, long ones piece by piece."""
        parts = [part for part in parts if len(part[1])]
        self.num_prefilled += sum(len(tokens) for _, tokens in parts)
        while parts:
            parts.sort(key=lambda part: -len(part[1]))
            width = min(_power_of_two(len(parts[0][1]), _SMALLEST_PREFILL), self.prefill_tokens)
            num_rows = min(max(self.prefill_tokens // width, 1), len(self._rows))
            group = parts[:num_rows]
            num_rows = 1 if len(group) == 1 else num_rows
            tokens, count = np.zeros((num_rows, width), np.int32), np.zeros(num_rows, np.int32)
            rows = np.full(num_rows, len(self._rows), np.int32)
            for i, (slot, left) in enumerate(group):
                rows[i], count[i] = slot, min(len(left), width)
                tokens[i, : count[i]] = left[:width]
            self._slots = prefill(self.model, self._slots, rows, tokens, count)
            parts = [(slot, left[width:]) for slot, left in group if len(left) > width] + parts[len(group) :]

    def _save(self, slot: int, tokens: np.ndarray) -> None:
        """Keep the state of a slot that holds exactly `tokens`."""
        if self.prefixes.max_bytes and not self.prefixes.holds(tokens):
            size = self._bucket(len(tokens))
            self.prefixes.add(Saved(tokens, size, take(self._slots, self.config, np.int32(slot), size)))

    def _leave(self, slot: int, row: _Row) -> None:
        """Free a slot; the state it is in is worth keeping."""
        self._save(slot, np.concatenate([row.request.prompt, np.array(row.reply.ids, np.int32)]))
        self._rows[slot] = None
        self._settings.limit[slot] = self._settings.step[slot]

    def _fit(self, length: int, saved: Sequence[Saved | None] = ()) -> None:
        """Make the caches just long enough, bucket by bucket: attention reads all of them for every token."""
        held = [row.length for row in self._rows if row is not None]
        # A saved row is placed as a whole, then cut.
        size = max([self._bucket(max([length, *held])), *(entry.size for entry in saved if entry is not None)])
        if size != self._size:
            self._slots, self._size = resize(self._slots, self.config, size), size

    def _bucket(self, length: int) -> int:
        return min(_power_of_two(length, _SMALLEST_CACHE), self.context_length)


def check_prompt(config: ModelConfig, prompt: np.ndarray) -> None:
    """Refuse a prompt that is no row of the model's token ids.

    Raises:
        ValueError: it is empty, has another number of dimensions, or holds ids beyond the vocabulary.
    """
    if prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"`prompt`: expected integers of shape [T], T at least 1, got shape {list(prompt.shape)}")
    check_tokens(config, prompt)


def check_stop_ids(config: ModelConfig, stop_ids: Iterable[int]) -> None:
    """Refuse ids that no reply could end with.

    Raises:
        ValueError: ids beyond the vocabulary.
    """
    if wrong := [i for i in stop_ids if not 0 <= i < config.vocab_size]:
        raise ValueError(f"`stop_ids`: expected ids in [0, {config.vocab_size}), got {', '.join(map(str, wrong))}")


def _power_of_two(length: int, smallest: int) -> int:
    return max(smallest, 1 << (length - 1).bit_length())
