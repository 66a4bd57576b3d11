"""Advantages against explicit loops, the identities they must satisfy, and published faults of their kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import Tree, random_tree

from focus_jax import (
    RolloutTrees,
    backup,
    grpo_advantages,
    leave_one_out_advantages,
    pack,
    segment_advantages,
    vineppo_advantages,
)

SHAPES = [("random", 1), ("random", 2), ("random", 40), ("random", 64), ("chain", 50), ("star", 64), ("star", 20), ("chain", 64)]


@pytest.fixture(scope="module")
def forest():
    rng = np.random.default_rng(0)
    hosts = [random_tree(rng, size, shape) for shape, size in SHAPES]
    values = [rng.random(size).astype(np.float32) for _, size in SHAPES]
    trees, packed = pack(hosts, values=values)
    return hosts, values, trees, packed["values"]


def chain(reward, terminal_last=False, steps=1):
    """A path with one edge per reward."""
    size = len(reward) + 1
    parent, last = [max(i - 1, 0) for i in range(size)], [False] * (size - 1) + [terminal_last]
    return Tree(parent, [0.0, *reward], [steps] * size, last)


def advantages_of(host, refined, **knobs):
    trees, packed = pack([host], refined=[refined])
    return segment_advantages(trees, packed["refined"], **knobs)[0, 1 : len(host)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.0), (0.9, 0.0), (0.9, 1.0), (1.0, 0.5), (0.7, 0.95)])
def test_equal_the_loop(forest, gamma, lam):
    hosts, _, trees, values = forest
    refined = backup(trees, values, gamma=gamma).refined
    got = segment_advantages(trees, refined, gamma=gamma, lam=lam)
    assert got.dtype == jnp.float32
    for row, host in enumerate(hosts):
        want = reference.segment_advantages(host, np.asarray(refined[row], float).tolist(), gamma, lam)
        np.testing.assert_allclose(got[row, : len(host)], want, rtol=1e-5, atol=1e-5)
        assert not np.any(got[row, len(host) :])


@pytest.mark.parametrize(("kappa", "gamma"), [(1.0, 1.0), (0.1, 0.9), (5.0, 0.99)])
def test_leave_one_out_equals_the_loop(forest, kappa, gamma):
    hosts, values, trees, packed = forest
    refined = backup(trees, packed, kappa=kappa, gamma=gamma).refined
    got = leave_one_out_advantages(trees, packed, refined, kappa=kappa, gamma=gamma)
    for row, host in enumerate(hosts):
        want = reference.leave_one_out_advantages(host, values[row].tolist(), refined[row].tolist(), kappa, gamma)
        np.testing.assert_allclose(got[row, : len(host)], want, rtol=1e-5, atol=1e-5)
        assert not np.any(got[row, len(host) :])


def test_leave_one_out_undoes_the_shrinking_of_the_plain_advantage(forest):
    """A = A_plain * (kappa + n) / (kappa + n - 1) where kappa >= 1."""
    _, _, trees, values = forest
    refined, _, num_children = backup(trees, values, kappa=2.0)
    siblings = np.take_along_axis(np.asarray(num_children), np.asarray(trees.parent), axis=1)
    plain = segment_advantages(trees, refined)
    expected = plain * (2.0 + siblings) / np.maximum(1.0 + siblings, 1.0)
    np.testing.assert_allclose(leave_one_out_advantages(trees, values, refined, kappa=2.0), expected, rtol=1e-4, atol=1e-5)


def test_advantages_along_a_path_telescope(forest):
    hosts, _, trees, values = forest
    refined = np.asarray(backup(trees, values).refined)
    advantages = np.asarray(segment_advantages(trees, refined))
    for row, host in enumerate(hosts):
        gained = [0.0] * len(host)
        for i in range(1, len(host)):
            gained[i] = gained[host.parent[i]] + float(advantages[row, i]) - host.reward[i]
            np.testing.assert_allclose(gained[i], refined[row, i] - refined[row, 0], atol=2e-5)


def test_the_mean_advantage_of_the_children_of_a_node_is_its_surprise(forest):
    """With G the mean child return, the advantages below a node average to G - Vt = kappa (G - V) / (kappa + n)."""
    hosts, _, trees, values = forest
    refined, target, _ = jax.device_get(backup(trees, values, kappa=3.0))
    advantages = np.asarray(segment_advantages(trees, refined))
    for row, host in enumerate(hosts):
        for i in range(len(host)):
            if below := host.children(i):
                np.testing.assert_allclose(np.mean(advantages[row, np.array(below)]), target[row, i] - refined[row, i], atol=1e-5)


def test_the_recovery_of_the_project_page():
    np.testing.assert_allclose(advantages_of(chain([0.0, 0.0]), [0.6, 0.4, 0.6]), [-0.2, 0.2], rtol=1e-6)


def test_b10_lambda_returns_bootstrap_from_the_last_state_once():
    refined = [0.5, 0.5, 0.5, 10.0]
    np.testing.assert_allclose(advantages_of(chain([1.0, 2.0, 3.0]), refined, gamma=0.9, lam=1.0), [12.02, 12.3, 11.5], rtol=1e-6)
    np.testing.assert_allclose(advantages_of(chain([1.0, 2.0, 3.0]), refined, gamma=0.9, lam=0.0), [0.95, 1.95, 11.5], rtol=1e-6)


def test_b11_an_episode_ends_at_its_own_last_edge():
    trees, packed = pack([chain([0.0, 1.0], terminal_last=True)] * 2, values=[[0.5] * 3] * 2)
    np.testing.assert_allclose(segment_advantages(trees, packed["values"])[:, :3], [[0.0, 0.0, 0.5]] * 2, atol=1e-7)


def test_b12_a_cut_off_state_bootstraps_from_itself_and_a_terminal_one_is_worth_nothing():
    np.testing.assert_allclose(advantages_of(chain([0.0]), [0.6, 0.7], gamma=0.9), [0.03], atol=1e-6)
    np.testing.assert_allclose(advantages_of(chain([0.0], terminal_last=True), [0.6, 0.7], gamma=0.9), [-0.6], atol=1e-6)


def test_b13_discounting_counts_task_transitions_only():
    """Two segments without task transitions, such as context management, discount nothing."""
    host = Tree([0, 0, 1, 2], [0.0, 0.0, 0.0, 1.0], [0, 1, 0, 0], [False, False, False, True])
    np.testing.assert_allclose(advantages_of(host, [0.0] * 4, gamma=0.9, lam=1.0), [0.9, 1.0, 1.0], rtol=1e-6)


def test_b19_no_value_leaks_from_a_terminal_state():
    host = chain([1.0], terminal_last=True)
    np.testing.assert_allclose(advantages_of(host, [0.4, 0.3], gamma=0.9), [0.6], rtol=1e-6)
    trees, packed = pack([host], values=[[0.4, 0.3]])
    for f in (vineppo_advantages, lambda t, v, gamma: leave_one_out_advantages(t, v, v, gamma=gamma)):
        np.testing.assert_allclose(f(trees, packed["values"], gamma=0.9)[0, :2], [0.0, 0.6], rtol=1e-6)


def test_vineppo_reads_both_ends_of_a_segment():
    trees, packed = pack([chain([0.25, 1.0], terminal_last=True)], mc=[[0.5, 0.75, 9.0]])
    np.testing.assert_allclose(vineppo_advantages(trees, packed["mc"], gamma=0.5)[0, :3], [0.0, 0.125, 0.25], rtol=1e-6)


def everything(trees, values, refined, lam=0.5):
    return jnp.stack(
        [
            segment_advantages(trees, refined, gamma=0.9),
            segment_advantages(trees, refined, gamma=0.9, lam=lam),
            leave_one_out_advantages(trees, values, refined, gamma=0.9),
            vineppo_advantages(trees, values, gamma=0.9),
        ]
    )


def test_b16_nan_in_padding_changes_nothing_forward_or_backward(forest):
    _, _, trees, values = forest
    refined = backup(trees, values).refined

    def loss(values, refined, reward):
        got = everything(RolloutTrees(trees.parent, reward, trees.steps, trees.terminal, trees.mask), values, refined)
        return jnp.sum(jnp.sin(got)), got

    f = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    dirty = [jnp.where(trees.mask, x, jnp.nan) for x in (values, refined, trees.reward)]
    jax.tree.map(np.testing.assert_array_equal, f(*dirty), f(values, refined, trees.reward))


def test_a_batch_equals_its_trees_one_by_one_and_vmap_and_shard_map(forest):
    _, _, trees, values = forest
    together = everything(trees, values, values)
    mapped = jax.vmap(everything, out_axes=1)(trees, values, values)
    np.testing.assert_allclose(mapped, together, rtol=1e-6, atol=1e-6)
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((8,), ("trees",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(everything, mesh=mesh, in_specs=(spec("trees"),) * 3, out_specs=spec(None, "trees"))
    np.testing.assert_allclose(jax.jit(sharded)(trees, values, values), together, rtol=1e-6, atol=1e-6)


def test_gradients_equal_finite_differences(forest):
    _, _, trees, values = jax.tree.map(lambda leaf: leaf[2:3] if isinstance(leaf, jax.Array) else leaf, forest)
    direction = jnp.where(trees.mask, jnp.cos(jnp.arange(64.0)[None]), 0)
    f = jax.jit(lambda v, lam: jnp.sum(everything(trees, v, v * 0.5, lam) ** 2))
    slope = jnp.vdot(jax.grad(f)(values, 0.5), direction)
    np.testing.assert_allclose(slope, (f(values + 0.01 * direction, 0.5) - f(values - 0.01 * direction, 0.5)) / 0.02, rtol=1e-3)
    np.testing.assert_allclose(jax.grad(f, argnums=1)(values, 0.5), (f(values, 0.51) - f(values, 0.49)) / 0.02, rtol=1e-3)


GROUPS = [
    ([1.0, 0.0, 0.0, 1.0], [True] * 4),
    ([1.0, 0.0, 0.0, 9.0], [True, True, True, False]),
    ([1.0, 1.0, 1.0, 1.0], [True] * 4),
    ([0.1, 0.1, 0.1, np.nan], [True, True, True, False]),
    ([1.0, np.nan, np.nan, np.nan], [True, False, False, False]),
    ([np.nan] * 4, [False] * 4),
    ([1e4, 1e4 + 1, np.inf, 1e4 + 3], [True, True, False, True]),
]


def test_b17_b72_grpo_equals_the_loop_whatever_is_missing():
    returns, mask = (jnp.array(x) for x in zip(*GROUPS, strict=True))
    got = grpo_advantages(returns, mask)
    np.testing.assert_allclose(got, [reference.grpo_advantages(*group) for group in GROUPS], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(got[2:6], np.zeros((4, 4)))
    np.testing.assert_array_equal(grpo_advantages(returns[0]), got[0])
    np.testing.assert_allclose(jax.vmap(grpo_advantages)(returns, mask), got, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(grpo_advantages(returns.reshape(7, 1, 4), mask.reshape(7, 1, 4))[:, 0], got)


def test_b72_a_lost_member_is_not_a_zero():
    """Mean 1/3 and sample deviation 0.577, never mean 0.25."""
    got = grpo_advantages(jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.array([True, True, True, False]))
    np.testing.assert_allclose(got, [2 / 3 / 0.57735, -1 / 3 / 0.57735, -1 / 3 / 0.57735, 0.0], rtol=1e-4)


def test_b17_gradients_of_grpo_are_finite_and_stay_in_their_group():
    returns, mask = (jnp.array(x) for x in zip(*GROUPS, strict=True))
    gradient = jax.grad(lambda r: jnp.sum(jnp.sin(grpo_advantages(r, mask))))(returns)
    assert np.all(np.isfinite(gradient))
    assert not np.any(np.where(mask, 0, gradient))
    assert not np.any(gradient[2:6])


def test_shapes_and_dtypes_are_refused_by_name(forest):
    _, _, trees, values = forest
    with pytest.raises(ValueError, match=r"`refined`: expected shape \(8, 64\), got \(8, 32\)"):
        segment_advantages(trees, values[:, :32])
    with pytest.raises(ValueError, match=r"`values`: expected shape \(8, 64\), got \(64,\)"):
        leave_one_out_advantages(trees, values[0], values)
    with pytest.raises(ValueError, match=r"`mc_values`: expected shape \(8, 64\), got \(4, 64\)"):
        vineppo_advantages(trees, values[:4])
    with pytest.raises(TypeError, match="`mask`: expected bool, got int32"):
        grpo_advantages(values, trees.steps)
    with pytest.raises(TypeError, match="`returns`: expected float32, got int32"):
        grpo_advantages(trees.steps)
