import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from run_folder import log_metrics, open_run, parse


@dataclass(frozen=True)
class Options:
    budget: int = 3
    rate: float = 0.5
    name: str | None = None
    folder: Path = Path("runs")
    sizes: tuple[int, ...] = (1, 2)
    fast: bool = False
    workers: int = 1


def test_options_written_by_a_run_read_back_as_they_were(tmp_path):
    typed = [
        "--budget",
        "7",
        "--rate",
        "1e-3",
        "--name",
        'a "b" \\ ü',
        "--folder",
        str(tmp_path / "x"),
        "--sizes",
        "4",
        "5",
        "--fast",
        "True",
    ]
    options = parse(Options, typed)
    assert options == Options(7, 1e-3, 'a "b" \\ ü', tmp_path / "x", (4, 5), True)
    open_run(tmp_path / "run", options)
    stored = tmp_path / "run" / "config.toml"
    assert parse(Options, ["--config", str(stored)]) == options
    assert parse(Options, [f"--config={stored}", "--budget", "8"]).budget == 8  # what is typed wins
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["packages"]["jax"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("budgte = 3\n", "unknown option 'budgte'; did you mean budget"),
        ("zzz = 3\n", "unknown option 'zzz'; known: budget, rate"),
        ("budget = \n", "no valid TOML"),
    ],
)
def test_a_bad_config_file_is_refused_by_name(tmp_path, content, message):
    (tmp_path / "c.toml").write_text(content)
    with pytest.raises(SystemExit, match=message):
        parse(Options, ["--config", str(tmp_path / "c.toml")])


def test_a_missing_config_file_and_a_missing_name(tmp_path):
    with pytest.raises(SystemExit, match="cannot be read"):
        parse(Options, ["--config", str(tmp_path / "nowhere.toml")])
    for arguments in (["--config"], ["--config="], ["--config", "--budget", "7"]):
        with pytest.raises(SystemExit, match="expected the name of a TOML file, got none"):
            parse(Options, arguments)


def test_a_stored_text_may_begin_with_a_dash(tmp_path):
    open_run(tmp_path, options := Options(name="-x", sizes=(-1, -2)))
    assert parse(Options, ["--config", str(tmp_path / "config.toml")]) == options


def test_a_folder_of_other_options_is_refused_and_left_alone(tmp_path):
    open_run(tmp_path, Options(), free=("workers",))
    open_run(tmp_path, Options(workers=8), free=("workers",))
    before = (tmp_path / "config.toml").read_text()
    with pytest.raises(SystemExit, match=r"other options \(budget: 3 there, 4 here; name: not set there, \"x\" here\)"):
        open_run(tmp_path, Options(budget=4, name="x"), free=("workers",))
    assert (tmp_path / "config.toml").read_text() == before


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="cannot be written"):
        open_run(tmp_path / "file" / "run", Options())


def test_the_same_metrics_are_logged_once(tmp_path):
    for tokens in (3, 3, 4):
        log_metrics(tmp_path, method="focus", tokens=tokens)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [3, 4]


def test_a_damaged_config_of_a_run_is_named_and_left_alone(tmp_path):
    (tmp_path / "config.toml").write_text("budget = 3\nrate = ")
    with pytest.raises(SystemExit, match=r"config.toml is no valid TOML: .* mend it, or name another folder"):
        open_run(tmp_path, Options())
    assert (tmp_path / "config.toml").read_text() == "budget = 3\nrate = "


def test_a_full_disk_leaves_what_was_there(tmp_path):
    open_run(tmp_path, Options())
    log_metrics(tmp_path, tokens=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code = (
        "import resource, signal, sys, pathlib; from test_run_folder import *; folder = pathlib.Path(sys.argv[1]);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40));"
        "{'open': lambda: open_run(folder, Options(workers=9), free=['workers']), 'log': lambda: log_metrics(folder, tokens=2)}"
        "[sys.argv[2]]()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    for step, message in (("open", "the run folder cannot be written: .*too large"), ("log", "File too large")):
        child = subprocess.run(
            [sys.executable, "-c", code, tmp_path, step], env=environment, capture_output=True, text=True, check=False
        )
        assert child.returncode == 1
        assert re.search(message, child.stderr)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_line_of_metrics_cut_short_is_logged_again(tmp_path):
    log_metrics(tmp_path, tokens=1)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"time": 1.0, "tok')
    log_metrics(tmp_path, tokens=2)
    assert [json.loads(line)["tokens"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
