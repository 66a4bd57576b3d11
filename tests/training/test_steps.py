"""Updates: the numbers of slow formulas, however the rows are cut up, over meshes, and untouched where a number is not finite."""

import functools
import math
from dataclasses import replace
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from training_records import letter_records, make_example, make_record

from focus_jax.models import Decoder, ModelConfig, ValueModel, add_lora, generate, make_mesh, score
from focus_jax.models.sharding import keep_sharded
from focus_jax.training import (
    ActorLoss,
    CriticLoss,
    NonFiniteError,
    Packed,
    actor_batches,
    actor_step,
    critic_batches,
    make_optimizer,
    update,
    without_adapters,
)
from focus_jax.training import steps as steps_module
from focus_jax.training.steps import gradient_of

CONFIG = ModelConfig("qwen3", 264, 32, 48, 4, 2, 16, ("full_attention",), tied=True)
SGD, ADAM = optax.sgd(5.0), optax.adam(1e-2)


@jax.jit
def build():
    return keep_sharded(Decoder(CONFIG, key=jax.random.key(0)))


@jax.jit
def build_critic():
    critic = ValueModel(Decoder(CONFIG, key=jax.random.key(0)))
    critic.head.weight[...] = jax.random.normal(jax.random.key(1), critic.head.weight.shape)
    return keep_sharded(critic)


@functools.cache
def two_problems():
    """Segment records and critic examples of two branching trees."""
    segments, examples = letter_records()
    names = sorted({s.problem for s in segments})[:2]
    return [s for s in segments if s.problem in names], [e for e in examples if e.problem in names]


def cut(make, records, num):
    """The rows in `num` micro-batches of one shape; what is left of it is padding."""
    packed = make(records, tokens_per_batch=32 * 144, buckets=(144,))
    (whole,) = packed.batches
    row = np.arange(32) % num

    def part(i):
        return jax.tree.map(lambda x: np.where((row == i)[:, None], x, 0).astype(x.dtype), whole)

    return Packed(tuple(part(i) for i in range(num)), packed.problems * num)


def arrays(tree):
    return jax.tree.map(np.asarray, nnx.state(tree))


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_close(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance)


def distance(a, b):
    return max(np.abs(x - y).max() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def run(model, packed, loss, tx=SGD):
    model, _, report = update(model, make_optimizer(model, tx), packed, loss)
    return arrays(model), report.fetch()


def alone(records):
    """Every record in a row of its own, behind it anything, and which tokens the policy sampled."""
    rows = [np.concatenate([r.prompt_ids, r.token_ids]) for r in records]
    tokens = np.full((len(rows), max(map(len, rows))), 7, np.int32)
    sampled = np.zeros(tokens.shape, bool)
    for i, (row, record) in enumerate(zip(rows, records, strict=True)):
        tokens[i, : len(row)] = row
        sampled[i, len(record.prompt_ids) : len(row)] = record.generated
    return tokens, sampled


def test_loss_and_gradient_are_those_of_every_segment_alone():
    """B05, B24, B28: a slow mean of means in float64 over records one by one, and the gradient of dense log-probabilities."""
    records, _ = two_problems()
    # Two old log-probabilities unknown, the others where some ratios are beyond the clip on either side.
    draw = np.random.default_rng(0)
    records = [replace(r, logprobs=np.where(r.generated, draw.uniform(-7, -4, len(r.generated)), 0)) for r in records]
    records[0].logprobs[np.flatnonzero(records[0].generated)[:2]] = np.nan
    tokens, sampled = alone(records)

    @jax.jit
    def dense(model, weights, old, advantages):
        def loss(model):
            logits = model.logits(model(jnp.asarray(tokens)))[:, :-1] / 0.5
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens)[:, 1:, None], -1)[..., 0]
            ratio = jnp.exp(picked - jnp.where(jnp.isfinite(old), old, jax.lax.stop_gradient(picked)))
            surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
            return -jnp.sum(surrogate * weights), picked

        return jax.grad(loss, has_aux=True)(model)

    old, advantages, weights = (np.zeros((len(tokens), tokens.shape[1] - 1), np.float32) for _ in range(3))
    problems = sorted({r.problem for r in records})
    for i, record in enumerate(records):
        at = np.flatnonzero(sampled[i]) - 1
        old[i, at], advantages[i, at] = record.logprobs[record.generated], record.advantage
        weights[i, at] = 1 / len(at) / sum(r.problem == record.problem for r in records) / len(problems)
    wanted, picked = dense(build(), weights, old, advantages)
    questions = [
        [
            [(float(p), float(o), r.advantage) for p, o, s in zip(picked[i], old[i], sampled[i, 1:], strict=True) if s]
            for i, r in members
        ]
        for _, members in groupby(enumerate(records), key=lambda pair: pair[1].problem)
    ]

    packed = actor_batches(records, tokens_per_batch=1024, buckets=(144,))
    before = arrays(build())
    after, metrics = run(build(), packed, ActorLoss(temperature=0.5), optax.sgd(1.0))
    assert metrics["loss"] == pytest.approx(reference.actor_objective(questions), abs=1e-5)
    assert metrics["weight"] == pytest.approx(1, abs=1e-5)
    assert (metrics["num_tokens"], metrics["num_unknown"]) == (sampled.sum(), 2)
    assert distance(before, after) > 1e-2
    assert_close(jax.tree.map(np.subtract, before, after), nnx.state(wanted))
    ratio = np.exp(picked - np.where(np.isfinite(old), old, picked))
    clipped = ((advantages > 0) & (ratio > 1.2) | (advantages < 0) & (ratio < 0.8))[sampled[:, 1:]]
    assert 0 < clipped.mean() < 1
    assert metrics["clip_share"] == pytest.approx(clipped.mean(), abs=1e-6)
    known = sampled[:, 1:] & np.isfinite(old)
    kl = ((ratio - 1 - np.log(ratio)) * weights)[known].sum() / weights[known].sum()
    assert metrics["behaviour_kl"] == pytest.approx(kl, rel=1e-4)


