"""What sets the methods apart, and what is measured, on trees made by hand."""

import asyncio
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import train_task
from simulated import collect_letters
from tiny_training import TINY
from train_log import MetricsLog
from train_rounds import give_credit, measure_critic, measure_round, plan_passes, summarize
from train_setup import fresh_learner, open_task

from focus_jax.collection import Budget, ConstantCritic, Pass, Probes, RootRollouts, ValueRefinement, collect
from focus_jax.sampling import ByteTokenizer, Reply, ScriptedSampler
from focus_jax.tasks import detour


@pytest.fixture(scope="module")
def task():
    with open_task(TINY) as task:
        yield task


def scripted_agent(task, script):
    return task.make_agent(ScriptedSampler(script, task.tokenizer), 1.0, 1.0)


def plan(task, method, budget):
    agent = scripted_agent(task, ["1"])
    return plan_passes(method, agent, budget=budget, num_roots=2, kappa=0.5, branch_every=task.branch_every)


def test_every_method_gets_the_whole_budget_and_no_more(task):
    """An episode has 24 replies, branch points after 4, 8, ... 20 of them: probes of all of them cost 20 + 16 + ... + 4 = 60."""
    assert plan(task, "grpo", 192) == [Pass(RootRollouts(), Budget(tokens=192))]
    assert plan(task, "focus", 192) == [
        Pass(RootRollouts(2), Budget(continuations=2)),
        Pass(ValueRefinement(0.5), Budget(tokens=144)),
    ]
    assert plan(task, "vineppo", 192) == [Pass(RootRollouts(2), Budget(continuations=2)), Pass(Probes(), Budget(tokens=144))]
    assert plan(task, "vineppo", 191)[0] == Pass(RootRollouts(1), Budget(continuations=1))


@pytest.mark.parametrize("budget", [108, 150, 192, 400])
def test_vineppo_probes_every_state_within_its_budget_at_the_worst(task, budget):
    agent = scripted_agent(task, lambda prompt, params: Reply("x"))  # never arrives: every episode takes all its steps
    problems = task.problems(1, 2)
    passes = plan(task, "vineppo", budget)
    round_ = asyncio.run(collect(agent, ConstantCritic(), problems, passes, make_environment=task.make_environment))
    assert round_.tokens() <= 2 * budget
    trees, credit = give_credit("vineppo", round_, kappa=1.0, lam=0.0, leave_one_out=False)
    assert len(trees) == 2
    assert all(np.isfinite(a).all() for a in credit.advantages)


def test_trees_with_a_state_without_a_probe_are_left_out_and_counted(task):
    agent = scripted_agent(task, lambda prompt, params: Reply("x"))
    passes = [Pass(RootRollouts(1), Budget(continuations=1)), Pass(Probes(), Budget(continuations=5))]  # of six states each
    round_ = asyncio.run(collect(agent, ConstantCritic(), task.problems(1, 2), passes, make_environment=task.make_environment))
    with pytest.raises(ValueError, match="no tree of the round is complete"):
        give_credit("vineppo", round_, kappa=1.0, lam=0.0, leave_one_out=False)
    assert summarize(measure_round(round_, 0))["problems_left_out"] == 2


def test_rounds_are_counted_as_their_trees_say():
    round_ = collect_letters(seed=3)
    trees, credit = give_credit("focus", round_, kappa=1.0, lam=0.0, leave_one_out=False)
    figures = summarize(measure_round(round_, len(trees)) | measure_critic(trees, credit))
    means = []
    for tree in trees:  # an attempt is a chain of nodes; those from the root begin right below it
        attempts = [node.attempt for node in tree.nodes[1:] if node.parent == 0]
        means.append(np.mean([sum(n.segment.reward for n in tree.nodes[1:] if n.attempt == a) for a in attempts]))
    assert figures["reward"] == pytest.approx(np.mean(means))
    assert figures["solved"] == np.mean([any(n.segment.reward > 0 for n in t.nodes[1:]) for t in trees])
    targets, values = [], []
    for tree, g, num in zip(trees, credit.targets, credit.num_children, strict=True):
        targets += g[num > 0].tolist()
        values += tree.values[num > 0].tolist()
    expected = 1 - np.var(np.subtract(targets, values)) / np.var(targets)
    assert figures["explained_variance"] == pytest.approx(expected, rel=1e-4)
    assert not any(name.startswith("_") for name in figures)


