import asyncio
import sqlite3
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from simulated import (
    PASSES,
    PROCESSES,
    TASKS,
    LetterEnvironment,
    LetterSampler,
    letter_agent,
    make_continuation,
    make_segment,
)
from simulated import collect_letters as run

from focus_jax.agents import SamplerError, State, derive_seed
from focus_jax.collection import (
    AllAttemptsFailed,
    Budget,
    ConstantCritic,
    Journal,
    JournalError,
    Pass,
    Probes,
    Random,
    RootRollouts,
    Round,
    TokenEntropy,
    Uniform,
    ValueRefinement,
    focus_credit,
    replay,
    vineppo_credit,
)
from focus_jax.collection.journal import Launch, Outcome, Root

TIMES = {"launches": "time", "outcomes": "time"}


def contents(path):
    """Every row of a journal but its clock times."""
    rows = {}
    with sqlite3.connect(path) as db:
        for table in ("meta", "roots", "launches", "outcomes", "segments"):
            columns = [c[1] for c in db.execute(f"PRAGMA table_info({table})") if c[1] != TIMES.get(table)]
            rows[table] = db.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY 1, 2").fetchall()
    db.close()
    return rows


def assert_same(a, b):
    """Trees, evidence and budgets of two rounds are equal, bit for bit (attempt numbers may differ after a crash)."""
    for s, t in zip(a.trees, b.trees, strict=True):
        assert (s is None) == (t is None)
        if s is None:
            continue
        assert len(s) == len(t)
        for i, (m, n) in enumerate(zip(s.nodes, t.nodes, strict=True)):
            assert (m.parent, m.environment, m.num_turns, m.num_tokens, m.value) == (
                n.parent, n.environment, n.num_turns, n.num_tokens, n.value)  # fmt: skip
            np.testing.assert_array_equal(s.context(i), t.context(i))
            if m.segment is not None:
                assert (m.segment.reward, m.segment.status) == (n.segment.reward, n.segment.status)
                np.testing.assert_array_equal(m.segment.logprobs, n.segment.logprobs)
    np.testing.assert_equal(a.evidence.nodes, b.evidence.nodes)
    assert [[str(x) for x in group] for group in a.ledgers] == [[str(x) for x in group] for group in b.ledgers]


def assert_settled(round_):
    """Nothing is pending or reserved, every tree is valid, and the ledgers hold exactly what the trees and failures tell."""
    assert not round_.evidence.nodes["pending"].any()
    for group in round_.ledgers:
        for ledger in group:
            assert ledger.reserved_tokens == ledger.reserved_continuations == 0
            for spent, limit in ((ledger.tokens, ledger.budget.tokens), (ledger.continuations, ledger.budget.continuations)):
                assert limit is None or spent <= limit
    trees = [t for t in round_.trees if t is not None]
    in_trees = sum(n.segment.num_generated for t in trees for n in t.nodes[1:])
    assert round_.tokens() == in_trees + sum(f.tokens for f in round_.failures)
    for t in trees:
        attempts = {n.attempt for n in t.nodes[1:]}
        tree = round_.problems.index(t.problem)
        # A finished continuation adds one outcome where it started and one at each node it created.
        assert round_.evidence.nodes["count"][tree].sum() == len(attempts) + len(t) - 1
        for i, n in enumerate(t.nodes[1:], 1):
            assert n.parent < i
            assert t.status(n.parent) == "open"


def test_grows_a_tree_under_each_budget():
    round_ = run(num_workers=1)
    assert_settled(round_)
    for group in round_.ledgers:
        assert [ledger.continuations for ledger in group] == [2, 6]
    starts = {n.parent for t in round_.trees for n in t.nodes[1:]}
    assert len(starts) > 2  # continuations started below the roots, too


