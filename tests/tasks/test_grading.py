"""Answers out of text, verdicts, and what happens when a grading worker hangs, dies or loses its parent."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from focus_jax.agents.environment import GraderFailure
from focus_jax.tasks.grading import WORKER_SCRIPT, Grader, extract_answer

ROOT = Path(__file__).parents[2]

# A worker whose comparator does what the answer says; everything else about it is the real one.
PATCHED_WORKER = f"""
import os, runpy, signal, sys, time
import math_verify.grader
worker = runpy.run_path({str(WORKER_SCRIPT)!r}, run_name="worker")

def compare(gold, answer):
    if answer == "1001":
        time.sleep(60)
    if answer == "1002":
        os.kill(os.getpid(), signal.SIGKILL)
    if answer == "1003":
        return len(str(7 ** 10 ** 9)) > 0  # holds the interpreter lock for minutes
    return worker["is_correct"](gold, answer)

failures = {{"1004": MemoryError, "1005": RecursionError, "1006": TypeError}}
compare_expressions = math_verify.grader.sympy_expr_eq

def compare_or_fail(gold, answer, *options):
    if str(answer) in failures:
        raise failures[str(answer)]
    return compare_expressions(gold, answer, *options)

math_verify.grader.sympy_expr_eq = compare_or_fail
worker["serve"](float(sys.argv[1]), compare)
"""
HANG, CRASH, SPIN, OUT_OF_MEMORY, OUT_OF_STACK, INCOMPARABLE = "1001", "1002", "1003", "1004", "1005", "1006"


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


@pytest.fixture(scope="module")
def patched_script(tmp_path_factory):
    path = tmp_path_factory.mktemp("worker") / "patched_worker.py"
    path.write_text(PATCHED_WORKER)
    return path


def worker_ids(grader):
    return {worker.process.pid for worker in grader._workers}


def is_running(pid):
    """Whether a process exists and is no zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout.strip()
    return bool(state) and not state.startswith("Z")


def wait_until_gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"It is \boxed{5}… no, \boxed{7}.", "7"),
        (r"\fbox{42}", "42"),
        (r"\boxed{a\{b\}}", r"a\{b\}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\frac{1", None),
        (r"\boxed{5} and then \boxed{\frac{1", "5"),
        (r"\boxed {8}", "8"),
        ("\\boxed{\n 3 + 4 \n}", "3 + 4"),
        (r"\boxed{\boxed{6}}", "6"),
        (r"\boxed{x = \fbox{6}}", "6"),
        (r"} stray \boxed{4} brace {", "4"),
        (r"\boxed{}", ""),
        (r"line \\ \boxed{9}", "9"),
        ("The answer is 12.\n#### 12", None),
        ("", None),
    ],
)
def test_b46_the_answer_is_the_last_closed_box(text, answer):
    assert extract_answer(text) == answer


def test_extraction_reads_hostile_text_once():
    # Quadratic in the number of boxes left open would be 10^10 characters.
    assert extract_answer(r"\boxed{" * 100_000) is None
    assert extract_answer(r"\boxed{" * 100_000 + "1" + "}" * 100_000) == "1"


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("42", r"\boxed{42}", True),  # B46
        (r"\boxed{\frac12}", r"\boxed{\frac13}", False),  # B46
        (r"\boxed{\frac12}", "0.5", True),
        ("1234", "1,234", True),
        ("1234", "1{,}234", True),
        ("1,234", "1234", True),
        ("5", "$5", True),
        ("5", r"\$5", True),
        ("12", "$12.00", True),
        ("12", "12.0", True),
        ("12", "12.", True),
        ("12", "$12$", True),
        ("50", "50%", True),
        ("50", r"50\%", True),
        ("50", "50 percent", True),
        ("0.5", "50%", True),
        ("12", "12 dollars", True),
        ("12", "12 apples", True),
        ("12", r"12\text{ cm}^2", True),
        (r"864 \mbox{ inches}^2", "864", True),
        ("12", "x = 12", True),
        ("-3", "−3", True),
        ("12", "12 hundred", False),
        ("12", "12 squared", False),
        ("12", "12 and 5", False),
        ("12", "5, 12", False),
        ("12", "21", False),
        ("12", "-12", False),
        ("12", "12.01", False),
        ("1234", "1.234", False),
        ("12", "", False),
        ("12", "twelve", False),
        ("12", "{", False),
        ("12", "}{", False),
        ("12", "\x00\ud800", False),
        (r"\text{even}", "even", True),
        (r"\text{even}", "odd", False),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", True),
        ("p - q", "q - p", False),
    ],
)
def test_verdicts(grader, gold, answer, correct):
    assert grader.grade(gold=gold, answer=answer) is correct


def test_b47_the_reference_goes_first(grader):
    assert grader.grade(gold="$(0, 12.5)$", answer="$0 < x < 12.5$") is False
    assert grader.grade(gold="$0 < x < 12.5$", answer="$(0, 12.5)$") is True
    with pytest.raises(TypeError):
        grader.grade("1", "1")  # by name only, so the roles cannot be mixed up


@pytest.mark.parametrize("gold", ["see figure", "figure", "all real numbers", "sqrt(2)", "2pi", r"\frac{1", "{", "", "   "])
def test_b48_a_reference_that_cannot_be_parsed_rewards_nobody(grader, gold):
    assert grader.is_parseable(gold) is False
    for answer in (gold, "12", ""):
        with pytest.raises(GraderFailure, match="reference answer"):
            grader.grade(gold=gold, answer=answer)


@pytest.mark.parametrize("gold", ["12", "$1,234", "12 dollars", r"\text{even}", r"\frac{270}7\text{ degrees}", "xy", "2516_8"])
def test_references_that_can_be_parsed(grader, gold):
    assert grader.is_parseable(gold) is True
    assert grader.grade(gold=gold, answer=gold) is True


