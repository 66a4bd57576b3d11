"""Bad input and faults: each is refused or recorded with a message that says what was expected, and the journal survives."""

import asyncio
import resource
import shutil
import sqlite3
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from simulated import PROCESSES, LetterEnvironment, LetterSampler, collect_letters, letter_agent, make_tree

from focus_jax.agents import EnvironmentFailure, Observation, Sample
from focus_jax.collection import (
    AllAttemptsFailed,
    Budget,
    Journal,
    JournalError,
    Pass,
    Probes,
    Random,
    RootRollouts,
    TokenEntropy,
    Uniform,
    ValueRefinement,
    focus_credit,
    grpo_credit,
    replay,
    vineppo_credit,
)

TASKS = {f"p{i}": f"task {i}" for i in range(2)}
ROOTS = Pass(RootRollouts(1), Budget(continuations=1))


run = partial(collect_letters, tasks=TASKS, passes=(ROOTS,))


@pytest.mark.parametrize("name", [1, (1, 2), None, "\ud800"])
def test_an_id_that_is_no_text_is_refused_before_a_journal_is_made(tmp_path, name):
    with pytest.raises(ValueError, match="expected ids that are valid text"):
        run(tasks={name: "task"}, journal=tmp_path / "j")
    assert not list(tmp_path.iterdir())


def test_odd_ids_come_back_from_the_journal_as_they_were(tmp_path):
    tasks = {"": "a", "[red]x\x00\n'; DROP TABLE roots; -- ✓": "b"}
    run(tasks=tasks, journal=tmp_path / "j")
    assert [tree.problem for tree in replay(tmp_path / "j").trees] == list(tasks)


def test_a_failure_whose_message_is_no_valid_text_is_recorded(tmp_path):
    class OddName(LetterEnvironment):
        def step(self, action):
            raise EnvironmentFailure("no file caf\udce9.txt")

    with pytest.raises(AllAttemptsFailed, match="no file caf"):
        run(make_environment=OddName, journal=tmp_path / "j")
    assert {failure.message for failure in replay(tmp_path / "j").failures} == {"no file caf?.txt"}


@dataclass(frozen=True)
class Chooses:
    """A rule that answers what it was given, whatever it is asked."""

    choices: object

    def __call__(self, frontier, num, *, max_pending):
        return self.choices


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([(10**6, 1.0)], "chose candidate 1000000, expected one of 0 to"),
        ([(-1, 1.0)], "chose candidate -1, expected one of 0 to"),
        ([(0, 1.0), (0, 1.0)], "chose candidate 0 2 times, beyond `max_pending` of 1"),
        ([(i, 1.0) for i in range(5)], "chose 5 candidates, expected at most 4"),
        ([0], r"answered \[0\], expected a list of \(candidate, score\)"),
        ([(0.5, 1.0)], "expected a list of"),
        ([(0, None)], "expected a list of"),
        (None, "answered None, expected a list of"),
    ],
)
def test_a_rule_that_chooses_what_it_may_not_is_refused_and_nothing_is_launched(tmp_path, choices, message):
    with pytest.raises(ValueError, match=message):
        run(
            tasks={"p": "t"},
            passes=[ROOTS, Pass(Chooses(choices), Budget(continuations=9))],
            num_workers=4,
            journal=tmp_path / "j",
        )
    assert [ledger.num_launched for ledger in replay(tmp_path / "j").ledgers[0]] == [1, 0]


def test_scores_and_indices_may_be_numpy_scalars(tmp_path):
    choices = [(np.int64(0), np.float32(0.5))]
    round_ = run(passes=[Pass(Chooses(choices), Budget(continuations=1))], tasks={"p": "t"}, journal=tmp_path / "j")
    assert round_.ledgers[0][0].continuations == 1


@pytest.mark.parametrize("knob", [np.float32(0.5), np.zeros(2), (1, 2)], ids=["scalar", "array", "tuple"])
def test_knobs_of_a_rule_of_ones_own_identify_it_in_the_journal(tmp_path, knob):
    def rule(value):
        return Knob(value)

    run(passes=[Pass(rule(knob), Budget(continuations=1))], journal=tmp_path / "j")
    run(passes=[Pass(rule(knob), Budget(continuations=1))], journal=tmp_path / "j")  # the same run goes on
    with pytest.raises(JournalError, match="another run"):
        run(passes=[Pass(rule("other"), Budget(continuations=1))], journal=tmp_path / "j")


