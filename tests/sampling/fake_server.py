"""A server on loopback that behaves like vLLM or llama.cpp until its script says otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from focus_jax.sampling.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
CONTEXT_LENGTH = 64
# The model behind both: the same few tokens are likely after every prompt (a to d, and the end of the turn).
LOGITS = {97: 2.0, 98: 1.0, 99: 0.0, 100: -1.0, 257: -2.0}


@dataclass(frozen=True)
class Request:
    """What came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What goes out, and how it goes wrong.

    Attributes:
        body: JSON content, or raw bytes.
        status: HTTP status.
        headers: beside the length and, for JSON, the type.
        delay: seconds before the first byte.
        cut: bytes of the body after which the connection closes, though more were announced.
        drip: seconds before each byte of the body.
        endless: repeat the body for ever.
        hang_up: close the connection without a word.
    """

    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    cut: int | None = None
    drip: float = 0.0
    endless: bool = False
    hang_up: bool = False


Script = Callable[[Request], Answer | None]


class FakeServer:
    """Use as a context manager. `script` sees each request and returns a fault, or None for the usual answer.

    Attributes:
        requests: everything that came in.
        open_connections: how many are open right now.
    """

    def __init__(self, usual: Callable[[Request], Answer], script: Script = lambda request: None):
        self.script = script
        self.requests: list[Request] = []
        self.open_connections = 0
        self._usual = usual

    def __enter__(self) -> FakeServer:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._run(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def asked(self, path: str) -> list[dict[str, Any]]:
        """The bodies that came to `path`."""
        return [request.body for request in self.requests if request.path == path]

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _shut_down(self) -> None:
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections += 1
        try:
            while (request := await _read_request(reader)) is not None:
                self.requests.append(request)
                if not await _send(writer, self.script(request) or self._usual(request)):
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open_connections -= 1
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split()
    headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    raw = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, json.loads(raw) if raw else {})


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> bool:
    """Send the answer; whether the connection may go on."""
    await asyncio.sleep(answer.delay)
    if answer.hang_up:
        return False
    raw = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
    kind = {} if isinstance(answer.body, bytes) else {"Content-Type": "application/json"}
    length = {} if answer.endless else {"Content-Length": str(len(raw))}
    head = "".join(f"{name}: {value}\r\n" for name, value in (kind | length | answer.headers).items())
    writer.write(f"HTTP/1.1 {answer.status} Whatever\r\n{head}\r\n".encode())
    if answer.drip:
        for i in range(len(raw)):
            await asyncio.sleep(answer.drip)
            writer.write(raw[i : i + 1])
            await writer.drain()
    while answer.endless:
        writer.write(raw)
        await writer.drain()
    writer.write(raw if answer.cut is None else raw[: answer.cut])
    await writer.drain()
    return answer.cut is None


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something the other side does."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def in_turn(*answers: Answer | None, path: str) -> Script:
    """A script that gives these answers to the first requests for `path`, then the usual ones."""
    left: Iterator[Answer | None] = iter(answers)
    return lambda request: next(left, None) if request.path == path else None


def likely(temperature: float, top_p: float = 1.0) -> dict[int, float]:
    """Log-probabilities of the model at this temperature and nucleus, most likely first."""
    total = math.log(sum(math.exp(x / temperature) for x in LOGITS.values()))
    logprobs = {i: x / temperature - total for i, x in LOGITS.items()}
    kept, mass = {}, 0.0
    for i, logprob in logprobs.items():
        if mass < top_p:
            kept[i] = logprob
            mass += math.exp(logprob)
    return {i: logprob - math.log(mass) for i, logprob in kept.items()}


def draw(body: dict[str, Any], max_tokens: int) -> tuple[list[int], str, str | None, str]:
    """Ids, text, stop string and reason ("stop", "length"), a function of prompt, seed and parameters."""
    temperature, top_p = body["temperature"], body["top_p"]
    rng = random.Random(f"{body['prompt']} {body['seed']}")
    weights = likely(temperature or 0.01, top_p)
    ids: list[int] = []
    while len(ids) < max_tokens:
        ids += rng.choices(list(weights), [math.exp(w) for w in weights.values()])
        if ids[-1] == 257:
            return ids, TOKENIZER.decode(ids[:-1]), None, "stop"
        text = TOKENIZER.decode(ids)
        for stop in body["stop"]:
            if stop in text:
                return ids, text[: text.index(stop)], stop, "stop"
    return ids, TOKENIZER.decode(ids), None, "length"


def vllm(request: Request, *, processed: bool = True) -> Answer:
    """What vLLM answers; `processed` as with `--logprobs-mode processed_logprobs`."""
    if request.path == "/v1/models":
        return Answer({"data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": CONTEXT_LENGTH}]})
    if request.path == "/tokenize":
        return Answer({"tokens": TOKENIZER.encode(request.body["prompt"])})
    if request.path != "/v1/completions":
        return Answer({"detail": "Not Found"}, status=404)
    body = request.body
    ids, text, stop, reason = draw(body, body["max_tokens"])
    table = likely(body["temperature"] or 1.0, body["top_p"]) if processed else likely(1.0)
    top = {f"token_id:{i}": logprob for i, logprob in list(table.items())[: body["logprobs"]]}
    return Answer(
        {
            "choices": [
                {
                    "text": text,
                    "token_ids": ids,
                    "prompt_token_ids": body["prompt"],
                    "finish_reason": reason,
                    "stop_reason": stop,
                    "logprobs": {"token_logprobs": [table[i] for i in ids], "top_logprobs": [top] * len(ids)},
                }
            ],
            "usage": {"completion_tokens": len(ids)},
        }
    )


def llama_cpp(request: Request) -> Answer:
    """What llama.cpp's server answers."""
    body = request.body
    if request.path == "/v1/models":
        return Answer({"data": [{"id": "tiny", "owned_by": "llamacpp", "meta": {"n_vocab": 260}}]})
    if request.path == "/props":
        names = {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "chat_template": TOKENIZER.chat_template}
        return Answer({"default_generation_settings": {"n_ctx": CONTEXT_LENGTH}, **names})
    if request.path == "/tokenize":
        return Answer({"tokens": TOKENIZER.encode(body["content"], special=body.get("parse_special", False))})
    if request.path == "/detokenize":
        return Answer({"content": TOKENIZER.decode(body["tokens"])})
    if request.path != "/completion":
        return Answer({"error": "Not Found"}, status=404)
    return Answer(_llama_cpp_completion({"top_p": 1.0, "stop": [], "seed": 0, "n_probs": 0, **body}))


