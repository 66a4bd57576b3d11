"""Models and update steps over meshes of devices: the same numbers as on one, one compilation, everything in its place."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from focus_jax.models import Decoder, DeltaConfig, ModelConfig, ValueModel, is_value_head, make_mesh
from focus_jax.models.sharding import abstract, keep_sharded, mesh_of, shard_rows
from focus_jax.training import ActorBatch, CriticBatch, actor_step, critic_step, make_optimizer
from focus_jax.training.steps import gradient_of

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
DENSE = ModelConfig("qwen3", layer_types=("full_attention",) * 2, **SIZES)
DELTA = replace(
    DENSE,
    family="qwen3_5",
    layer_types=("linear_attention", "full_attention") * 2,
    partial_rotary=0.25,
    tied=True,
    delta=DeltaConfig(2, 4, 8, 8, 4),
)
SGD = optax.sgd(0.1, momentum=0.9)
NOTHING = jax.checkpoint_policies.nothing_saveable


def make_rows(rows=8, length=16, seed=0):
    """Rows of two sequences each with padding behind, and of numbers for every token."""
    draw = np.random.default_rng(seed)
    segment_ids = np.repeat([[1] * 7 + [2] * 6 + [0] * (length - 13)], rows, 0).astype(np.int32)
    tokens = draw.integers(0, SIZES["vocab_size"], (rows, length)).astype(np.int32)
    mask = (segment_ids > 0) & (np.arange(length) % 3 > 0)
    return tokens, segment_ids, mask, *draw.normal(size=(3, rows, length)).astype(np.float32)


def actor_batch(**shape):
    tokens, segment_ids, mask, a, b, c = make_rows(**shape)
    return ActorBatch(tokens, segment_ids, mask, -4 - a, b, np.abs(c))


def critic_batch(**shape):
    tokens, segment_ids, mask, a, _, c = make_rows(**shape)
    return CriticBatch(tokens, segment_ids, mask, np.abs(a), np.abs(c))


def build(config, **options):
    return jax.jit(lambda: keep_sharded(Decoder(config, key=jax.random.key(0), **options)))()


def build_critic(config):
    def make():
        critic = ValueModel(Decoder(config, key=jax.random.key(0)))
        critic.head.weight[...] = jax.random.normal(jax.random.key(1), critic.head.weight.shape)
        return keep_sharded(critic)

    return jax.jit(make)()


def run(step, model, batch, tx=SGD, steps=3):
    """The model after a few steps, its optimizer, the losses, and how often the step was compiled."""
    optimizer, batch, compiled = make_optimizer(model, tx), shard_rows(batch), step._cache_size()
    losses = []
    for _ in range(steps):
        model, optimizer, metrics = step(model, optimizer, batch)
        losses.append(float(metrics["loss"]))
    return model, optimizer, losses, step._cache_size() - compiled


def specs(tree):
    """Path -> how the array there is split, trailing axes that are not left out."""

    def axes(leaf):
        given = list(leaf.sharding.spec)
        while given and given[-1] is None:
            given.pop()
        return tuple(given)

    return {jax.tree_util.keystr(path): axes(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_close(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=tolerance)


@functools.cache
def alone(config):
    """Three actor steps on one device."""
    return run(actor_step, build(config), actor_batch())


@pytest.mark.parametrize(
    ("config", "layout", "remat"),
    [
        (DENSE, (8, 1), None),
        pytest.param(DENSE, (2, 4), NOTHING, marks=pytest.mark.slow),
        (DELTA, (4, 2), NOTHING),
        pytest.param(DENSE, (4, 2), None, marks=pytest.mark.slow),
        pytest.param(DELTA, (8, 1), None, marks=pytest.mark.slow),
        pytest.param(DELTA, (2, 4), None, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_gives_the_loss_and_the_parameters_of_one_device(config, layout, remat):
    """With or without recomputing activations in the backward pass."""
    with jax.set_mesh(make_mesh(*layout)):
        model = build(config, remat=remat)
        before, start = specs(model), jax.tree.map(np.asarray, nnx.state(model))
        model, optimizer, losses, compiled = run(actor_step, model, actor_batch())
    wanted, _, wanted_losses, _ = alone(config)
    assert compiled == 1
    np.testing.assert_allclose(losses, wanted_losses, atol=1e-5)
    assert losses[-1] < losses[0]
    assert max(np.abs(x - y).max() for x, y in zip(jax.tree.leaves(start), jax.tree.leaves(model), strict=True)) > 1e-3
    assert_close(model, wanted)
    # Parameters stay where they were, and their moments are beside them.
    assert specs(model) == before
    moments = [spec for path, spec in specs(optimizer).items() if "trace" in path]
    assert moments == list(before.values())
    assert mesh_of(model).shape == {"fsdp": layout[0], "tensor": layout[1]}


def test_every_kind_of_parameter_is_split_as_it_should_be():
    expected = {
        "embed_tokens": ("tensor", "fsdp"),
        "q_proj": (None, "tensor", "fsdp"),
        "o_proj": (None, "fsdp", "tensor"),
        "in_proj_qkv": (None, "tensor", "fsdp"),
        "out_proj": (None, "fsdp", "tensor"),
        "conv1d": (None, "tensor"),
        "A_log": (None, "tensor"),
        "dt_bias": (None, "tensor"),
        "up_proj": (None, "tensor", "fsdp"),
        "down_proj": (None, "fsdp", "tensor"),
        "layernorm": (),
    }
    with jax.set_mesh(make_mesh(4, 2)):
        shapes = jax.eval_shape(lambda: Decoder(DELTA, key=jax.random.key(0)))
        found = specs(abstract(shapes))
        rows = shard_rows(actor_batch())
    for name, axes in expected.items():
        matches = {path: spec for path, spec in found.items() if name in path}
        assert matches
        assert set(matches.values()) == {axes}, name
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(rows)} == {PartitionSpec("fsdp")}


def test_a_model_built_under_a_mesh_is_split_at_once():
    with jax.set_mesh(make_mesh(4, 2)):
        eager = specs(Decoder(replace(DENSE, layer_types=("full_attention",)), key=jax.random.key(0)))
        jitted = specs(build(replace(DENSE, layer_types=("full_attention",))))
    assert eager == jitted
    assert ("tensor", "fsdp") in eager.values()


def test_dimensions_that_do_not_divide_an_axis_are_not_split():
    odd = replace(DENSE, vocab_size=97, intermediate_size=45, num_heads=3, num_kv_heads=3, hidden_size=36)
    with jax.set_mesh(make_mesh(2, 4)):
        found = specs(abstract(jax.eval_shape(lambda: Decoder(odd, key=jax.random.key(0)))))
        assert {spec for path, spec in found.items() if "embed" in path} == {(None, "fsdp")}
        assert {spec for path, spec in found.items() if "up_proj" in path} == {(None, None, "fsdp")}
        model = abstract(jax.eval_shape(lambda: Decoder(odd, key=jax.random.key(0))))
        optimizer = abstract(jax.eval_shape(lambda model: make_optimizer(model, SGD), model))
        actor_step.lower(model, optimizer, actor_batch(rows=3))


def test_a_critic_step_is_the_same_on_a_mesh_and_trains_no_more_than_it_is_told():
    wanted, _, wanted_losses, _ = run(critic_step, build_critic(DENSE), critic_batch())
    with jax.set_mesh(make_mesh(4, 2)):
        model, _, losses, compiled = run(critic_step, build_critic(DENSE), critic_batch())
        assert compiled == 1
        np.testing.assert_allclose(losses, wanted_losses, atol=1e-5)
        assert_close(model, wanted)
        optimizer = make_optimizer(model, SGD, is_value_head)
    assert sum(leaf.size for leaf in jax.tree.leaves(optimizer)) < 2 * (1 + DENSE.hidden_size)
    gradient = jax.eval_shape(
        lambda model: gradient_of(lambda m: (m(jnp.zeros((1, 4), int)).sum(),) * 3, model, is_value_head), model
    )
    assert set(nnx.to_pure_dict(gradient[0])) == {"head"}


def test_gradients_are_float32_and_split_like_their_parameters():
    """Left alone, the gradient of x W^T comes with its axes swapped."""
    tokens, segment_ids, *_ = map(jnp.asarray, make_rows())

    def loss(model):
        return model(tokens, segment_ids).astype(jnp.float32).sum(), jnp.ones(()), {}

    with jax.set_mesh(make_mesh(4, 2)):
        model = build(DENSE, dtype=jnp.bfloat16)
        gradient, _ = jax.jit(lambda model: gradient_of(loss, model, nnx.Param))(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    assert specs(nnx.to_pure_dict(gradient)) == specs(nnx.to_pure_dict(nnx.state(model)))


def test_float32_stays_where_half_precision_computes():
    """B52: master weights, A_log, dt_bias, norms and moments are float32 after a step in bfloat16."""
    model = jax.eval_shape(lambda: Decoder(DELTA, dtype=jnp.bfloat16, key=jax.random.key(0)))
    optimizer = jax.eval_shape(lambda model: make_optimizer(model, SGD), model)
    after = jax.eval_shape(actor_step, model, optimizer, actor_batch())[:2]
    assert jax.eval_shape(lambda model: model(jnp.zeros((1, 4), int)), model).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(after) if leaf.ndim} == {jnp.dtype("float32")}
    assert "A_log" in str(jax.tree_util.tree_leaves_with_path(after[0]))


def test_the_program_does_not_grow_with_depth():
    def size(layers):
        config = replace(DELTA, layer_types=DELTA.layer_types * (layers // 4))
        with jax.set_mesh(make_mesh(4, 2)):
            model = abstract(jax.eval_shape(lambda: Decoder(config, remat=NOTHING, key=jax.random.key(0))))
            optimizer = abstract(jax.eval_shape(lambda model: make_optimizer(model, SGD), model))
            return len(actor_step.lower(model, optimizer, actor_batch()).as_text())

    shallow, deep = size(4), size(16)
    assert deep < 1.01 * shallow


def test_a_batch_without_any_token_to_learn_from_moves_nothing():
    """B26."""
    batch = replace(actor_batch(rows=8), mask=np.zeros((8, 16), bool))
    before = build(DENSE)
    wanted = jax.tree.map(np.asarray, nnx.state(before))
    model, _, metrics = actor_step(before, make_optimizer(before, SGD), batch)
    assert_close(nnx.state(model), wanted, 0)
    assert {name: float(value) for name, value in metrics.items()} == dict.fromkeys(metrics, 0)
