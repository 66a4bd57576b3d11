"""The decoders against transformers, from checkpoint folders, float32: logits, gradients, greedy tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, VOCAB, make_oracle, save_oracle, smollm2_folder
from flax import nnx
from transformers import AutoModelForCausalLM

from focus_jax.models import empty_cache, for_decoding, load_hf
from focus_jax.models.checkpoint import parameter_path
from focus_jax.sampling.tokenizers import HFTokenizer

# Compiling dominates these tests, and how fast the result runs matters little.
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def tokens_of(shape, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, shape)


def mean_loss(logits, tokens):
    picked = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits[:, :-1], -1) - picked)


@quick_jit
def loss_logits_gradients(model, tokens):
    def loss(model):
        logits = model.logits(model(tokens))
        return mean_loss(logits, tokens), logits

    (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(model)
    return value, logits, gradients


@quick_jit
def logits_of(model, tokens):
    return model.logits(model(tokens))


@quick_jit
def next_tokens(model, tokens, cache):
    hidden, cache = model.extend(tokens[:, None], jnp.ones(tokens.shape, jnp.int32), cache)
    return jnp.argmax(model.logits(hidden[:, 0]), -1), cache


def continue_greedily(model, prompts, count):
    """`count` tokens [B, count] after prompts [B, T], all through the cache, one token at a time."""
    cache = empty_cache(model.config, prompts.shape[0], prompts.shape[1] + count)
    for column in prompts.T:
        tokens, cache = next_tokens(model, jnp.asarray(column), cache)
    found = [tokens]
    for _ in range(count - 1):
        tokens, cache = next_tokens(model, tokens, cache)
        found.append(tokens)
    return np.stack(found, 1)


def torch_logits(oracle, tokens):
    with torch.no_grad():
        return oracle(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_logits_and_every_gradient_are_those_of_transformers(family, tmp_path):
    # Of Qwen3.5 a block of one layer of each kind: its gradients take long to compile.
    fields = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2} if family == "qwen3_5" else {}
    for seed in (0, 1):
        oracle = make_oracle(family, seed=seed, tied=True, **fields)
        model = load_hf(save_oracle(oracle, tmp_path / str(seed)))
        tokens = tokens_of((2, 65), seed)
        loss, logits, gradients = loss_logits_gradients(model, tokens)

        answer = oracle(torch.tensor(tokens), labels=torch.tensor(tokens))
        answer.loss.backward()
        np.testing.assert_allclose(logits, answer.logits.detach(), rtol=0, atol=1e-4)
        np.testing.assert_allclose(loss, answer.loss.item(), rtol=1e-5)
        ours = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(gradients))}
        compared = 0
        for name, parameter in oracle.named_parameters():  # B55: where tied, one gradient that sums both uses
            path, block = parameter_path(name, model.config)
            mine = np.asarray(ours[path])
            mine = mine if mine.ndim == parameter.ndim else mine[block]
            theirs = parameter.grad.numpy()
            assert np.linalg.norm(mine - theirs) <= 1e-3 * np.linalg.norm(theirs), name
            compared += mine.size
        assert compared == sum(leaf.size for leaf in ours.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_untied_logits_and_64_greedy_tokens_are_those_of_transformers(family, tmp_path):
    oracle = make_oracle(family, seed=2, tied=False, **({"num_hidden_layers": 4} if family == "qwen3_5" else {}))
    with torch.no_grad():  # as first drawn, the layers add so little that one token follows itself over and over
        for parameter in oracle.parameters():
            parameter.mul_(6 if parameter.ndim == 2 else 1)
    model = load_hf(save_oracle(oracle, tmp_path))
    prompts = tokens_of((2, 5), 2)
    tokens = np.concatenate([prompts, continue_greedily(model, prompts, 64)], 1)
    expected = torch_logits(oracle, tokens)
    np.testing.assert_allclose(logits_of(model, tokens), expected, rtol=0, atol=1e-4)
    # Each token is the likeliest after those before it: what transformers would have written.
    np.testing.assert_array_equal(tokens[:, 5:], expected[:, 4:-1].argmax(-1))
    assert len(np.unique(tokens[:, 5:])) > 8


# The delta layers work in chunks; around 64 and far beyond it is where that would show.
@pytest.fixture(scope="module")
def delta_models(tmp_path_factory):
    oracle = make_oracle("qwen3_5", seed=3, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    return oracle, load_hf(save_oracle(oracle, tmp_path_factory.mktemp("delta")))


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 200])
def test_qwen3_5_agrees_at_lengths_around_its_chunks(length, delta_models):
    oracle, model = delta_models
    tokens = tokens_of((2, length), length)
    np.testing.assert_allclose(logits_of(model, tokens), torch_logits(oracle, tokens), rtol=0, atol=1e-4)


TEXT = """The harbour was quiet that morning. Two fishing boats lay side by side at the end of the pier, and a boy sat between
them mending a net. He did not look up when the old woman came down the steps with her basket. "They say the storm will turn
north," she told him. "They said that last year," he answered, and pulled the knot tight with his teeth."""
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_smollm2_gives_the_loss_and_32_greedy_tokens_of_transformers():
    folder = smollm2_folder()
    tokenizer = HFTokenizer(folder)
    model = load_hf(folder)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text, question = np.array([tokenizer.encode(TEXT)]), np.array([tokenizer.encode(QUESTION, special=True)])
    with torch.no_grad():
        expected = oracle(torch.tensor(text), labels=torch.tensor(text)).loss.item()
    assert 1 < expected < 4  # it knows English
    assert mean_loss(logits_of(model, text), text) == pytest.approx(expected, abs=1e-4)
    answer = continue_greedily(for_decoding(model), question, 32)
    logits = torch_logits(oracle, np.concatenate([question, answer], 1))
    np.testing.assert_array_equal(answer, logits[:, question.shape[1] - 1 : -1].argmax(-1))
    assert "Paris" in tokenizer.decode(answer[0].tolist())
