"""What predicts values during collection: the `Critic` protocol and two reference critics."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from focus_jax.agents import State


class Critic(Protocol):
    """Scores states: the expected remaining return when the acting policy goes on from each."""

    async def score(self, states: Sequence[State]) -> np.ndarray:
        """Predicted values, float [len(states)], finite."""
        ...


@dataclass(frozen=True)
class ConstantCritic:
    """Answers the same value everywhere.

    Example:
        >>> import asyncio
        >>> asyncio.run(ConstantCritic(0.5).score([]))
        array([], dtype=float32)
    """

    value: float = 0.5

    def __post_init__(self) -> None:
        if not np.isfinite(self.value):
            raise ValueError(f"ConstantCritic: `value` must be finite, got {self.value}")

    async def score(self, states: Sequence[State]) -> np.ndarray:
        return np.full(len(states), self.value, np.float32)


@dataclass(frozen=True)
class RandomCritic:
    """Uniform in [0, 1), a function of the seed and the state, so the same state always gets the same value."""

    seed: int = 0

    async def score(self, states: Sequence[State]) -> np.ndarray:
        return np.array([self._value(state) for state in states], np.float32)

    def _value(self, state: State) -> float:
        digest = hashlib.blake2b(state.context.tobytes() + state.environment, digest_size=8, key=str(self.seed).encode())
        # 24 bits are exact in float32, so the result stays below 1.
        return (int.from_bytes(digest.digest(), "little") >> 40) / 2**24
