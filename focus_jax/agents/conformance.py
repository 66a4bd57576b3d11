"""What an environment must hold to be branched from: `check_environment`, and snapshots by pickle for simple ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from focus_jax.agents.environment import Action, Environment, Observation, call_environment, check_observation

DEFAULT_ACTIONS = (Action("first", ended=True), Action("", ended=True), Action("cut off", ended=False))


class ConformanceError(Exception):
    """An environment does not hold what branching needs; the message says what was expected and what came."""


def pickle_snapshot(environment: object, *, exclude: Sequence[str] = ()) -> bytes:
    """Snapshot of an object's attributes, naming the one that cannot be copied.

    Args:
        environment: any object with plain attributes.
        exclude: attributes that stay with the instance: locks, handles, shared read-only data.

    Returns:
        What `pickle_restore` takes.

    Raises:
        TypeError: an attribute cannot be pickled.

    Example:
        >>> from types import SimpleNamespace
        >>> game = SimpleNamespace(board=[1, 2])
        >>> saved = pickle_snapshot(game)
        >>> game.board.append(3)
        >>> pickle_restore(game, saved)
        >>> game.board
        [1, 2]
    """
    attributes = {name: value for name, value in vars(environment).items() if name not in exclude}
    try:
        # The round trip makes equal states equal bytes: pickle tells apart whether equal strings are the same object.
        return pickle.dumps(pickle.loads(pickle.dumps((attributes, tuple(exclude)))))
    except Exception:
        for name, value in attributes.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise TypeError(
                    f"`{type(environment).__name__}.{name}` ({type(value).__name__}) cannot be copied ({error}): "
                    "leave it out with `exclude=` and make it anew, or share it, in each instance"
                ) from error
        raise


def pickle_restore(environment: object, snapshot: bytes) -> None:
    """Put the attributes of a `pickle_snapshot` back; whatever it excluded stays as it is.

    Snapshots are pickles: restore only those your own runs have written.
    """
    attributes, exclude = pickle.loads(snapshot)
    kept = {name: value for name, value in vars(environment).items() if name in exclude}
    vars(environment).clear()
    vars(environment).update(attributes | kept)


def check_environment(
    make_environment: Callable[[], Environment], tasks: Iterable[Any], actions: Sequence[Action] = DEFAULT_ACTIONS
) -> None:
    """Check that an environment can be saved and resumed, at the start of each task and after every action.

    A restored run gives the observations of the uninterrupted one, in a new environment and in a used one; restoring
    takes everything back (the snapshot, and every public number, such as a counter or a limit); what one child does
    reaches neither its sibling nor its parent; snapshots are bytes; a last action ends the episode; rewards are finite.
    Every environment that was made is closed at the end, where it has a `close`.

    Args:
        make_environment: makes a fresh environment.
        tasks: a few tasks to try, at least one.
        actions: what to do in each, in order, until the episode ends. Use actions that matter to the task.

    Raises:
        ConformanceError: the first thing that does not hold.
        EnvironmentFailure, GraderFailure: the environment broke, or answered what is no observation.

    Example:
        >>> from focus_jax.agents import Message
        >>> class Echo:
        ...     def reset(self, task):
        ...         return Observation((Message("user", task),))
        ...     def step(self, action):
        ...         return Observation((Message("user", action.text),), done=action.last)
        ...     def snapshot(self):
        ...         return b""
        ...     def restore(self, snapshot):
        ...         pass
        >>> check_environment(Echo, tasks=["hello"])
    """
    num_tasks = 0
    for num_tasks, task in enumerate(tasks, start=1):
        with ExitStack() as closing:
            make = partial(_make, make_environment, closing)
            _check_task(make, task, f"{type(make()).__name__}, task {num_tasks - 1}", actions)
    if not num_tasks:
        raise ConformanceError("`tasks`: expected at least one task to try, got none")


@dataclass(frozen=True)
class _Point:
    """A place in the uninterrupted run: its snapshot, and the numbers that must come back with it."""

    name: str
    snapshot: bytes
    numbers: dict[str, float]

    @classmethod
    def of(cls, environment: Environment, name: str) -> _Point:
        return cls(name, _snapshot(environment, name), _numbers(environment))


def _make(make_environment: Callable[[], Environment], closing: ExitStack) -> Environment:
    environment = make_environment()
    if (close := getattr(environment, "close", None)) is not None:
        closing.callback(call_environment, "close", close)
    return environment


def _check_task(make: Callable[[], Environment], task: Any, name: str, actions: Sequence[Action]) -> None:
    parent = make()
    opening = check_observation(call_environment("reset", parent.reset, task), "reset")
    _require(bool(opening.messages), f"{name}, `reset`: expected at least one message, got none")
    _require(not opening.done, f"{name}, `reset`: expected `done=False`, got True")
    points = [_Point.of(parent, f"{name}, at the start")]
    observations: list[Observation] = []
    for action in actions:
        observations.append(_step(parent, action))
        if observations[-1].done:
            break
        points.append(_Point.of(parent, f"{name}, after {len(observations)} steps"))
    for i, point in enumerate(points):
        _check_point(make, point, actions[i : len(observations)], observations[i:])
    # Back to the start in the instance that has gone furthest: nothing may be left over.
    used = replace(points[0], name=f"{name}, restored over a used environment")
    _check_restored(parent, used)
    _check_run(parent, used.name, actions, observations)


def _check_point(
    make: Callable[[], Environment], point: _Point, actions: Sequence[Action], expected: Sequence[Observation]
) -> None:
    parent, first, second, last = make(), make(), make(), make()
    for environment in (parent, first, second, last):
        _check_restored(environment, point)
    final = _step(last, replace(actions[0] if actions else Action("", ended=True), last=True))
    _require(final.done, f"{point.name}: expected `done=True` after an action with `last=True`, got False")
    _check_run(first, point.name, actions, expected)
    for role, environment in (("parent", parent), ("sibling", second)):
        same = _snapshot(environment, point.name) == point.snapshot
        _require(same, f"{point.name}: expected a child's steps to leave its {role} alone, but they share data that changed")
    _check_run(second, f"{point.name}, second child", actions, expected)


def _check_restored(environment: Environment, point: _Point) -> None:
    call_environment("restore", environment.restore, point.snapshot)
    restored = _numbers(environment)
    for name, number in point.numbers.items():
        got = restored.get(name)
        same = got == number or (got != got and number != number)
        _require(same, f"{point.name}: expected `{name}` to be restored to {number}, got {got}; put it in the snapshot")
    again = _snapshot(environment, point.name)
    _require(
        again == point.snapshot,
        f"{point.name}: expected the restored environment to give the same snapshot ({len(point.snapshot)} bytes), got "
        f"another ({len(again)} bytes): something is not restored, or the order of a set or the time gets in",
    )


def _check_run(environment: Environment, name: str, actions: Sequence[Action], expected: Sequence[Observation]) -> None:
    for i, (action, observation) in enumerate(zip(actions, expected, strict=False)):
        got = _step(environment, action)
        _require(got == observation, f"{name}, then action {i}: expected {observation} as in the uninterrupted run, got {got}")


def _numbers(environment: Environment) -> dict[str, float]:
    """Public numbers of an environment: counters and limits."""
    attributes = getattr(environment, "__dict__", {})
    return {n: v for n, v in attributes.items() if isinstance(v, (int, float)) and not n.startswith("_")}


def _step(environment: Environment, action: Action) -> Observation:
    return check_observation(call_environment("step", environment.step, action), "step")


def _snapshot(environment: Environment, name: str) -> bytes:
    try:
        snapshot = environment.snapshot()
    except Exception as error:
        raise ConformanceError(f"{name}, `snapshot`: the environment cannot be copied: {error}") from error
    _require(isinstance(snapshot, bytes), f"{name}, `snapshot`: expected bytes, got {type(snapshot).__name__}")
    return snapshot


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConformanceError(message)
