"""The conformance kit: accepts an environment that can be branched from, and names what is wrong with one that cannot."""

import itertools
import pickle
import random
import re
import threading
from contextlib import nullcontext

import pytest
from agent_fakes import CountingEnvironment

from focus_jax.agents import (
    Action,
    ConformanceError,
    EnvironmentFailure,
    Message,
    Observation,
    check_environment,
    pickle_restore,
    pickle_snapshot,
)

TASKS = [{"reward": 0.5}, {"observation": [["tool", "x"]]}]


class Walk:
    """A counter, a list, a random generator, and a step limit that the task sets (default 1000)."""

    def __init__(self):
        self.counter, self.items, self.step_limit = 0, [], 1000
        self.random = random.Random(0)

    def reset(self, task):
        self.counter, self.items, self.step_limit = 0, [1], task
        return Observation((Message("user", "walk"),))

    def step(self, action):
        self.counter += 1
        self.items.append(self.random.randrange(10**9))
        done = action.last or self.counter >= self.step_limit
        return Observation((Message("user", f"{self.items} {self.counter}"),), done=done)

    def snapshot(self):
        return pickle_snapshot(self)

    def restore(self, snapshot):
        pickle_restore(self, snapshot)


def test_good_environments_pass():
    check_environment(CountingEnvironment, TASKS)
    check_environment(Walk, [100, 2], actions=[Action("go", ended=True)] * 4)


def test_restored_children_keep_limits_and_share_nothing():
    """B42: counter 3, list [1], limit 100 (default 1000)."""
    parent = Walk()
    parent.reset(100)
    parent.counter = 3
    saved = parent.snapshot()
    first, second = Walk(), Walk()
    first.restore(saved)
    second.restore(saved)
    assert [(w.counter, w.step_limit, w.items) for w in (first, second)] == [(3, 100, [1])] * 2
    first.items.append(9)
    assert second.items == parent.items == [1]
    assert second.step(Action("go", ended=True)) == parent.step(Action("go", ended=True))


def fails_with(environment, message, tasks=(100,), **options):
    with pytest.raises(ConformanceError, match=message):
        check_environment(environment, tasks, **options)


def test_lost_limit_is_named():
    """B42: restoring rebuilds from the constructor, so the limit is 1000 again."""

    class Rebuilt(Walk):
        def snapshot(self):
            return pickle.dumps((self.counter, self.items, self.random.getstate()))

        def restore(self, snapshot):
            self.__init__()
            self.counter, self.items, state = pickle.loads(snapshot)
            self.random.setstate(state)

    fails_with(
        Rebuilt, "Rebuilt, task 0, at the start: expected `step_limit` to be restored to 100, got 1000; put it in the snapshot"
    )


def test_lost_counter_is_named():
    class Leftover(Walk):
        def snapshot(self):
            return pickle_snapshot(self, exclude=["counter"])

    fails_with(Leftover, "expected `counter` to be restored to 1, got 0")


def test_leftovers_of_a_used_environment_are_named():
    class Piling(CountingEnvironment):
        def restore(self, snapshot):
            log = self.log
            super().restore(snapshot)
            self.log = log + self.log

    fails_with(Piling, "restored over a used environment: expected the restored environment to give the same snapshot", TASKS)


def test_shared_data_is_named():
    """B42: what one child appends, its parent and its sibling see."""
    shared = []

    class Sharing(Walk):
        def step(self, action):
            shared.append(1)
            return super().step(action)

        def snapshot(self):
            return pickle.dumps((len(shared), super().snapshot()))

        def restore(self, snapshot):
            length, rest = pickle.loads(snapshot)
            del shared[length:]
            super().restore(rest)

    fails_with(Sharing, "expected a child's steps to leave its parent alone, but they share data that changed")


def test_unrestored_chance_is_named():
    class Forgetful(Walk):
        def snapshot(self):
            return pickle_snapshot(self, exclude=["random"])

        def step(self, action):
            observation = super().step(action)
            self.items.pop()
            return observation

    fails_with(
        Forgetful, r"after 1 steps, then action 0: expected Observation\(.*\) as in the uninterrupted run, got Observation"
    )


def test_unstable_snapshot_is_named():
    class Ticking(Walk):
        clock = itertools.count()

        def snapshot(self):
            return pickle.dumps((next(self.clock), super().snapshot()))

        def restore(self, snapshot):
            super().restore(pickle.loads(snapshot)[1])

    fails_with(Ticking, "expected the restored environment to give the same snapshot .* the order of a set or the time gets in")


def test_unpicklable_attribute_is_named():
    """B43: a lock inside the environment is refused by name when first saved."""

    class Locked(Walk):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    fails_with(
        Locked,
        re.escape("task 0, at the start, `snapshot`: the environment cannot be copied: `Locked.lock` (lock) cannot be copied"),
    )
    with pytest.raises(TypeError, match=r"`Locked\.lock` .* leave it out with `exclude=`"):
        Locked().snapshot()


def test_excluded_attributes_stay_with_the_instance():
    first, second = Walk(), Walk()
    first.lock, second.lock, second.extra = threading.Lock(), threading.Lock(), 5
    own = second.lock
    pickle_restore(second, pickle_snapshot(first, exclude=["lock"]))
    assert second.lock is own
    assert not hasattr(second, "extra")


def test_snapshot_must_be_bytes():
    class Texty(CountingEnvironment):
        def snapshot(self):
            return "text"

    fails_with(Texty, "`snapshot`: expected bytes, got str", TASKS)


def test_last_action_must_end_the_episode():
    class Endless(CountingEnvironment):
        def step(self, action):
            return super().step(Action(action.text, action.ended))

    fails_with(Endless, "at the start: expected `done=True` after an action with `last=True`, got False", TASKS)


def test_opening_must_be_an_opening():
    class Silent(CountingEnvironment):
        def reset(self, task):
            super().reset(task)
            return Observation()

    class Over(CountingEnvironment):
        def reset(self, task):
            super().reset(task)
            return Observation((Message("user", "x"),), done=True)

    fails_with(Silent, "`reset`: expected at least one message, got none", TASKS)
    fails_with(Over, "`reset`: expected `done=False`, got True", TASKS)


def test_rewards_must_be_finite():
    with pytest.raises(EnvironmentFailure, match="`step`: expected a finite reward, got nan"):
        check_environment(CountingEnvironment, [{"reward": float("nan")}])


def test_there_must_be_a_task():
    fails_with(CountingEnvironment, "expected at least one task to try, got none", [])


class Closing(CountingEnvironment):
    """Keeps its instances, which count how often they were closed."""

    def __init__(self, instances):
        super().__init__()
        self.instances, self._closed = instances, 0
        instances.append(self)

    def step(self, action):
        assert not self._closed
        return super().step(action)

    def close(self):
        self._closed += 1


@pytest.mark.parametrize(("reward", "outcome"), [(0.5, nullcontext()), (float("nan"), pytest.raises(EnvironmentFailure))])
def test_every_environment_is_closed_once(reward, outcome):
    instances = []
    with outcome:
        check_environment(lambda: Closing(instances), [{}, {"reward": reward}])
    assert len(instances) > 2
    assert {environment._closed for environment in instances} == {1}


def test_a_close_that_breaks_is_named():
    class Stuck(CountingEnvironment):
        def close(self):
            raise OSError("busy")

    with pytest.raises(EnvironmentFailure, match="`close` raised OSError: busy"):
        check_environment(Stuck, TASKS)
