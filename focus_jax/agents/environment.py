"""What the agent acts on: the `Environment` protocol, its data, and a conformance kit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

Role = Literal["user", "tool", "continue"]


class EnvironmentFailure(Exception):
    """The environment, its tools or its sandbox broke. Never a reward."""


class GraderFailure(Exception):
    """The grader crashed, hung or could not be reached. Never a reward."""


@dataclass(frozen=True)
class Action:
    """What the policy did in one task turn.

    Attributes:
        text: the reply as text.
        ended: True when the policy ended its own turn (end-of-turn token); False when a stop string or the token limit did.
        last: True when no turn follows: the environment must grade what it has and answer `done=True`.
        stop: the stop string that ended the reply, which `text` lacks; None when something else ended it.
    """

    text: str
    ended: bool
    last: bool = False
    stop: str | None = None


@dataclass(frozen=True)
class Message:
    """One chat message: `role` is what the model's template knows (system, user, assistant, tool)."""

    role: str
    content: str


@dataclass(frozen=True)
class Observation:
    """What the environment answers to a reset or a step.

    Attributes:
        messages: what to append to the context. After `reset`: the whole opening (system, examples, the task).
            After `step`: usually one user or tool message; empty means that the policy goes on within its own message.
        reward: reward of this transition (finite).
        done: True when the episode is over.
        num_transitions: task transitions this step counts for the discount, d (1 unless the environment says otherwise).
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    num_transitions: int = 1


class Environment(Protocol):
    """A resumable task. One instance serves one attempt at a time; `snapshot` and `restore` carry it elsewhere.

    `step` may block (it runs in a worker thread). It raises `EnvironmentFailure` or `GraderFailure` when the machinery
    breaks; any other exception counts as an environment failure too.
    """

    def reset(self, task: Any) -> Observation: ...

    def step(self, action: Action) -> Observation: ...

    def snapshot(self) -> bytes: ...

    def restore(self, snapshot: bytes) -> None: ...
