"""Both forms of a sweep, for CPU and for accelerators, run on CPU: values, derivatives and transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import random_tree

from focus_jax import RolloutTrees, backup, pack, sweeps

SHAPES = [("random", 1), ("random", 40), ("chain", 64), ("star", 50), ("random", 33), ("chain", 2), ("star", 2), ("random", 64)]


def backed_up(trees, offset, scale):
    """Without a prior value and with the division by the number of children undone, the sum is linear in what is sent."""
    count = sweeps.child_sum(trees, jnp.ones_like(offset))
    scale = jnp.where(sweeps.is_edge(trees), scale, 0) * (2 + count)
    return sweeps.backed_up_sum(trees, offset, scale, jnp.zeros_like(offset), 2.0)[0]


@pytest.fixture(scope="module", params=["sequential", "doubling"])
def sweep(request):
    """The sum that is backed up, in one of its forms."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "doubling":
            patch.setattr(sweeps, "_to_root_sequential", sweeps._to_root_doubling)
            patch.setattr(sweeps, "_to_leaves_sequential", sweeps._to_leaves_doubling)
        jax.clear_caches()
        yield jax.jit(backed_up)
    jax.clear_caches()


@pytest.fixture(scope="module")
def forest():
    rng = np.random.default_rng(0)
    hosts = [random_tree(rng, size, shape) for shape, size in SHAPES]
    trees, _ = pack(hosts)
    offset, scale = (jnp.asarray(rng.random((8, 64)), jnp.float32) for _ in range(2))
    return hosts, trees, offset, scale


def by_algebra(trees, offset, scale, weights):
    """Value and gradients of sum(weights * sin(total)), with total = C (offset + scale * total) solved as equations.

    C[p, c] = 1 where c is a child of p, so (I - C diag(scale)) total = C offset.
    """
    totals, gradients = [], []
    for parent, edge, o, s, w in zip(trees.parent, sweeps.is_edge(trees), offset, scale, weights, strict=True):
        children = np.zeros((64, 64))
        children[np.asarray(parent)[edge], np.flatnonzero(edge)] = 1
        matrix = np.eye(64) - children * np.asarray(s, float)
        totals.append(np.linalg.solve(matrix, children @ np.asarray(o, float)))
        arriving = children.T @ np.linalg.solve(matrix.T, w * np.cos(totals[-1]))
        gradients.append((arriving, totals[-1] * arriving))
    return np.stack(totals), *map(np.stack, zip(*gradients, strict=True))


def loss_of(f, weights):
    return lambda trees, offset, scale: jnp.sum(weights * jnp.sin(f(trees, offset, scale)))


def test_values_and_gradients_equal_the_definition(sweep, forest):
    _, trees, offset, scale = forest
    weights = np.cos(np.arange(512.0, dtype=np.float32)).reshape(8, 64)
    got = jax.jit(jax.grad(loss_of(sweep, weights), argnums=(1, 2)))(trees, offset, scale)
    for a, b in zip((sweep(trees, offset, scale), *got), by_algebra(trees, offset, scale, weights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_vmap_of_value_and_gradient_equals_the_batch(sweep, forest):
    _, trees, offset, scale = forest
    value_and_grad = jax.value_and_grad(lambda t, o, s: jnp.sum(jnp.sin(sweep(t, o, s))), argnums=(1, 2))
    values, gradients = jax.jit(jax.vmap(value_and_grad))(trees, offset, scale)
    value, gradient = jax.jit(value_and_grad)(trees, offset, scale)
    np.testing.assert_allclose(jnp.sum(values), value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradients, gradient)


def test_shard_map_of_value_and_gradient_equals_the_batch(sweep, forest):
    _, trees, offset, scale = forest
    spec = jax.sharding.PartitionSpec("trees")
    mesh = jax.make_mesh((8,), ("trees",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(sweep, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
    one = jnp.ones((8, 64))
    got = jax.jit(jax.value_and_grad(loss_of(sharded, one), argnums=(1, 2)))(trees, offset, scale)
    want = jax.jit(jax.value_and_grad(loss_of(sweep, one), argnums=(1, 2)))(trees, offset, scale)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_nan_where_no_edge_enters_reaches_neither_values_nor_gradients(sweep, forest):
    _, trees, offset, scale = forest
    edge = sweeps.is_edge(trees)
    dirty = [jnp.where(edge, x, jnp.nan) for x in (offset, scale)]
    f = jax.jit(jax.value_and_grad(lambda o, s: jnp.sum(jnp.sin(sweep(trees, o, s))), argnums=(0, 1)))
    jax.tree.map(np.testing.assert_array_equal, f(*dirty), f(offset, scale))


def test_nan_values_of_no_weight_reach_neither_values_nor_gradients(sweep, forest):
    del sweep  # patched in
    _, trees, offset, scale = forest
    closed = ~sweeps.is_edge(trees) | (scale < 0.3)
    scale = jnp.where(closed, 0, scale)

    def total(value):
        return jnp.sum(jnp.sin(sweeps.backed_up_sum(trees, offset, scale, value, 2.0)[0]))

    f = jax.jit(jax.value_and_grad(total))
    jax.tree.map(np.testing.assert_array_equal, f(jnp.where(closed, jnp.nan, offset)), f(offset))


@pytest.mark.parametrize(("kappa", "gamma"), [(0.01, 1.0), (1.0, 0.99), (100.0, 0.9)])
def test_the_backup_built_on_it_equals_the_recursion(sweep, kappa, gamma):
    del sweep  # patched in
    rng = np.random.default_rng(1)
    hosts = [random_tree(rng, size, shape) for shape, size in [("chain", 1001), ("random", 700), ("star", 1024)]]
    values = [rng.random(len(host)).astype(np.float32) for host in hosts]
    trees, packed = pack(hosts, values=values)
    refined = backup(trees, packed["values"], kappa=kappa, gamma=gamma).refined
    for row, (host, value) in enumerate(zip(hosts, values, strict=True)):
        want = np.array(reference.backup(host, value.tolist(), kappa, gamma)[0])
        # A value near 0 on a long chain is the difference of sums as large as the largest.
        np.testing.assert_allclose(refined[row, : len(host)], want, atol=1e-5 * max(1.0, np.abs(want).max()))


def test_weights_that_underflow_leave_no_trace(sweep):
    """Long products of small weights are 0, never 0/0."""
    trees = RolloutTrees(
        parent=jnp.maximum(jnp.arange(256) - 1, 0),
        reward=jnp.ones(256),
        steps=jnp.ones(256, jnp.int32),
        terminal=jnp.zeros(256, bool),
        mask=jnp.ones(256, bool),
    )

    def root_and_all(scale):
        total = sweep(trees, jnp.ones(256), scale)
        return total[0], total

    f = jax.jit(jax.value_and_grad(root_and_all, has_aux=True))
    (_, total), gradient = f(jnp.full(256, 1e-20))
    np.testing.assert_allclose(total, [1.0] * 255 + [0.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.0, 1.0] + [0.0] * 254, atol=1e-6)
