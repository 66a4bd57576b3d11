"""The HTTP sampler against servers that behave like vLLM and like llama.cpp, and against their faults."""

import asyncio
import math
from functools import partial

import numpy as np
import pytest
from fake_server import CONTEXT_LENGTH, TOKENIZER, Answer, FakeServer, change, in_turn, likely, llama_cpp, vllm

from focus_jax.sampling import ContextLengthError, SamplerError, SamplingParams
from focus_jax.sampling.openai import OpenAISampler
from focus_jax.sampling.transport import Limits

QUICK = Limits(deadline=10.0, max_retries=2, backoff=0.001)
PROMPT = np.array([72, 105], np.int32)
ENGINES = {"vllm": vllm, "llama.cpp": llama_cpp}
PATHS = {"vllm": "/v1/completions", "llama.cpp": "/completion"}
either = pytest.mark.parametrize("engine", ENGINES)


def connect(server: FakeServer, **options):
    """Connect and close again."""

    async def call():
        async with await OpenAISampler.connect(server.url, **{"tokenizer": TOKENIZER, **options}) as sampler:
            return sampler

    return asyncio.run(call())


def sample(server: FakeServer, *params: SamplingParams, prompt: np.ndarray = PROMPT, script=None, **options):
    """Connect, switch to the script, and sample one after another; a list when several are asked for."""

    async def call():
        async with await OpenAISampler.connect(server.url, **{"tokenizer": TOKENIZER, "limits": QUICK, **options}) as sampler:
            if script is not None:
                server.script = script
            server.requests.clear()
            return [await sampler.sample(prompt, p) for p in params or (SamplingParams(max_tokens=8),)]

    samples = asyncio.run(call())
    return samples if len(params) > 1 else samples[0]


@either
def test_ids_and_logprobs_are_those_of_the_distribution_sampled_from(engine):
    """B28: whatever the temperature; B29: renormalised over the nucleus, as documented."""
    asked = [
        SamplingParams(max_tokens=20, seed=1),
        SamplingParams(max_tokens=20, seed=2, temperature=0.5),
        SamplingParams(max_tokens=20, seed=3, temperature=2.0),
        SamplingParams(max_tokens=20, seed=4, temperature=0.0),
        SamplingParams(max_tokens=20, seed=5, top_p=0.8),
    ]
    with FakeServer(ENGINES[engine]) as server:
        samples = sample(server, *asked)
    for params, got in zip(asked, samples, strict=True):
        table = likely(params.temperature or 1.0, params.top_p)
        np.testing.assert_allclose(got.logprobs, [table[i] for i in got.ids.tolist()], atol=1e-6)
        assert got.ids.dtype == np.int32
        assert got.logprobs.dtype == np.float32
        assert got.text == TOKENIZER.decode([i for i in got.ids.tolist() if i != 257])
        assert (got.finish_reason == "stop") == (got.ids[-1] == 257)
        assert got.stop is None


def test_b28_the_faulty_ratio_does_not_occur():
    """Logits [2, 0] at T = 0.5: -0.018150, where raw log-probabilities would give -0.126928."""
    table = likely(0.5)
    gap = table[97] - table[99]
    assert gap == pytest.approx(4.0)
    with FakeServer(llama_cpp) as server:
        got = sample(server, SamplingParams(max_tokens=20, seed=2, temperature=0.5))
    values = dict(zip(got.ids.tolist(), got.logprobs.tolist(), strict=True))
    assert values[97] == pytest.approx(table[97], abs=1e-6)


def test_b28_b29_raw_logprobs_are_found_out_and_other_temperatures_refused():
    with FakeServer(partial(vllm, processed=False)) as server:
        got = sample(server, SamplingParams(seed=1, max_tokens=5))
        np.testing.assert_allclose(got.logprobs, [likely(1.0)[i] for i in got.ids.tolist()], atol=1e-6)
        sample(server, SamplingParams(temperature=0.0))
        for params in (SamplingParams(temperature=0.5), SamplingParams(top_p=0.8)):
            with pytest.raises(SamplerError, match="--logprobs-mode processed_logprobs"):
                sample(server, params)
            assert server.asked("/v1/completions") == []


