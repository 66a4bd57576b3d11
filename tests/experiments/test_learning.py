"""The learning experiment: rows, figures, and that a run goes from its options to a table."""

import json
import subprocess
import sys
from pathlib import Path

import compare_learning
import jax
import jax.numpy as jnp
import learning
import numpy as np
import pytest
import scipy.stats
from compare_learning import RUNS, Run, ratio, smooth
from diagnostic import cosine
from learning_config import Config, check
from learning_rounds import Lessons, Problems, compact, correlation, pad, ranks
from run_folder import parse

CONFIGS = Path(compare_learning.__file__).parent.parent / "configs"
TINY = Config(
    level="short", num_seeds=2, tokens=600, num_problems=2, rollouts=2, success=0.0, warmup=1, epochs=1, critic_epochs=1
)


def make_lessons():
    """Two seeds, two problems of 5 pages, three nodes, edges of two replies."""
    given = np.zeros((2, 2, 3, 2), bool)
    given[:, 0, 1:] = True  # seed 0 and 1: two edges of two replies
    given[0, 1, 1, 0] = True  # seed 0: one edge of one reply; seed 1 has none
    pages = np.arange(24).reshape(2, 2, 3, 2) % 5
    has_target = np.zeros((2, 2, 3), bool)
    has_target[:, 0, :2] = True
    has_target[0, 1, 0] = True
    real = np.linspace(0, 1, 12, dtype=np.float32).reshape(2, 2, 3)
    zeros = np.zeros((2, 2, 3), np.int32)
    return Lessons(pages, pages % 3, given, -np.stack([real, 2 * real], -1), 10 * real, zeros, zeros, 5 * real, has_target)


def test_rows_hold_every_reply_and_state_once_with_its_share_of_the_weight():
    lessons = make_lessons()
    problems = Problems(np.arange(2 * 2 * 5 * 7, dtype=np.uint8).reshape(2, 2, 5, 7), np.zeros((2, 2, 5, 5), np.int32))
    prompts = np.arange(2 * 2 * 3 * 4, dtype=np.int32).reshape(2, 2, 3, 4)
    rows = compact(problems, lessons, prompts)
    for seed in range(2):
        found = {}
        for k in np.flatnonzero(rows.token_weights[seed]):
            text = tuple(np.asarray(rows.text[seed])[rows.page[seed, k]].tolist())
            figures = (rows.reply, rows.old_logprobs, rows.advantages, rows.token_weights)
            found[text, *(round(float(x[seed, k]), 5) for x in figures)] = found.get(text, 0) + 1
        expected = {}
        for problem, node, step in np.argwhere(lessons.given[seed]):
            replies = lessons.given[seed, problem, node].sum()
            edges = lessons.given[seed, problem].any(-1).sum()
            page = lessons.pages[seed, problem, node, step]
            text = tuple(problems.text[seed, problem, page].tolist())
            old, advantage = lessons.old_logprobs[seed, problem, node, step], lessons.advantages[seed, problem, node]
            figures = (page % 3, old, advantage, 1 / replies / edges)
            expected[text, *(round(float(x), 5) for x in figures)] = 1
        assert found == expected
        states = np.argwhere(lessons.has_target[seed])
        weights = [1 / lessons.has_target[seed, problem].sum() for problem, _ in states]
        np.testing.assert_allclose(rows.state_weights[seed, : len(states)], weights, rtol=1e-6)
        np.testing.assert_allclose(rows.targets[seed, : len(states)], lessons.targets[seed][lessons.has_target[seed]])
        assert (np.asarray(rows.prompts[seed, : len(states)]) == prompts[seed][lessons.has_target[seed]]).all()
        assert not np.asarray(rows.state_weights[seed, len(states) :]).any()


def test_padding_keeps_a_row_where_there_is_nothing():
    assert pad([np.zeros((0, 3)), np.zeros((0, 3))]).shape == (2, 512, 3)
    padded = pad([np.arange(3.0), np.arange(600.0)])
    assert padded.shape == (2, 1024)
    assert padded[0].sum() == 3
    assert padded.dtype == np.float32


def test_correlations_are_those_of_scipy():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, (3, 40)).astype(np.float32)  # with ties
    y = (x + rng.normal(size=x.shape)).astype(np.float32)
    mask = rng.random(x.shape) < 0.7
    linear = correlation(x, y, mask)
    ranked = correlation(ranks(jnp.asarray(x), mask), ranks(jnp.asarray(y), mask), mask)
    for row in range(3):
        a, b = x[row][mask[row]], y[row][mask[row]]
        assert linear[row] == pytest.approx(scipy.stats.pearsonr(a, b).statistic, abs=1e-5)
        assert ranked[row] == pytest.approx(scipy.stats.spearmanr(a, b).statistic, abs=1e-5)