@functools.cache
def actor_in_one():
    return run(build(), cut(actor_batches, two_problems()[0], 1), ActorLoss())


@pytest.mark.parametrize("num", [2, 5])
def test_the_actors_update_does_not_depend_on_the_number_of_micro_batches(num):
    wanted, metrics = actor_in_one()
    after, others = run(build(), cut(actor_batches, two_problems()[0], num), ActorLoss())
    assert distance(wanted, arrays(build())) > 1e-3
    assert_close(after, wanted)
    assert others == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("layout", [pytest.param((8, 1), marks=pytest.mark.slow), (2, 4)])
def test_the_actors_update_is_the_same_on_a_mesh(layout):
    wanted, metrics = actor_in_one()
    with jax.set_mesh(make_mesh(*layout)):
        packed = cut(actor_batches, two_problems()[0], 2)
        model = build()
        places = [leaf.sharding for leaf in jax.tree.leaves(model)]
        optimizer = make_optimizer(model, SGD)
        compiled = steps_module._gather._cache_size(), steps_module._apply._cache_size()
        model, optimizer, report = update(model, optimizer, packed, ActorLoss())
        assert_close(arrays(model), wanted)
        assert report.fetch() == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        update(model, optimizer, packed, ActorLoss())[2].fetch()
    assert [leaf.sharding for leaf in jax.tree.leaves(model)] == places
    assert (steps_module._gather._cache_size(), steps_module._apply._cache_size()) == (compiled[0] + 1, compiled[1] + 1)


@functools.cache
def critic_in_one():
    return run(build_critic(), cut(critic_batches, two_problems()[1], 1), CriticLoss(), optax.sgd(0.5))


@pytest.mark.parametrize("num", [2, 4, 8])
def test_the_critics_update_does_not_depend_on_the_number_of_micro_batches_b25(num):
    wanted, metrics = critic_in_one()
    after, others = run(build_critic(), cut(critic_batches, two_problems()[1], num), CriticLoss(), optax.sgd(0.5))
    assert distance(wanted, arrays(build_critic())) > 1e-3
    assert_close(after, wanted)
    assert others == pytest.approx(metrics, rel=1e-4)