def test_everything_that_acts_on_the_distribution_is_stated():
    """A server's or a model's own defaults (top-k 40, penalties...) must not slip in."""
    with FakeServer(vllm) as server:
        sample(server)
        neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        assert neutral.items() <= server.asked("/v1/completions")[0].items()
    with FakeServer(llama_cpp) as server:
        sample(server, SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(top_p=0.9))
        chains = [request["samplers"] for request in server.asked("/completion") if request["n_predict"] > 1]
        assert chains == [["temperature"], ["temperature", "top_k"], ["temperature", "top_p"]]
        assert server.asked("/completion")[1]["top_k"] == 260


@either
def test_b34_a_stop_string_trims_the_text_and_not_the_ids(engine):
    with FakeServer(ENGINES[engine]) as server:
        found = [s for s in sample(server, *(SamplingParams(stop=("ba", "c"), seed=i) for i in range(20))) if s.stop]
    assert {"ba", "c"} <= {s.stop for s in found}
    for got in found:
        assert got.finish_reason == "stop"
        assert TOKENIZER.decode(got.ids.tolist()) == got.text + got.stop
        assert len(got.ids) == len(got.logprobs)
        np.testing.assert_allclose(got.logprobs, [likely(1.0)[i] for i in got.ids.tolist()], atol=1e-6)


def test_b34_a_stop_string_that_begins_inside_a_token():
    """Stop "DE", tokens "ABC" and "DEF": the environment sees "ABC", the last id stays as sampled."""
    choice = {
        "text": "ABC",
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "stop_reason": "DE",
        "logprobs": {"token_logprobs": [-0.1, -0.2]},
    }
    with FakeServer(vllm) as server:
        script = in_turn(Answer({"choices": [choice]}), path="/v1/completions")
        got = sample(server, SamplingParams(stop=("DE",)), script=script)
    assert (got.text, got.stop, got.ids.tolist()) == ("ABC", "DE", [7, 8])
    np.testing.assert_allclose(got.logprobs, [-0.1, -0.2], rtol=1e-6)


@either
def test_b39_the_seed_is_passed_on_and_siblings_differ(engine):
    with FakeServer(ENGINES[engine]) as server:
        asked = [SamplingParams(max_tokens=20, seed=s) for s in (1, 2, 3, 4)]
        first, again = sample(server, *asked), sample(server, *asked)
        assert [body["seed"] for body in server.asked(PATHS[engine]) if body["seed"]] == [1, 2, 3, 4]
    assert len({s.text for s in first}) == 4
    assert [s.ids.tolist() for s in first] == [s.ids.tolist() for s in again]


@either
def test_b39_a_retried_call_keeps_its_seed(engine):
    with FakeServer(ENGINES[engine]) as server:
        got = sample(server, SamplingParams(seed=7), script=in_turn(Answer({}, status=503), path=PATHS[engine]))
        assert [body["seed"] for body in server.asked(PATHS[engine])] == [7, 7]
        server.script = lambda request: None
        assert got.ids.tolist() == sample(server, SamplingParams(seed=7)).ids.tolist()


def edit_vllm(**fields):
    def edit(content):
        content["choices"][0] |= fields

    return change(vllm, "/v1/completions", edit)


def edit_llama(**fields):
    return change(llama_cpp, "/completion", lambda content: content.update(fields))


def test_b36_an_aborted_reply_is_no_finished_answer():
    ids = [97] * 30
    logprobs = {"token_logprobs": [-0.5] * 30}
    with FakeServer(vllm) as server:
        script = edit_vllm(token_ids=ids, logprobs=logprobs, finish_reason="abort")
        got = sample(server, SamplingParams(max_tokens=40), script=script)
    assert (got.finish_reason, len(got.ids)) == ("abort", 30)
    with FakeServer(llama_cpp) as server:
        assert sample(server, script=edit_llama(stop_type="none")).finish_reason == "abort"
    with FakeServer(vllm) as server:
        script = edit_vllm(token_ids=[], logprobs=None, finish_reason="abort")
        assert sample(server, script=script).finish_reason == "abort"


