"""The sampler in this process: what its samples hold, and that no caller is left waiting."""

import asyncio
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated import CRITIC, PASSES, TASKS, TURNS, LetterEnvironment

from focus_jax.agents import Agent, ChatRenderer
from focus_jax.collection import collect
from focus_jax.models import ContinuousBatch, Decoder, ModelConfig, decoding
from focus_jax.sampling import ByteTokenizer, ContextLengthError, SamplerError, SamplingParams
from focus_jax.sampling.flax_sampler import FlaxSampler
from focus_jax.sampling.stops import StopFinder

TOKENIZER = ByteTokenizer()
CONFIG = ModelConfig("llama", 260, 32, 48, 4, 2, 8, ("full_attention",), tied=True, max_positions=1024)
MODEL = Decoder(CONFIG, key=jax.random.key(0))
PROMPT = np.array(TOKENIZER.encode("Hello, world"), np.int32)


def make_sampler(model=MODEL, **knobs):
    return FlaxSampler(model, TOKENIZER, **{"num_slots": 4, "context_length": 256, **knobs})


def sample(sampler, prompt=PROMPT, **params):
    return asyncio.run(sampler.sample(prompt, SamplingParams(**params)))


def sample_all(sampler, calls):
    """Concurrent calls, each (prompt, params)."""

    async def gather():
        return await asyncio.gather(*(sampler.sample(prompt, params) for prompt, params in calls))

    return asyncio.run(gather())


async def until(condition):
    while not condition():  # noqa: ASYNC110  what is waited for happens in a thread that knows no events
        await asyncio.sleep(0.001)


@pytest.fixture(scope="module")
def sampler():
    with make_sampler() as sampler:
        yield sampler


@jax.jit
def _log_probs(model, tokens):
    return jax.nn.log_softmax(model.logits(model(tokens)))


def score(model, ids):
    rows = np.asarray(_log_probs(model, np.concatenate([PROMPT, ids])[None]))[0]
    return rows[np.arange(len(PROMPT) - 1, len(PROMPT) - 1 + len(ids)), ids]


def test_b39_samples_depend_on_their_seed_and_on_nothing_beside_them(sampler):
    calls = [(PROMPT[: 12 - i % 5], SamplingParams(max_tokens=4 + i, seed=i, temperature=0.6 + 0.1 * (i % 7))) for i in range(16)]
    alone = [sample_all(sampler, [call])[0] for call in calls]
    assert len({tuple(s.ids[:4]) for s in alone}) == 16
    with make_sampler(num_slots=3, num_steps=5, prompt_cache_mib=0) as other:
        together = sample_all(other, calls[::-1])[::-1]
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
    assert (alone[0].ids.dtype, alone[0].logprobs.dtype) == (np.int32, np.float32)


def test_replies_end_with_the_turn_or_at_the_limit(sampler):
    samples = sample_all(sampler, [(PROMPT, SamplingParams(max_tokens=150, seed=i)) for i in range(12)])
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    for s in samples:
        ended = s.finish_reason == "stop"
        assert ended == (s.ids[-1] in TOKENIZER.eos_ids)
        assert not set(s.ids[:-1]) & TOKENIZER.eos_ids
        assert ended or len(s.ids) == 150
        assert s.text == TOKENIZER.decode(s.ids[: len(s.ids) - ended])
        assert s.stop is None


def test_greedy_logprobs_are_those_of_temperature_one(sampler):
    got = sample(sampler, max_tokens=6, temperature=0.0)
    np.testing.assert_allclose(got.logprobs, score(MODEL, got.ids), atol=1e-5)
    assert got.ids.tolist() == sample(sampler, max_tokens=6, temperature=0.0, seed=7).ids.tolist()


def test_b34_a_stop_string_trims_the_text_and_keeps_the_ids(sampler):
    free = sample(sampler, max_tokens=60, seed=3)
    letters = [chr(i) for i in free.ids[5:] if 32 < i < 127]
    stop = next(letter for letter in letters if free.text.count(letter) == 1)
    got = sample(sampler, max_tokens=60, seed=3, stop=("never seen", stop))
    assert (got.stop, got.finish_reason) == (stop, "stop")
    assert got.text == free.text.partition(stop)[0]
    np.testing.assert_array_equal(got.ids, free.ids[: len(got.ids)])
    assert TOKENIZER.decode(got.ids) == got.text + stop
    assert len(got.logprobs) == len(got.ids)


def test_a_stop_string_is_found_where_it_is_complete_and_characters_are_never_split():
    pieces = ["a", "b\n", "\nU", "ser", ":", "…"]
    finder = StopFinder(("\n\nUser:", "ser:…"), lambda ids: "".join(pieces[i] for i in ids))
    assert finder.find([0, 1, 2]) is None
    assert finder.find([0, 1, 2, 3, 4, 5]) == (5, "\n\nUser:")
    text = "naïve 你好 😀 end".encode()
    finder = StopFinder(("😀",), TOKENIZER.decode)
    found = [finder.find(list(text[:n])) for n in range(1, len(text) + 1)]
    end = text.index("😀".encode()) + 4
    assert found[end - 2] is None
    assert found[end - 1] == (end, "😀")


