"""What the agent acts on: the `Environment` protocol, its data, and how it is called."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


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

    Every call may block: it runs in a thread of its own, unless the environment has an attribute `blocking = False`, which
    saves a quick one the thread. It raises `EnvironmentFailure` or `GraderFailure` when the machinery breaks; any other
    exception counts as an environment failure too.

    An environment may also have `close()`, which takes and returns nothing: called once its attempt is over, however it
    ended, to give back a sandbox, a browser or a file. Nothing is called after it, but a call that its deadline left behind
    may still be running.
    """

    def reset(self, task: Any) -> Observation:
        """Start `task` afresh, whatever was done before.

        Returns:
            The whole opening: at least one message, reward 0 and `done=False`.
        """
        ...

    def step(self, action: Action) -> Observation:
        """Take one turn of the policy, and answer it.

        Returns:
            What the policy sees next, and the reward. After `action.last` it must have `done=True`.

        Raises:
            EnvironmentFailure, GraderFailure: the machinery broke. What the policy did wrong is an observation instead.
        """
        ...

    def snapshot(self) -> bytes:
        """Everything that what follows depends on, limits and random generators included; equal states give equal bytes.

        Raises:
            TypeError: the environment cannot be copied; see `pickle_snapshot`.
            EnvironmentFailure: the machinery broke.
        """
        ...

    def restore(self, snapshot: bytes) -> None:
        """Take on the state in `snapshot`, from this instance or another; nothing of the present state is left."""
        ...


def call_environment(operation: str, function: Callable[..., T], *args: Any) -> T:
    """Call into an environment's code; whatever breaks there is a failure that says where.

    Args:
        operation: what is being done, for the message.
        function: a method of the environment, or a function of it.

    Raises:
        EnvironmentFailure, GraderFailure: as the environment raised them; any other exception, an exit included,
            becomes an `EnvironmentFailure` with the exception as its cause.
    """
    try:
        return function(*args)
    except (EnvironmentFailure, GraderFailure):
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailure(f"`{operation}` raised {type(error).__name__}: {error}") from error


def check_observation(observation: Observation, operation: str) -> Observation:
    """The observation itself, if it is one that can be used.

    Raises:
        EnvironmentFailure: it is no `Observation`, or its reward, messages or transitions are not what they should be.
    """
    if not isinstance(observation, Observation):
        raise EnvironmentFailure(f"`{operation}`: expected an Observation, got {type(observation).__name__}")
    if not _is_finite(observation.reward):
        raise EnvironmentFailure(f"`{operation}`: expected a finite reward, got {observation.reward!r}")
    if not (isinstance(observation.num_transitions, int) and observation.num_transitions >= 0):
        raise EnvironmentFailure(f"`{operation}`: expected `num_transitions` >= 0, got {observation.num_transitions!r}")
    for message in observation.messages:
        if not (isinstance(message, Message) and isinstance(message.content, str)):
            raise EnvironmentFailure(f"`{operation}`: expected messages with text contents, got {message!r}")
    return observation


def take_snapshot(environment: Environment) -> tuple[bytes, bool]:
    """The environment's snapshot and True, or nothing and False, with a warning, where it cannot be copied.

    Raises:
        EnvironmentFailure, GraderFailure: the machinery broke, which is not the same as refusing to be copied.
    """
    try:
        snapshot = environment.snapshot()
    except (EnvironmentFailure, GraderFailure):
        raise
    except Exception as error:
        name = type(environment).__name__
        warnings.warn(f"{name} cannot be copied, so its states cannot be resumed: {error}", RuntimeWarning, stacklevel=2)
        return b"", False
    if not isinstance(snapshot, bytes):
        raise EnvironmentFailure(f"`snapshot`: expected bytes, got {type(snapshot).__name__}")
    return snapshot, True


def _is_finite(reward: object) -> bool:
    try:
        return math.isfinite(reward)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        return False
