"""The value model, and the front that batches what concurrent workers ask."""

import asyncio
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from simulated import LetterEnvironment, letter_agent

from focus_jax.collection import Budget, JournalError, Pass, RootRollouts, collect
from focus_jax.models import (
    Decoder,
    DeltaConfig,
    FlaxCritic,
    ModelConfig,
    ValueModel,
    is_value_head,
    last_values,
    linear,
    make_mesh,
    segment_ends,
    without_head,
)
from focus_jax.models import critic as critic_module

SIZES = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
DENSE = ModelConfig("qwen3", layer_types=("full_attention",) * 2, max_positions=512, **SIZES)
DELTA = replace(
    DENSE,
    family="qwen3_5",
    layer_types=("linear_attention",) * 3 + ("full_attention",),
    partial_rotary=0.25,
    delta=DeltaConfig(2, 4, 8, 8, 4),
)


@partial(jax.jit, static_argnums=0)
def make_model(config=DENSE, seed=0) -> ValueModel:
    """A value model whose head is random."""
    model = ValueModel(Decoder(config, key=jax.random.key(seed)))
    model.head.weight[...] = jax.random.normal(jax.random.key(seed + 1), model.head.weight.shape)
    return model


@jax.jit
def evaluate(model, tokens):
    return model(tokens)


def make_states(*lengths, seed=0):
    draw = np.random.default_rng(seed)
    return [SimpleNamespace(context=draw.integers(0, SIZES["vocab_size"], n).astype(np.int32)) for n in lengths]


