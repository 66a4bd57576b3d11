"""Seeds: fixed by what they are derived from, in range, and no two alike."""

import itertools

from focus_jax.agents import derive_seed


def test_b39_siblings_differ_and_replays_repeat():
    seeds = [derive_seed(7, tree, node, attempt) for tree, node, attempt in itertools.product(range(10), repeat=3)]
    assert len(set(seeds)) == 1000
    assert seeds == [derive_seed(7, tree, node, attempt) for tree, node, attempt in itertools.product(range(10), repeat=3)]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert max(seeds) > 2**30  # the whole range is used


def test_parts_are_kept_apart():
    assert len({derive_seed(1, 23), derive_seed(12, 3), derive_seed(123), derive_seed(3, 12), derive_seed(-1, 23)}) == 5
