import asyncio
import io

from rich.console import Console
from simulated import LetterEnvironment, letter_agent

from focus_jax.collection import (
    Budget,
    ConstantCritic,
    Pass,
    Progress,
    RootRollouts,
    Round,
    Uniform,
    collect,
    show_progress,
)
from focus_jax.collection.progress import spent_share, summary

PASSES = [Pass(RootRollouts(2), Budget(continuations=2)), Pass(Uniform(), Budget(continuations=10, tokens=60))]


def collect_with(report):
    tasks = {"a": "a", "b": "b"}
    return asyncio.run(
        collect(letter_agent(), ConstantCritic(), tasks, PASSES, make_environment=LetterEnvironment, num_workers=3, report=report)
    )


def test_the_summary_tells_what_is_spent_and_what_is_reserved():
    round_ = Round(PASSES, ["a", "b"])
    first, second = round_.ledgers[0]
    first.reserve(30)
    first.settle(30, tokens=21, finished=True)
    second.reserve(30)
    assert summary(Progress(round_, 1, 0.12345)) == (
        "1 finished, 0 failed, 1 in flight, 21 tokens spent, 30 reserved, score 0.123"
    )


def test_the_share_spent_follows_the_scarcer_side_of_each_budget():
    round_ = Round(PASSES, ["a"])
    first, second = round_.ledgers[0]
    first.continuations = 1
    assert spent_share(Progress(round_, 0, 0.0)) == (1 / 2 + 0) / 2
    round_.cursor[:] = 1  # a pass that is over counts as spent, whatever it left
    second.continuations, second.tokens = 1, 30
    assert spent_share(Progress(round_, 0, 0.0)) == (1 + 30 / 60) / 2
    round_.cursor[:] = 2
    assert spent_share(Progress(round_, 0, 0.0)) == 1


def test_the_share_spent_never_falls_and_ends_at_one():
    shares = []
    round_ = collect_with(lambda progress: shares.append(spent_share(progress)))
    assert shares == sorted(shares)
    assert spent_share(Progress(round_, 0, 0.0)) == 1


def test_plain_lines_where_there_is_no_terminal():
    console = Console(file=(out := io.StringIO()), force_terminal=False, width=20)
    with show_progress("[focus]", console, every=0.0) as report:
        collect_with(report)
    lines = out.getvalue().splitlines()
    assert len(lines) > 10  # never wrapped
    assert all(line.startswith("[focus]: ") and "score" in line for line in lines)
    with show_progress("focus", console, every=3600.0) as report:
        collect_with(report)
    assert out.getvalue().splitlines() == lines  # not an hour has passed


def test_a_bar_on_a_terminal():
    console = Console(file=(out := io.StringIO()), force_terminal=True, width=160)
    with show_progress("focus", console) as report:
        collect_with(report)
    assert "0 failed, 0 in flight" in out.getvalue()
