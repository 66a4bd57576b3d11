"""What a server can do, found out by asking for tiny samples; what training needs and it lacks is refused by name."""

from __future__ import annotations

from typing import Any

from focus_jax.agents.sampler import SamplerError, SamplingParams
from focus_jax.agents.tokenizer import Tokenizer
from focus_jax.sampling.engine import Engine, read_field
from focus_jax.sampling.transport import JsonClient, StatusError
from focus_jax.sampling.wire_llama_cpp import LlamaCpp
from focus_jax.sampling.wire_vllm import Vllm, read_top_logprobs

_NO_LIST = "expected the answer of an OpenAI-compatible /v1/models"
# Plain text on which any tokenizer of the same model must agree with ours.
_ROUND_TRIPS = ("Hello, world!\n", "x² + 1 ≤ 30 and 7 % 3 = 1", "  two  spaces\n\n你好 😀")


async def choose_model(client: JsonClient, model: str | None) -> dict[str, Any]:
    """The entry of `model` in the server's list; the only one where none is named.

    Raises:
        SamplerError: no such model, or several and none named.
    """
    try:
        listing = await client.get("/v1/models")
    except StatusError as error:
        if error.status == 404:
            raise SamplerError(
                f"{client.base_url}: has no /v1/models, so it is no OpenAI-compatible server; check the address"
            ) from None
        raise
    models = {read_field(entry, "id", str, _NO_LIST): entry for entry in read_field(listing, "data", list, _NO_LIST)}
    if model is None and len(models) == 1:
        return next(iter(models.values()))
    if model not in models:
        wanted = "no model is named" if model is None else f"`model` is {model!r}"
        raise SamplerError(f"{client.base_url}: {wanted}, the server serves {sorted(models)[:20]}; name one of them")
    return models[model]


async def connect_engine(client: JsonClient, entry: dict[str, Any], tokenizer: Tokenizer | None) -> Engine:
    """The engine behind `entry`, after a tiny sample has shown that it can do what training needs."""
    if entry.get("owned_by") == "llamacpp":
        return await _connect_llama_cpp(client, entry)
    return await _connect_vllm(client, entry, tokenizer)


async def check_tokenizer(client: JsonClient, engine: Engine, tokenizer: Tokenizer) -> None:
    """The server and `tokenizer` must give plain text the same ids (checked where the server has /tokenize)."""
    for text in _ROUND_TRIPS:
        theirs, ours = await engine.encode(client, text), tokenizer.encode(text)
        if theirs is not None and theirs != ours:
            raise SamplerError(
                f"`tokenizer`: it reads {text!r} as {ours[:8]}, the server's model {engine.model!r} as {theirs[:8]}; "
                "use the tokenizer of the served model"
            )


async def _connect_llama_cpp(client: JsonClient, entry: dict[str, Any]) -> LlamaCpp:
    hint = "start a llama.cpp server of 2025 or later"
    props = await client.get("/props")
    settings = read_field(props, "default_generation_settings", dict, hint)
    facts = read_field(entry, "meta", dict, hint)
    plain = await client.post("/tokenize", {"content": "a", "add_special": False})
    engine = LlamaCpp(
        model=entry["id"],
        context_length=read_field(settings, "n_ctx", int, hint),
        vocab_size=read_field(facts, "n_vocab", int, hint),
        plain_id=read_field(plain, "tokens", list, hint)[-1],
    )
    prompt = [engine.plain_id] * 3
    await engine.reply(client, prompt, SamplingParams(max_tokens=2))
    at_one, at_two = [
        await engine.list_tokens(client, prompt, SamplingParams(max_tokens=1, temperature=t, seed=1), 8) for t in (1.0, 2.0)
    ]
    ratio = temperature_ratio(at_one, at_two)
    if ratio is not None and abs(ratio - 0.5) > 0.05:
        raise SamplerError(
            f"{client.base_url}: its log-probabilities are not those of the temperature asked for (`post_sampling_probs`): "
            f"log-odds at temperature 2 are {ratio:.2f} of those at 1, expected 0.5; {hint}"
        )
    return engine


async def _connect_vllm(client: JsonClient, entry: dict[str, Any], tokenizer: Tokenizer | None) -> Vllm:
    if tokenizer is None:
        raise SamplerError("`tokenizer`: expected the tokenizer of the served model, HFTokenizer(folder), got none")
    context_length = read_field(entry, "max_model_len", int, "the server must tell its context length (vLLM does)")
    engine = Vllm(entry["id"], context_length, tokenizer.vocab_size, processed=False)
    prompt = tokenizer.encode("The answer is")
    reply = await engine.reply(client, prompt, SamplingParams(max_tokens=2))
    if not len(reply.ids):
        raise SamplerError(f"{client.base_url}: generated nothing when asked for two tokens")
    at_one, at_two = [
        read_top_logprobs(
            await client.post(
                "/v1/completions", engine.request(prompt, SamplingParams(max_tokens=1, temperature=t, seed=1), num_listed=5)
            )
        )
        for t in (1.0, 2.0)
    ]
    ratio = temperature_ratio(at_one, at_two)
    return Vllm(engine.model, context_length, tokenizer.vocab_size, processed=ratio is not None and ratio < 0.75)


def temperature_ratio(at_one: dict[Any, float], at_two: dict[Any, float]) -> float | None:
    """The largest log-odds at temperature 1 told by the server, as a share of itself at temperature 2.

    Half where the log-probabilities are those of the temperature asked for, 1 where they are always those of
    temperature 1, None where all listed tokens are about as likely and nothing can be told.

    Example:
        >>> temperature_ratio({"a": -0.5, "b": -2.5}, {"a": -0.6, "b": -1.6})
        0.5
    """
    both = sorted(at_one.keys() & at_two.keys(), key=lambda token: at_one[token])
    if len(both) < 2 or at_one[both[-1]] - at_one[both[0]] < 0.05:
        return None
    low, high = both[0], both[-1]
    return (at_two[high] - at_two[low]) / (at_one[high] - at_one[low])
