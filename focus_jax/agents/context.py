"""What happens to the context between task turns: `AppendOnly`, `Summarize`, and the protocol for a third."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from focus_jax.agents.environment import Message, call_environment
from focus_jax.agents.sampler import Sample
from focus_jax.agents.segment import SegmentBuilder
from focus_jax.agents.threads import run_environment


class ContextManager(Protocol):
    """Looks at the segment after each task turn, and may change its context.

    Make it a frozen dataclass, or give it a `__repr__` that holds its settings: they identify the run in its journal.
    """

    async def after_turn(self, segment: SegmentBuilder) -> bool:
        """Look at `segment`, whose observation has just been appended; True ends it here, at a branch point.

        A manager may append messages, generate with the policy, and replace the context. A branch point without room for
        a reply is passed over: the agent cuts the trajectory off there.
        """
        ...


@dataclass(frozen=True)
class AppendOnly:
    """Keeps the whole transcript; every task turn is a branch point."""

    async def after_turn(self, segment: SegmentBuilder) -> bool:
        return True


@dataclass(frozen=True)
class LatestOnly:
    """Shows the policy the latest observation and nothing else, as to an agent that stands before one page at a time.

    Args:
        branch_every: so many task turns from one branch point to the next.

    Raises:
        ValueError: `branch_every` below 1.

    Source: ours; the page's agents keep or summarise their transcript.
    """

    branch_every: int = 1

    def __post_init__(self) -> None:
        if self.branch_every < 1:
            raise ValueError(f"LatestOnly: expected `branch_every` of at least 1, got {self.branch_every}")

    async def after_turn(self, segment: SegmentBuilder) -> bool:
        if segment.pending:  # with no observation the policy goes on within its own message
            await segment.replace(segment.pending, keep_opening=False)
        return segment.num_turns % self.branch_every == 0


@dataclass(frozen=True)
class Summarize:
    """Lets the policy replace its transcript by its own summary when it has grown long; only there are branch points.

    The new context is the seed messages, the summary as the policy's own message, and a user message that asks it to go
    on, with the workspace's text. The summary's tokens are trained like any others and count no task transition.
    Reasoning up to "</think>" is not carried over.
    A summary that is empty, cut off at its limit, or without a required section is refused once, with the reason, and
    sampled again. Failing that too costs `penalty`, and the agent goes on from what it wrote, however poor.
    A summary is asked for only where it fits in full: keep trigger_tokens + one reply + one observation + 2 *
    summary_tokens below the context length, or the trajectory may run into its caps instead.

    Args:
        trigger_tokens: summarize when the next prompt would have so many tokens.
        trigger_calls: summarize after so many task turns since the start or the last summary.
        summary_tokens: most tokens of one attempt at a summary.
        request: asks for the summary; the sections are named after it.
        sections: headings that a summary must have, each at the start of a line, or None.
        penalty: subtracted from the segment's reward for a summary that stays malformed, discounted like the value of
            the state it leads to. With 0/1 outcomes a return can then fall below 0.
        workspace: text of the environment's workspace to show beside the summary, or None.

    Raises:
        ValueError: no trigger, or a number out of range.

    Source: project page, "Backup details".
    """

    trigger_tokens: int | None = None
    trigger_calls: int | None = None
    summary_tokens: int = 4096
    request: str = (
        "Your transcript is about to be cleared. Write down everything you need to go on from here: what you know, where "
        "you know it from, what is undecided, and what to do next. You will see only the task and these notes."
    )
    sections: tuple[str, ...] | None = ("State", "Evidence", "Open questions", "Next steps")
    penalty: float = 0.1
    workspace: Callable[[Any], str] | None = None

    def __post_init__(self) -> None:
        if self.trigger_tokens is None and self.trigger_calls is None:
            raise ValueError("Summarize: expected `trigger_tokens`, `trigger_calls` or both, got neither")
        for name in ("trigger_tokens", "trigger_calls", "summary_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Summarize: expected `{name}` of at least 1, got {value}")
        if not 0 <= self.penalty < float("inf"):
            raise ValueError(f"Summarize: expected a finite `penalty` >= 0, got {self.penalty}")

    async def after_turn(self, segment: SegmentBuilder) -> bool:
        long = self.trigger_tokens is not None and segment.num_tokens >= self.trigger_tokens
        many = self.trigger_calls is not None and segment.num_turns >= self.trigger_calls
        if not (long or many):
            return False
        request = self.request
        if self.sections:
            request += "\n\nUse these headings: " + ", ".join(self.sections) + "."
        observed = segment.pending
        await segment.append([Message("user", request)])
        if segment.room < self.summary_tokens:
            segment.drop_pending()
            await segment.append(observed)
            return False
        summary, fault = self._read(await segment.generate(self.summary_tokens))
        if fault is not None:
            await segment.append([Message("user", f"These notes cannot be used: {fault}. Write them again, complete.")])
            if segment.room >= self.summary_tokens:
                second, fault = self._read(await segment.generate(self.summary_tokens))
                summary = second or summary
            if fault is not None:
                segment.add_reward(-self.penalty)
        text = "The transcript up to these notes of yours has been cleared. Go on from here."
        if self.workspace is not None:
            shown = await run_environment(segment.environment, call_environment, "workspace", self.workspace, segment.environment)
            text += f"\n\nYour workspace:\n\n{shown}"
        # The notes stand as a reply, so that the roles alternate, as some templates demand.
        await segment.replace([Message("assistant", summary or "(no notes)"), Message("user", text)])
        return True

    def _read(self, sample: Sample) -> tuple[str, str | None]:
        """The summary's text, and what is wrong with it."""
        text = sample.text.rpartition("</think>")[2].strip()
        if not text:
            return text, "they are empty"
        if sample.finish_reason == "length":
            return text, f"they were cut off at {self.summary_tokens} tokens"
        missing = [s for s in self.sections or () if not re.search(rf"(?im)^[\W\d_]*{re.escape(s)}\b", text)]
        return text, f"the heading {missing[0]!r} is missing" if missing else None