def test_b36_a_sample_is_tagged_with_the_version_it_was_begun_under():
    async def call(server):
        async with await OpenAISampler.connect(server.url, tokenizer=TOKENIZER, policy_version=3) as sampler:
            server.script = in_turn(Answer({}, status=503), path="/v1/completions")
            task = asyncio.create_task(sampler.sample(PROMPT, SamplingParams()))
            await asyncio.sleep(0)
            sampler.policy_version = 4
            return await task, await sampler.sample(PROMPT, SamplingParams())

    with FakeServer(vllm) as server:
        begun_before, begun_after = asyncio.run(call(server))
    assert (begun_before.policy_version, begun_after.policy_version) == (3, 4)


def test_b32_unknown_logprobs_are_nan():
    odd = [-0.1, None, math.nan, "-inf", -9999.0, -math.inf, 0.5, -0.3]
    known = [0, 7]
    with FakeServer(vllm) as server:
        script = edit_vllm(token_ids=[97] * 8, logprobs={"token_logprobs": odd})
        got = sample(server, script=script)
    assert np.isfinite(got.logprobs).nonzero()[0].tolist() == known
    np.testing.assert_allclose(got.logprobs[known], [-0.1, -0.3], rtol=1e-6)
    with FakeServer(llama_cpp) as server:
        entries = [{"id": 97, "logprob": value} for value in odd]
        got = sample(server, script=edit_llama(tokens=[97] * 8, tokens_predicted=8, completion_probabilities=entries))
    assert np.isfinite(got.logprobs).nonzero()[0].tolist() == known


@pytest.mark.parametrize(
    ("engine", "script", "field"),
    [
        ("vllm", edit_vllm(logprobs=None), "request field `logprobs`"),
        ("vllm", edit_vllm(logprobs={"token_logprobs": None}), "request field `logprobs`"),
        ("llama.cpp", edit_llama(completion_probabilities=None), "`n_probs` asks for them"),
        ("llama.cpp", edit_llama(completion_probabilities="none"), "`n_probs` asks for them"),
    ],
)
def test_b33_missing_logprobs_name_the_request_field(engine, script, field):
    with FakeServer(ENGINES[engine]) as server:
        with pytest.raises(SamplerError, match=field) as caught:
            sample(server, SamplingParams(seed=1), script=script)
        server.script = lambda request: None
        assert caught.value.num_tokens == len(sample(server, SamplingParams(seed=1)).ids)


def shorten(content):
    content["choices"][0]["logprobs"]["token_logprobs"].pop()


@pytest.mark.parametrize(
    ("engine", "script", "message"),
    [
        ("vllm", change(vllm, "/v1/completions", shorten), "ids but .* log-probabilities"),
        ("vllm", edit_vllm(token_ids=[97, 260]), r"expected token ids in \[0, 260\), got 260"),
        ("vllm", edit_vllm(token_ids=[97, -1]), "expected token ids in"),
        ("vllm", edit_vllm(token_ids=["97"]), "expected token ids in"),
        ("vllm", edit_vllm(token_ids=[True]), "expected token ids in"),
        ("vllm", edit_vllm(token_ids=None), "return_token_ids"),
        ("vllm", edit_vllm(text=None), "expected `text`"),
        ("vllm", edit_vllm(prompt_token_ids=[1, 72, 105]), "another prompt"),
        ("vllm", edit_vllm(token_ids=[97] * 9, logprobs={"token_logprobs": [-1.0] * 9}), "asked for were 1 to 8"),
        ("vllm", edit_vllm(token_ids=[], logprobs={"token_logprobs": []}), "generated 0 tokens"),
        ("vllm", in_turn(Answer({"choices": []}), path="/v1/completions"), "expected one choice"),
        ("vllm", in_turn(Answer([]), path="/v1/completions"), "expected `choices`"),
        ("llama.cpp", edit_llama(tokens=[97, 260], tokens_predicted=2), "expected token ids in"),
        ("llama.cpp", edit_llama(tokens=None), "`return_tokens` was asked for"),
        ("llama.cpp", edit_llama(tokens_predicted=100), "generated 100 tokens but sent"),
        ("llama.cpp", edit_llama(tokens_evaluated=3), "read a prompt of 3 tokens, 2 were sent"),
        ("llama.cpp", edit_llama(completion_probabilities=[{"id": 5, "logprob": -1.0}]), "for other tokens"),
        ("llama.cpp", in_turn(Answer("text"), path="/completion"), "expected `tokens`"),
        ("llama.cpp", in_turn(Answer(b"<html>oops</html>", headers={"Content-Type": "text/html"}), path="/completion"), "JSON"),
    ],
)
def test_answers_that_cannot_be_trusted_are_refused_and_the_next_call_works(engine, script, message):
    async def call(server):
        async with await OpenAISampler.connect(server.url, tokenizer=TOKENIZER, limits=QUICK) as sampler:
            server.script = script
            with pytest.raises(SamplerError, match=message):
                await sampler.sample(PROMPT, SamplingParams(max_tokens=8))
            server.script = lambda request: None
            return await sampler.sample(PROMPT, SamplingParams(max_tokens=8))

    with FakeServer(ENGINES[engine]) as server:
        assert len(asyncio.run(call(server)).ids) >= 1