MODEL = make_model()
JITTED = critic_module._values_at


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the batches the model was called with."""
    shapes = []

    def counted(model, tokens, index):
        shapes.append(tokens.shape)
        return JITTED(model, tokens, index)

    monkeypatch.setattr(critic_module, "_values_at", counted)
    return shapes


@pytest.mark.parametrize(("prior", "output"), [(0.5, jax.nn.sigmoid), (0.2, jax.nn.sigmoid), (-3.5, linear), (0.0, linear)])
def test_a_fresh_critic_answers_its_prior_everywhere(prior, output):
    values = evaluate(ValueModel(MODEL.backbone, prior=prior, output=output), jnp.arange(10).reshape(2, 5))
    assert values.shape == (2, 5)
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, prior, rtol=2e-7)


def test_a_fresh_critic_learns_although_its_head_is_zero():
    gradient = jax.jit(jax.grad(lambda model: ((model(jnp.array([[3, 1, 4]])) - 1) ** 2).sum()))(ValueModel(MODEL.backbone))
    assert jnp.abs(gradient.head.weight[...]).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": 1.0}, "`prior`: expected one in"),
        ({"prior": float("nan"), "output": linear}, "`prior`: expected a finite one, got nan"),
        ({"output": jnp.tanh}, "`output`: expected jax.nn.sigmoid or"),
    ],
)
def test_a_wrong_value_model_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ValueModel(MODEL.backbone, **options)


def test_padding_and_packing_change_neither_values_nor_gradients():
    """B50, B57, B58: two sequences alone, padded left, padded right with junk ids, and packed in one row."""
    model, (a, b) = make_model(DELTA), [state.context for state in make_states(9, 14)]
    junk = [np.full(32 - len(x), 259, np.int32) for x in (a, b)]
    left = np.stack([np.concatenate([j, x]) for j, x in zip(junk, (a, b), strict=True)])
    right = np.stack([np.concatenate([x, j]) for j, x in zip(junk, (a, b), strict=True)])
    length, index = np.array([[9], [14]]), np.arange(32)[None]
    packed = np.stack([np.concatenate([junk[0][:3], a, b, junk[0][:6]]), np.full(32, 259)])
    layouts = {
        "left": (left, index >= 32 - length),
        "right": (right, index < length),
        "packed": (packed, [[0] * 3 + [1] * 9 + [2] * 14 + [0] * 6, [0] * 32]),
    }
    # What follows a token does not reach it: rows padded right without segment ids are as good as alone.
    wanted = [values[:n] for values, n in zip(evaluate(model, jnp.array(right)), (9, 14), strict=True)]

    @jax.jit
    def values_and_gradient(model, tokens, segment_ids):
        def loss(model):
            values = model(tokens, segment_ids)
            return jnp.where(segment_ends(segment_ids), (values - 1) ** 2, 0).sum(), values

        return jax.grad(loss, has_aux=True)(model)

    gradients = []
    for name, (tokens, segment_ids) in layouts.items():
        segment_ids = np.array(segment_ids, np.int32)
        gradient, values = values_and_gradient(model, jnp.array(tokens, jnp.int32), segment_ids)
        real = np.concatenate([np.asarray(row)[s == i] for row, s in zip(values, segment_ids, strict=True) for i in (1, 2)])
        np.testing.assert_allclose(real, np.concatenate(wanted), atol=1e-5, err_msg=name)
        if name != "packed":
            np.testing.assert_allclose(last_values(values, segment_ids), [w[-1] for w in wanted], atol=1e-5)
        assert np.isfinite(values).all()
        gradients.append(jax.tree.leaves(gradient))
    for other in gradients[1:]:
        for x, y in zip(gradients[0], other, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


def test_a_row_of_padding_alone_has_no_last_value():
    assert last_values(jnp.full((1, 3), jnp.nan), jnp.zeros((1, 3), jnp.int32)).tolist() == [0]
    assert not segment_ends(jnp.zeros((1, 3), jnp.int32)).any()


def test_a_shared_backbone_is_one_object_and_the_head_can_train_alone():
    actor = MODEL.backbone
    model = ValueModel(actor)
    assert model.backbone is actor
    _, head, rest = nnx.split(model, is_value_head, ...)
    assert set(nnx.to_pure_dict(head)) == {"head"}
    assert set(nnx.to_pure_dict(rest)) == {"backbone"}


def test_a_critics_backbone_needs_no_output_head():
    actor = MODEL.backbone
    critic = ValueModel(without_head(nnx.clone(actor)))
    assert actor.lm_head is not None
    assert actor.config == DENSE
    assert critic.backbone.lm_head is None
    head = DENSE.vocab_size * DENSE.hidden_size
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(model)) for model in (actor, critic.backbone)]
    assert sizes[0] - sizes[1] == head


def test_64_workers_asking_at_once_cost_a_few_calls(calls):
    """B65: at most one compilation for each pair of a batch and a length, whatever the weights."""
    states, batches = make_states(*range(1, 65)), [(32, 32), (32, 64)]
    critic = FlaxCritic(MODEL, version=0, buckets=(32, 64))

    async def ask(critic):
        return np.concatenate(await asyncio.gather(*(critic.score([state]) for state in states)))

    compiled = JITTED._cache_size()
    values = asyncio.run(ask(critic))
    assert calls == batches
    assert JITTED._cache_size() == compiled + 2

    critic.publish(make_model(DENSE, 5), version=1)
    others = asyncio.run(ask(critic))
    assert calls == 2 * batches
    assert JITTED._cache_size() == compiled + 2
    assert np.abs(values - others).max() > 0.1

    alone = FlaxCritic(MODEL, version=0, buckets=(64,))
    for i in (0, 20, 63):  # B57: neither who asks along nor the padding matters
        np.testing.assert_allclose(asyncio.run(alone.score([states[i]]))[0], values[i], atol=1e-6)


def test_batches_hold_no_more_rows_and_tokens_than_allowed(monkeypatch):
    calls = []
    monkeypatch.setattr(critic_module, "_values_at", lambda _, tokens, last: calls.append(tokens.shape) or last * 0.5)
    states = make_states(*[60] * 7, *[10] * 9)
    critic = FlaxCritic(MODEL, version=0, buckets=(16, 64), max_batch=8, max_tokens=150)
    assert asyncio.run(critic.score(states)).tolist() == [29.5] * 7 + [4.5] * 9
    assert calls == [(8, 16), (1, 16), *[(2, 64)] * 3, (1, 64)]


def test_the_event_loop_runs_on_and_who_asks_meanwhile_shares_the_next_call(monkeypatch):
    shapes, started, go = [], threading.Event(), threading.Event()

    def held(model, tokens, index):
        shapes.append(tokens.shape)
        started.set()
        assert go.wait(60)
        return np.zeros(len(tokens))

    monkeypatch.setattr(critic_module, "_values_at", held)
    critic = FlaxCritic(MODEL, version=0, buckets=(16,))

    async def ask():
        first = asyncio.create_task(critic.score(make_states(3)))
        await asyncio.to_thread(started.wait, 60)
        others = [asyncio.create_task(critic.score(make_states(4, 5))) for _ in range(5)]
        await asyncio.sleep(0.01)
        go.set()
        await asyncio.gather(first, *others)

    asyncio.run(ask())
    assert shapes == [(1, 16), (16, 16)]


def test_a_failing_call_reaches_its_callers_alone(monkeypatch):
    def failing(model, tokens, index):
        if tokens.shape[1] == 32:
            raise RuntimeError("out of memory")
        return index * 0.5

    monkeypatch.setattr(critic_module, "_values_at", failing)
    critic = FlaxCritic(MODEL, version=0, buckets=(16, 32))

    async def ask():
        asked = [critic.score(make_states(*lengths)) for lengths in ((3, 4), (20,), (5, 21), (6,))]
        return await asyncio.gather(*asked, return_exceptions=True)

    for _ in range(2):
        fine, broken, half, also_fine = asyncio.run(ask())
        assert (fine.shape, also_fine.shape) == ((2,), (1,))
        assert str(broken) == str(half) == "out of memory"


def test_values_that_are_not_finite_are_an_error():
    critic = FlaxCritic(jax.tree.map(lambda leaf: leaf * jnp.nan, MODEL), version=0, buckets=(16,))
    with pytest.raises(FloatingPointError, match="values are not finite"):
        asyncio.run(critic.score(make_states(3)))


def test_cancelled_callers_do_no_harm(calls):
    critic = FlaxCritic(MODEL, version=0, buckets=(16, 32))

    async def ask():
        staying = asyncio.create_task(critic.score(make_states(3)))
        leaving = [asyncio.create_task(critic.score(make_states(20))) for _ in range(3)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        return await asyncio.gather(staying, *leaving, return_exceptions=True)

    value, *errors = asyncio.run(ask())
    assert value.shape == (1,)
    assert all(isinstance(error, asyncio.CancelledError) for error in errors)
    assert calls == [(1, 16)]  # nobody waits for the others any more

    async def leave():
        asking = asyncio.create_task(critic.score(make_states(3)))
        await asyncio.sleep(0)
        return asking

    asyncio.run(leave())  # the loop ends while a call is asked for
    assert asyncio.run(critic.score(make_states(3))).tolist() == value.tolist()


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (np.zeros(33, np.int32), "expected a context of 1 to 32 tokens, the longest this critic takes, got 33"),
        (np.zeros(0, np.int32), "got 0"),
        (np.array([1, 260], np.int32), r"expected ids in \[0, 260\), got 260"),
        (np.array([-1], np.int32), "got -1"),
    ],
)
def test_a_context_it_cannot_take_is_refused_before_any_call(context, message, calls):
    critic = FlaxCritic(MODEL, version=0, buckets=(16, 32))
    with pytest.raises(ValueError, match=message):
        asyncio.run(critic.score([*make_states(3), SimpleNamespace(context=context)]))
    assert not calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": ()}, "`buckets`: expected increasing lengths from 1 to 512"),
        ({"buckets": (64, 32)}, "got \\(64, 32\\)"),
        ({"buckets": (64, 1024)}, "max_positions"),
        ({"max_batch": 48}, "`max_batch`: expected a power of two, got 48"),
    ],
)
def test_wrong_limits_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FlaxCritic(MODEL, version=0, **options)


def test_the_default_buckets_end_at_the_position_limit():
    model = SimpleNamespace(backbone=SimpleNamespace(config=replace(DENSE, max_positions=700)))
    assert FlaxCritic(model, version=0).buckets == (128, 256, 512, 700)


def test_a_sharded_critic_answers_the_same():
    with jax.set_mesh(make_mesh(4, 2)):
        sharded = make_model()
    states = make_states(3, 9, 16)
    answers = [asyncio.run(FlaxCritic(model, version=0, buckets=(16,)).score(states)) for model in (MODEL, sharded)]
    np.testing.assert_allclose(*answers, atol=1e-6)


def test_it_serves_a_collection_and_its_journal_knows_the_version(tmp_path, calls):
    def run(critic, journal):
        passes = [Pass(RootRollouts(), Budget(continuations=6))]
        tasks = {f"p{i}": f"task {i}" for i in range(4)}
        agent = letter_agent()
        options = {"make_environment": LetterEnvironment, "num_workers": 8, "seed": 3, "journal": tmp_path / journal}
        return asyncio.run(collect(agent, critic, tasks, passes, **options))

    critic = FlaxCritic(MODEL, version=7, buckets=(512,), max_batch=2)
    assert repr(critic) == "FlaxCritic(qwen3, layers=2, hidden_size=32, float32, output=sigmoid, version=7)"
    grown = run(critic, "first")
    assert sum(ledger.continuations for group in grown.ledgers for ledger in group) == 24
    assert set(calls) <= {(1, 512), (2, 512)}  # which of them depends on who asks at the same time
    assert len(calls) < sum(len(tree.values) for tree in grown.trees)
    for tree in grown.trees:
        values = tree.values
        assert len(set(values.tolist())) > 2
        alone = asyncio.run(critic.score([tree.state(0)]))[0]
        np.testing.assert_allclose(values[0], alone, atol=1e-6)

    run(FlaxCritic(MODEL, version=7, buckets=(512,), max_batch=2), "first")  # nothing left to do
    critic.publish(make_model(DENSE, 9), version=8)
    with pytest.raises(JournalError):
        run(critic, "first")
    after = run(critic, "second")
    assert after.trees[0].values[0] != grown.trees[0].values[0]


def test_weights_of_another_shape_are_not_published():
    critic, other = FlaxCritic(MODEL, version=0), SimpleNamespace(backbone=SimpleNamespace(config=replace(DENSE, tied=True)))
    with pytest.raises(ValueError, match="expected a model of"):
        critic.publish(other, version=1)
    assert critic.model is MODEL