def test_one_worker_twice_writes_the_same_journal(tmp_path):
    for name in ("a", "b"):
        run(letter_agent(failing=0.1), num_workers=1, journal=tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a")["segments"]


@pytest.mark.parametrize("shared", [False, True])
def test_replay_of_eight_workers_gives_the_same_round_b73(tmp_path, shared):
    collected = run(letter_agent(delay=0.003, failing=0.1), num_workers=8, journal=tmp_path / "j", shared_budget=shared)
    replayed = replay(tmp_path / "j")
    assert_same(collected, replayed)
    for a, b in zip(focus_credit(collected.trees).advantages, focus_credit(replayed.trees).advantages, strict=True):
        np.testing.assert_array_equal(a, b)


def test_budget_is_never_overshot_with_64_workers_and_failures():
    spent = []

    def watch(progress):
        for group in progress.round.ledgers:
            for ledger in group:
                limit = ledger.budget
                assert limit.tokens is None or ledger.tokens + ledger.reserved_tokens <= limit.tokens
                assert limit.continuations is None or ledger.continuations + ledger.reserved_continuations <= limit.continuations
        spent.append(progress.in_flight)

    passes = [Pass(RootRollouts(3), Budget(continuations=40)), Pass(ValueRefinement(), Budget(tokens=4000), max_pending=3)]
    tasks = {f"p{i}": f"task {i}" for i in range(12)}
    agent = letter_agent(delay=0.002, failing=0.07)  # about 20 % of attempts
    round_ = run(agent, tasks=tasks, passes=passes, num_workers=64, shared_budget=True, report=watch, max_failures=100)
    assert_settled(round_)
    assert round_.failures
    assert max(spent) <= 64
    assert agent.sampler.most_in_flight > 20
    assert round_.ledgers[0][1].tokens > 3800  # no more is left over than one continuation may cost


@pytest.mark.parametrize("rule", [TokenEntropy(), Uniform(), Random(3), ValueRefinement(), RootRollouts()])
def test_every_rule_spends_its_budget(rule):
    passes = [Pass(RootRollouts(2), Budget(continuations=2)), Pass(rule, Budget(continuations=5))]
    round_ = run(passes=passes, num_workers=3)
    assert_settled(round_)
    assert [group[1].continuations for group in round_.ledgers] == [5] * len(TASKS)


def test_token_entropy_starts_from_the_bare_root():
    round_ = run(passes=[Pass(TokenEntropy(), Budget(continuations=3))], num_workers=1)
    assert [group[0].continuations for group in round_.ledgers] == [3] * len(TASKS)


def test_value_refinement_of_bare_roots_buys_nothing_and_ends():
    # At kappa = 1 and no outcome the benefit is 0 whatever the critic says.
    with pytest.warns(RuntimeWarning, match="start with RootRollouts"):
        round_ = run(passes=[Pass(ValueRefinement(), Budget(continuations=3))], num_workers=4)
    assert all(len(t) == 1 for t in round_.trees)


def test_probes_leave_the_trees_alone():
    passes = [Pass(RootRollouts(1), Budget(continuations=1)), Pass(Probes(2), Budget(continuations=100))]
    round_ = run(passes=passes, num_workers=4)
    for i, tree in enumerate(round_.trees):
        is_open = np.array([tree.status(j) == "open" for j in range(len(tree))])
        nodes = {name: column[i, : len(tree)] for name, column in round_.evidence.nodes.items()}
        assert len(set(tree.parent[1:].tolist())) == len(tree) - 1  # still one chain
        np.testing.assert_array_equal(nodes["probes"], np.where(is_open, 2, 0))
        assert set(nodes["probe_mean"][is_open]) <= {0.0, 0.5, 1.0}
        assert round_.ledgers[i][1].continuations == 2 * is_open.sum()


def test_a_problem_that_always_fails_ends_with_its_reason_and_stops_no_other():
    class Stuck(LetterEnvironment):
        def step(self, action):
            if self.letters.startswith("task 2"):
                raise RuntimeError("stuck for good")
            return super().step(action)

    tasks = {**TASKS, "p9": "broken"}
    round_ = run(tasks=tasks, make_environment=Stuck, num_workers=4)
    assert "stuck for good" in round_.errors["p2"]
    assert "no such task" in round_.errors["p9"]
    assert len(round_.trees[2]) == 1  # B38: a failure is no child, no outcome and no reward
    assert round_.evidence.nodes["count"][2].sum() == 0
    assert [round_.ledgers[i][1].continuations for i in (0, 1, 3, 4)] == [6] * 4


def test_a_round_in_which_nothing_succeeds_fails_b38():
    with pytest.raises(AllAttemptsFailed, match="sampler: the server fell over"):
        run(letter_agent(failing=1.0))


class Faulty(LetterEnvironment):
    """Raises, answers nothing, or hangs, as its task says."""

    def step(self, action):
        if self.letters.startswith("raise"):
            raise ValueError("out of order")
        if self.letters.startswith("none"):
            return None
        if self.letters.startswith("hang"):
            time.sleep(60)
        return super().step(action)


@pytest.mark.parametrize(
    ("task", "kind", "cause"), [("raise", "environment", "out of order"), ("none", "environment", "None"), ("hang", "time", "")]
)
def test_workers_that_raise_answer_nothing_or_hang_b67(task, kind, cause):
    round_ = run(tasks={"good": "task", "bad": task}, make_environment=Faulty, attempt_timeout=0.5, num_workers=2)
    assert {f.kind for f in round_.failures} == {kind}
    assert cause in round_.errors["bad"]
    assert_settled(round_)
    assert round_.ledgers[0][1].continuations == 6


def test_more_workers_than_work_ends_b68():
    round_ = run(letter_agent(delay=0.001), tasks={f"p{i}": str(i) for i in range(10)}, num_workers=16)
    assert sum(len(t) > 1 for t in round_.trees) == 10


def test_a_critic_that_fails_is_recorded_as_such():
    @dataclass(frozen=True)
    class Broken:
        async def score(self, states):
            if any(s.num_turns for s in states):
                return np.full(len(states), np.nan)
            return np.zeros(len(states))

    with pytest.raises(AllAttemptsFailed, match="critic: expected"):
        run(critic=Broken())


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (TypeError("a bug"), TypeError),
        (asyncio.CancelledError("by nobody here"), asyncio.CancelledError),
        (SamplerError("down", num_tokens="many"), ValueError),
    ],
    ids=["bug", "cancellation", "bad count"],
)
def test_a_programming_error_is_raised_not_recorded(tmp_path, error, raised):
    class Typo(LetterSampler):
        model = "LetterSampler"  # as far as a journal can tell, the policy that goes on afterwards

        async def sample(self, prompt_ids, params):
            raise error

    with pytest.raises(raised, match=r"a bug|by nobody here|many"):
        run(replace(letter_agent(), sampler=Typo()), journal=tmp_path / "j")
    # What was in flight is on record as interrupted; the journal can be continued.
    assert_settled(replay(tmp_path / "j"))
    round_ = run(letter_agent(), journal=tmp_path / "j")
    assert_settled(round_)