def test_an_answer_without_end_is_wrong_and_never_parsed(grader):
    assert grader.grade(gold="12", answer="(" * 100_000) is False


def test_b45_hanging_answers_cost_their_limit_and_no_worker(patched_script):
    with Grader(num_workers=2, timeout=0.5, script=patched_script) as grader:
        before = worker_ids(grader)

        def hang(_):
            with pytest.raises(GraderFailure, match=r"longer than 0\.5 s"):
                grader.grade(gold="7", answer=HANG)

        with ThreadPoolExecutor(4) as pool:  # not the main thread: an alarm signal could not work here
            list(pool.map(hang, range(5)))
            assert len(worker_ids(grader)) == 2
            assert not before & worker_ids(grader)
            assert not any(map(is_running, before))
            grader.timeout = 60.0  # the good ones must not fail on a busy machine
            assert list(pool.map(lambda n: grader.grade(gold=str(n), answer=f"{n}.0"), range(10))) == [True] * 10


def test_b38_a_crashed_grader_is_a_failure_and_not_a_zero(patched_script):
    with Grader(num_workers=1, timeout=60.0, script=patched_script) as grader:
        with pytest.raises(GraderFailure, match="crashed"):
            grader.grade(gold="7", answer=CRASH)
        assert grader.grade(gold="7", answer="7") is True
        (idle,) = worker_ids(grader)
        os.kill(idle, signal.SIGKILL)
        assert wait_until_gone([idle], 10)
        with pytest.raises(GraderFailure, match="crashed"):
            grader.grade(gold="7", answer="7")
        assert grader.grade(gold="7", answer="7") is True


@pytest.mark.parametrize("answer", [OUT_OF_MEMORY, OUT_OF_STACK])
def test_b38_a_grader_that_runs_out_of_room_is_a_failure_and_not_a_zero(patched_script, answer):
    with Grader(num_workers=1, timeout=60.0, script=patched_script) as grader:
        with pytest.raises(GraderFailure, match="crashed"):
            grader.grade(gold="7", answer=answer)
        assert grader.grade(gold="7", answer="7") is True


def test_an_answer_that_cannot_be_compared_is_wrong(patched_script):
    with Grader(num_workers=1, timeout=60.0, script=patched_script) as grader:
        before = worker_ids(grader)
        assert grader.grade(gold="7", answer=INCOMPARABLE) is False
        assert worker_ids(grader) == before


def test_a_worker_that_cannot_start_is_a_failure(tmp_path):
    with Grader(num_workers=1, script=tmp_path / "nowhere.py") as grader, pytest.raises(GraderFailure, match="crashed"):
        grader.grade(gold="7", answer="7")


def test_a_worker_that_cannot_be_replaced_is_a_failure_and_the_pool_recovers(patched_script, monkeypatch):
    def refuse(*args, **options):
        raise BlockingIOError("no more processes")

    with Grader(num_workers=1, timeout=60.0, script=patched_script) as grader:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            for answer in (CRASH, "7"):
                with pytest.raises(GraderFailure, match="no other can be started: no more processes"):
                    grader.grade(gold="7", answer=answer)
        with pytest.raises(GraderFailure, match="has crashed"):  # the dead worker's place is taken now
            grader.grade(gold="7", answer="7")
        assert grader.grade(gold="7", answer="7") is True


def test_closing_ends_the_workers_and_what_they_were_doing(patched_script):
    grader = Grader(num_workers=2, timeout=60.0, script=patched_script)
    assert grader.grade(gold="7", answer="7")
    failures = []

    def hang():
        with pytest.raises(GraderFailure, match="is closed") as failure:
            grader.grade(gold="7", answer=HANG)
        failures.append(failure)

    thread = threading.Thread(target=hang)
    thread.start()
    while grader._idle.qsize() == 2:
        time.sleep(0.01)
    workers = worker_ids(grader)
    grader.close()
    grader.close()
    thread.join(30)
    assert len(failures) == 1
    assert not any(map(is_running, workers))
    with pytest.raises(GraderFailure, match="is closed"):
        grader.grade(gold="7", answer="7")


@pytest.mark.parametrize("answer", [HANG, SPIN])
def test_workers_end_when_their_parent_is_killed(patched_script, answer):
    program = f"""
import json, threading, time
from pathlib import Path
from focus_jax.tasks.grading import Grader
grader = Grader(num_workers=2, timeout=1.0, script=Path({str(patched_script)!r}))
assert grader.grade(gold="7", answer="7")
grader.timeout = 1000.0  # here; the workers keep to 1 s of computing
threading.Thread(target=lambda: grader.grade(gold="7", answer={answer!r}), daemon=True).start()
time.sleep(0.5)
print(json.dumps([worker.process.pid for worker in grader._workers]), flush=True)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with parent:
        workers = json.loads(parent.stdout.readline())
        assert all(map(is_running, workers))
        parent.kill()
    assert wait_until_gone(workers, 60)


def test_the_worker_imports_neither_jax_nor_this_package():
    program = f"""
import runpy, sys
runpy.run_path({str(WORKER_SCRIPT)!r}, run_name="worker")
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    modules = set(run.stdout.split())
    assert "math_verify" in modules
    assert not modules & {"jax", "jaxlib", "focus_jax", "flax"}


@pytest.mark.parametrize("arguments", [{"num_workers": 0}, {"timeout": 0.0}, {"timeout": float("nan")}])
def test_arguments_that_mean_nothing(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"`{name}`: expected"):
        Grader(**arguments)


def test_without_math_verify_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'focus_jax\[math\]'"):
        Grader()
