"""Log-probabilities and entropies against the whole softmax, in any pieces, on any mesh, within little memory."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from benchmarks.scoring_memory import temporary_bytes

from focus_jax.models import Decoder, ModelConfig, TokenScores, make_mesh, score, scoring, token_logprobs

SHAPE, VOCAB, WIDTH = (3, 7), 48, 16
MODEL = ModelConfig("qwen3", 61, 32, 48, 4, 2, 16, ("full_attention",), tied=True)


def make_inputs(vocab=VOCAB, seed=0):
    """Hidden states, head, targets, a mask, and what each log-probability and each entropy count for in the loss."""
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(*SHAPE, WIDTH)).astype(np.float32), rng.normal(size=(vocab, WIDTH)).astype(np.float32)
    targets, mask = rng.integers(0, vocab, SHAPE).astype(np.int32), rng.random(SHAPE) < 0.7
    return hidden, head, targets, mask, *rng.normal(size=(2, *SHAPE)).astype(np.float32)


@partial(jax.jit, static_argnames=("temperature", "chunk"))
def evaluate(hidden, head, targets, mask, a, b, **knobs):
    """Scores, and the gradients of sum(a * logprob + b * entropy) with respect to hidden states and head."""

    def loss(hidden, head):
        scores = token_logprobs(hidden, head, targets, mask, **knobs)
        return jnp.sum(a * scores.logprobs + b * scores.entropy), scores

    gradients, scores = jax.grad(loss, (0, 1), has_aux=True)(hidden, head)
    return scores, gradients


def slow(hidden, head, targets, mask, a, b, temperature=1.0):
    """The same by the reference, position by position."""
    logprobs, entropy, d_hidden = np.zeros(SHAPE), np.zeros(SHAPE), np.zeros((*SHAPE, WIDTH))
    d_head = np.zeros(head.shape)
    for at in zip(*np.nonzero(mask), strict=True):
        logprobs[at], entropy[at] = reference.token_scores(hidden[at], head, targets[at], temperature)
        d_hidden[at], more = reference.token_scores_gradient(hidden[at], head, targets[at], temperature, a[at], b[at])
        d_head += more
    return TokenScores(logprobs, entropy), (d_hidden, d_head)


def assert_close(got, want, value=1e-5, gradient=1e-4):
    for pair, tolerance in zip(zip(got, want, strict=True), (value, gradient), strict=True):
        for x, y in zip(*pair, strict=True):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("chunk", "temperature"), [(None, 1.0), ((5, 7), 0.7), ((8, 1), 1.3)], ids=str)
def test_equal_the_whole_softmax_in_any_pieces(chunk, temperature):
    inputs = make_inputs()
    got = evaluate(*inputs, temperature=temperature, chunk=chunk)
    assert {x.dtype.name for x in jax.tree.leaves(got)} == {"float32"}
    assert_close(got, slow(*inputs, temperature=temperature))


def test_one_position_and_none():
    hidden, head, targets, *_ = make_inputs()
    got = token_logprobs(hidden[0, 0], head, targets[0, 0])
    np.testing.assert_allclose(got, reference.token_scores(hidden[0, 0], head, targets[0, 0], 1.0), rtol=1e-5)
    assert token_logprobs(hidden[:, :0], head, targets[:, :0]).logprobs.shape == (3, 0)


@pytest.mark.parametrize("filler", [np.nan, np.inf, -1e30])
def test_b31_what_stands_at_masked_positions_changes_nothing(filler):
    hidden, head, targets, mask, a, b = make_inputs()
    clean = evaluate(hidden, head, targets, mask, a, b, chunk=(5, 7))
    dirty = np.where(mask[..., None], hidden, np.float32(filler)), head, np.where(mask, targets, -(10**6)).astype(np.int32)
    jax.tree.map(np.testing.assert_array_equal, evaluate(*dirty, mask, a, b, chunk=(5, 7)), clean)
    scores, (d_hidden, _) = clean
    assert not any(np.any(x[~mask]) for x in (*scores, d_hidden))


def test_half_precision_is_summed_in_float32():
    hidden, head, *rest = make_inputs()
    hidden, rounded = (jnp.asarray(x, jnp.bfloat16) for x in (hidden, head))
    want = slow(np.asarray(hidden, np.float32), np.asarray(rounded, np.float32), *rest)
    scores, (d_hidden, d_head) = evaluate(hidden, head, *rest, chunk=(5, 7))
    assert (d_hidden.dtype, d_head.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close((scores, (d_hidden.astype(jnp.float32), d_head)), want, gradient=2e-2)
    assert jax.eval_shape(evaluate, hidden, rounded, *rest)[1][1].dtype == jnp.bfloat16
    # B30: logits 20.03 and 20 would be equal in bfloat16.
    logprobs = token_logprobs(jnp.ones(2, jnp.bfloat16), jnp.array([[20, 0.03], [20, 0]], jnp.bfloat16), jnp.array(0)).logprobs
    np.testing.assert_allclose(logprobs, -0.678260, atol=5e-5)


def test_b28_temperature_is_the_samplers():
    hidden, head, target = jnp.array([1.0]), jnp.array([[2.0], [0.0]]), jnp.array(0)
    np.testing.assert_allclose(token_logprobs(hidden, head, target, temperature=0.5).logprobs, -0.018150, atol=1e-6)
    np.testing.assert_allclose(token_logprobs(hidden, head, target).logprobs, -0.126928, atol=1e-6)


def test_b29_scores_are_those_of_the_whole_vocabulary():
    scores = token_logprobs(jnp.ones(1), jnp.log(jnp.array([[0.5], [0.3], [0.2]])), jnp.array(0))
    np.testing.assert_allclose(scores.logprobs, -0.693147, atol=1e-6)


def test_extreme_logits_and_tokens_that_do_not_exist():
    head = jnp.array([[300.0], [0.0], [-300.0]])
    (scores, gradients) = evaluate(jnp.ones((3, 1)), head, jnp.arange(3), jnp.ones(3, bool), 1.0, 1.0, chunk=(3, 1))
    np.testing.assert_allclose(scores.logprobs, [0, -300, -600])
    np.testing.assert_allclose(scores.entropy, 0, atol=1e-6)
    assert all(np.all(np.isfinite(x)) for x in gradients)
    assert np.isnan(token_logprobs(jnp.ones((2, 1)), head, jnp.array([-1, 3])).logprobs).all()


@pytest.mark.parametrize(("fsdp", "tensor", "vocab"), [(4, 2, 480), (2, 4, 498)])
def test_a_mesh_changes_no_number_and_sends_no_logits(fsdp, tensor, vocab):
    hidden, head, *rest = make_inputs(vocab)
    knobs = {"temperature": 0.7, "chunk": (5, 7)}
    alone, mesh = evaluate(hidden, head, *rest, **knobs), make_mesh(fsdp, tensor)
    split = jax.sharding.NamedSharding(mesh, jax.P("tensor" if vocab % tensor == 0 else None, "fsdp"))
    with jax.set_mesh(mesh):
        head = jax.device_put(head, split)
        compiled = evaluate.lower(hidden, head, *rest, **knobs).compile()
        scores, gradients = compiled(hidden, head, *rest)
    assert_close((scores, gradients), alone, value=1e-5, gradient=1e-5)
    assert gradients[1].sharding == split
    sent = re.findall(
        r"= (.*) (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)[a-z-]*\(", compiled.as_text()
    )
    shapes = [[int(n) for n in shape.split(",")] for line in sent for shape in re.findall(r"f32\[([\d,]+)\]", line)]
    assert [7, WIDTH] in shapes  # a piece of the head
    assert max(np.prod(shape) for shape in shapes) <= 24 * WIDTH  # no more than the hidden states, padded


def test_b30_memory_is_a_small_share_of_the_dense_versions():
    dense, ours = (temporary_bytes(how, 4096, 32768, 64) for how in ("dense", "chunked"))
    assert ours < 0.02 * dense
    assert temporary_bytes("chunked", 4096, 32768, 64, chunk=(256, 32768)) < 3 * 256 * 32768 * 4


def test_b65_one_compile_per_shape():
    hidden, head, targets, *_ = make_inputs(seed=1)
    before = scoring._token_logprobs._cache_size()
    for length in (2, 4, 2, 4):
        token_logprobs(hidden[:, :length] * length, head, targets[:, :length], chunk=(4, 40))
    assert scoring._token_logprobs._cache_size() == before + 2


@cache
def make_decoder():
    model = Decoder(MODEL, key=jax.random.key(0))
    return jax.tree.map(lambda leaf: leaf * 5, model)  # sharper than where it starts


@pytest.fixture(scope="module")
def sequences():
    """Three sequences with the log-probability and the entropy of every token after the first, from the whole logits."""
    rng, model, lengths = np.random.default_rng(0), make_decoder(), (5, 1, 8)
    tokens, head = rng.integers(0, MODEL.vocab_size, (3, 8)).astype(np.int32), np.asarray(model.head_weight())
    rows = []
    for length, row, hidden in zip(lengths, tokens, np.asarray(jax.jit(type(model).__call__)(model, tokens)), strict=True):
        scores = [reference.token_scores(hidden[t - 1], head, row[t], 0.7) for t in range(1, length)]
        rows.append((row[:length], np.array([(0.0, 0.0), *scores])))
    return rows


LAYOUTS = {
    "left": [[-11, 0], [-15, 1], [-8, 2]],
    "right": [[0], [1], [2]],
    "packed": [[0, 1, 2], [], [2, 0]],
    "padding between": [[-1, 2, -3, 1, -2], [0, -2, 0], [1]],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_b05_b58_every_token_has_its_own_score_wherever_it_stands(layout, sequences):
    tokens, segments = np.full((3, 16), 10**6, np.int32), np.zeros((3, 16), np.int32)
    want = np.zeros((3, 16, 2))
    for row, pieces in enumerate(layout):
        at = 0
        for number, i in enumerate(pieces, 1):
            length = -i if i < 0 else len(sequences[i][0])
            if i >= 0:
                here = slice(at, at + length)
                tokens[row, here], want[row, here], segments[row, here] = *sequences[i], number
            at += length
    got = np.stack(scored(make_decoder(), tokens, segments), -1)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.array_equal(got != 0, want != 0)  # exactly 0 at padding and at first tokens


@jax.jit
def scored(model, tokens, segments):
    return score(model, tokens, segments, temperature=0.7)


def test_b05_a_token_changes_its_own_score_and_later_ones():
    tokens = np.random.default_rng(1).integers(0, 61, 16).astype(np.int32) * np.ones((3, 1), np.int32)
    tokens[1, 4], tokens[2, 15] = 60 - tokens[1, 4], 60 - tokens[2, 15]
    whole, as_segment = (scored(make_decoder(), tokens, ids) for ids in (None, np.ones_like(tokens)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), whole, as_segment)
    differs = np.abs(whole.logprobs[1:] - whole.logprobs[:1]) > 1e-5
    assert np.array_equal(np.argmax(differs, 1), [4, 15])  # nothing before it
    assert differs[0].sum() > 6
    np.testing.assert_allclose(whole.entropy[2], whole.entropy[0], atol=1e-6)


def test_the_gradient_reaches_a_model_on_a_mesh():
    tokens = np.random.default_rng(0).integers(0, 61, (4, 8)).astype(np.int32)
    segments = np.array([[0, 0, 1, 1, 1, 2, 2, 2]] * 4, np.int32)

    @jax.jit
    @jax.grad
    def gradient(model):
        return score(model, tokens, segments).logprobs.sum()

    alone = jax.tree.leaves(gradient(make_decoder()))
    with jax.set_mesh(make_mesh(4, 2)):
        on_mesh = jax.tree.leaves(gradient(make_decoder()))
    for x, y in zip(alone, on_mesh, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
        assert np.any(x)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, "`temperature`: expected a number > 0, got 0.0; a greedy reply is scored at"),
        ({"temperature": np.nan}, ValueError, "`temperature`: expected a number > 0, got nan"),
        ({"chunk": (4, 0)}, ValueError, "`chunk`: expected two numbers >= 1"),
        ({"head": jnp.zeros((5, 3))}, ValueError, r"`head`: expected shape \(5, 16\), got \(5, 3\)"),
        ({"targets": jnp.zeros(3, jnp.int32)}, ValueError, r"`targets`: expected shape \(3, 7\), got \(3,\)"),
        ({"targets": jnp.zeros(SHAPE)}, TypeError, "`targets`: expected integer, got float32"),
        ({"mask": jnp.zeros(SHAPE)}, TypeError, "`mask`: expected bool, got float32"),
        ({"hidden": jnp.zeros((3, 7, 16), int)}, TypeError, "`hidden`: expected floating, got int32"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(change, error, message):
    hidden, head, targets, *_ = make_inputs()
    with pytest.raises(error, match=message):
        token_logprobs(**{"hidden": hidden, "head": head, "targets": targets} | change)