def test_sibling_seeds_differ_and_failed_attempts_draw_new_ones_b39(tmp_path):
    run(letter_agent(failing=0.2), num_workers=8, journal=tmp_path / "j", max_failures=50)
    with sqlite3.connect(tmp_path / "j") as db:
        seeds = [row[0] for row in db.execute("SELECT seed FROM launches")]
    db.close()
    assert len(seeds) > 40
    assert len(set(seeds)) == len(seeds)


def open_journal(path, answer):
    try:
        Journal(path, {})
    except JournalError as error:
        answer.send(str(error))


def test_two_processes_one_journal(tmp_path):
    journal = Journal(tmp_path / "j", {})
    answer, child_end = PROCESSES.Pipe(duplex=False)
    second = PROCESSES.Process(target=open_journal, args=(tmp_path / "j", child_end))
    second.start()
    child_end.close()
    assert "is being written by another process" in answer.recv()
    second.join()
    journal.close()
    answer.close()


@pytest.mark.parametrize(
    "knobs",
    [
        {"seed": 1},
        {"policy_version": 1},
        {"tasks": {**TASKS, "p0": "another task"}},
        {"passes": PASSES[:1]},
        {"critic": ConstantCritic(0.25)},
    ],
)
def test_a_journal_of_another_run_is_refused_b63(tmp_path, knobs):
    run(journal=tmp_path / "j")
    with pytest.raises(JournalError, match="another run"):
        run(journal=tmp_path / "j", **knobs)


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b""])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "j"
    path.write_bytes(content)
    if content:
        with pytest.raises(JournalError, match="cannot be opened as a journal"):
            run(journal=path)
        assert path.read_bytes() == content
    else:
        run(journal=path)  # an empty file is a journal that has not begun


def test_a_journal_in_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be written"):
        run(journal=tmp_path / "file" / "j")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"tasks": {}}, "at least one problem"),
        ({"passes": []}, "at least one pass"),
        ({"num_workers": 0}, "num_workers"),
        ({"attempt_timeout": 0.0}, "attempt_timeout"),
    ],
)
def test_bad_input_is_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        run(**knobs)


def test_attempt_numbers_that_an_interruption_gave_back_are_used_again_and_no_other_b39():
    round_ = Round(PASSES, ["p"])
    round_.start(Root(0, "p", State(np.zeros(1, np.int32), 1, b""), 0.5))

    def launch(attempt):
        number = round_.number(0, 0)
        round_.launch(Launch(attempt, 0, 0, 0, number, derive_seed(0, 0, 0, number), 0, 0, 0.0))
        return number

    assert [launch(0), launch(1)] == [0, 1]
    round_.settle(Outcome(1, "finished", None, 3, make_continuation(make_segment(status="terminal"))))
    round_.settle(Outcome(0, "interrupted", None, 0, None))
    assert launch(2) == 0  # the same seed again, and not that of the sibling which finished
    round_.settle(Outcome(2, "sampler", "down", 0, None))
    assert round_.number(0, 0) == 2  # a failed attempt is not repeated


