"""Trees grown on the device obey what the collector's trees obey."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulation import Task, grow, plant, probe, root_only, uniform, value_refinement

from focus_jax import backup, validate
from focus_jax.tasks.detour import Level, Problem, exact_values, make_search

LEVEL = Level(3, 14)
NUM, SEGMENT = 6, 4


def make_task(num=NUM, seed=0):
    rng = np.random.default_rng(seed)
    searches = [make_search(Problem(LEVEL, i)) for i in range(num)]
    stay = np.arange(LEVEL.num_pages)[:, None]
    following = np.stack([np.concatenate([s.next, stay], 1) for s in searches]).astype(np.int32)
    return Task(jnp.asarray(following), jnp.asarray(rng.dirichlet(np.ones(5), size=following.shape[:2]), jnp.float32))


def critic(page, time):
    """Some value that depends on both."""
    return 0.1 + 0.8 * jnp.abs(jnp.sin((page + 3 * time).astype(jnp.float32)))


@partial(jax.jit, static_argnames=("rule", "first", "budget", "num_nodes"))
def grown(task, key, *, rule, first=2, budget=160, num_nodes=80):
    settings = {"critic": critic, "max_steps": LEVEL.max_steps}
    growth = plant(task, critic, num_nodes=num_nodes, segment=SEGMENT)
    budgets = jnp.full(len(task.next), budget, jnp.int32)
    roots = lambda g: jnp.where(g.stats.count < first, root_only(g), 0)  # noqa: E731
    growth = grow(growth, task, budgets, rule=roots, key=key, **settings)
    return grow(growth, task, budgets, rule=rule, key=jax.random.fold_in(key, 1), **settings)


FOCUS = value_refinement(0.5)
RULES = {"focus": FOCUS, "uniform": uniform, "roots": root_only}


@pytest.fixture(params=RULES, scope="module")
def trees(request):
    return request.param, make_task(), grown(make_task(), jax.random.key(3), rule=RULES[request.param])


def test_they_are_trees(trees):
    _, _, growth = trees
    validate(growth.trees)
    assert (growth.num_nodes > 20).all()


def test_every_edge_is_what_its_replies_led_to(trees):
    _, task, growth = trees
    goal = LEVEL.num_pages
    g = jax.tree.map(np.asarray, growth)
    following, probs = np.asarray(task.next), np.asarray(task.probs)
    for tree in range(NUM):
        for node in range(1, g.num_nodes[tree]):
            parent = g.parent[tree, node]
            page, time = g.page[tree, parent], g.time[tree, parent]
            assert not g.terminal[tree, parent]
            assert g.given[tree, node].sum() >= 1
            for k in np.flatnonzero(g.given[tree, node]):
                assert g.pages[tree, node, k] == page
                assert probs[tree, page, g.replies[tree, node, k]] > 0
                page, time = following[tree, page, g.replies[tree, node, k]], time + 1
            assert (page, time) == (g.page[tree, node], g.time[tree, node])
            over = page == goal or time == LEVEL.max_steps
            assert g.terminal[tree, node] == over
            assert over or g.given[tree, node].all()
            assert g.reward[tree, node] == (page == goal)


def test_evidence_and_values_are_those_of_the_method(trees):
    """One observation at a continuation's start and at each node it made; strict ancestors of the start get nothing."""
    _, _, growth = trees
    g = jax.tree.map(np.asarray, growth)
    for tree in range(NUM):
        count, total = np.zeros(g.value.shape[1]), np.zeros(g.value.shape[1])
        for leaf in np.unique(g.leaf[tree, 1 : g.num_nodes[tree]]):
            made = [n for n in range(1, g.num_nodes[tree]) if g.leaf[tree, n] == leaf]
            for node in [g.parent[tree, made[0]], *made]:
                count[node] += 1
                total[node] += g.reward[tree, leaf]
        np.testing.assert_array_equal(count, g.stats.count[tree])
        np.testing.assert_allclose(total / np.maximum(count, 1), g.stats.mean[tree], atol=1e-6)
    open_ = np.asarray(growth.mask) & ~g.terminal
    np.testing.assert_allclose(g.value[open_], np.asarray(critic(growth.page, growth.time))[open_], atol=1e-6)
    assert (g.value[~open_] == 0).all()


def test_no_tree_holds_more_than_its_budget(trees):
    _, _, growth = trees
    np.testing.assert_array_equal(growth.spent, np.asarray(growth.given).sum((1, 2)))
    assert (np.asarray(growth.spent) <= 160).all()
    assert (np.asarray(growth.spent) > 160 - LEVEL.max_steps).all()


def test_rules_choose_what_they_say(trees):
    name, _, growth = trees
    starts = [
        np.asarray(growth.parent)[t][np.unique(np.asarray(growth.leaf)[t, 1 : int(growth.num_nodes[t])])] for t in range(NUM)
    ]
    counts = np.asarray(growth.stats.count)
    if name == "roots":
        assert all((counts[t, 1 : int(growth.num_nodes[t])] == 1).all() for t in range(NUM)), starts
    if name == "uniform":
        inner = np.asarray(growth.mask) & ~np.asarray(growth.terminal)
        assert max(np.ptp(counts[t][inner[t]]) for t in range(NUM)) <= 2
    if name == "focus":
        assert np.ptp(counts[np.asarray(growth.mask)]) > 2


def test_a_full_tree_stops():
    growth = grown(make_task(), jax.random.key(0), rule=uniform, budget=10_000, num_nodes=24)
    assert (np.asarray(growth.num_nodes) <= 24).all()
    assert (np.asarray(growth.num_nodes) > 24 - 5).all()


def test_returns_are_those_of_the_exact_values():
    task = make_task(1)
    value = float(exact_values(task.next[0, :, :4], task.probs[0, :, :4], LEVEL.max_steps)[0, 0])
    many = Task(jnp.repeat(task.next, 4000, 0), jnp.repeat(task.probs, 4000, 0))
    start = jnp.zeros((4000, 1), jnp.int32)
    returns, cost = jax.jit(partial(probe, max_steps=LEVEL.max_steps))(many, start, start, start == 0, key=jax.random.key(1))
    assert 0.02 < value < 0.98
    assert float(returns.mean()) == pytest.approx(value, abs=4 * (value * (1 - value) / 4000) ** 0.5)
    assert int(cost.min()) >= 1
    assert int(cost.max()) == LEVEL.max_steps
    one = grown(many, jax.random.key(2), rule=root_only, first=1, budget=LEVEL.max_steps, num_nodes=8)
    assert float(one.stats.mean[:, 0].mean()) == pytest.approx(value, abs=4 * (value * (1 - value) / 4000) ** 0.5)


def test_a_probe_that_is_not_asked_for_costs_nothing():
    task = make_task()
    page = jnp.zeros((NUM, 2), jnp.int32)
    _, cost = probe(task, page, page, page == 1, max_steps=LEVEL.max_steps, key=jax.random.key(0))
    assert not np.asarray(cost).any()


def test_refined_values_need_no_more_than_the_tree():
    """The arrays go straight into the public functions."""
    growth = grown(make_task(), jax.random.key(3), rule=FOCUS)
    result = backup(growth.trees, growth.value, kappa=0.5)
    assert np.isfinite(result.refined).all()
    assert (np.asarray(result.num_children) > 0)[:, 0].all()