def test_the_critic_reads_the_page_and_the_turns_left(task):
    read = task.read
    context = np.array(list(b"0fFCD+.>"), np.int32)
    assert bytes(read(SimpleNamespace(context=context, num_turns=4)).tolist()) == b"0fFCD+.>20"


def test_exact_values_are_those_of_the_prompts_the_agent_sees(task):
    """The table's prompts are the contexts of the tree's states, and a policy's values those of its own probabilities."""
    agent = scripted_agent(task, lambda prompt, params: Reply("123<x"[int(prompt[0] + prompt[1]) % 5]))
    problems = task.problems(1, 2)
    passes = [Pass(RootRollouts(2), Budget(continuations=2))]
    round_ = asyncio.run(collect(agent, ConstantCritic(), problems, passes, make_environment=task.make_environment))
    for tree, problem in zip(round_.grown, problems.values(), strict=True):
        for node in np.flatnonzero(~tree.terminal):
            page, _ = detour.page_of(tree.nodes[node].environment)
            shown = detour.make_search(problem).text[page].tobytes() + b">"
            assert bytes(tree.context(int(node)).tolist()) == shown

    actor = fresh_learner(TINY, task).actor
    exact = task.exact(actor, list(problems.values()))
    search = detour.make_search(next(iter(problems.values())))
    prompts = np.pad(search.text.astype(np.int32), ((0, 0), (0, 1)), constant_values=ord(">"))
    logits = np.asarray(actor.logits(actor(prompts)[:, -1]), np.float64)
    probs = np.exp(logits - np.logaddexp.reduce(logits, -1, keepdims=True))[:, [ord(c) for c in detour.ACTIONS]]
    np.testing.assert_allclose(exact[0], detour.exact_values(search.next, probs.astype(np.float32), 24), rtol=1e-4)


def test_rounds_draw_other_problems_than_evaluations_and_each_other(task):
    rounds = [set(task.problems(number, 8)) for number in range(1, 20)]
    assert len(set.union(*rounds)) == 19 * 8
    assert not set.union(*rounds) & set(task.held_out(16))


def test_math_problems_come_once_an_epoch_and_held_out_ones_never():
    options = {"seed": 0, "step_tokens": 8, "max_steps": 2, "num_held_out": 4, "num_examples": 0}
    with train_task.math_task(None, ByteTokenizer(), **options) as task:
        held_out = set(task.held_out(4))
        first = [name for number in (1, 2, 3) for name in task.problems(number, 5)]
        assert len(held_out) == 4
        assert len(set(first)) == 15
        assert not held_out & set(first)
        assert task.problems(1, 5) == task.problems(1, 5)
        with pytest.raises(ValueError, match="--num-problems: expected at most"):
            task.problems(1, 10_000)
    with (
        pytest.raises(ValueError, match="--evaluate-problems: expected fewer than"),
        train_task.math_task(None, ByteTokenizer(), **options | {"num_held_out": 10_000}),
    ):
        pass


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="--level: expected one of short, medium, long, longest, got 'hard'"):
        train_task.detour_task("hard", ByteTokenizer(), seed=0, branch_every=4, temperature=1.0)


@pytest.mark.parametrize("content", ["no json\n", "{}\n", '{"round": "x"}\n', "[1]\n"])
def test_a_metrics_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"metrics.jsonl.*; mend it, or name another run folder"):
        MetricsLog(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == content


def test_tensorboard_gets_the_numbers_where_a_writer_is_installed(tmp_path, monkeypatch):
    """And forgets rounds after the one the run goes on from."""
    calls = []

    class Writer:
        def __init__(self, folder, purge_step):
            calls.append(("made", folder, purge_step))

        def add_scalar(self, *arguments):
            calls.append(arguments)

        def close(self):
            calls.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Writer))
    with MetricsLog(tmp_path) as log:
        log.go_on(after=4)
        log.write(5, {"reward": 0.5, "note": "text"})
    assert calls == [("made", str(tmp_path / "tensorboard"), 5), ("reward", 0.5, 5), "closed"]