def test_logprobs_left_out_are_asked_for_again_where_they_belong():
    """llama.cpp leaves out entries in the middle: never zip what is left with the ids."""

    def leave_out(content):
        if content["tokens_predicted"] > 1:
            del content["completion_probabilities"][1::3]

    with FakeServer(llama_cpp) as server:
        for temperature in (1.0, 0.7):
            params = SamplingParams(max_tokens=12, seed=5, temperature=temperature)
            got = sample(server, params, script=change(llama_cpp, "/completion", leave_out))
            np.testing.assert_allclose(got.logprobs, [likely(temperature)[i] for i in got.ids.tolist()], atol=1e-6)
            again = [body["prompt"] for body in server.asked("/completion")][1:]
            whole = [*PROMPT.tolist(), *got.ids.tolist()]
            assert again
            assert all(prompt == whole[: len(prompt)] for prompt in again)
            server.script = lambda request: None


def test_a_failure_while_asking_again_charges_what_was_generated():
    def script(request):
        if request.path != "/completion" or request.body["n_predict"] > 1:
            return change(llama_cpp, "/completion", lambda c: c["completion_probabilities"].pop())(request)
        return Answer({"error": "gone"}, status=400)

    with FakeServer(llama_cpp) as server, pytest.raises(SamplerError, match="gone") as caught:
        sample(server, SamplingParams(max_tokens=8, seed=1), script=script)
    assert caught.value.num_tokens >= 1


@either
def test_max_tokens_is_cut_to_what_the_context_leaves(engine):
    prompt = np.full(CONTEXT_LENGTH - 2, 97, np.int32)
    with FakeServer(ENGINES[engine]) as server:
        got = sample(server, SamplingParams(max_tokens=50, seed=1), prompt=prompt)
        body = server.asked(PATHS[engine])[0]
    assert body.get("max_tokens", body.get("n_predict")) == 2
    assert len(got.ids) <= 2


@either
def test_a_prompt_that_fills_the_context_makes_no_request(engine):
    with FakeServer(ENGINES[engine]) as server:
        with pytest.raises(ContextLengthError, match=f"{CONTEXT_LENGTH} tokens, the context holds {CONTEXT_LENGTH}") as caught:
            sample(server, prompt=np.full(CONTEXT_LENGTH, 97, np.int32))
        assert server.requests == []
    assert caught.value.num_tokens == 0


@pytest.mark.parametrize("prompt", [[], [260], [-1]])
def test_a_prompt_that_is_none_makes_no_request(prompt):
    with FakeServer(vllm) as server:
        with pytest.raises(SamplerError, match="`prompt_ids`: expected"):
            sample(server, prompt=np.array(prompt, np.int32))
        assert server.requests == []


def drop(field):
    def edit(content):
        content["choices"][0].pop(field)

    return change(vllm, "/v1/completions", edit)