def test_b66_looking_for_stop_strings_reads_each_token_a_few_times():
    read = []

    def decode(ids):
        read.append(len(ids))
        return bytes(ids).decode()

    totals = []
    for length in (1024, 2048):
        read.clear()
        finder = StopFinder(("##",), decode)
        for n in range(8, length + 1, 8):
            assert finder.find([97] * n) is None
        totals.append(sum(read))
    assert totals[1] / totals[0] < 2.2


def test_a_full_context_is_refused_and_a_long_reply_is_cut(sampler):
    with pytest.raises(ContextLengthError, match="256 tokens, the context holds 256"):
        sample(sampler, np.zeros(256, np.int32))
    got = sample(sampler, np.zeros(250, np.int32), max_tokens=99, seed=1)
    assert len(got.ids) == 6 or got.finish_reason == "stop"
    assert sampler._worker._batch.num_active == 0


def test_bad_input_is_named(sampler):
    for prompt, message in [
        ([], "expected at least one token"),
        ([[1]], "expected at least one token"),
        ([260], r"expected ids in \[0, 260\), got int64 260 to 260"),
        ([-1], "got int64 -1 to -1"),
        ([0.5], "got float64"),
    ]:
        with pytest.raises(SamplerError, match=message):
            sample(sampler, np.array(prompt))
    small = Decoder(ModelConfig("llama", 259, 8, 8, 2, 1, 4, ("full_attention",)), key=jax.random.key(0))
    with pytest.raises(ValueError, match="a tokenizer of at most 259 tokens, the rows of the model's embedding, got 260"):
        make_sampler(small)
    with pytest.raises(ValueError, match="at most 1024 tokens"):
        make_sampler(context_length=1025)
    with pytest.raises(ValueError, match="`num_slots`"):
        make_sampler(num_slots=0)
    with pytest.raises(ValueError, match="`prefix_bytes`"):
        make_sampler(prompt_cache_mib=-1)
    odd = type("Odd", (ByteTokenizer,), {"eos_ids": frozenset({700})})()
    with pytest.raises(ValueError, match=r"`stop_ids`: expected ids in \[0, 260\), got 700"):
        FlaxSampler(MODEL, odd, context_length=256)
    with pytest.raises(ValueError, match="`max_tokens`: expected a whole number"):
        sample(sampler, max_tokens=2.5)


def test_whatever_cannot_be_published_is_an_error_and_the_old_weights_stay(sampler):
    expected = sample(sampler, max_tokens=3, seed=1)
    used_up = Decoder(CONFIG, key=jax.random.key(1))
    for leaf in jax.tree.leaves(used_up):  # as a training step leaves the model it was given
        leaf.delete()

    async def publish(model):
        await asyncio.wait_for(sampler.publish(model, 1), 60)

    for model, message in ((used_up, "deleted"), ("folder", "no attribute 'config'")):
        with pytest.raises((RuntimeError, AttributeError), match=message):
            asyncio.run(publish(model))
    assert sampler.policy_version == 0
    np.testing.assert_array_equal(sample(sampler, max_tokens=3, seed=1).ids, expected.ids)


def test_b71_a_cancelled_call_frees_its_slot():
    async def cancel_all(sampler):
        calls = [asyncio.create_task(sampler.sample(PROMPT, SamplingParams(max_tokens=240, seed=i))) for i in range(7)]
        await until(lambda: sampler._worker._batch.num_active == 4)
        for call in calls:
            call.cancel()
        assert {type(e) for e in await asyncio.gather(*calls, return_exceptions=True)} == {asyncio.CancelledError}
        await until(lambda: not sampler._worker._batch.num_active and not sampler._worker._batch.num_waiting)
        return await sampler.sample(PROMPT, SamplingParams(max_tokens=2, seed=1))

    with make_sampler() as sampler:
        got = asyncio.run(asyncio.wait_for(cancel_all(sampler), 60))
        assert got.ids.tolist() == sample(sampler, max_tokens=2, seed=1).ids.tolist()


def test_b67_a_failure_reaches_every_caller_and_the_next_call_works(sampler, monkeypatch):
    expected = sample(sampler, max_tokens=3, seed=1)
    step = ContinuousBatch.step

    def fail(batch, **knobs):
        step(batch, **knobs)
        raise MemoryError("out of memory")

    async def gather():
        calls = (sampler.sample(PROMPT, SamplingParams(max_tokens=60, seed=i)) for i in range(9))
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)

    with monkeypatch.context() as patch:
        patch.setattr(ContinuousBatch, "step", fail)
        errors = asyncio.run(gather())
    assert {str(error) for error in errors} == {"decoding failed: MemoryError: out of memory"}
    assert {type(error) for error in errors} == {SamplerError}
    np.testing.assert_array_equal(sample(sampler, max_tokens=3, seed=1).ids, expected.ids)