def test_cosine_of_nothing_is_nothing():
    np.testing.assert_allclose(cosine(np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[4.0, 3.0], [1.0, 0.0]])), [0.96, 0.0])


def make_run(reach, *, rounds=20, step=1000.0):
    """Success is 1 from round `reach` on, seed by seed, 0 before."""
    at = np.arange(rounds)[:, None] * step * np.ones(len(reach))
    return Run({"at": at, "success": (np.arange(rounds)[:, None] >= reach).astype(float)})


def test_replies_to_the_threshold():
    run = make_run(np.array([5, 25]))
    replies, reached = run.replies_to(0.8)
    assert reached.tolist() == [True, False]
    assert replies.tolist() == [6000.0, run.budget]  # one round later: means of three rounds
    assert run.at(4500).tolist() == [pytest.approx(0.5), 0.0]
    assert smooth(np.array([[0.0], [3.0], [0.0]])).ravel().tolist() == [1.0, 1.0, 1.0]


def test_ratio_is_a_geometric_mean_over_seeds():
    ours, theirs = make_run(np.array([1, 3, 7])), make_run(np.array([3, 7, 15]))
    options = compare_learning.Config()
    assert ratio(theirs, theirs, options) == "1"
    assert ratio(ours, theirs, options).startswith("0.50 [0.50, 0.50]")  # 2, 4, 8 thousand beside 4, 8, 16 thousand


@pytest.mark.parametrize("method", ["focus", "grpo", "vineppo", "actor-critic"])
def test_every_method_runs_and_stays_finite(method, tmp_path):
    config = Config(**{**vars(TINY), "method": method, "run_folder": tmp_path})
    learning.main(config)
    history = dict(np.load(tmp_path / "history.npz"))
    assert all(figures.shape == history["at"].shape for figures in history.values())
    assert np.isfinite(history["success"]).all()
    assert (history["tokens"].sum(0) >= TINY.tokens).all()
    assert (history["success"] >= 0).all()
    assert (history["success"] <= 1).all()


def test_a_warm_start_is_kept_for_others_and_another_s_is_refused(tmp_path):
    start = tmp_path / "start.npz"
    first = learning.warm_start(learning.Experiment(Config(**{**vars(TINY), "start": start})))
    again = learning.warm_start(learning.Experiment(Config(**{**vars(TINY), "start": start})))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), first, again))
    with pytest.raises(SystemExit, match=r"made with .*num_seeds 2.* expected .*num_seeds 1"):
        learning.warm_start(learning.Experiment(Config(**{**vars(TINY), "start": start, "num_seeds": 1})))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "endless"}, "--level: expected one of short, medium, long, longest, got endless"),
        ({"num_seeds": 0}, "--num-seeds: expected at least 1, got 0"),
        ({"kappa": 0.0}, "--kappa: expected a number above 0"),
        ({"actor_lr": float("nan")}, "--actor-lr: expected a number above 0"),
        ({"noise": 1.5}, "--noise: expected a share"),
        ({"method": "grpo", "leave_one_out": True}, "--leave-one-out are FOCUS's; grpo has none"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(SystemExit, match=message):
        check(Config(**options))


@pytest.mark.parametrize("name", RUNS)
def test_stored_options_are_valid(name):
    stored, changed = RUNS[name]
    config = parse(Config, ["--config", str(CONFIGS / f"{stored}.toml"), *changed])
    check(config)
    tokens = config.num_problems * config.rollouts
    assert tokens == 32  # episodes an update, for all


def test_an_unknown_run_is_refused():
    with pytest.raises(SystemExit, match="expected names among FOCUS, GRPO"):
        compare_learning.main(compare_learning.Config(only=("PPO",)))


@pytest.mark.slow
def test_the_comparison_runs_from_nothing_to_a_figure(tmp_path):
    tiny = ["--num-seeds=2", "--tokens=600", "--level=short", "--num-problems=2", "--rollouts=2", "--success=0", "--hidden=8"]
    command = [sys.executable, compare_learning.__file__, "--folder", str(tmp_path), "--only", "FOCUS", "GRPO", "actor-critic"]
    ran = subprocess.run([*command, f"--options={' '.join(tiny)}"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["FOCUS", "GRPO", "actor-critic"]
    assert (tmp_path / "learning.png").stat().st_size > 1000
    assert json.loads((tmp_path / "focus" / "environment.json").read_text())["packages"]["jax"]