def test_a_run_of_many_workers_killed_and_resumed_repeats_no_seed_b62(tmp_path):
    passes = [Pass(RootRollouts(6), Budget(continuations=6)), Pass(Uniform(), Budget(continuations=12), max_pending=3)]

    class Killed(BaseException):
        """Stands for the end of the process: nothing after it is written."""

    def stop_at(num_attempts):
        def report(progress):
            if progress.round.num_attempts >= num_attempts:
                raise Killed

        return report

    for num in (9, 25, 45, 80):
        with pytest.raises(Killed):
            run(letter_agent(delay=0.002), passes=passes, num_workers=8, journal=tmp_path / "j", report=stop_at(num))
    round_ = run(letter_agent(delay=0.002), passes=passes, num_workers=8, journal=tmp_path / "j")
    assert_settled_but_interrupted(round_, tmp_path / "j")
    assert_same(round_, replay(tmp_path / "j"))


def assert_settled_but_interrupted(round_, journal):
    """All budgets are spent, and no two finished continuations had the same seed."""
    assert [ledger.continuations for group in round_.ledgers for ledger in group] == [6, 12] * len(TASKS)
    with sqlite3.connect(journal) as db:
        query = "SELECT seed FROM launches JOIN outcomes USING (attempt) WHERE kind = 'finished'"
        seeds = [row[0] for row in db.execute(query)]
    db.close()
    assert len(seeds) == len(set(seeds)) == 18 * len(TASKS)


def test_an_outage_counts_once_and_a_second_call_gives_another_chance(tmp_path):
    @dataclass
    class Outage(LetterSampler):
        up: bool = False

        def __post_init__(self):
            super().__init__(delay=0.001)
            self.all_in_flight = asyncio.Barrier(4)

        async def sample(self, prompt_ids, params):
            if not self.up:
                await self.all_in_flight.wait()
                raise SamplerError("no connection")
            return await super().sample(prompt_ids, params)

    agent = replace(letter_agent(), sampler=(sampler := Outage()))
    passes = [Pass(RootRollouts(8), Budget(continuations=8), max_attempts=100)]
    with pytest.raises(AllAttemptsFailed, match="no connection"):
        run(agent, tasks={"p": "task"}, passes=passes, num_workers=4, journal=tmp_path / "j")
    assert len(replay(tmp_path / "j").failures) == 12  # three times four in flight together
    sampler.up = True
    round_ = run(agent, tasks={"p": "task"}, passes=passes, num_workers=4, journal=tmp_path / "j")
    assert round_.errors == {}
    assert round_.ledgers[0][0].continuations == 8


def test_a_problem_that_could_not_start_is_started_again_but_not_one_that_cannot(tmp_path):
    class Warming(LetterEnvironment):
        broken = True

        def reset(self, task):
            if task == "late" and Warming.broken:
                raise RuntimeError("still warming up")
            return super().reset("x" * 9000 if task == "long" else task)

    tasks = {"good": "task", "late": "late", "long": "long"}
    first = run(tasks=tasks, make_environment=Warming, journal=tmp_path / "j")
    assert "warming up" in first.errors["late"]
    assert "shorten the prompt" in first.errors["long"]
    Warming.broken = False
    second = run(tasks=tasks, make_environment=Warming, journal=tmp_path / "j")
    assert set(second.errors) == {"long"}
    assert [len(t) > 1 for t in second.grown] == [True, True]
    focus_credit(second.grown)


def test_a_start_that_hangs_and_an_environment_that_cannot_be_made_end_only_their_problem():
    class Slow(LetterEnvironment):
        def reset(self, task):
            if task == "hang":
                time.sleep(60)
            return super().reset(task)

    round_ = run(tasks={"good": "task", "bad": "hang"}, make_environment=Slow, attempt_timeout=0.3)
    assert "time: not over after 0.3 s" in round_.errors["bad"]

    def broken():
        raise OSError("no space left")

    with pytest.raises(AllAttemptsFailed, match="no space left"):
        run(make_environment=broken)