def test_the_critics_loss_is_the_mean_over_states_then_problems():
    """B15: one context at a time, the value at its last token."""
    _, examples = two_problems()
    _, metrics = critic_in_one()
    width = max(len(e.state.context) for e in examples)
    tokens = np.stack([np.pad(e.state.context, (0, width - len(e.state.context))) for e in examples])
    values = np.asarray(jax.jit(lambda model, tokens: model(tokens))(build_critic(), tokens), np.float64)
    errors = {}
    for example, row in zip(examples, values, strict=True):
        errors.setdefault(example.problem, []).append((row[len(example.state.context) - 1] - example.target) ** 2)
    assert metrics["loss"] == pytest.approx(np.mean([np.mean(e) for e in errors.values()]), rel=1e-5)
    assert metrics["num_states"] == len(examples)


def test_batches_of_one_length_compile_once_whatever_the_learning_rate_does():
    """B65, over updates: two lengths, a schedule, several micro-batches."""
    tx = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, warmup_steps=2, decay_steps=5))
    model = build()
    optimizer = make_optimizer(model, tx)
    compiled = steps_module._gather._cache_size(), steps_module._apply._cache_size()
    for lengths in ([10, 20, 30], [3], [25, 25], [30]):
        records = [make_record("Q", chr(65 + i) * length, i) for i, length in enumerate(lengths)]
        packed = actor_batches(records, tokens_per_batch=32, buckets=(16, 32))
        model, optimizer, report = update(model, optimizer, packed, ActorLoss())
        report.fetch()
    assert (steps_module._gather._cache_size(), steps_module._apply._cache_size()) == (compiled[0] + 2, compiled[1] + 1)
    assert int(optimizer.step[...]) == 4


def three_batches():
    """Micro-batches of the problems a; b and c; d."""
    records = [make_record("Q", "a" * 31, 1, "a"), make_record("Q", "b" * 10, 1, "b"), make_record("Q", "c" * 10, 1, "c")]
    packed = actor_batches([*records, make_record("Q", "d" * 25, 1, "d")], tokens_per_batch=32)
    assert packed.problems == (("a",), ("d",), ("b", "c"))
    return packed


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_a_number_that_is_not_finite_leaves_everything_as_it_was_and_is_named(bad):
    packed = three_batches()
    model = build()
    optimizer = make_optimizer(model, ADAM)
    model, optimizer, report = update(model, optimizer, packed, ActorLoss())
    report.fetch()
    before = arrays(model), arrays(optimizer)
    last = packed.batches[2]
    broken = replace(last, advantages=np.where(last.mask, bad, 0).astype(np.float32), weights=last.mask * np.float32(100))
    model, optimizer, report = update(model, optimizer, replace(packed, batches=(*packed.batches[:2], broken)), ActorLoss())
    with pytest.raises(NonFiniteError, match=r"micro-batch 2 of 3 \(problems 'b', 'c'\): loss .*the update was left out"):
        report.fetch()
    assert_same((arrays(model), arrays(optimizer)), before)
    # And it goes on from there.
    model, optimizer, report = update(model, optimizer, packed, ActorLoss())
    report.fetch()
    assert int(optimizer.step[...]) == 2
    assert distance(arrays(model), before[0]) > 1e-4


def test_a_single_step_is_guarded_and_equals_an_update():
    packed = three_batches()
    batch = packed.batches[0]
    wanted, metrics = run(build(), Packed((batch,), packed.problems[:1]), ActorLoss(), ADAM)
    model = build()
    model, optimizer, found = actor_step(model, make_optimizer(model, ADAM), batch)
    assert_close(arrays(model), wanted)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    before = arrays(model), arrays(optimizer)
    bad = replace(batch, advantages=np.full(batch.mask.shape, np.nan, np.float32))
    model, optimizer, found = actor_step(model, optimizer, bad)
    assert math.isnan(found["loss"])
    assert_same((arrays(model), arrays(optimizer)), before)


def test_a_batch_without_anything_to_learn_from_moves_nothing_not_even_moments():
    """B26, B33: it is no progress."""
    packed = three_batches()
    model = build()
    model, optimizer, report = update(model, make_optimizer(model, ADAM), packed, ActorLoss())
    before = arrays(model), arrays(optimizer)
    nothing = packed.map(lambda batch: replace(batch, mask=np.zeros_like(batch.mask)))
    model, optimizer, report = update(model, optimizer, nothing, ActorLoss())
    assert_same((arrays(model), arrays(optimizer)), before)
    assert report.fetch() == dict.fromkeys(report.fetch(), 0)
    with pytest.raises(ValueError, match="`packed`: expected at least one batch"):
        update(model, optimizer, Packed((), ()), ActorLoss())