def test_scores_that_are_not_finite_are_an_error():
    with make_sampler(jax.tree.map(lambda leaf: leaf * jnp.nan, MODEL)) as sampler:
        with pytest.raises(SamplerError, match="not finite") as caught:
            sample(sampler, max_tokens=60)
        assert caught.value.num_tokens == 8


def test_closing_answers_who_waits_and_refuses_the_rest():
    async def close(sampler):
        calls = [asyncio.create_task(sampler.sample(PROMPT, SamplingParams(max_tokens=240, seed=i))) for i in range(40)]
        await until(lambda: sampler._worker._batch.num_active)
        sampler.close()
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)

    sampler = make_sampler()
    errors = [answer for answer in asyncio.run(close(sampler)) if isinstance(answer, SamplerError)]
    assert {str(error) for error in errors} == {"the sampler is closed; make another"}
    with pytest.raises(SamplerError, match="closed"):
        sample(sampler)
    assert not sampler._worker._thread.is_alive()
    sampler.close()


def test_a_forgotten_sampler_leaves_no_thread():
    worker = make_sampler()._worker
    gc.collect()
    worker._thread.join(10)
    assert not worker._thread.is_alive()


def test_b36_b37_new_weights_leave_running_replies_whole_and_old_states_unused():
    new = jax.tree.map(lambda leaf: 1.5 * leaf, MODEL)

    async def publish(sampler):
        running = [asyncio.create_task(sampler.sample(PROMPT, SamplingParams(max_tokens=100, seed=i))) for i in range(6)]
        await until(lambda: sampler._worker._batch.num_active == 4)
        publication = asyncio.create_task(sampler.publish(new, 5))
        await asyncio.sleep(0)
        later = asyncio.create_task(sampler.sample(PROMPT, SamplingParams(max_tokens=100, seed=9)))
        await publication
        assert sampler.policy_version == 5
        return await asyncio.gather(*running, later)

    with make_sampler(policy_version=4) as sampler:
        sample(sampler, max_tokens=1)
        compiled = decoding.decode._cache_size(), decoding.prefill._cache_size()
        samples = asyncio.run(asyncio.wait_for(publish(sampler), 120))
        assert (decoding.decode._cache_size(), decoding.prefill._cache_size()) == compiled
        other = Decoder(ModelConfig("llama", 260, 8, 8, 2, 1, 4, ("full_attention",)), key=jax.random.key(0))
        with pytest.raises(ValueError, match="expected the shape, dtype and mesh of the one before"):
            asyncio.run(sampler.publish(other, 6))
        assert sampler.policy_version == 5
    versions = [s.policy_version for s in samples]
    assert versions == sorted(versions)
    assert (versions[:4], versions[-1]) == ([4] * 4, 5)
    for s in samples:
        model = new if s.policy_version == 5 else MODEL
        np.testing.assert_allclose(s.logprobs, score(model, s.ids), atol=1e-4)


def test_b74_the_event_loop_stays_free_while_every_slot_is_busy():
    async def watch(sampler):
        calls = [asyncio.create_task(sampler.sample(PROMPT, SamplingParams(max_tokens=200, seed=i))) for i in range(8)]
        publication = asyncio.create_task(sampler.publish(MODEL, 1))
        ticks = 0
        while not all(call.done() for call in calls):
            await asyncio.sleep(0.001)
            ticks += 1
        await publication
        return ticks

    with make_sampler() as sampler:
        assert asyncio.run(asyncio.wait_for(watch(sampler), 120)) > 5


def test_several_event_loops_may_use_it_at_once(sampler):
    expected = sample(sampler, max_tokens=5, seed=2).ids.tolist()
    got = []
    threads = [threading.Thread(target=lambda: got.append(sample(sampler, max_tokens=5, seed=2).ids.tolist())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected] * 4


def test_the_policy_has_a_name_and_shows_itself(sampler):
    assert sampler.model == "flax-llama-1x32"
    assert repr(sampler) == "FlaxSampler('flax-llama-1x32', context_length=256, policy_version=0)"
    agent = Agent(sampler, ChatRenderer(TOKENIZER), SamplingParams())
    assert agent.describe()["policy"] == "flax-llama-1x32"


def test_a_round_of_collection_over_it():
    with make_sampler(context_length=1024, num_slots=8) as sampler:
        agent = Agent(
            sampler,
            ChatRenderer(TOKENIZER),
            SamplingParams(max_tokens=6),
            max_turns=TURNS + 1,
            max_tokens=6 * TURNS,
            final_tokens=6,
        )
        round_ = asyncio.run(collect(agent, CRITIC, TASKS, PASSES, make_environment=LetterEnvironment, num_workers=8))
        batch = sampler._worker._batch
    assert not round_.failures
    assert all(tree is not None and len(tree) > 2 for tree in round_.trees)
    read = sum(len(tree.context(i)) for tree in round_.trees for i in range(len(tree)))
    assert batch.num_prefilled < read / 2  # most of every context was there already
    for tree in round_.trees:
        for node in tree.nodes[1:]:
            assert np.isfinite(node.segment.logprobs[node.segment.generated]).all()
