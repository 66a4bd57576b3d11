"""States that generation may go on from instead of reading their tokens again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import jax
import numpy as np

from focus_jax.models.decoding import Slots

# States kept at most, so that looking through them stays a matter of a millisecond or two.
_MOST = 1024


@dataclass(frozen=True)
class Saved:
    """One row as it stood after `tokens`.

    Attributes:
        tokens: int32 [T].
        size: length of the row's attention caches, at least T.
        row: a single row.
    """

    tokens: np.ndarray
    size: int
    row: Slots

    @property
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.row))


class PrefixStore:
    """The saved states used last, as many as the memory given to them holds.

    Args:
        max_bytes: memory for all of them; 0 keeps none.
        can_cut: attention caches can be cut to any of their first tokens. The state of a delta layer stands for exactly its
            tokens, so models that have one go on from a saved state only where all of it fits.
    """

    def __init__(self, max_bytes: int, *, can_cut: bool) -> None:
        self.max_bytes = max_bytes
        self.can_cut = can_cut
        self.num_bytes = 0
        self._saved: OrderedDict[bytes, Saved] = OrderedDict()

    def __len__(self) -> int:
        return len(self._saved)

    def find(self, prompt: np.ndarray) -> tuple[Saved | None, int]:
        """The saved state that spares most of `prompt`, and how many tokens it spares."""
        best, most = None, 0
        for saved in self._saved.values():
            if (usable := shared_length(saved.tokens, prompt, can_cut=self.can_cut)) > most:
                best, most = saved, usable
        if best is not None:
            self._saved.move_to_end(best.tokens.tobytes())
        return best, most

    def add(self, saved: Saved) -> None:
        """Keep a state; those unused for longest go."""
        key = saved.tokens.tobytes()
        if saved.num_bytes > self.max_bytes or key in self._saved:
            return
        self._saved[key] = saved
        self.num_bytes += saved.num_bytes
        while self.num_bytes > self.max_bytes or len(self._saved) > _MOST:
            self.num_bytes -= self._saved.popitem(last=False)[1].num_bytes

    def holds(self, tokens: np.ndarray) -> bool:
        """Whether the state after exactly `tokens` is kept."""
        return tokens.tobytes() in self._saved

    def clear(self) -> None:
        """Forget all."""
        self._saved.clear()
        self.num_bytes = 0


def shared_length(tokens: np.ndarray, prompt: np.ndarray, *, can_cut: bool) -> int:
    """How many tokens of `prompt` the state after `tokens` spares.

    Example:
        >>> shared_length(np.array([1, 2, 3, 4]), np.array([1, 2, 9]), can_cut=True)
        2
        >>> shared_length(np.array([1, 2]), np.array([1, 2, 9]), can_cut=False)
        2
    """
    size = min(len(tokens), len(prompt))
    differs = tokens[:size] != prompt[:size]
    common = int(differs.argmax()) if differs.any() else size
    if common == len(tokens):
        return common
    # Only the whole state knows its output, from which the next token is drawn: a cut one reads its last token again.
    return min(common, len(prompt) - 1) if can_cut else 0