def test_adapters_alone_are_trained_and_the_base_stays_where_it_is():
    model = add_lora(build(), rank=2, key=jax.random.key(1))
    adapters, base = (nnx.state(model, kind) for kind in (nnx.LoRAParam, nnx.Not(nnx.LoRAParam)))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(base)]
    before, fixed = jax.tree.map(np.asarray, adapters), jax.tree.map(np.asarray, base)
    optimizer = make_optimizer(model, ADAM, nnx.LoRAParam)
    assert sum(leaf.size for leaf in jax.tree.leaves(optimizer)) < 3 * sum(leaf.size for leaf in jax.tree.leaves(before))
    loss = ActorLoss(kl=0.5)
    packed = three_batches().map(lambda batch: loss.add_reference_logprobs(batch, without_adapters(model)))
    metrics = []
    for _ in range(3):
        model, optimizer, report = update(model, optimizer, packed, loss)
        metrics.append(report.fetch())
    after = nnx.state(model, nnx.Not(nnx.LoRAParam))
    assert_same(after, fixed)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == pointers  # not even copied
    assert distance(nnx.state(model, nnx.LoRAParam), before) > 1e-3
    # The reference is the model without its adapters: no divergence before the first update, some after it.
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[2]["kl"] > 1e-5
    batch = packed.batches[0]
    scores = jax.jit(score)(without_adapters(model), batch.tokens, batch.segment_ids)
    assert_close(scores.logprobs, batch.reference_logprobs)


def test_the_whole_model_trains_with_value_clipping_and_its_old_values():
    loss = CriticLoss(clip=0.01)
    critic = build_critic()
    packed = critic_batches([make_example("Qab", 0, target=1.0), make_example("Rcd", 1, target=0.0)], tokens_per_batch=16)
    with pytest.raises(ValueError, match="`old_values`"):
        loss(critic, packed.batches[0])
    batch = loss.add_old_values(packed.batches[0], critic)
    moved = build_critic()
    moved.head.bias[...] = moved.head.bias[...] + 0.3
    values, old = (np.asarray(jax.jit(lambda m: m(batch.tokens, batch.segment_ids))(m)) for m in (moved, critic))
    total, weight, sums = jax.jit(loss)(moved, batch)
    flat = [np.asarray(x).ravel().tolist() for x in (values, batch.targets, batch.mask, batch.weights, old)]
    wanted, wanted_weight = reference.value_loss(*flat, clip=0.01)
    assert (float(total), float(weight)) == pytest.approx((wanted, wanted_weight), rel=1e-5)
    assert wanted != pytest.approx(reference.value_loss(*flat[:4])[0], rel=1e-3)
    assert float(sums["num_states"]) == 2


def flattened(batch, logprobs, **more):
    columns = (logprobs, batch.old_logprobs, batch.advantages, batch.mask, batch.weights)
    more = {name: np.asarray(x).ravel().tolist() if hasattr(x, "shape") else x for name, x in more.items()}
    return reference.policy_loss(*(np.asarray(x).ravel().tolist() for x in columns), **more)


def test_importance_weights_make_up_for_a_sampler_that_computes_differently():
    loss = ActorLoss(max_importance=1.5)
    (packed,) = actor_batches([make_record("Q", "abc", logprobs=np.array([-5.0, -5.2, np.nan]))], tokens_per_batch=8).batches
    batch = loss.add_old_logprobs(packed, build())
    np.testing.assert_array_equal(batch.sampler_logprobs, packed.old_logprobs)
    model = build()
    model.embed_tokens[...] = model.embed_tokens[...] * 1.5
    logprobs = jax.jit(score)(model, batch.tokens, batch.segment_ids).logprobs
    total, _, sums = jax.jit(loss)(model, batch)
    wanted, _ = flattened(batch, logprobs, sampler=batch.sampler_logprobs, max_importance=1.5)
    assert float(total) == pytest.approx(wanted, rel=1e-4)
    assert wanted != pytest.approx(flattened(batch, logprobs)[0], rel=1e-2)
    assert float(sums["num_unknown"]) == 1
    # Filled again, the sampler's are still the sampler's.
    again = loss.add_old_logprobs(batch, model)
    np.testing.assert_array_equal(again.sampler_logprobs, packed.old_logprobs)
    np.testing.assert_allclose(again.old_logprobs, logprobs, atol=1e-6)


