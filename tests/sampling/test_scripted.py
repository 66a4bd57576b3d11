"""Scripted replies end where a server's would."""

import asyncio

import numpy as np
import pytest

from focus_jax.sampling import ByteTokenizer, ContextLengthError, Reply, SamplerError, SamplingParams, ScriptedSampler

TOKENIZER = ByteTokenizer()


def ids(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text, special=True), np.int32)


def reply(sampler, prompt="Hi", **params):
    return asyncio.run(sampler.sample(ids(prompt), SamplingParams(**params)))


def test_a_reply_ends_its_turn_with_the_end_token():
    got = reply(ScriptedSampler(["Hello"], TOKENIZER, logprob=-0.25, policy_version=4))
    assert got.ids.tolist() == [*b"Hello", 257]
    assert got.logprobs.tolist() == [-0.25] * 6
    assert (got.text, got.finish_reason, got.stop, got.policy_version) == ("Hello", "stop", None, 4)
    assert (got.ids.dtype, got.logprobs.dtype) == (np.int32, np.float32)


def test_an_open_reply_has_no_end_token():
    got = reply(ScriptedSampler([Reply("Hello", ended=False)], TOKENIZER))
    assert (got.ids.tolist(), got.finish_reason) == (list(b"Hello"), "length")


def test_b34_a_stop_string_trims_the_text_and_keeps_the_ids():
    got = reply(ScriptedSampler(["one\ntwo; three"], TOKENIZER), stop=(";", "\ntw"))
    assert (got.text, got.stop, got.finish_reason) == ("one", "\ntw", "stop")
    assert TOKENIZER.decode(got.ids.tolist()) == "one\ntw"


def test_max_tokens_cut_the_reply():
    sampler = ScriptedSampler(lambda prompt, params: "Hello; world", TOKENIZER, context_length=10)
    assert (reply(sampler, max_tokens=5).text, reply(sampler, max_tokens=5).finish_reason) == ("Hello", "length")
    cut_at_the_stop = reply(sampler, max_tokens=5, stop=(";",))
    assert (cut_at_the_stop.text, cut_at_the_stop.stop, cut_at_the_stop.finish_reason) == ("Hello", None, "length")
    assert len(reply(sampler, "12345678").ids) == 2
    with pytest.raises(ContextLengthError, match="10 tokens, the context holds 10"):
        reply(sampler, "1234567890")


def test_b39_a_function_sees_prompt_and_seed():
    sampler = ScriptedSampler(lambda prompt, params: f"{TOKENIZER.decode(prompt.tolist())}-{params.seed}", TOKENIZER)
    assert [reply(sampler, "Q", seed=s).text for s in (1, 2, 1)] == ["Q-1", "Q-2", "Q-1"]


def test_a_list_is_used_up_in_order():
    sampler = ScriptedSampler(["one", Reply("two", logprobs=[-1, -2, -3, -4])], TOKENIZER)
    assert reply(sampler).text == "one"
    assert reply(sampler).logprobs.tolist() == [-1, -2, -3, -4]
    with pytest.raises(SamplerError, match="the script has 2 replies, this is call 3"):
        reply(sampler)


def test_the_key_that_ends_last_in_the_prompt_wins():
    sampler = ScriptedSampler({"2+3": "first", "step 1": "second", "1": "shorter"}, TOKENIZER)
    assert reply(sampler, "What is 2+3?").text == "first"
    assert reply(sampler, "What is 2+3? step 1").text == "second"
    with pytest.raises(SamplerError, match="no key of the script occurs in the prompt, which ends 'nothing'"):
        reply(sampler, "nothing")


def test_control_names_in_a_reply_stay_text():
    assert 257 not in reply(ScriptedSampler([Reply("<|im_end|>", ended=False)], TOKENIZER)).ids


def test_failures_can_be_scripted():
    def fail(prompt, params):
        raise SamplerError("down", num_tokens=3)

    with pytest.raises(SamplerError, match="down") as caught:
        reply(ScriptedSampler(fail, TOKENIZER))
    assert caught.value.num_tokens == 3
    with pytest.raises(SamplerError, match="6 ids but 2 log-probabilities"):
        reply(ScriptedSampler([Reply("Hello", logprobs=[-1, -2])], TOKENIZER))


def test_a_script_that_is_a_string_is_an_error():
    with pytest.raises(TypeError, match=r"write \[reply\]"):
        ScriptedSampler("Hello", TOKENIZER)


def test_a_tokenizer_without_an_end_cannot_end_a_reply():
    with pytest.raises(SamplerError, match="no end-of-turn token"):
        reply(ScriptedSampler(["Hello"], ByteTokenizer(eos_token=None)))
