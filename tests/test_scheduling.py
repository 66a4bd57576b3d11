"""Evidence, benefits, and picks that must be those of choosing one at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_jax import OutcomeStats, allocate, benefit, benefit_slope, benefit_step, beta_bernoulli, normal, token_entropy
from focus_jax.scheduling import _top

checked = settings(max_examples=70, deadline=None, database=None, derandomize=True)


def stats_of(outcomes, pending=None):
    """Statistics of ragged lists of outcomes, one list per state, recorded one after the other."""
    stats = OutcomeStats.zeros(len(outcomes))
    for turn in range(max(map(len, outcomes), default=0)):
        where = jnp.array([turn < len(x) for x in outcomes])
        returns = jnp.array([x[turn] if turn < len(x) else jnp.nan for x in outcomes], jnp.float32)
        stats = stats.record(returns, where)
    return raise_pending(stats, np.zeros(len(outcomes)) if pending is None else pending)


def raise_pending(stats, pending):
    return OutcomeStats(stats.count, stats.mean, stats.m2, jnp.asarray(pending, jnp.int32).reshape(stats.count.shape))


def test_record_is_welford_and_touches_nothing_else():
    rng = np.random.default_rng(0)
    outcomes = [rng.normal(100.0, 3.0, size).astype(np.float32) for size in (0, 1, 2, 50)]
    stats = stats_of(outcomes, pending=[1, 2, 3, 4])
    assert (stats.count.dtype, stats.mean.dtype, stats.m2.dtype) == (jnp.int32, jnp.float32, jnp.float32)
    assert stats.count.tolist() == [0, 1, 2, 50]
    assert stats.pending.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(stats.mean, [np.mean(x) if len(x) else 0.0 for x in outcomes], rtol=1e-5)
    np.testing.assert_allclose(stats.m2, [np.sum((x - np.mean(x)) ** 2) if len(x) else 0.0 for x in outcomes], rtol=1e-4)


def test_b18_an_outcome_delivered_twice_counts_twice():
    """Whoever delivers must deliver once: the statistics cannot tell a repetition from a second outcome."""
    stats = stats_of([[1.0]])
    again = stats.record(jnp.array([1.0]), jnp.array([True]))
    assert (stats.count.tolist(), again.count.tolist()) == ([1], [2])


def test_one_continuation_is_one_observation_where_it_started_and_where_it_went():
    """Two shapes of batch, and vmap over problems."""
    where = jnp.array([[False, True, True], [True, False, False]])
    returns = jnp.array([[9.0, 0.5, 0.25], [1.0, 9.0, 9.0]])
    stats = OutcomeStats.zeros((2, 3)).record(returns, where)
    assert stats.count.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert stats.mean.tolist() == [[0.0, 0.5, 0.25], [1.0, 0.0, 0.0]]
    mapped = jax.vmap(OutcomeStats.record)(OutcomeStats.zeros((2, 3)), returns, where)
    jax.tree.map(np.testing.assert_array_equal, mapped, stats)


OUTCOMES = [[], [1.0], [0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.25, 1.0, 0.5], [0.0] * 9]
VALUES = np.array([0.3, 0.0, 0.8, 1.0, 0.5, 0.1], np.float32)


@pytest.mark.parametrize("kappa", [0.01, 1.0, 7.0, 100.0])
@pytest.mark.parametrize("model", ["beta_bernoulli", "normal"])
@pytest.mark.parametrize("rule", ["benefit_slope", "benefit_step"])
def test_benefits_equal_the_formulas(model, rule, kappa):
    models = {"beta_bernoulli": beta_bernoulli, "normal": normal}
    rules = {"benefit_slope": benefit_slope, "benefit_step": benefit_step}
    pending = [0, 1, 2, 0, 3, 1]
    stats = stats_of(OUTCOMES, pending)
    e2, s2 = models[model](VALUES, stats, kappa=kappa)
    got = benefit(VALUES, stats, kappa=kappa, model=models[model], rule=rules[rule])
    expected = [getattr(reference, model)(float(v), x, kappa) for v, x in zip(VALUES, OUTCOMES, strict=True)]
    np.testing.assert_allclose(np.stack([e2, s2], -1), expected, rtol=1e-5, atol=1e-6)
    by_hand = [
        getattr(reference, rule)(*moments, len(x) + p, kappa) for moments, x, p in zip(expected, OUTCOMES, pending, strict=True)
    ]
    np.testing.assert_allclose(got, by_hand, rtol=1e-4, atol=1e-6 * max(1.0, np.abs(by_hand).max()))


def test_the_slope_is_the_derivative_of_the_error():
    e2, s2 = jnp.float32(0.1), jnp.float32(0.2)
    for n in (0.0, 1.0, 5.0):
        slope = jax.grad(lambda n: (4 * e2 + n * s2) / (2 + n) ** 2)(n)
        np.testing.assert_allclose(benefit_slope(e2, s2, jnp.float32(n), 2.0), -slope, rtol=1e-5)


@pytest.mark.parametrize("model", [beta_bernoulli, normal])
def test_without_evidence_and_a_prior_of_one_the_benefit_is_exactly_zero(model):
    values = jnp.linspace(-0.5, 1.5, 1001)
    np.testing.assert_array_equal(benefit(values, OutcomeStats.zeros(1001), model=model), np.zeros(1001))


def test_returns_outside_the_unit_interval_give_no_negative_variance():
    stats = stats_of([[1.001] * 3, [-0.01], [1.5, -0.5], []])
    e2, s2 = beta_bernoulli(jnp.array([1.0, 0.0, 2.0, 1.2]), stats, kappa=1.0)
    assert np.all(np.isfinite(e2) & np.isfinite(s2) & (np.asarray(e2) >= 0) & (np.asarray(s2) >= 0))


def test_nan_in_padding_reaches_neither_picks_nor_gradients():
    stats = stats_of(OUTCOMES)
    dirty = OutcomeStats(stats.count, stats.mean.at[5].set(jnp.nan), stats.m2.at[5].set(jnp.nan), stats.pending)
    values, candidates = jnp.asarray(VALUES), jnp.arange(6) < 5
    picks = allocate(values.at[5].set(jnp.nan), dirty, candidates, 6, max_pending=3)
    jax.tree.map(np.testing.assert_array_equal, picks, allocate(values, stats, candidates, 6, max_pending=3))
    gradient = jax.grad(lambda v: jnp.sum(jnp.where(candidates, benefit(v, dirty), 0)))(values)
    clean = jax.grad(lambda v: jnp.sum(jnp.where(candidates, benefit(v, stats), 0)))(values)
    np.testing.assert_array_equal(gradient[:5], clean[:5])


def half(values, stats, *, kappa):
    """An outcome of variance 1 and a critic whose squared error is 1/4."""
    del stats, kappa
    return jnp.full(values.shape, 0.25), jnp.full(values.shape, 1.0)


def test_b20_two_workers_at_two_equal_states_take_one_each():
    stats, values, both = OutcomeStats.zeros(2), jnp.zeros(2), jnp.ones(2, bool)
    step = partial(benefit, values, kappa=4.0, model=half, rule=benefit_step)
    np.testing.assert_allclose(step(stats), [0.05, 0.05], rtol=1e-6)
    np.testing.assert_allclose(step(raise_pending(stats, [1, 0])), [0.033333, 0.05], rtol=1e-4)
    picks = allocate(values, stats, both, 4, kappa=4.0, model=half, rule=benefit_step, max_pending=8)
    assert picks.index.tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(picks.benefit, [0.05, 0.05, 0.033333, 0.033333], rtol=1e-4)


def test_b20_no_more_than_max_pending_are_in_flight_from_one_state():
    stats = stats_of([[0.0, 1.0], [0.0, 1.0]], pending=[1, 0])
    for max_pending, expected in ((1, [1, -1, -1]), (2, [1, 0, 1]), (3, [1, 0, 1])):
        picks = allocate(jnp.array([0.5, 0.5]), stats, jnp.ones(2, bool), 3, max_pending=max_pending)
        assert picks.index.tolist() == expected
        assert (picks.benefit > 0).tolist() == [i >= 0 for i in expected]


def coded(e2, s2, n, kappa):
    """Benefits -1, 0, 1 or 2, as the base-4 digits of e2 (n = 0 to 7) and s2 (n = 8 to 15) spell them."""
    del kappa
    code, place = jnp.where(n < 8, e2, s2), jnp.where(n < 8, n, n - 8)
    return jnp.floor(code / 4**place) % 4 - 1


def as_codes(values, stats, *, kappa):
    del kappa
    return values, stats.m2


@pytest.mark.parametrize("max_pending", [1, 2, 3, 8, 10**9])
@pytest.mark.parametrize("num", [5, 70])
@checked
@given(data=st.data())
def test_picks_are_those_of_choosing_one_at_a_time(num, max_pending, data):
    """Any sequences of benefits: rising again after a fall, tied everywhere, zero or negative."""
    entries = partial(data.draw, st.lists(st.integers(0, 4**8 - 1), min_size=15, max_size=15))
    first, second = np.array(entries()), np.array(entries())
    bits = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=15, max_size=15))
    count, pending, candidates = (np.array(x).reshape(3, 5) for x in zip(*bits, strict=True))
    digits = np.array([[(code >> 2 * k) & 3 for k in range(8)] for code in (*first, *second)]).reshape(2, 15, 8)
    table = np.concatenate([digits[0], digits[1], np.zeros((15, 100), int)], axis=1) - 1

    def benefit_of(pending):
        return np.take_along_axis(table, (count + pending).reshape(15, 1), axis=1).reshape(3, 5)

    values, m2 = (jnp.asarray(x.reshape(3, 5), jnp.float32) for x in (first, second))
    stats = OutcomeStats(jnp.asarray(count, jnp.int32), jnp.zeros((3, 5)), m2, jnp.asarray(pending, jnp.int32))
    got = allocate(values, stats, candidates, num, model=as_codes, rule=coded, max_pending=max_pending)
    index, bought = reference.allocate(benefit_of, pending, candidates, num, max_pending)
    assert got.index.tolist() == index
    assert got.benefit.tolist() == bought


@pytest.mark.parametrize(("model", "rule"), [(beta_bernoulli, benefit_slope), (normal, benefit_step)])
@pytest.mark.parametrize("max_pending", [1, 3, 1000])
@settings(checked, max_examples=40)
@given(
    states=st.lists(
        st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.9]), st.lists(st.sampled_from([0.0, 1.0]), max_size=4), st.integers(0, 2)),
        min_size=6,
        max_size=6,
    ),
    kappa=st.sampled_from([0.1, 1.0, 4.0]),
)
def test_picks_are_those_of_calling_benefit_after_every_choice(states, kappa, model, rule, max_pending):
    """The models themselves, bit for bit, with many equal states."""
    values, outcomes, pending = zip(*states, strict=True)
    values, stats = jnp.array(values), stats_of(outcomes, pending)

    def benefit_of(pending):
        return np.asarray(benefit(values, raise_pending(stats, pending), kappa=kappa, model=model, rule=rule))

    got = allocate(values, stats, jnp.ones(6, bool), 12, kappa=kappa, model=model, rule=rule, max_pending=max_pending)
    index, bought = reference.allocate(benefit_of, np.array(pending), np.ones(6, bool), 12, max_pending)
    assert got.index.tolist() == index
    assert got.benefit.tolist() == bought


@pytest.mark.parametrize("size", [1, 63, 4099, 50_000])
@pytest.mark.parametrize("num", [0, 1, 7, 256])
def test_the_largest_are_found_with_the_lower_index_first_among_equals(size, num):
    rng = np.random.default_rng(size)
    for levels in (2, 50, 10**6):
        x = np.where(rng.random(size) < 0.3, -np.inf, rng.integers(0, levels, size)).astype(np.float32)
        top, index = jax.jit(_top, static_argnums=1)(jnp.asarray(x), num)
        expected = np.argsort(-x, kind="stable")[:num]
        np.testing.assert_array_equal(top, x[expected])
        finite = np.isfinite(x[expected])
        np.testing.assert_array_equal(np.asarray(index)[finite], expected[finite])


def test_picks_run_jointly_over_all_leading_axes_and_per_tree_under_vmap():
    rng = np.random.default_rng(3)
    values, count = (jnp.asarray(rng.random((2, 3, 40)), jnp.float32), jnp.asarray(rng.integers(0, 5, (2, 3, 40)), jnp.int32))
    stats = OutcomeStats(count, jnp.asarray(rng.random((2, 3, 40)), jnp.float32), jnp.zeros((2, 3, 40)), jnp.zeros_like(count))
    candidates = jnp.asarray(rng.random((2, 3, 40)) < 0.7)
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1), (values, stats, candidates))
    jax.tree.map(
        np.testing.assert_array_equal, allocate(values, stats, candidates, 9, max_pending=2), allocate(*flat, 9, max_pending=2)
    )
    rows = jax.tree.map(lambda leaf: leaf.reshape(6, 40), (values, stats, candidates))
    each = jax.vmap(lambda v, s, c: allocate(v, s, c, 9, max_pending=2))(*rows)
    for row in range(6):
        alone = allocate(*jax.tree.map(lambda leaf, row=row: leaf[row], rows), 9, max_pending=2)
        jax.tree.map(lambda a, b, row=row: np.testing.assert_array_equal(a[row], b), each, alone)


def test_works_under_shard_map():
    rng = np.random.default_rng(4)
    values, stats = jnp.asarray(rng.random((8, 20)), jnp.float32), OutcomeStats.zeros((8, 20))
    stats = stats.record(jnp.asarray(rng.random((8, 20)), jnp.float32), jnp.asarray(rng.random((8, 20)) < 0.5))
    mesh = jax.make_mesh((8,), ("trees",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("trees")
    sharded = partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    np.testing.assert_array_equal(jax.jit(sharded(benefit))(values, stats), benefit(values, stats))
    picks = jax.jit(sharded(lambda v, s: allocate(v, s, jnp.ones(v.shape, bool), 3)))(values, stats)
    for row in range(8):
        alone = allocate(values[row], jax.tree.map(lambda leaf, row=row: leaf[row], stats), jnp.ones(20, bool), 3)
        np.testing.assert_array_equal(picks.index[3 * row : 3 * row + 3], alone.index)


def test_nothing_is_picked_where_nothing_would_help():
    stats = OutcomeStats.zeros((2, 4))
    picks = allocate(jnp.full((2, 4), 0.5), stats, jnp.ones((2, 4), bool), 20, max_pending=2)
    assert picks.index.tolist() == [-1] * 20
    assert picks.benefit.tolist() == [0.0] * 20
    assert picks.index.dtype == jnp.int32
    assert allocate(jnp.full((2, 4), 0.5), stats, jnp.ones((2, 4), bool), 0).index.shape == (0,)


@pytest.mark.parametrize("window", [1, 8, 50])
def test_token_entropy_equals_the_loop(window):
    rng = np.random.default_rng(5)
    logprobs = np.log(rng.random((4, 6, 30))).astype(np.float32)
    mask = rng.random((4, 6, 30)) < np.array([0.0, 0.05, 0.3, 0.8, 0.95, 1.0])[None, :, None]
    got = token_entropy(logprobs, mask, window=window)
    expected = [
        [reference.token_entropy(lp, m, window) for lp, m in zip(*rows, strict=True)] for rows in zip(logprobs, mask, strict=True)
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(partial(token_entropy, window=window))(logprobs, mask), got, rtol=1e-6)
    wider = [np.pad(x, ((0, 0), (0, 0), (0, 9)), constant_values=fill) for x, fill in ((logprobs, np.nan), (mask, False))]
    np.testing.assert_allclose(token_entropy(*wider, window=window), got, rtol=1e-6)


def test_token_entropy_of_impossible_unknown_and_no_tokens():
    logprobs = jnp.array([[-jnp.inf, jnp.nan, -1.0], [0.0, -jnp.inf, 0.0], [jnp.nan] * 3])
    got = token_entropy(logprobs, jnp.ones((3, 3), bool))
    np.testing.assert_allclose(got, [np.exp(-1.0) / 2, 0.0, 0.0], rtol=1e-6)
    assert token_entropy(jnp.zeros((2, 0)), jnp.zeros((2, 0), bool)).tolist() == [0.0, 0.0]
    gradient = jax.grad(lambda lp: jnp.sum(token_entropy(lp, jnp.ones((3, 3), bool))))(logprobs)
    np.testing.assert_allclose(gradient, [[0.0] * 3, [-1 / 6, 0.0, -1 / 6], [0.0] * 3], atol=1e-6)  # -(1 + log p) p


def test_shapes_dtypes_and_numbers_are_refused_by_name():
    stats, values, there = OutcomeStats.zeros((8, 128)), jnp.zeros((8, 128)), jnp.ones((8, 128), bool)
    with pytest.raises(ValueError, match=r"`stats.count`: expected shape \(8, 64\), got \(8, 128\)"):
        benefit(values[:, :64], stats)
    with pytest.raises(TypeError, match="`values`: expected float32, got int32"):
        benefit(stats.count, stats)
    with pytest.raises(ValueError, match=r"`values`: expected shape \(8, 128\), got \(8, 64\)"):
        beta_bernoulli(values[:, :64], stats, kappa=1.0)
    with pytest.raises(ValueError, match=r"`candidates`: expected shape \(8, 128\), got \(128,\)"):
        allocate(values, stats, there[0], 3)
    with pytest.raises(ValueError, match="expected `num` >= 0 and `max_pending` >= 1, got 3 and 0"):
        allocate(values, stats, there, 3, max_pending=0)
    with pytest.raises(TypeError, match="`where`: expected bool, got float32"):
        stats.record(values, values)
    with pytest.raises(ValueError, match=r"`returns`: expected shape \(8, 128\), got \(\)"):
        stats.record(jnp.float32(1.0), there)
    with pytest.raises(ValueError, match=r"`mask`: expected shape \(8, 128\), got \(8, 1\)"):
        token_entropy(values, there[:, :1])
    with pytest.raises(ValueError, match="`window`: expected 1 or more, got 0"):
        token_entropy(values, there, window=0)