@pytest.mark.parametrize(
    ("usual", "script", "message"),
    [
        (vllm, drop("token_ids"), "return_token_ids"),
        (vllm, drop("logprobs"), "request field `logprobs`"),
        (vllm, change(vllm, "/v1/models", lambda c: c["data"][0].pop("max_model_len")), "context length"),
        (vllm, in_turn(Answer({}, status=404), path="/v1/models"), "no OpenAI-compatible server"),
        (vllm, in_turn(Answer({"data": []}), path="/v1/models"), "no model is named"),
        (vllm, in_turn(Answer({"error": "prompt must be a string"}, status=400), path="/v1/completions"), "must be a string"),
        (vllm, in_turn(Answer({"tokens": [1, 2, 3]}), path="/tokenize"), "use the tokenizer of the served model"),
        (llama_cpp, change(llama_cpp, "/completion", lambda c: c.pop("tokens")), "return_tokens"),
        (llama_cpp, change(llama_cpp, "/completion", lambda c: c.pop("completion_probabilities")), "n_probs"),
        (llama_cpp, in_turn(Answer({}, status=404), path="/props"), "answered 404"),
    ],
)
def test_connecting_refuses_by_name_what_is_missing(usual, script, message):
    with FakeServer(usual, script) as server, pytest.raises(SamplerError, match=message):
        connect(server)


def test_b28_connecting_refuses_probabilities_that_ignore_the_temperature():
    def ignore_temperature(request):
        if request.path == "/completion" and request.body.get("post_sampling_probs"):
            request = type(request)("POST", request.path, {}, {**request.body, "temperature": 1.0})
            return llama_cpp(request)
        return None

    with FakeServer(llama_cpp, ignore_temperature) as server, pytest.raises(SamplerError, match="not those of the temperature"):
        connect(server)


def test_the_model_is_chosen_by_name():
    def two(content):
        content["data"].append({**content["data"][0], "id": "other"})

    with FakeServer(vllm, change(vllm, "/v1/models", two)) as server:
        assert connect(server, model="other").model == "other"
        with pytest.raises(SamplerError, match=r"no model is named, the server serves \['other', 'tiny'\]"):
            connect(server)
        with pytest.raises(SamplerError, match="`model` is 'third'"):
            connect(server, model="third")


def test_a_tokenizer_is_needed_where_the_server_lends_none():
    with FakeServer(vllm) as server, pytest.raises(SamplerError, match="`tokenizer`: expected"):
        connect(server, tokenizer=None)


def test_a_llama_cpp_server_lends_its_tokenizer():
    """B07: every id that ends a turn is found, not only the one called EOS."""
    with FakeServer(llama_cpp) as server:

        async def call():
            async with await OpenAISampler.connect(server.url) as sampler:
                tokenizer = sampler.tokenizer
                assert tokenizer.eos_ids == {257, 258}
                assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.adds_bos) == (260, 259, False)
                assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|startoftext|>", "<|im_end|>")
                assert tokenizer.chat_template == TOKENIZER.chat_template
                assert tokenizer.encode("a<|im_end|>", special=True) == [97, 257]
                assert tokenizer.encode("<|im_end|>") == list(b"<|im_end|>")
                assert tokenizer.encode("") == []
                assert tokenizer.decode([104, 105]) == "hi"
                num_requests = len(server.requests)
                first = tokenizer.encode("again")
                first.append(0)
                assert tokenizer.encode("again") == list(b"again")
                assert len(server.requests) == num_requests + 1
                with pytest.raises(ValueError, match=r"in \[0, 260\), got 260"):
                    tokenizer.decode([260])
                server.script = in_turn(Answer({}, status=500), path="/tokenize")
                with pytest.raises(SamplerError, match="answered 500"):
                    tokenizer.encode("new")

        asyncio.run(call())


def test_a_server_that_is_not_there_is_named():
    with FakeServer(vllm) as server:
        pass
    with pytest.raises(SamplerError, match=r"/v1/models: the connection failed .* is the server running\?"):
        connect(server)


def test_the_key_reaches_every_request_and_no_message(monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "s3cret")
    with FakeServer(llama_cpp) as server:
        sampler = connect(server, api_key_env="SERVER_KEY", tokenizer=None)
        assert {request.headers.get("authorization") for request in server.requests} == {"Bearer s3cret"}
    assert "s3cret" not in repr(sampler) + repr(sampler.tokenizer) + repr(vars(sampler))


def test_a_long_answer_is_cut_off():
    endless = Answer(b'{"x": "' + b"y" * 10**5, headers={"Content-Type": "application/json"}, endless=True)
    with FakeServer(vllm) as server, pytest.raises(SamplerError, match="longer than"):
        sample(server, script=in_turn(endless, path="/v1/completions"))