def _llama_cpp_completion(body: dict[str, Any]) -> dict[str, Any]:
    post = body.get("post_sampling_probs", False)
    table = likely(body["temperature"] or 1.0, body["top_p"]) if post else likely(1.0)
    ids, text, stop, reason = draw(body, body["n_predict"])
    for forced, _ in body.get("logit_bias", []):
        ids, text, stop, reason = [forced], TOKENIZER.decode([forced]), None, "length"
        ended = forced in TOKENIZER.eos_ids
        reason = "stop" if ended else "length"
    key, value = ("prob", math.exp) if post else ("logprob", lambda x: x)
    listed = [{"id": i, key: value(x)} for i, x in list(table.items())[: body["n_probs"]]]
    entries = [{"id": i, key: value(table.get(i, -9.0)), f"top_{key}s": listed} for i in ids]
    if stop is not None:
        entries = entries[: -len(stop)]  # as the real one leaves them out
    return {
        "content": text,
        "tokens": ids,
        "tokens_predicted": len(ids),
        "tokens_evaluated": len(body["prompt"]),
        "completion_probabilities": entries,
        "stop_type": "word" if stop else {"stop": "eos", "length": "limit"}[reason],
        "stopping_word": stop or "",
    }


def change(usual: Callable[[Request], Answer], path: str, edit: Callable[[Any], None]) -> Script:
    """A script that edits the usual JSON answer to `path`."""

    def script(request: Request) -> Answer | None:
        if request.path != path:
            return None
        answer = usual(request)
        content = json.loads(json.dumps(answer.body))
        edit(content)
        return replace(answer, body=content)

    return script