@dataclass(frozen=True)
class Knob:
    value: object

    def __call__(self, frontier, num, *, max_pending):
        return Uniform()(frontier, num, max_pending=max_pending)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((partial(ValueRefinement, kappa), "`kappa` must be a finite number above 0") for kappa in (0, -1, np.nan, np.inf)),
        (partial(RootRollouts, 0), "RootRollouts: `num` must be a whole number"),
        (partial(Probes, 0), "Probes: `num` must be a whole number"),
        (partial(TokenEntropy, 0), "TokenEntropy: `window` must be a whole number"),
        (partial(Random, -1), "Random: `seed` must be at least 0"),
        (partial(Pass, Uniform, Budget(tokens=1)), "must be a rule such as Uniform()"),
        (partial(Pass, Uniform(), Budget(tokens=1), max_pending=1.5), "`max_pending` must be a whole number"),
    ],
)
def test_knobs_out_of_range_are_refused_when_they_are_given(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("rule", [RootRollouts(), Uniform(), Random(), TokenEntropy(), ValueRefinement()])
def test_a_huge_pending_cap_means_no_cap(rule):
    round_ = run(passes=[ROOTS, Pass(rule, Budget(continuations=3), max_pending=10**30)], num_workers=1000)
    assert [group[1].continuations for group in round_.ledgers] == [3, 3]


@pytest.mark.parametrize("num_workers", [0, -1, 2.5])
def test_workers_are_counted_in_whole_numbers(num_workers):
    with pytest.raises(ValueError, match=f"`num_workers`: expected a whole number of at least 1, got {num_workers}"):
        run(num_workers=num_workers)


@pytest.mark.parametrize(
    "knobs",
    [
        {"kappa": 0},
        {"kappa": -1},
        {"kappa": np.nan},
        {"kappa": np.inf},
        {"gamma": -0.1},
        {"gamma": 1.1},
        {"gamma": np.nan},
        {"lam": 2},
    ],
)
def test_credit_refuses_numbers_out_of_range(knobs):
    with pytest.raises(ValueError, match=f"`{next(iter(knobs))}`: expected"):
        focus_credit([make_tree()], **knobs)


def test_the_baselines_credit_refuses_numbers_out_of_range():
    with pytest.raises(ValueError, match=r"`gamma`: expected a number in \[0, 1\], got 2"):
        grpo_credit([make_tree()], gamma=2)
    with pytest.raises(ValueError, match=r"`gamma`: expected a number in \[0, 1\], got -1"):
        vineppo_credit([make_tree()], [np.zeros(1)], gamma=-1)
    for credit in (focus_credit, grpo_credit):
        with pytest.raises(ValueError, match="at least one tree"):
            credit([])


def test_a_budget_below_one_continuation_is_told():
    with pytest.warns(RuntimeWarning, match=r"must hold a whole one \(up to 30 tokens here\)"):
        round_ = run(passes=[Pass(RootRollouts(), Budget(tokens=29))])
    assert round_.num_attempts == 0


def test_a_policy_that_generates_nothing_comes_to_an_end():
    class Silent(LetterSampler):
        async def sample(self, prompt_ids, params):
            await asyncio.sleep(0)
            return Sample(np.zeros(0, np.int32), np.zeros(0, np.float32), "", "stop", policy_version=3)

    round_ = run(replace(letter_agent(), sampler=Silent()), passes=[Pass(Uniform(), Budget(tokens=40))], policy_version=3)
    assert [group[0].num_launched for group in round_.ledgers] == [40, 40]
    assert round_.tokens() == 0


def test_an_environment_that_is_over_at_once_gives_trees_of_one_step():
    class Over(LetterEnvironment):
        def step(self, action):
            return Observation(reward=1.0, done=True)

    round_ = run(make_environment=Over, passes=[Pass(RootRollouts(2), Budget(continuations=2))])
    assert [tree.parent.tolist() for tree in round_.trees] == [[0, 0, 0]] * 2
    np.testing.assert_array_equal(focus_credit(round_.grown).targets[0], [1, 0, 0])


def test_an_environment_that_begins_at_its_end_cannot_start():
    class Done(LetterEnvironment):
        def reset(self, task):
            return replace(super().reset(task), done=True)

    with pytest.raises(AllAttemptsFailed, match="first failure: could not start, environment: `reset`: expected opening"):
        run(make_environment=Done)


@pytest.mark.parametrize("reward", [np.nan, np.inf, "1", None])
def test_a_reward_that_is_no_finite_number_is_a_failure_of_the_environment(reward):
    class Broken(LetterEnvironment):
        def step(self, action):
            return replace(super().step(action), reward=reward)

    with pytest.raises(AllAttemptsFailed, match="environment: `step`: expected a finite reward, got"):
        run(make_environment=Broken)


def test_a_prompt_longer_than_the_context_stops_no_other_problem():
    round_ = run(tasks={**TASKS, "long": "x" * 5000})
    assert "shorten the prompt" in round_.errors["long"]
    assert [tree.problem for tree in round_.grown] == list(TASKS)


def test_large_snapshots_survive_the_journal(tmp_path):
    class Large(LetterEnvironment):
        def snapshot(self):
            return super().snapshot() + b" " * 10_000_000

    round_ = run(make_environment=Large, tasks={"p": "t"}, journal=tmp_path / "j")
    assert [n.environment for n in replay(tmp_path / "j").trees[0].nodes] == [n.environment for n in round_.trees[0].nodes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The path of a finished journal."""
    path = tmp_path_factory.mktemp("whole") / "j"
    run(journal=path)
    return path


@pytest.mark.parametrize("kept", [10, 100, 4096, 20_000])
def test_a_truncated_journal_is_refused_and_left_alone(tmp_path, whole, kept):
    (tmp_path / "j").write_bytes(content := whole.read_bytes()[:kept])
    for use in (replay, lambda path: run(journal=path)):
        with pytest.raises(JournalError, match="database"):
            use(tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == content


def test_garbage_after_a_journal_does_no_harm(tmp_path, whole):
    (tmp_path / "j").write_bytes(whole.read_bytes() + b"garbage" * 1000)
    assert [len(t) for t in run(journal=tmp_path / "j").trees] == [len(t) for t in replay(whole).trees]


@pytest.mark.parametrize(
    "damage",
    [
        "PRAGMA user_version = 7",
        "UPDATE meta SET value = '{'",
        "DROP TABLE segments",
        "DELETE FROM segments WHERE attempt = 0",
        "DELETE FROM launches",
        "DELETE FROM roots WHERE problem = 0",
        "UPDATE launches SET node = 999",
        "UPDATE segments SET logprobs = x'00'",
    ],
)
def test_a_journal_whose_rows_do_not_fit_is_refused_and_left_alone(tmp_path, whole, damage):
    shutil.copy(whole, tmp_path / "j")
    db = sqlite3.connect(tmp_path / "j")
    db.executescript(damage)
    db.close()
    content = (tmp_path / "j").read_bytes()
    for use in (replay, lambda path: run(journal=path)):
        with pytest.raises(JournalError, match=r"journal is damaged|cannot be read|no journal of this version"):
            use(tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == content


def test_a_journal_that_has_not_begun_says_so(tmp_path, whole):
    shutil.copy(whole, tmp_path / "j")
    db = sqlite3.connect(tmp_path / "j")
    db.executescript("DELETE FROM meta")
    db.close()
    with pytest.raises(JournalError, match="holds no round yet"):
        replay(tmp_path / "j")


def test_another_runs_journal_is_refused_with_the_setting_that_differs(tmp_path):
    Journal(tmp_path / "j", {"seed": 0, "agent": {"max_turns": 4, "gamma": 1.0}}).close()
    with pytest.raises(JournalError, match=r"another run \(agent.max_turns: 4 there, 5 here\)"):
        Journal(tmp_path / "j", {"seed": 0, "agent": {"max_turns": 5, "gamma": 1.0}})


def collect_on_a_full_disk(path, limit, answer):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        run(journal=path)
    except JournalError as error:
        answer.send(str(error))


@pytest.mark.parametrize("limit", [5_000, 60_000])
def test_a_full_disk_stops_the_run_and_the_journal_goes_on_afterwards(tmp_path, limit):
    answer, child_end = PROCESSES.Pipe(duplex=False)
    child = PROCESSES.Process(target=collect_on_a_full_disk, args=(tmp_path / "j", limit, child_end))
    child.start()
    child_end.close()
    message = answer.recv()
    assert "journal" in message
    assert "disk" in message
    child.join()
    answer.close()
    assert [group[0].continuations for group in run(journal=tmp_path / "j").ledgers] == [1, 1]