def test_the_penalty_is_added_and_wants_a_reference():
    loss = ActorLoss(kl=0.3)
    (batch,) = actor_batches([make_record("Q", "abc")], tokens_per_batch=8).batches
    model = build()
    with pytest.raises(ValueError, match="expected `reference_logprobs` in the batch"):
        loss(model, batch)
    other = build()
    other.embed_tokens[...] = other.embed_tokens[...] * 1.5
    batch = loss.add_reference_logprobs(batch, other)
    logprobs = jax.jit(score)(model, batch.tokens, batch.segment_ids).logprobs
    columns = (logprobs, batch.reference_logprobs, batch.mask, batch.weights)
    kl, _ = reference.kl_penalty(*(np.asarray(x).ravel().tolist() for x in columns))
    total, _, sums = jax.jit(loss)(model, batch)
    assert float(sums["kl"][0]) == pytest.approx(kl, rel=1e-4)
    assert kl > 1e-3
    assert float(total) == pytest.approx(flattened(batch, logprobs)[0] + 0.3 * kl, rel=1e-5)


def test_the_samplers_temperature_is_the_trainers_b28():
    model = build()
    model.embed_tokens[...] = model.embed_tokens[...] * 20  # away from uniform
    reply = generate(model, [[5, 6, 7]], max_tokens=8, seeds=[0], temperature=0.5)
    ids, logprobs = np.asarray(reply.ids)[0], np.asarray(reply.logprobs)[0]
    record = replace(make_record("Q", "a" * 8), prompt_ids=np.array([5, 6, 7]), token_ids=ids, logprobs=logprobs)
    (batch,) = actor_batches([record], tokens_per_batch=16).batches
    kl = {}
    for temperature in (0.5, 1.0):
        _, _, sums = jax.jit(ActorLoss(temperature=temperature))(model, batch)
        kl[temperature] = float(sums["behaviour_kl"][0])
    assert kl[0.5] == pytest.approx(0, abs=1e-6)
    assert kl[1.0] > 1e-3


def test_what_the_sampler_says_at_extremes_and_outside_the_mask_does_no_harm():
    """B22: a token 85 nats below the trainer's; B31: anything at masked positions; B32: unknown ones."""
    logprobs = np.array([-0.1, np.nan, -95.0, -0.3])
    record = make_record("Q", "abcd", logprobs=logprobs, advantage=-1.0)
    (batch,) = actor_batches([record], tokens_per_batch=8).batches
    for sampled in (None, batch.old_logprobs):
        clean = replace(batch, sampler_logprobs=sampled)
        gradient = jax.jit(lambda model, batch: gradient_of(lambda m: ActorLoss()(m, batch), model, nnx.Param))
        wanted = gradient(build(), clean)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(wanted))
        assert float(wanted[1][2]["num_unknown"]) == 1
        for filling in (np.nan, np.inf, -np.inf, 1.0):
            columns = {
                name: np.where(batch.mask, getattr(clean, name), filling).astype(np.float32)
                for name in ("old_logprobs", "sampler_logprobs", "advantages", "weights")
                if getattr(clean, name) is not None
            }
            assert_same(gradient(build(), replace(clean, **columns)), wanted)


def test_numbers_that_mean_nothing_are_refused():
    for knobs, message in [
        ({"temperature": 0.0}, "`temperature`: expected a finite number above 0, got 0.0"),
        ({"clip": 0.0}, "`clip`: expected a number above 0"),
        ({"clip_high": -0.1}, "`clip_high`"),
        ({"max_importance": math.nan}, "`max_importance`"),
        ({"kl": -1.0}, "`kl`: expected a finite number of at least 0"),
    ]:
        with pytest.raises(ValueError, match=f"ActorLoss: {message}"):
            ActorLoss(**knobs)
    with pytest.raises(ValueError, match="CriticLoss: `clip`: expected a number above 0, or None, got 0"):
        CriticLoss(clip=0)
