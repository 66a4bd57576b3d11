import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import quickstart
from quickstart import Config, check, main
from simulated import LetterSampler

from focus_jax.collection import JournalError, replay
from focus_jax.sampling import SamplerError

TINY = Config(num_problems=2, num_roots=2, max_steps=2, step_tokens=8, budget=60, num_workers=2)


@contextlib.asynccontextmanager
async def connect_letters(config, delay=0.0):
    sampler = LetterSampler(delay=delay)
    sampler.model = "letters"
    yield sampler, sampler.tokenizer


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """A tiny run whose policy writes random letters."""
    monkeypatch.setattr(quickstart, "connect", connect_letters)
    return replace(TINY, run_folder=tmp_path / "run")


@pytest.mark.parametrize(
    ("option", "number"),
    [
        *(
            (name, 0)
            for name in ("num_problems", "num_roots", "budget", "step_tokens", "max_steps", "num_workers", "num_threads")
        ),
        ("budget", -5),
        ("budget", 191),
        *(("kappa", number) for number in (0.0, -1.0, np.nan, np.inf)),
        *(("temperature", number) for number in (-0.1, np.nan, np.inf)),
    ],
)
def test_numbers_that_mean_nothing_are_refused_by_the_name_of_their_option(option, number):
    with pytest.raises(ValueError, match=rf"--{option.replace('_', '-')}: expected .*, got {number}"):
        check(replace(Config(), **{option: number}))


def test_the_default_options_pass():
    check(Config())


def test_a_run_shows_both_rules_and_goes_on_to_the_same_end(scripted, capsys):
    main(scripted)
    first = capsys.readouterr().out
    assert "Prediction 0.8, mean of the two outcomes (critic target) 0.5, refined value 0.6." in first
    assert sorted(path.name for path in scripted.run_folder.iterdir() if path.suffix != ".lock") == [
        "config.toml", "environment.json", "focus.sqlite", "metrics.jsonl", "uniform.sqlite"]  # fmt: skip
    main(replace(scripted, num_workers=1))  # nothing is left to do
    assert _without_policy(capsys.readouterr().out) == _without_policy(first)
    assert len((scripted.run_folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_folder_of_other_options_or_in_use_is_refused_and_left_alone(scripted, monkeypatch):
    main(scripted)
    before = {path.name: path.read_bytes() for path in scripted.run_folder.iterdir()}
    with pytest.raises(SystemExit, match=r"other options \(budget: 60 there, 70 here\); go on with the same, or name another"):
        main(replace(scripted, budget=70))
    with open(scripted.run_folder / "focus.sqlite.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(JournalError, match="being written by another process; wait for it, or name another run folder"):
            main(scripted)
    assert {path.name: path.read_bytes() for path in scripted.run_folder.iterdir()} == before
    monkeypatch.chdir(scripted.run_folder.parent)
    main(replace(scripted, run_folder=Path("run")))  # the same folder by another name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "openai", "base_url": "http://127.0.0.1:9"}, "127.0.0.1:9/v1/models: the connection failed"),
        ({"sampler": "openai", "base_url": "nonsense"}, "expected an address like"),
        ({"model": "/nowhere.gguf"}, "expected a GGUF file, /nowhere.gguf is no file"),
        ({"model": __file__}, "expected a GGUF file, .* starts with"),
        ({"tokenizer": "/nowhere"}, "expected a model folder with a tokenizer.json"),
        ({"data": Path("/nowhere.jsonl")}, "there is no such file"),
    ],
)
def test_a_policy_or_problems_that_are_not_there_leave_no_folder(tmp_path, options, message):
    with pytest.raises((SamplerError, ValueError, OSError), match=message):
        main(replace(TINY, run_folder=tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()


def test_a_row_without_an_answer_and_answers_that_cannot_be_parsed(tmp_path, scripted, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "2 + 2?", "answer": "4"}\n{"question": "Which?", "answer": "see figure"}\n')
    main(replace(scripted, data=data))
    assert "left out, their reference answer cannot be parsed: line-2" in capsys.readouterr().out
    for rows, message in (('{"question": "2 + 2?"}', "line 1: expected `answer`"), ("", "the file is empty")):
        data.write_text(rows)
        with pytest.raises(ValueError, match=message):
            main(replace(scripted, data=data, run_folder=tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_the_script_ends_with_one_line_and_no_traceback(tmp_path):
    command = [sys.executable, quickstart.__file__, "--run-folder", tmp_path / "run", "--data", tmp_path / "nowhere.jsonl"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert re.fullmatch(r"quickstart: .*nowhere.jsonl: expected a JSON Lines file .*\n", child.stderr)


SLOW = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C, and so do their children
from functools import partial
from pathlib import Path
import quickstart
from dataclasses import replace
from test_quickstart import TINY, connect_letters
quickstart.connect = partial(connect_letters, delay=0.05)
try:
    quickstart.main(replace(TINY, budget=2000, run_folder=Path(sys.argv[1])))
except KeyboardInterrupt:
    raise SystemExit("stopped") from None
"""


def test_ctrl_c_leaves_a_journal_that_goes_on(scripted, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "COLUMNS": "100"}
    command = [sys.executable, "-u", "-c", SLOW, scripted.run_folder]
    # A session of its own stands for a terminal's: Ctrl-C reaches every process in it.
    child = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    while "2 problems, 2 root rollouts each" not in (line := child.stdout.readline()):
        assert line, "the script ended early"
    journal = scripted.run_folder / "focus.sqlite"
    while not _has_outcomes(journal):
        assert child.poll() is None
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert (child.returncode, errors) == (1, "stopped\n")
    stopped = replay(journal)
    assert not stopped.launches  # what was in flight is on record as interrupted
    assert 0 < stopped.tokens() < 4000
    main(replace(scripted, budget=2000))
    assert [ledger.reserved_tokens for group in replay(journal).ledgers for ledger in group] == [0] * 4


def _without_policy(text):
    return re.sub("Policy: .*", "", text)


def _has_outcomes(journal):
    try:
        return any(ledger.continuations for group in replay(journal).ledgers for ledger in group)
    except JournalError:
        return False
