"""Budgets in continuations and generated tokens, with reservation: charged + reserved never exceeds the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """What a pass may spend; None leaves that side unlimited, and at least one side is set.

    Args:
        continuations: finished continuations.
        tokens: generated tokens, those of failed attempts included.

    Raises:
        ValueError: nothing is set, or a limit is not a positive whole number.
    """

    continuations: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.continuations is None and self.tokens is None:
            raise ValueError("Budget: expected `continuations` and/or `tokens`, got neither")
        for name in ("continuations", "tokens"):
            limit = getattr(self, name)
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
                raise ValueError(f"Budget: `{name}` must be a whole number of at least 1, got {limit!r}")


class Ledger:
    """Keeps one budget. Reserve before launching, settle when the attempt ended, whichever way."""

    def __init__(self, budget: Budget):
        self.budget = budget
        self.continuations = 0
        self.tokens = 0
        self.reserved_continuations = 0
        self.reserved_tokens = 0
        self.num_launched = 0

    def free_tokens(self) -> float:
        """Tokens one more continuation may reserve: inf without a token limit, -1 where no continuation is left."""
        limit = self.budget
        if limit.continuations is not None and self.continuations + self.reserved_continuations >= limit.continuations:
            return -1
        return math.inf if limit.tokens is None else limit.tokens - self.tokens - self.reserved_tokens

    def reserve(self, tokens: int) -> None:
        """Set aside one continuation of at most `tokens` generated tokens."""
        if tokens > self.free_tokens():
            raise ValueError(f"Ledger: {tokens} tokens do not fit in {self}")
        self.num_launched += 1
        self.reserved_continuations += 1
        self.reserved_tokens += tokens

    def settle(self, reserved: int, *, tokens: int, finished: bool) -> None:
        """Release a reservation and charge what was spent; a failed attempt costs its tokens, not a continuation."""
        self.reserved_continuations -= 1
        self.reserved_tokens -= reserved
        self.tokens += tokens
        self.continuations += finished

    def __repr__(self) -> str:
        limit = self.budget
        sides = []
        if limit.continuations is not None:
            sides.append(f"{self.continuations} + {self.reserved_continuations} of {limit.continuations} continuations")
        if limit.tokens is not None:
            sides.append(f"{self.tokens} + {self.reserved_tokens} of {limit.tokens} tokens")
        return f"Ledger({', '.join(sides)}; charged + reserved)"
