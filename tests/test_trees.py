"""Packing ragged host trees, and what is refused on the way."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import Tree, random_tree

from focus_jax import RolloutTrees, pack, validate
from focus_jax.trees import BUCKETS


def test_pack_pads_each_tree_to_the_smallest_bucket_that_holds_the_largest():
    rng = np.random.default_rng(0)
    hosts = [random_tree(rng, size) for size in (1, 17, 9)]
    trees, packed = pack(hosts, values=[np.arange(len(h)) / 2 for h in hosts], depth=[[0] * len(h) for h in hosts])
    assert [leaf.shape for leaf in jax.tree.leaves((trees, packed))] == [(3, 32)] * 7
    assert [leaf.dtype for leaf in jax.tree.leaves(trees)] == [jnp.int32, jnp.float32, jnp.int32, jnp.bool_, jnp.bool_]
    assert (packed["values"].dtype, packed["depth"].dtype) == (jnp.float32, jnp.int32)
    for row, host in enumerate(hosts):
        size = len(host)
        for name in ("parent", "reward", "steps", "terminal"):
            np.testing.assert_allclose(getattr(trees, name)[row, :size], getattr(host, name))
            assert not np.any(getattr(trees, name)[row, size:])
        assert trees.mask[row].tolist() == [True] * size + [False] * (32 - size)
        np.testing.assert_array_equal(packed["values"][row], np.pad(np.arange(size) / 2, (0, 32 - size)))


def test_a_full_bucket_has_no_padding_and_own_buckets_are_obeyed():
    host = random_tree(np.random.default_rng(1), 64)
    assert pack([host])[0].mask.shape == (1, 64)
    assert pack([host], buckets=[100, 70, 10])[0].mask.shape == (1, 70)
    assert list(BUCKETS) == sorted(BUCKETS)


def test_pack_takes_unpadded_rollout_trees_and_a_root_without_parent():
    arrays = RolloutTrees(
        parent=np.array([-1, 0, 1]),
        reward=np.zeros(3),
        steps=np.ones(3, np.int64),
        terminal=np.zeros(3, bool),
        mask=np.ones(3, bool),
    )
    trees, _ = pack([arrays])
    assert trees.parent[0, :4].tolist() == [0, 0, 1, 0]


def test_pack_keeps_nan_in_values_beside_the_trees():
    _, packed = pack([random_tree(np.random.default_rng(2), 3)], values=[[0.5, np.nan, 1.0]])
    np.testing.assert_array_equal(packed["values"][0, :4], [0.5, np.nan, 1.0, 0.0])


def tree(**changes):
    fields = {"parent": [0, 0, 1, 1], "reward": [0.0] * 4, "steps": [0, 1, 1, 1], "terminal": [False] * 4}
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent": [0, -1, 1, 1]}, "tree 1, node 1: a second root"),
        ({"parent": [0, 0, 2, 1]}, "tree 1, node 2: a second root"),
        ({"parent": [0, 0, 3, 0]}, "tree 1, node 2: its parent is node 3; expected one that comes before it"),
        ({"parent": [0, 0, 1, 99]}, "tree 1, node 3: its parent is node 99"),
        ({"parent": [2, 0, 1, 1]}, "tree 1, node 0: a root whose parent is 2; expected 0"),
        ({"parent": [0, 0, 2**32, 1]}, "tree 1: `parent`: expected numbers that fit 32 bits, got 4294967296"),
        ({"reward": [0.0, 0.0, float("nan"), 0.0]}, "tree 1, node 2: its reward is nan; expected a finite number"),
        ({"reward": [0.0, 0.0, 1e39, 0.0]}, "tree 1, node 2: its reward is inf"),
        ({"steps": [0, 1, 1, -2]}, "tree 1, node 3: its steps are -2; expected 0 or more"),
        ({"terminal": [False, True, False, False]}, "tree 1, node 2: a child of the terminal node 1"),
        ({"parent": [], "reward": [], "steps": [], "terminal": []}, "tree 1 is empty: expected at least a root"),
        ({"reward": [0.0]}, r"tree 1: `reward`: expected shape \(4,\), got \(1,\)"),
        ({"steps": [[0], [1], [1], [1]]}, r"tree 1: `steps`: expected shape \(4,\), got \(4, 1\)"),
        ({"mask": [True, True, True, False]}, "tree 1 is padded already"),
    ],
)
def test_pack_names_the_tree_and_the_node_that_are_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        pack([tree(), tree(**changes)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent": [0, 0.5, 1, 1]}, "tree 0: `parent`: expected integer entries, got float64"),
        ({"terminal": [0, 0, 0, 1]}, "tree 0: `terminal`: expected bool entries, got int64"),
        ({"reward": ["0"] * 4}, "tree 0: `reward`: expected float or integer entries, got <U1"),
    ],
)
def test_pack_names_the_entries_of_the_wrong_kind(changes, message):
    with pytest.raises(TypeError, match=message):
        pack([tree(**changes)])


def test_pack_refuses_no_trees_too_many_nodes_and_arrays_that_do_not_fit():
    with pytest.raises(ValueError, match="expected at least one tree"):
        pack([])
    with pytest.raises(ValueError, match="tree 1 has 4 nodes and the largest bucket holds 2: pass larger `buckets`"):
        pack([Tree([0], [0.0], [0], [False]), tree()], buckets=[1, 2])
    with pytest.raises(ValueError, match="`values`: expected 2 arrays, one per tree, got 1"):
        pack([tree(), tree()], values=[[0.0] * 4])
    with pytest.raises(ValueError, match=r"tree 1: `values`: expected shape \(4,\), got \(3,\)"):
        pack([tree(), tree()], values=[[0.0] * 4, [0.0] * 3])


def padded(**changes):
    fields = {
        "parent": np.zeros((2, 3, 4), np.int32),
        "reward": np.zeros((2, 3, 4), np.float32),
        "steps": np.ones((2, 3, 4), np.int32),
        "terminal": np.zeros((2, 3, 4), bool),
        "mask": np.tile([True, True, False, False], (2, 3, 1)),
    }
    for name, value in changes.items():
        fields[name] = fields[name].copy()
        fields[name][1, 2] = value
    return RolloutTrees(**fields)


def test_validate_takes_any_leading_shape_and_nan_in_padding():
    validate(padded(reward=[0.0, 0.0, np.nan, np.inf], steps=[0, 0, -1, -1]))
    validate(jax.tree.map(jnp.asarray, padded()))
    validate(jax.tree.map(lambda leaf: leaf[0, 0], padded()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": [True, False, True, False]}, r"tree \(1, 2\), node 2: a real node after padding"),
        ({"mask": [False] * 4}, r"tree \(1, 2\), node 0: there is no root"),
        ({"parent": [0, 0, 1, 0]}, r"tree \(1, 2\), node 2: padding whose parent is 1; expected 0"),
        ({"reward": [0.0, -np.inf, 0.0, 0.0]}, r"tree \(1, 2\), node 1: its reward is -inf"),
    ],
)
def test_validate_names_the_tree_by_its_leading_indices(changes, message):
    with pytest.raises(ValueError, match=message):
        validate(padded(**changes))


def test_validate_refuses_shapes_and_dtypes():
    good = padded()
    with pytest.raises(ValueError, match=r"`trees.reward`: expected shape \(2, 3, 4\), got \(2, 4\)"):
        validate(RolloutTrees(good.parent, good.reward[:, 0], good.steps, good.terminal, good.mask))
    with pytest.raises(TypeError, match=r"`trees.mask`: expected bool, got float32"):
        validate(RolloutTrees(good.parent, good.reward, good.steps, good.terminal, good.reward))
    with pytest.raises(ValueError, match=r"`trees.parent`: expected shape \(..., N\) with N >= 1, got \(\)"):
        validate(jax.tree.map(lambda leaf: leaf[0, 0, 0], good))
