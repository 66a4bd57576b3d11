"""Compares answers with math-verify, in a process of its own: it may hang or crash without taking anything along.

Run by path, as `python -P grading_worker.py TIMEOUT`; imports neither jax nor this package. Writes a line when it is
ready, then one JSON line for each one it reads: `{"gold": G}` asks whether the reference answer can be parsed,
`{"gold": G, "answer": A}` whether the answer is right. It ends when its input does.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from math_verify import LatexExtractionConfig, verify
from math_verify import parse as math_verify_parse

MAX_MEMORY = 4 << 30  # bytes of address space; a few hundred million are used

# A number as people write it: sign, thousands commas, decimals, a percent sign or up to three words of unit.
_NUMBER = re.compile(
    r"(?P<number>[+-]?\s?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)(?:\s*(?P<percent>%|percent)|(?P<unit>(?:\s+[A-Za-z]{2,}){0,3}))"
)
_NOT_A_UNIT = re.compile(
    r"\b(?:and|or|plus|minus|times|over|squared|cubed|hundred|thousand|million|billion|dozen)\b", re.IGNORECASE
)
_TYPOGRAPHY = ((r"\$", ""), ("$", ""), ("€", ""), ("£", ""), (r"\%", "%"), ("{,}", ","), (r"\!", ""), (r"\,", " "), ("−", "-"))
_LATEX = re.compile(r"\\(?:begin|end|text\w*|mbox|math\w+|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_PROSE = re.compile(r"[A-Za-z]{3,}|pi|ln")


def tidy(text: str) -> str:
    """A plain number without currency, thousands commas and unit words; anything else as it is."""
    plain = text
    for written, meant in _TYPOGRAPHY:
        plain = plain.replace(written, meant)
    match = _NUMBER.fullmatch(plain.strip().removesuffix("."))
    if match is None or not any(map(str.isdigit, match["number"])) or _NOT_A_UNIT.search(match["unit"] or ""):
        return text
    return re.sub(r"[,\s]", "", match["number"]) + (r"\%" if match["percent"] else "")


def parse(text: str) -> list[Any]:
    """The answer as a list of SymPy expressions, empty where it cannot be parsed."""
    return math_verify_parse(
        r"\boxed{" + tidy(text) + "}",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )


def is_parseable(gold: str) -> bool:
    """Whether a reference answer can be graded against; bare words cannot, they would be products of letters."""
    return not _PROSE.search(_LATEX.sub(" ", tidy(gold))) and bool(parse(gold))


def is_correct(gold: str, answer: str) -> bool:
    """Whether the answer equals the reference. `verify` is not symmetric: the reference goes first."""
    try:
        return bool(verify(parse(gold), parse(answer), timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise  # ends the process: running out of room says nothing about the answer
    except Exception:  # such as a comparison that SymPy does not know
        return False


def respond(request: dict[str, str], correct: Callable[[str, str], bool] = is_correct) -> dict[str, Any]:
    """One reply: `parseable`, and `correct` where an answer came along."""
    if not is_parseable(request["gold"]):
        return {"parseable": False}
    return {"parseable": True} | ({"correct": correct(request["gold"], request["answer"])} if "answer" in request else {})


def set_limit(kind: int, value: int) -> None:
    """Set a soft resource limit, never above the hard one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def serve(timeout: float, correct: Callable[[str, str], bool] = is_correct) -> None:
    """Answer requests until the input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not land among the replies
    set_limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":
        set_limit(resource.RLIMIT_AS, MAX_MEMORY)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # whoever asked is gone; a computation under way is of no use to anybody

    threading.Thread(target=read, daemon=True).start()
    print(json.dumps({"ready": True}), file=replies)
    while True:
        request = json.loads(requests.get())
        # The asker keeps the time. This only ends a computation that holds the interpreter lock after the asker died.
        set_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + timeout) + 1)
        print(json.dumps(respond(request, correct)), file=replies)


if __name__ == "__main__":
    serve(float(sys.argv[1]))
