"""Losses against explicit loops, sums that add up, far tails, and published faults of their kind."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from focus_jax import kl_penalty, policy_loss, value_loss

SHAPE = (4, 25)


@pytest.fixture(scope="module")
def batch():
    """Log-probabilities near each other, advantages of both signs, a few unknown old ones, about half masked."""
    rng = np.random.default_rng(0)
    logprobs, noise, more, advantages = rng.normal(size=(4, *SHAPE)).astype(np.float32)
    logprobs = -np.abs(logprobs)
    old, sampler = logprobs + 0.3 * noise, logprobs + 0.3 * noise + 0.5 * more
    old[0, ::5], sampler[1, ::4] = np.nan, -np.inf
    return {
        "logprobs": logprobs,
        "old": old,
        "sampler": sampler,
        "advantages": advantages,
        "mask": rng.random(SHAPE) < 0.6,
        "weights": rng.random(SHAPE, dtype=np.float32),
    }


def flat(*arrays):
    return [np.asarray(array, np.float64).ravel().tolist() for array in arrays]


def slope(function, x, step=1e-3):
    """Central differences of a scalar function of a float64 array."""
    x, out = np.asarray(x, np.float64), np.zeros(np.size(x))
    for i in range(x.size):
        up, down = x.copy().ravel(), x.copy().ravel()
        up[i], down[i] = up[i] + step, down[i] - step
        out[i] = (function(up) - function(down)) / (2 * step)
    return out.reshape(x.shape)


@pytest.mark.parametrize("knobs", [{}, {"clip": 0.1, "clip_high": 0.3}, {"max_importance": 1.2}])
def test_policy_loss_equals_the_loop(batch, knobs):
    logprobs, old, advantages, mask, weights, sampler = (
        batch[k] for k in ("logprobs", "old", "advantages", "mask", "weights", "sampler")
    )
    more = {"sampler_logprobs": sampler} if "max_importance" in knobs else {}

    def loss(logprobs):
        return policy_loss(logprobs, old, advantages, mask, weights=weights, **more, **knobs)

    low = knobs.get("clip", 0.2)
    options = (low, knobs.get("clip_high", low), flat(sampler)[0] if more else None, knobs.get("max_importance", 2.0))
    fixed = [*flat(old, advantages), mask.ravel().tolist(), *flat(weights)]
    want = reference.policy_loss(*flat(logprobs), *fixed, *options)
    np.testing.assert_allclose(loss(logprobs), want, rtol=1e-5)

    # Differences of the loop, with the old log-probability of unknown tokens, and the importance weight, held fixed.
    known = np.where(np.isfinite(old), old, logprobs)
    fixed[0] = flat(known)[0]
    wanted = slope(lambda x: reference.policy_loss(x.tolist(), *fixed, *options)[0], logprobs.ravel(), 1e-6).reshape(SHAPE)
    got = jax.grad(lambda x: loss(x)[0])(logprobs)
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5)
    assert np.count_nonzero(got[mask]) < mask.sum()  # some are clipped
    assert not np.any(got[~mask])


def test_value_loss_equals_the_loop_and_its_gradient(batch):
    values, targets, old = batch["logprobs"], batch["advantages"], batch["logprobs"] + 0.3 * batch["advantages"]
    mask, weights = batch["mask"], batch["weights"]
    for clip in (None, 0.2):
        options = {} if clip is None else {"old_values": old, "clip": clip}
        loop_options = [] if clip is None else [*flat(old), clip]

        def loop(x, more=loop_options):
            return reference.value_loss(list(x), *flat(targets), mask.ravel().tolist(), *flat(weights), *more)

        def loss(values, targets, more=options):
            return value_loss(values, targets, mask, weights=weights, **more)[0]

        np.testing.assert_allclose(value_loss(values, targets, mask, weights=weights, **options), loop(values.ravel()), rtol=1e-5)
        d_values, d_targets = jax.grad(loss, (0, 1))(values, targets)
        np.testing.assert_allclose(d_values.ravel(), slope(lambda x: loop(x)[0], values.ravel(), 1e-6), rtol=1e-3, atol=1e-5)
        assert not np.any(d_targets)
    with pytest.raises(ValueError, match="expected `old_values` and `clip` together"):
        value_loss(values, targets, mask, clip=0.2)


def test_kl_penalty_equals_the_loop(batch):
    logprobs, mask, weights = (batch[k] for k in ("logprobs", "mask", "weights"))
    other = np.nan_to_num(batch["old"], nan=-1.0)
    got = kl_penalty(logprobs, other, mask, weights=weights)
    np.testing.assert_allclose(
        got, reference.kl_penalty(*flat(logprobs, other), mask.ravel().tolist(), *flat(weights)), rtol=1e-5
    )


@pytest.mark.parametrize(("d", "value"), [(1.0, 0.718282), (-1.0, 0.367879), (0.0, 0.0), (1e-4, 5e-9), (-1e3, 999.0)])
def test_b27_value_of_the_kl_estimate(d, value):
    np.testing.assert_allclose(kl_penalty(jnp.zeros(1), jnp.full(1, d, jnp.float32))[0], value, rtol=1e-5, atol=1e-10)


def test_b27_gradient_of_the_kl_estimate_is_that_of_the_reverse_divergence():
    logits, other = jnp.array([0.3, -0.5, 1.0]), jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.4]))

    def divergence(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - other))

    # The exact expectation over tokens of the policy itself: each token weighs as much as it is likely.
    def expected(logits):
        logp = jax.nn.log_softmax(logits)
        return kl_penalty(logp, other, weights=jnp.exp(logp))[0]

    def expected_k3(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp)) * (jnp.exp(other - logp) - 1 - (other - logp)))

    np.testing.assert_allclose(expected(logits), divergence(logits), atol=1e-6)
    np.testing.assert_allclose(jax.grad(expected)(logits), jax.grad(divergence)(logits), atol=1e-6)
    assert np.abs(jax.grad(expected_k3)(logits) - jax.grad(divergence)(logits)).max() > 0.05


@pytest.mark.parametrize("gap", [85.0, 100.0, 1e3, -85.0, -1e3])
def test_b22_far_tails_are_finite_for_every_loss(gap):
    logprobs = jnp.array([-1.0, -1.0, -1.0, -1.0])
    far, mask, advantages = logprobs - gap, jnp.array([True, True, False, False]), jnp.array([1.0, -1.0, 1.0, -1.0])
    losses = {
        "policy": lambda x: policy_loss(x, far, advantages, mask)[0],
        "importance": lambda x: policy_loss(x, x, advantages, mask, sampler_logprobs=far)[0],
        "kl": lambda x: kl_penalty(x, far, mask)[0],
    }
    for name, loss in losses.items():
        total, slope = jax.value_and_grad(loss)(logprobs)
        assert np.isfinite(total), name
        assert np.all(np.isfinite(slope)), name
        assert not np.any(slope[2:]), name
    # What is so unlikely under the sampler that its ratio is cut teaches nothing.
    assert not np.any(jax.grad(losses["policy"])(logprobs))


def test_b24_b26_tokens_count_as_they_are_weighted_and_dropped_ones_not_at_all():
    lengths, owner = [50, 100, 30, 30, 30, 40], [0, 0, 1, 1, 1, 2]
    mask = np.arange(100) < np.array(lengths)[:, None]
    tokens = np.bincount(owner, lengths)
    weights = np.broadcast_to(np.float32(1 / (3 * tokens[owner]))[:, None], mask.shape)
    zeros, ones = jnp.zeros(mask.shape), jnp.ones(mask.shape)
    total, weight = policy_loss(zeros, zeros, -ones, mask, weights=weights)  # loss 1 per token
    np.testing.assert_allclose([total, weight, total / weight], 1.0, rtol=1e-5)
    # A second sample that is left out leaves the weight too.
    for loss in (
        lambda m: policy_loss(zeros[:2, :4], zeros[:2, :4], -ones[:2, :4], m),
        lambda m: value_loss(ones[:2, :4], zeros[:2, :4], m),
    ):
        np.testing.assert_allclose(loss(jnp.array([[True] * 4, [False] * 4])), [4.0, 4.0])
        nothing = jnp.zeros((2, 4), bool)
        assert [float(x) for x in loss(nothing)] == [0.0, 0.0]
    for loss in (policy_loss, value_loss, kl_penalty):
        arrays = (zeros, ones, ones)[: 3 if loss is policy_loss else 2]
        assert not np.any(jax.grad(lambda x, loss=loss, rest=arrays[1:]: loss(x, *rest, jnp.zeros(mask.shape, bool))[0])(ones))


def test_b25_sums_over_weights_do_not_depend_on_micro_batches():
    rng = np.random.default_rng(1)
    states, targets, weights = rng.normal(size=(8, 5)), rng.normal(size=8), rng.random(8)
    states, targets, weights = (jnp.asarray(x, jnp.float32) for x in (states, targets, weights))
    head, mask = jnp.linspace(-1, 1, 5), jnp.arange(8) % 3 > 0

    @jax.jit
    @partial(jax.jacobian, has_aux=True)
    def gradient(head, states, targets, weights, mask):
        values = states @ head
        critic = value_loss(values, targets, mask, weights=weights)
        actor = policy_loss(values, targets, targets, mask, weights=weights)
        penalty = kl_penalty(values, targets, mask, weights=weights)
        return jnp.stack([critic[0], actor[0], penalty[0]]), critic[1]

    def mean_gradient(num):
        parts = [[x[i * 8 // num : (i + 1) * 8 // num] for x in (states, targets, weights, mask)] for i in range(num)]
        gradients, totals = zip(*(gradient(head, *part) for part in parts), strict=True)
        return sum(gradients) / sum(totals)

    for num in (2, 8):
        np.testing.assert_allclose(mean_gradient(num), mean_gradient(1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("filler", [1.0, math.nan, math.inf, -math.inf, -9999.0])
def test_b31_what_stands_where_masked_changes_nothing(batch, filler):
    names = ("logprobs", "old", "advantages", "weights", "sampler")
    mask = batch["mask"]
    clean, dirty = ({k: np.where(mask, batch[k], f).astype(np.float32) for k in names} for f in (0.0, filler))
    dirty["weights"] = dirty["weights"] if math.isfinite(filler) else np.where(mask, batch["weights"], np.nan).astype(np.float32)

    def everything(x):
        def total(logprobs):
            parts = [
                policy_loss(logprobs, x["old"], x["advantages"], mask, weights=x["weights"], sampler_logprobs=x["sampler"]),
                value_loss(logprobs, x["advantages"], mask, weights=x["weights"], old_values=x["logprobs"], clip=0.1),
                kl_penalty(logprobs, x["advantages"], mask, weights=x["weights"]),
            ]
            return sum(p[0] for p in parts), parts

        return jax.value_and_grad(total, has_aux=True)(x["logprobs"])

    jax.tree.map(np.testing.assert_array_equal, everything(dirty), everything(clean))


@pytest.mark.parametrize("unknown", [math.nan, -math.inf])
def test_b32_an_unknown_old_log_probability_is_ratio_one(unknown):
    logprobs, old, advantages = jnp.array([-0.1, -2.0, -0.3]), jnp.array([-0.1, unknown, -0.3]), jnp.array([1.0, 3.0, 1.0])
    total, slope = jax.value_and_grad(lambda x: policy_loss(x, old, advantages)[0])(logprobs)
    np.testing.assert_allclose(total, -5.0, rtol=1e-6)
    np.testing.assert_allclose(slope, -advantages, rtol=1e-6)
    total, _ = policy_loss(logprobs, logprobs, advantages, sampler_logprobs=old)
    np.testing.assert_allclose(total, -5.0, rtol=1e-6)


def test_clipping_can_be_wider_above_than_below():
    ratio = jnp.array([0.5, 0.85, 1.1, 1.25, 1.5])

    def losses(sign, **knobs):
        each = jax.vmap(lambda r: policy_loss(jnp.log(r), jnp.zeros(()), jnp.full((), sign, jnp.float32), **knobs)[0])
        return each(ratio)

    np.testing.assert_allclose(losses(1.0, clip=0.2, clip_high=0.3), [-0.5, -0.85, -1.1, -1.25, -1.3], rtol=1e-6)
    np.testing.assert_allclose(losses(-1.0, clip=0.2, clip_high=0.3), [0.8, 0.85, 1.1, 1.25, 1.5], rtol=1e-6)
    np.testing.assert_allclose(losses(1.0, clip=0.2), [-0.5, -0.85, -1.1, -1.2, -1.2], rtol=1e-6)


def test_shapes_and_dtypes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"`old_logprobs`: expected shape \(3,\), got \(2,\)"):
        policy_loss(jnp.zeros(3), jnp.zeros(2), jnp.zeros(3))
    with pytest.raises(ValueError, match=r"`weights`: expected shape \(3,\), got \(1,\)"):
        value_loss(jnp.zeros(3), jnp.zeros(3), weights=jnp.ones(1))
    with pytest.raises(TypeError, match="`mask`: expected bool, got int32"):
        kl_penalty(jnp.zeros(3), jnp.zeros(3), jnp.ones(3, jnp.int32))
