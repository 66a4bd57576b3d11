"""Refined values against the recursion, their gradients, and what padding must not do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import Tree, random_tree

from focus_jax import RolloutTrees, backup, pack, refine

SHAPES = [("random", 1), ("random", 2), ("random", 40), ("random", 128), ("chain", 60), ("star", 50), ("star", 128)]


def forest(seed=0, shapes=SHAPES, **pack_options):
    rng = np.random.default_rng(seed)
    hosts = [random_tree(rng, size, shape) for shape, size in shapes]
    values = [rng.random(size).astype(np.float32) for _, size in shapes]
    trees, packed = pack(hosts, values=values, **pack_options)
    return hosts, values, trees, packed["values"]


def with_padding(trees, x, fill):
    return jnp.where(trees.mask, x, fill)


@pytest.mark.parametrize(("kappa", "gamma"), [(1.0, 1.0), (0.01, 0.9), (100.0, 0.99), (1.0, 0.0), (7.0, 0.5)])
def test_equals_the_recursion(kappa, gamma):
    hosts, values, trees, packed = forest()
    refined, target, num_children = backup(trees, packed, kappa=kappa, gamma=gamma)
    assert (refined.dtype, target.dtype, num_children.dtype) == (jnp.float32, jnp.float32, jnp.int32)
    for row, (host, value) in enumerate(zip(hosts, values, strict=True)):
        expected = reference.backup(host, value.tolist(), kappa, gamma)
        for got, want in zip((refined, target, num_children), expected, strict=True):
            np.testing.assert_allclose(got[row, : len(host)], want, rtol=1e-5, atol=1e-5)
            assert not np.any(got[row, len(host) :])


@pytest.mark.parametrize(("kappa", "gamma"), [(0.01, 1.0), (1.0, 0.99), (100.0, 1.0)])
def test_equals_the_recursion_on_a_chain_of_depth_1000(kappa, gamma):
    (host,), (value,), trees, packed = forest(shapes=[("chain", 1001)])
    refined, target, _ = backup(trees, packed, kappa=kappa, gamma=gamma)
    expected = reference.backup(host, value.tolist(), kappa, gamma)
    scale = np.max(np.abs(expected[0]))  # a value near 0 here is the difference of sums this large
    np.testing.assert_allclose(refined[0, :1001], expected[0], atol=1e-5 * scale)
    np.testing.assert_allclose(target[0, :1001], expected[1], atol=1e-5 * scale)


def test_the_worked_example_of_the_project_page():
    trees, packed = pack([Tree([0, 0, 0], [0.0, 0.0, 1.0], [0, 1, 1], [False, True, True])], values=[[0.8, 0.3, 0.3]])
    refined, target, num_children = backup(trees, packed["values"])
    np.testing.assert_allclose([target[0, 0], refined[0, 0]], [0.5, 0.6], rtol=1e-6)
    assert num_children[0, 0] == 2


def test_b18_two_outcomes_and_a_prior_of_four():
    trees, packed = pack([Tree([0, 0, 0], [0.0, 1.0, 0.0], [0, 1, 1], [False, True, True])], values=[[0.2, 0.0, 0.0]])
    refined, target, num_children = backup(trees, packed["values"], kappa=4.0)
    np.testing.assert_allclose([target[0, 0], refined[0, 0]], [0.5, 0.3], rtol=1e-6)
    assert num_children[0, 0] == 2


def test_b19_b12_only_a_terminal_node_has_no_remaining_value():
    """A cut-off state bootstraps from its own value, a terminal one is worth 0 whatever the critic says."""
    terminal, cut = (Tree([0, 0], [1.0 if end else 0.0, 1.0 if end else 0.0], [0, 1], [False, end]) for end in (True, False))
    trees, packed = pack([terminal, cut], values=[[0.5, 0.3], [0.5, 0.7]])
    refined, target, _ = backup(trees, packed["values"], gamma=0.9)
    np.testing.assert_allclose(refined[:, :2], [[0.75, 0.0], [0.565, 0.7]], rtol=1e-6)
    np.testing.assert_allclose(target[:, :2], [[1.0, 0.0], [0.63, 0.0]], rtol=1e-6)


def test_a_chain_without_a_prior_is_a_discounted_return():
    rng = np.random.default_rng(3)
    reward, steps = rng.normal(size=100), rng.integers(0, 10, 100)
    host = Tree(list(np.maximum(np.arange(100) - 1, 0)), reward.tolist(), steps.tolist(), [False] * 99 + [True])
    trees, packed = pack([host], values=[np.full(100, 1e3)])
    expected, discounted = 0.0, []
    for r, d in zip(reward[:0:-1], steps[:0:-1], strict=True):
        expected = r + 0.97**d * expected
        discounted.append(expected)
    refined = backup(trees, packed["values"], kappa=1e-30, gamma=0.97).refined
    np.testing.assert_allclose(refined[0, :99], discounted[::-1], rtol=1e-5, atol=1e-5)


def test_a_prior_of_zero_trusts_outcomes_alone_and_the_critic_where_there_are_none():
    trees, packed = pack([Tree([0, 0, 0], [0.0, 0.2, 0.6], [0, 1, 1], [False, True, False])], values=[[0.9, 0.9, 0.4]])
    np.testing.assert_allclose(backup(trees, packed["values"], kappa=0.0).refined[0, :3], [0.6, 0.0, 0.4], rtol=1e-6)


def test_a_batch_equals_its_trees_one_by_one_and_any_leading_shape_will_do():
    _, _, trees, values = forest(shapes=[("random", 30)] * 6)
    together = backup(trees, values, gamma=0.9)
    for row in range(6):
        alone = backup(jax.tree.map(lambda leaf, row=row: leaf[row], trees), values[row], gamma=0.9)
        jax.tree.map(lambda got, want, row=row: np.testing.assert_array_equal(got, want[row]), alone, together)
    folded = jax.tree.map(lambda leaf: leaf.reshape(2, 3, -1), (trees, values))
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got.reshape(6, -1), want), backup(*folded, gamma=0.9), together)


def test_works_under_vmap_over_trees_and_over_priors():
    _, _, trees, values = forest()
    mapped = jax.vmap(lambda t, v: backup(t, v, gamma=0.9).refined)
    np.testing.assert_allclose(mapped(trees, values), backup(trees, values, gamma=0.9).refined, rtol=1e-6, atol=1e-6)
    priors = jnp.array([0.1, 1.0, 10.0])
    over_priors = jax.vmap(lambda k: backup(trees, values, kappa=k).refined)(priors)
    for got, kappa in zip(over_priors, priors, strict=True):
        np.testing.assert_allclose(got, backup(trees, values, kappa=kappa).refined, rtol=1e-6, atol=1e-6)


def test_works_under_shard_map_forward_and_backward():
    _, _, trees, values = forest(shapes=[("random", 30), ("chain", 9)] * 8)
    mesh = jax.make_mesh((8,), ("trees",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = jax.sharding.PartitionSpec("trees"), jax.sharding.PartitionSpec()

    def refined(trees, values, kappa):
        return backup(trees, values, kappa=kappa, gamma=0.9).refined

    sharded = jax.shard_map(refined, mesh=mesh, in_specs=(rows, rows, everywhere), out_specs=rows)
    np.testing.assert_allclose(jax.jit(sharded)(trees, values, 2.0), refined(trees, values, 2.0), rtol=1e-6, atol=1e-7)
    got, want = (
        jax.jit(jax.grad(lambda v, k, f=f: jnp.sum(jnp.sin(f(trees, v, k))), argnums=(0, 1)))(values, 2.0)
        for f in (sharded, refined)
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


def test_b16_nan_in_padding_changes_nothing_forward_or_backward():
    _, _, trees, values = forest()

    def loss(values, reward, kappa, gamma):
        dirty = RolloutTrees(trees.parent, reward, trees.steps, trees.terminal, trees.mask)
        result = backup(dirty, values, kappa=kappa, gamma=gamma)
        return jnp.sum(jnp.sin(result.refined) + result.target**2), result

    clean = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(values, trees.reward, 2.0, 0.9)
    ignored = jnp.where(trees.terminal, jnp.nan, with_padding(trees, values, jnp.nan))
    dirty = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(ignored, with_padding(trees, trees.reward, jnp.nan), 2.0, 0.9)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    for gradient in clean[0][:2]:
        assert not np.any(np.where(trees.mask, 0, gradient))


def test_garbage_in_padding_changes_nothing():
    _, _, trees, values = forest()
    dirty = RolloutTrees(
        *(with_padding(trees, x, fill) for x, fill in ((trees.parent, -7), (trees.reward, jnp.inf), (trees.steps, 99))),
        terminal=with_padding(trees, trees.terminal, True),
        mask=trees.mask,
    )
    jax.tree.map(np.testing.assert_array_equal, backup(dirty, values, gamma=0.9), backup(trees, values, gamma=0.9))


def test_larger_padding_changes_nothing():
    _, _, trees, values = forest()
    _, _, wide_trees, wide_values = forest(buckets=[500])
    small, large = backup(trees, values, gamma=0.9), backup(wide_trees, wide_values, gamma=0.9)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[:, :128], rtol=1e-6, atol=1e-6), small, large)


@pytest.mark.parametrize(("kappa", "gamma"), [(1.0, 0.9), (0.3, 1.0), (20.0, 0.7)])
def test_gradients_equal_finite_differences_of_the_recursion(kappa, gamma):
    (host,), (value,), trees, packed = forest(seed=5, shapes=[("random", 12)])
    weights = np.random.default_rng(6).normal(size=(2, 12))

    def expected(value, reward, kappa, gamma):
        tree = Tree(host.parent, list(reward), host.steps, host.terminal)
        refined, target, _ = reference.backup(tree, list(value), kappa, gamma)
        return float(weights[0] @ np.sin(refined) + weights[1] @ np.sin(target))

    def loss(value, reward, kappa, gamma):
        tree = RolloutTrees(trees.parent, reward, trees.steps, trees.terminal, trees.mask)
        refined, target, _ = backup(tree, value, kappa=kappa, gamma=gamma)
        padded = jnp.asarray(np.pad(weights, ((0, 0), (0, 4))), jnp.float32)
        return jnp.sum(padded[:1] * jnp.sin(refined) + padded[1:] * jnp.sin(target))

    point = [value.astype(float), np.array(host.reward), kappa, gamma]
    got = jax.grad(loss, argnums=(0, 1, 2, 3))(packed, trees.reward, kappa, gamma)
    for k in range(4):
        want, base = [], np.atleast_1d(point[k]).astype(float)
        for i in range(base.size):
            moved = []
            for step in (1e-6, -1e-6):
                shifted = base.copy()
                shifted[i] += step
                moved.append(expected(*point[:k], shifted if k < 2 else shifted[0], *point[k + 1 :]))
            want.append((moved[0] - moved[1]) / 2e-6)
        np.testing.assert_allclose(np.ravel(got[k])[: base.size], want, rtol=1e-4, atol=1e-4)


def test_b65_one_compile_per_bucket():
    rng = np.random.default_rng(7)
    backup.clear_cache()
    for size in rng.integers(1, 129, 40):
        host = random_tree(rng, int(size))
        trees, packed = pack([host], values=[rng.random(int(size))])
        backup(trees, packed["values"], kappa=float(rng.random()), gamma=float(rng.random()))
    assert backup._cache_size() == 4  # 16, 32, 64, 128


def test_each_platform_gets_its_own_form():
    _, _, trees, values = forest(shapes=[("random", 16)])
    traced = backup.trace(trees, values)
    cpu, gpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda"))
    # Doubling stops when no ancestor moves any more, and asks that with a reduction; the pass over the nodes just counts.
    asks = "stablehlo.reduce"
    assert asks in gpu
    assert asks not in cpu


def test_refine_is_elementwise_and_gives_the_value_where_nothing_was_seen():
    value, target, count = jnp.array([0.8, 0.8, 0.3]), jnp.array([0.5, jnp.nan, 1.0]), jnp.array([2, 0, 1])
    np.testing.assert_allclose(refine(value, target, count), [0.6, 0.8, 0.65], rtol=1e-6)
    np.testing.assert_allclose(refine(value, target, count, kappa=0.0), [0.5, 0.8, 1.0], rtol=1e-6)
    np.testing.assert_allclose(refine(0.8, 0.5, 2), 0.6, rtol=1e-6)
    gradient = jax.grad(lambda t: jnp.sum(refine(value, t, count)))(target)
    np.testing.assert_allclose(gradient, [2 / 3, 0.0, 0.5], rtol=1e-6)


def test_shapes_and_dtypes_are_refused_by_name():
    _, _, trees, values = forest(shapes=[("random", 20)] * 8, buckets=[128])
    with pytest.raises(ValueError, match=r"`values`: expected shape \(8, 128\), got \(8, 64\)"):
        backup(trees, values[:, :64])
    with pytest.raises(TypeError, match="`values`: expected float32, got int32"):
        backup(trees, trees.steps)
    with pytest.raises(TypeError, match="`values`: expected an array of float32, got list"):
        backup(trees, [0.0] * 128)
    with pytest.raises(ValueError, match=r"`trees.mask`: expected shape \(8, 128\), got \(128,\)"):
        backup(RolloutTrees(trees.parent, trees.reward, trees.steps, trees.terminal, trees.mask[0]), values)
    with pytest.raises(TypeError, match=r"`trees.parent`: expected int32, got float32"):
        backup(RolloutTrees(values, trees.reward, trees.steps, trees.terminal, trees.mask), values)
    with pytest.raises(ValueError, match=r"`target`: expected shape \(3,\), got \(2,\)"):
        refine(jnp.zeros(3), jnp.zeros(2), jnp.zeros(3, jnp.int32))
