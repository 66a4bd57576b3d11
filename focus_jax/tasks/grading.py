"""Answers out of solutions, and whether they are right: math-verify in worker processes with a hard limit.

A grader that hangs or crashes is a `GraderFailure`, never a reward of 0.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import re
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from focus_jax.agents.environment import GraderFailure

WORKER_SCRIPT = Path(__file__).with_name("grading_worker.py")
START_TIMEOUT = 120.0  # seconds for a worker's imports, on a machine that is busy with other things
MAX_ANSWER_LENGTH = 500  # characters; the longest reference answer of MATH-500 has 53

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def extract_answer(text: str) -> str | None:
    r"""What stands in the last closed `\boxed{...}` or `\fbox{...}` of a solution; of nested ones, the innermost.

    Nothing else counts as an answer: the opening asks for the box, and looser rules ("the answer is ...") would
    reward numbers that were only passed by.

    Args:
        text: a solution, or a part of one.

    Returns:
        The content, stripped, or None where no box is closed. Escaped braces do not count.

    Example:
        >>> extract_answer(r"So \boxed{5}. No, half of it: \boxed{\frac{5}{2}}.")
        '\\frac{5}{2}'
    """
    open_braces: list[int | None] = []  # where the content of a box starts, None for any other brace
    start, answer = -1, None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            content_start = open_braces.pop() if open_braces else None
            if content_start is not None and content_start > start:
                start, answer = content_start, text[content_start : match.start()].strip()
        elif token.endswith("{") and token != r"\{":
            open_braces.append(match.end() if token != "{" else None)
    return answer


class Grader:
    r"""Grades answers in worker processes. One grader serves any number of threads.

    The limit is on the wall clock and holds whatever the worker does: it is killed and replaced, so the pool keeps
    its size. The workers end with the process that started them, however that ends.

    Args:
        num_workers: processes, and so the answers graded at the same time.
        timeout: seconds for one answer.
        script: what the workers run.

    Raises:
        ImportError: math-verify is not installed.

    Example:
        >>> with Grader(num_workers=1) as grader:
        ...     grader.grade(gold=r"\frac{1}{2}", answer="0.5"), grader.grade(gold="1234", answer="$1,234")
        (True, True)
    """

    def __init__(self, num_workers: int = 2, *, timeout: float = 5.0, script: Path = WORKER_SCRIPT):
        if num_workers < 1:
            raise ValueError(f"`num_workers`: expected at least 1, got {num_workers}")
        if not timeout > 0:
            raise ValueError(f"`timeout`: expected seconds > 0, got {timeout}")
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("grading needs math-verify, which is not installed: pip install 'focus_jax[math]'")
        self.num_workers = num_workers
        self.timeout = timeout
        self._script = script
        self._lock = threading.Lock()
        self._closed = False
        self._workers = {_Worker(script, timeout) for _ in range(num_workers)}
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def grade(self, *, gold: str, answer: str) -> bool:
        r"""Whether an answer equals the reference answer.

        The two are no peers (an answer `(0, 12.5)` meets the reference `0 < x < 12.5`, not the other way round), hence
        the names. Plain numbers are compared as numbers: `$1,234`, `12.0`, `50\%` and `12 apples` are 1234, 12, 50 and 12.

        Args:
            gold: the reference answer, with or without its box.
            answer: the policy's answer, with or without its box. One longer than 500 characters is wrong.

        Raises:
            GraderFailure: the worker hung or crashed, or the reference answer cannot be parsed.
        """
        answer = _unbox(answer)
        if len(answer) > MAX_ANSWER_LENGTH:
            return False
        reply = self._ask({"gold": _unbox(gold), "answer": answer})
        if not reply["parseable"]:
            raise GraderFailure(
                f"reference answer: expected a number, LaTeX, or words as \\text{{...}}, got {gold!r}; leave the problem out"
            )
        return bool(reply["correct"])

    def is_parseable(self, gold: str) -> bool:
        r"""Whether a reference answer can be graded against: a number, LaTeX, or words as `\text{...}`.

        Raises:
            GraderFailure: the worker hung or crashed.
        """
        return bool(self._ask({"gold": _unbox(gold)})["parseable"])

    def close(self) -> None:
        """End the workers. What is being graded ends in a `GraderFailure`. A second call does nothing."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.process.kill()
        # A busy worker comes back once its thread has seen the end of the pipe; only then may the pipe be closed.
        workers = [self._idle.get() for _ in range(self.num_workers)]
        for worker in workers:
            worker.kill()
            self._idle.put(worker)

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, request: dict[str, str]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            reply = worker.ask(request, self.timeout)
        except BaseException as error:  # an interrupt too may leave half a reply in the pipe
            worker = self._replace(worker)
            if not isinstance(error, OSError | EOFError):
                raise
            cause = "is closed" if self._closed else str(error)
            raise GraderFailure(f"the grader {cause}; request: {str(request)[:200]}") from error
        finally:
            self._idle.put(worker)
        return reply

    def _replace(self, worker: _Worker) -> _Worker:
        """A new worker in place of one that failed; where none can start, the dead one stays and is replaced at its next use."""
        worker.kill()
        with self._lock:
            if self._closed:
                return worker
            try:
                new = _Worker(self._script, self.timeout)
            except OSError as error:
                raise GraderFailure(f"the grader lost a worker, and no other can be started: {error}") from error
            self._workers.discard(worker)
            self._workers.add(new)
            return new


class _Worker:
    """One worker process and its pipes."""

    def __init__(self, script: Path, timeout: float):
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(timeout)],  # -P: this folder's math.py must not stand in for Python's
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the parent to handle
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._replies = self.process.stdin, self.process.stdout
        self._ready = False

    def ask(self, request: dict[str, str], timeout: float) -> dict[str, Any]:
        if (status := self.process.poll()) is not None:
            raise EOFError(f"has crashed (exit status {status})")
        if not self._ready:
            self._read_line(START_TIMEOUT)
            self._ready = True
        self._requests.write(json.dumps(request).encode() + b"\n")
        return json.loads(self._read_line(timeout))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._requests.close()
        self._replies.close()

    def _read_line(self, timeout: float) -> bytes:
        deadline, line = time.monotonic() + timeout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"took longer than {timeout:g} s")
                if not (piece := self._replies.read(65536)):
                    raise EOFError(f"crashed (exit status {self.process.wait()})")
                line += piece
        return line


def _unbox(answer: str) -> str:
    boxed = extract_answer(answer)
    return answer.strip() if boxed is None else boxed