def test_environments_are_closed_when_their_attempt_is_over():
    closed = []

    class Closing(LetterEnvironment):
        def close(self):
            closed.append(self)

    run(tasks={"p": "task"}, make_environment=Closing, num_workers=1)
    for _ in range(100):
        if len(closed) == 9:  # one start and eight continuations
            return
        time.sleep(0.05)
    raise AssertionError(f"{len(closed)} of 9 were closed")


def test_a_sample_of_another_policy_version_is_refused():
    with pytest.raises(AllAttemptsFailed, match="expected samples of policy version 1, got 0"):
        run(policy_version=1)


def test_two_windows_in_one_round_are_refused():
    with pytest.raises(ValueError, match=r"one token-entropy window in a round, got \[2, 8\]"):
        run(passes=[Pass(TokenEntropy(8), Budget(continuations=1)), Pass(TokenEntropy(2), Budget(continuations=1))])


def test_what_a_journal_could_not_tell_from_another_is_refused(tmp_path):
    class Anonymous:
        async def score(self, states):
            return np.zeros(len(states))

    with pytest.raises(TypeError, match="Anonymous: expected what can be told from another"):
        run(critic=Anonymous(), journal=tmp_path / "j")
    with pytest.raises(TypeError, match="object: expected what can be told from another"):
        run(tasks={"p": object()}, journal=tmp_path / "j")
    lambdas = Pass(ValueRefinement(model=lambda values, stats, kappa: (values, values)), Budget(tokens=100))
    with pytest.raises(TypeError, match="named function"):
        run(passes=[lambdas], journal=tmp_path / "j")


def test_probes_give_mc_values_and_a_missing_one_is_named():
    passes = [Pass(RootRollouts(1), Budget(continuations=1)), Pass(Probes(1), Budget(continuations=100))]
    round_ = run(passes=passes)
    credit = vineppo_credit(round_.grown, round_.mc_values())
    for tree, values, advantages in zip(round_.grown, round_.mc_values(), credit.advantages, strict=True):
        expected = tree.reward + values - values[tree.parent]
        np.testing.assert_allclose(advantages[1:], expected[1:], atol=1e-6)
    unprobed = run(passes=passes[:1])
    with pytest.raises(ValueError, match="node 0 has no probe"):
        vineppo_credit(unprobed.grown, unprobed.mc_values())


def test_stats_of_a_tree_are_what_its_nodes_observed():
    round_ = run(num_workers=1)
    stats = round_.stats(1)
    assert stats.count[0] == sum(n.parent == 0 for n in round_.tree(1).nodes[1:])
    assert len(stats.mean) == len(round_.tree(1))


def test_a_journal_with_an_odd_name_is_replayed_while_it_is_written(tmp_path):
    path = tmp_path / "a #1? 50%.sqlite"
    sizes = []

    def watch(progress):
        sizes.append(sum(len(t) for t in replay(path).grown))

    round_ = run(tasks={"p": "task"}, journal=path, report=watch)
    assert sizes[-1] == len(round_.tree(0))
    assert sorted(sizes) == sizes


LONG = [
    Pass(RootRollouts(2), Budget(continuations=2)),
    Pass(Uniform(), Budget(tokens=100)),
    Pass(ValueRefinement(), Budget(tokens=150)),
]


def collect_long(path, report=lambda progress: None):
    return run(
        letter_agent(delay=0.001, failing=0.03), passes=LONG, num_workers=1, max_failures=1000, journal=path, report=report
    )


def collect_and_tell(path, progress):
    collect_long(path, report=lambda _: progress.send_bytes(b"one more outcome"))


def test_killed_at_20_moments_and_resumed_equals_one_that_was_not(tmp_path):
    whole = collect_long(tmp_path / "whole")
    assert_settled(whole)
    draw = np.random.default_rng(0)
    for num_outcomes in draw.integers(1, 9, 20):
        progress, child_end = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=collect_and_tell, args=(tmp_path / "killed", child_end))
        process.start()
        child_end.close()
        for _ in range(num_outcomes):
            progress.recv_bytes()
        time.sleep(draw.uniform(0.0, 0.01))  # somewhere within the attempts that follow
        process.kill()
        process.join()
        progress.close()
        partial = replay(tmp_path / "killed")
        attempts = [n.attempt for t in partial.trees if t for n in t.nodes[1:]]
        assert len(set(attempts)) == sum(ledger.continuations for group in partial.ledgers for ledger in group)
    resumed = collect_long(tmp_path / "killed")
    assert_settled(resumed)
    assert_same(whole, resumed)
    assert_same(resumed, replay(tmp_path / "killed"))
