"""Generated tokens are those of the plain forward pass, each row by itself, whatever is reused or decoded beside it."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from focus_jax.models import (
    ContinuousBatch,
    Decoder,
    DeltaConfig,
    ModelConfig,
    Request,
    ValueModel,
    decoding,
    engine,
    for_decoding,
    generate,
    make_mesh,
    prefixes,
)
from focus_jax.models.draw import draw

VOCAB = 61
DELTA = DeltaConfig(num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=8, kernel_size=4)
FULL, LINEAR = "full_attention", "linear_attention"
BLOCKS = {"llama": (FULL,) * 2, "qwen2": (FULL,), "qwen3": (FULL,), "qwen3_5": (LINEAR, FULL)}
CONFIGS = {
    family: ModelConfig(
        family, VOCAB, 32, 48, 4, 2, 8, layers, tied=family != "qwen3", max_positions=128, qkv_bias=family == "qwen2",
        partial_rotary=0.5 if family == "qwen3_5" else 1.0, delta=DELTA if family == "qwen3_5" else None,
    )
    for family, layers in BLOCKS.items()
}  # fmt: skip
FAMILIES = tuple(CONFIGS)
PROMPTS = [np.arange(1, 8), np.array([9]), np.arange(30, 50), np.array([3, 3, 3])]
LONGEST = 64


@cache
def decoder(family="llama", dtype=jnp.float32):
    """Weights large enough for the distributions to be far from uniform."""
    model = Decoder(CONFIGS[family], dtype=dtype, key=jax.random.key(0))
    for weight in (model.embed_tokens, model.lm_head):
        if weight is not None:
            weight[...] = 20 * weight[...]
    return model


@jax.jit
def _log_probs(model, tokens, temperature):
    return jax.nn.log_softmax(model.logits(model(tokens)).astype(jnp.float32) / temperature)


def log_probs(model, tokens, temperature=1.0):
    """Log-probabilities [T, VOCAB] after each token, from the forward pass over the whole row."""
    row = np.zeros((1, LONGEST), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(_log_probs(model, row, np.float32(temperature)))[0, : len(tokens)]


def score(model, prompt, ids, temperature=1.0):
    rows = log_probs(model, np.concatenate([prompt, ids]), temperature)[len(prompt) - 1 : -1]
    return rows[np.arange(len(ids)), ids]


def reply(got, row):
    return got.ids[row, : got.length[row]], got.logprobs[row, : got.length[row]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_plain_loop_and_samples_score_the_same(family):
    model = decoder(family)
    got = generate(model, PROMPTS, max_tokens=12, temperature=0.0, seeds=range(4))
    for row, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(log_probs(model, tokens)[-1].argmax()))
        assert got.ids[row].tolist() == tokens[len(prompt) :]
        np.testing.assert_allclose(got.logprobs[row], score(model, prompt, got.ids[row]), atol=1e-4)
    got = generate(model, PROMPTS, max_tokens=12, temperature=0.7, seeds=range(4))
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(got.logprobs[row], score(model, prompt, got.ids[row], 0.7), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_b57_b58_a_reply_depends_on_its_own_prompt_and_seed_alone(family, monkeypatch):
    model = for_decoding(decoder(family))
    requests = [Request(p, 9 + i, seed=i, temperature=0.5 + 0.25 * i, stop_ids=(5,)) for i, p in enumerate(PROMPTS)]
    alone = [run(model, [request], num_slots=4)[0] for request in requests]
    assert alone[0].ids == run(model, requests[:1], num_slots=4)[0].ids
    assert len({tuple(r.ids[:4]) for r in alone}) == 4
    knobs = {"num_slots": 4, "prefill_tokens": 16}  # other company, prompts in pieces
    if family == "llama":  # fewer slots, shorter steps; caches that grow and shrink
        monkeypatch.setattr(engine, "_SMALLEST_CACHE", 16)
        knobs |= {"num_slots": 2, "num_steps": 5}
    together = run(model, requests[::-1] + requests, **knobs)
    for i, reply in enumerate(alone):
        for other in (together[3 - i], together[4 + i]):
            assert (other.ids, other.finish_reason) == (reply.ids, reply.finish_reason)
            np.testing.assert_allclose(other.logprobs, reply.logprobs, atol=1e-5)


def run(model, requests, *, batch=None, **knobs):
    """Replies to requests that are submitted at once."""
    batch = batch or ContinuousBatch(model, context_length=128, **knobs)
    handles = [batch.submit(request) for request in requests]
    replies = {}
    while batch.num_waiting or batch.num_active:
        replies |= batch.step()
    return [replies[handle] for handle in handles]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_continuations_of_a_shared_prefix_read_it_once_and_stay_the_same(family):
    model = for_decoding(decoder(family))
    state = np.arange(20, dtype=np.int32)
    requests = [Request(state, 7, seed=i) for i in range(4)]
    plain = run(model, requests, num_slots=4)
    batch = ContinuousBatch(model, num_slots=4, context_length=128, prefix_bytes=2**24)
    again = run(model, requests, batch=batch)
    assert batch.num_prefilled == len(state)
    # A next turn goes on from a reply's end; what has a state cannot go on from the middle of one, attention can.
    turn = np.concatenate([state, np.array(plain[0].ids, np.int32), [1, 2, 3]])
    branch = np.concatenate([state[:17], [7, 7]])
    follow = [Request(turn, 5, seed=8), Request(branch, 5, seed=9)]
    again += run(model, follow, batch=batch)
    assert batch.num_prefilled == len(state) + 3 + (2 if family == "llama" else len(branch))
    for reply, other in zip(plain + run(model, follow, num_slots=4), again, strict=True):
        assert reply.ids == other.ids
        np.testing.assert_allclose(reply.logprobs, other.logprobs, atol=1e-5)


def test_the_states_kept_are_those_used_last_and_fit_their_memory():
    row = decoding.empty_slots(decoder(), 1, 8)
    saved = [prefixes.Saved(np.array(tokens, np.int32), 8, row) for tokens in ([1, 2], [1, 2, 3, 4], [5], [6])]
    store = prefixes.PrefixStore(3 * saved[0].num_bytes, can_cut=True)
    for entry in saved[:3]:
        store.add(entry)
    assert store.find(np.array([1, 2, 3, 9])) == (saved[1], 3)  # the longest beginning they share
    assert store.find(np.array([1, 2])) == (saved[0], 2)  # all of it: its output is known, the longer one's is not
    assert store.find(np.array([7])) == (None, 0)
    store.add(saved[3])
    assert [store.holds(entry.tokens) for entry in saved] == [True, True, False, True]
    assert store.num_bytes == store.max_bytes
    exact = prefixes.PrefixStore(2**20, can_cut=False)
    exact.add(saved[1])
    assert exact.find(np.array([1, 2, 3, 9])) == (None, 0)
    assert exact.find(np.array([1, 2, 3, 4, 9])) == (saved[1], 4)


def test_requests_enter_and_leave_while_others_go_on():
    model = for_decoding(decoder())
    requests = [Request(PROMPTS[0], n, seed=n) for n in (30, 31, 32, 2, 2, 9)]
    expected = [run(model, [request], num_slots=4)[0].ids for request in requests]
    batch = ContinuousBatch(model, num_slots=4, context_length=128)
    first, second, third, gone, short, later = map(batch.submit, requests)
    batch.cancel(gone)
    replies = batch.step()
    assert set(replies) == {first, second, third, short}
    assert (replies[short].ids, replies[short].finish_reason) == (expected[4], "length")
    assert replies[first].ids == expected[0][:8]
    replies = batch.step()
    assert replies[later].ids == expected[5][:8]
    batch.cancel(later)
    batch.cancel(second)
    assert (batch.num_active, batch.num_waiting) == (2, 0)
    while batch.num_active:
        replies |= batch.step()
    assert (replies[first].ids, replies[third].ids) == (expected[0], expected[2])


def test_stop_ids_end_a_reply_and_belong_to_it():
    model = decoder("qwen2")
    free = generate(model, PROMPTS, max_tokens=12, seeds=range(4))
    assert free.finish_reason == ("length",) * 4
    never = sorted(set(range(VOCAB)) - set(free.ids.ravel().tolist()))
    stops = {int(free.ids[0, 5]), int(free.ids[2, 2]), *never[:5]}  # more than the four there is room for at first
    got = generate(model, PROMPTS, max_tokens=12, seeds=range(4), stop_ids=sorted(stops))
    for row in range(4):
        ids = free.ids[row].tolist()
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), 12)
        assert reply(got, row)[0].tolist() == ids[:end]
        assert got.finish_reason[row] == ("stop" if ids[end - 1] in stops else "length")
        assert not got.ids[row, end:].any()
        np.testing.assert_allclose(reply(got, row)[1], free.logprobs[row, :end], atol=1e-5)


def test_a_padded_array_with_lengths_is_the_list_of_its_rows():
    array = np.full((4, 20), -5)
    for row, prompt in enumerate(PROMPTS):
        array[row, : len(prompt)] = prompt
    lengths = [len(prompt) for prompt in PROMPTS]
    a = generate(decoder(), array, lengths=lengths, max_tokens=12, seeds=[4, 4, 4, 4])
    b = generate(decoder(), PROMPTS, max_tokens=12, seeds=[4, 4, 4, 4])
    np.testing.assert_array_equal(a.ids, b.ids)


def test_first_tokens_have_the_frequencies_of_the_distribution():
    model, prompt = decoder(), PROMPTS[0]
    n = 600
    batch = ContinuousBatch(model, num_slots=4, context_length=128, prefix_bytes=2**20)
    got = run(None, [Request(prompt, 1, seed=i, temperature=2.5) for i in range(n)], batch=batch)
    expected = n * np.exp(log_probs(model, prompt, 2.5)[-1])
    assert (expected > 5).sum() > 8
    assert chi_square(np.bincount([reply.ids[0] for reply in got], minlength=VOCAB), expected) < 1.6


def chi_square(counts, expected):
    """Per degree of freedom; rare tokens count as one."""
    rare = expected < 5
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    return ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum() / (len(counts) - 1)


def test_draws_from_a_large_vocabulary_have_the_frequencies_of_the_distribution():
    logits = jax.random.normal(jax.random.key(1), (1000,)) * 2
    n = 100_000
    uniforms = jax.random.uniform(jax.random.key(2), (n, 2))
    one = jax.jit(lambda u: draw(logits[None], u[None], jnp.full(1, 0.8), jnp.ones(1)))
    ids, logprobs = jax.lax.map(one, uniforms, batch_size=1000)
    true = np.asarray(jax.nn.log_softmax(logits / 0.8))
    np.testing.assert_allclose(logprobs[:, 0], true[ids[:, 0]], atol=1e-5)
    assert chi_square(np.bincount(ids[:, 0], minlength=1000), n * np.exp(true)) < 1.2


def test_b29_the_nucleus_is_that_of_the_sorted_distribution_and_renormalises():
    rng = np.random.default_rng(0)
    logits = (2 * rng.normal(size=(64, 700))).astype(np.float32)
    logits[1, :] = 0.0  # all tied: nothing can be left out
    top_p = rng.uniform(0.05, 1.0, 64).astype(np.float32)
    top_p[:3] = 1e-6, 0.5, 1.0
    uniforms = rng.uniform(size=(300, 64, 2)).astype(np.float32)
    ids, logprobs = jax.lax.map(lambda u: draw(jnp.array(logits), u, jnp.ones(64), jnp.array(top_p)), uniforms)
    for row in range(64):
        p = np.exp(logits[row].astype(np.float64))
        p /= p.sum()
        order = np.argsort(-p)
        size = int((np.cumsum(p[order]) < top_p[row] - 1e-6).sum()) + 1 if row != 1 else 700
        kept = p[order[:size]].sum()
        assert set(ids[:, row].tolist()) <= set(order[: size + 1].tolist())  # one more where rounding decides
        np.testing.assert_allclose(logprobs[:, row], np.log(p[ids[:, row]] / kept), atol=2e-3)
    assert set(ids[:, 0].tolist()) == {int(logits[0].argmax())}


def test_a_token_of_probability_zero_is_never_drawn():
    logits = np.full((6, 600), -np.inf, np.float32)
    logits[:, [3, 258, 511]] = 0.0, -90.0, 0.0
    edges = np.array([0, 0.5, np.nextafter(np.float32(0.5), 1), 1 - 2**-24, 1e-38, 0.25], np.float32)
    for second in edges:
        uniforms = np.stack([edges, np.full(6, second)], 1)
        ids, logprobs = jax.jit(draw)(logits, uniforms, np.ones(6, np.float32), np.ones(6, np.float32))
        assert set(ids.tolist()) <= {3, 258, 511}
        assert np.isfinite(logprobs).all()


def test_b65_lengths_share_compiled_steps():
    batch = ContinuousBatch(for_decoding(decoder()), num_slots=4, context_length=128, prefill_tokens=64)
    rng = np.random.default_rng(0)
    before = decoding.decode._cache_size(), decoding.prefill._cache_size()
    for length in rng.integers(1, 125, 30):
        run(None, [Request(rng.integers(0, VOCAB, length), 3, seed=0)], batch=batch)
    assert decoding.decode._cache_size() - before[0] <= 1
    assert decoding.prefill._cache_size() - before[1] <= 3


def test_caches_are_written_in_place():
    model = for_decoding(decoder())
    slots = decoding.empty_slots(model, 4, 4096)
    settings = ContinuousBatch(model, num_slots=4, context_length=64)._settings
    memory = decoding.decode.lower(model, slots, settings, 8).compile().memory_analysis()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(slots))
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 4


def test_b52_half_precision_weights_are_cast_once_and_decay_rates_stay():
    model = decoder("qwen3_5", jnp.bfloat16)
    apart = for_decoding(model)
    layer = apart.blocks[0].layers[0]
    assert (layer.mlp.up_proj.weight.dtype, layer.linear_attn.A_log.dtype) == (jnp.bfloat16, jnp.float32)
    assert (apart.embed_tokens.dtype, apart.norm.weight.dtype) == (jnp.bfloat16, jnp.float32)
    assert model.blocks.layers[0].mlp.up_proj.weight.dtype == model.embed_tokens.dtype == jnp.float32
    assert for_decoding(apart) is apart
    got = generate(decoder("qwen2", jnp.bfloat16), PROMPTS, max_tokens=5, seeds=range(4))
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(got.logprobs[row], score(decoder("qwen2"), prompt, got.ids[row]), atol=0.15)


def test_what_is_laid_out_outlives_the_buffers_it_was_made_from():
    model = Decoder(CONFIGS["qwen3"], key=jax.random.key(0))
    apart = for_decoding(model)
    for leaf in jax.tree.leaves(model):
        leaf.delete()
    assert np.isfinite(generate(apart, PROMPTS, max_tokens=12, seeds=range(4)).logprobs).all()


def test_a_model_on_a_mesh_generates_the_same():
    config = CONFIGS["qwen2"]
    with jax.set_mesh(make_mesh(2, 2)):
        model = Decoder(config, key=jax.random.key(0))
    alone = Decoder(config, key=jax.random.key(0))
    got, expected = (generate(m, PROMPTS[:2], max_tokens=6, seeds=[0, 1]) for m in (model, alone))
    np.testing.assert_array_equal(got.ids, expected.ids)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)


def test_a_critic_is_refused():
    critic = ValueModel(decoder())
    with pytest.raises(TypeError, match="expected a Decoder to sample from, got ValueModel; a critic's `backbone`"):
        generate(critic, [[1]], max_tokens=4, seeds=[0])
    with pytest.raises(TypeError, match="got ValueModel"):
        ContinuousBatch(critic, num_slots=1, context_length=32)


def test_bad_input_is_named():
    model = decoder()
    good = {"max_tokens": 4, "seeds": [0]}
    for prompts, knobs, message in [
        ([], {}, "at least one"),
        ([[]], {}, r"expected integers of shape \[T\]"),
        ([[[1, 2]]], {}, r"expected integers of shape \[T\]"),
        ([[1.5]], {}, "expected integers"),
        ([[1, 61]], {}, r"ids in \[0, 61\), got 61"),
        ([[-1]], {}, "got -1"),
        ([[1]], {"seeds": [1, 2]}, "one for each of 1 prompts, got 2"),
        ([[1]], {"seeds": 0}, "one for each of 1 prompts, got 0"),
        ([[1]], {"seeds": [-1]}, r"`seed`: expected a whole number in \[0, 2\*\*32\), got -1"),
        ([[1]], {"seeds": [0.5]}, "`seed`: expected a whole number"),
        ([[1]], {"max_tokens": 0}, "`max_tokens`: expected a whole number, at least 1, got 0"),
        ([[1]], {"max_tokens": 2.5}, "`max_tokens`: expected a whole number, at least 1, got 2.5"),
        ([[1]], {"temperature": -1.0}, "`temperature`: expected a finite number >= 0, got -1.0"),
        ([[1]], {"temperature": np.nan}, "`temperature`: .* got nan"),
        ([[1]], {"temperature": np.inf}, "`temperature`: .* got inf"),
        ([[1]], {"top_p": 0.0}, r"`top_p`: expected a number in \(0, 1\], got 0.0"),
        ([[1]], {"top_p": 2.0}, r"`top_p`: .* got 2.0"),
        ([[1]], {"stop_ids": [5, 61, -1]}, r"`stop_ids`: expected ids in \[0, 61\), got 61, -1"),
        ([[1]], {"max_tokens": 128}, "at most 128 tokens"),
        ([[1]], {"lengths": [2]}, "`lengths`"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(model, prompts, **{**good, **knobs})
    for knobs, message in [
        ({"num_slots": 0}, "`num_slots`"),
        ({"num_steps": 0}, "`num_steps`"),
        ({"prefill_tokens": 1}, "`prefill_tokens`"),
        ({"context_length": 1}, "`context_length`"),
        ({"context_length": 129}, "at most 128 tokens"),
        ({"prefix_bytes": -1}, "`prefix_bytes`: expected at least 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            ContinuousBatch(model, **{"num_slots": 1, "context_length": 32, **knobs})
    batch = ContinuousBatch(model, num_slots=4, context_length=8)
    with pytest.raises(ValueError, match="at most 3, what a prompt of 5 tokens leaves of 8; got 4"):
        batch.submit(Request(np.arange(5), 4, seed=0))
    batch.submit(Request(np.arange(5), 3, seed=0))
    with jax.set_mesh(make_mesh(2, 2)):
        elsewhere = Decoder(CONFIGS["llama"], key=jax.random.key(0))
    for other in (decoder("qwen2"), decoder("llama", jnp.bfloat16), elsewhere):
        with pytest.raises(ValueError, match="expected the shape, dtype and mesh of the one before"):
            batch.publish(other)
    with pytest.raises(ValueError, match=r"`stop_ids`: .* got 61"):
        batch.submit(Request(np.arange(5), 3, seed=0, stop_ids=(61,)))


def test_scores_that_are_not_finite_are_an_error():
    model = jax.tree.map(lambda leaf: leaf * jnp.nan, decoder())
    with pytest.raises(FloatingPointError, match="the reply to prompt 0"):
        generate(model, PROMPTS, max_tokens=8, seeds=range(4))


def test_old_weights_answer_nothing_after_new_ones_are_published():
    old, new = decoder(), jax.tree.map(lambda leaf: 1.5 * leaf, decoder())
    request = Request(PROMPTS[2], 6, seed=1)
    batch = ContinuousBatch(old, num_slots=4, context_length=128, prefix_bytes=2**24)
    before = run(None, [request], batch=batch)[0]
    batch.submit(replace(request, max_tokens=20))
    batch.step()
    with pytest.raises(ValueError, match="1 requests are still being decoded"):
        batch.publish(new)
    while batch.num_active:
        batch.step()
    batch.publish(new)
    after = run(None, [request], batch=batch)[0]
    assert after.ids == run(new, [request], num_slots=4)[0].ids
    np.testing.assert_allclose(after.logprobs, score(new, request.prompt, after.ids), atol=1e-4)
    assert after.logprobs != before.logprobs
