"""The mathematics task: reading problems, the built-in set, the opening, the environment."""

import asyncio
import json
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest

from focus_jax.agents import Action, Agent, ChatRenderer, GraderFailure, SamplingParams, check_environment
from focus_jax.agents.environment import EnvironmentFailure
from focus_jax.sampling.scripted import Reply, ScriptedSampler
from focus_jax.sampling.tokenizers import ByteTokenizer
from focus_jax.tasks import math as math_task
from focus_jax.tasks.grading import Grader, extract_answer
from focus_jax.tasks.math import (
    EXAMPLES,
    FINAL_REQUEST,
    STOP,
    MathEnvironment,
    Problem,
    build_opening,
    builtin_problems,
    load_problems,
)

ROWS = {
    "math500": [
        {"problem": r"What is $\frac{1}{2}+\frac{1}{4}$?", "answer": r"\frac{3}{4}", "level": 2, "unique_id": "test/a/1.json"},
        {"problem": "Is $4$ even or odd?", "answer": r"\text{even}", "level": 1, "unique_id": "test/b/2.json"},
    ],
    "gsm8k": [{"id": "gsm8k-0", "question": "Ann has 2 hens with 3 eggs each. How many eggs?", "solution": "2*3", "answer": "6"}],
}
DATA = Path(__file__).parents[3] / "shared" / "data"
REAL_FILES = [path for name in ROWS if (path := DATA / name / "test.jsonl").is_file()]
PENS = Problem("pens", "Three boxes hold 4 pens each. How many pens are there?", "12")
STEP = Action("There are 3 * 4 pens.", ended=False, stop="\n\n")


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


@pytest.fixture
def environment(grader):
    environment = MathEnvironment(grader)
    environment.reset(PENS)
    return environment


class NoGrader:
    """Stands where grading would be a mistake, or breaks."""

    def grade(self, *, gold, answer):
        raise GraderFailure("broken")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def every_tenth_row(source, target):
    lines = source.read_text().splitlines(keepends=True)
    target.write_text("".join(lines[::10]))
    return target


def test_reads_the_math500_format(tmp_path, grader):
    problems, excluded = load_problems(write_rows(tmp_path / "rows.jsonl", ROWS["math500"]), grader=grader)
    assert problems[0] == Problem("test/a/1.json", r"What is $\frac{1}{2}+\frac{1}{4}$?", r"\frac{3}{4}", 2)
    assert [problem.answer for problem in problems] == [r"\frac{3}{4}", r"\text{even}"]
    assert excluded == ()


def test_reads_the_gsm8k_format(tmp_path, grader):
    loaded = load_problems(str(write_rows(tmp_path / "rows.jsonl", ROWS["gsm8k"])), grader=grader)
    assert loaded.problems == (Problem("gsm8k-0", ROWS["gsm8k"][0]["question"], "6"),)


def test_reads_rows_without_ids_and_answers_inside_solutions(tmp_path, grader):
    rows = [
        {"question": "2 * 3?", "answer": "It is 2 * 3 = 6.\n#### 1,006"},
        {"question": "Half?", "answer": r"So $\boxed{\frac{1}{2}}$."},
        {"question": "7?", "answer": 7},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    path.write_text(path.read_text().replace("\n", "\n\n", 1))  # an empty line
    problems, _ = load_problems(path, grader=grader)
    assert [(p.id, p.answer, p.level) for p in problems] == [
        ("line-1", "1,006", 0),
        ("line-3", r"\frac{1}{2}", 0),
        ("line-4", "7", 0),
    ]


@pytest.mark.parametrize("path", REAL_FILES or [None], ids=lambda path: path.parent.name if path else "ours")
def test_every_reference_solution_is_accepted(path, tmp_path, grader):
    # A fixed sample of the data where it lies beside the checkout, rows of our own elsewhere.
    file = every_tenth_row(path, tmp_path / "rows.jsonl") if path else write_rows(tmp_path / "rows.jsonl", ROWS["math500"])
    problems, excluded = load_problems(file, grader=grader)
    rows = {str(row.get("unique_id", row.get("id"))): row for row in map(json.loads, file.read_text().splitlines())}
    assert excluded == ()
    assert len(problems) == len(rows)
    for problem in problems:
        answer = extract_answer(rows[problem.id].get("solution", "")) or problem.answer
        assert grader.grade(gold=problem.answer, answer=answer), problem


def test_b48_a_reference_that_cannot_be_parsed_is_left_out_and_reported(tmp_path, grader):
    rows = [{"id": str(i), "question": "How many?", "answer": a} for i, a in enumerate(["1", "see figure", "3", r"\frac{1"])]
    problems, excluded = load_problems(write_rows(tmp_path / "rows.jsonl", rows), grader=grader)
    assert [problem.id for problem in problems] == ["0", "2"]
    assert excluded == ("1", "3")


def test_b48_a_file_of_nothing_else_is_refused(tmp_path, grader):
    path = write_rows(tmp_path / "rows.jsonl", [{"id": "a", "question": "How many?", "answer": "see figure"}])
    with pytest.raises(ValueError, match=r"rows\.jsonl: expected reference answers.* none of 1 can be parsed \(ids a"):
        load_problems(path, grader=grader)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"rows\.jsonl: expected one JSON object a line, but the file is empty"),
        ("\n \n", r"rows\.jsonl: .*the file is empty"),
        ('{"question": "a", "answer": "1"}\n{"question": ', r"rows\.jsonl, line 2: expected a JSON object, got"),
        ("[1]\n", r"line 1: expected a JSON object, got"),
        ('{"answer": "1"}\n', r"line 1: expected `problem` or `question` as text, got None; the row has answer"),
        ('{"question": " ", "answer": "1"}\n', r"line 1: expected `problem` or `question` as text, got ' '"),
        ('{"question": "a"}\n', r"line 1: expected `answer` as text, got None; the row has question"),
        ('{"question": "a", "answer": null}\n', r"line 1: expected `answer` as text, got None"),
        ('{"question": "a", "answer": true}\n', r"line 1: expected `answer` as text, got True"),
        ('{"question": "a", "answer": "1", "level": "hard"}\n', r"line 1: expected an integer `level`, got 'hard'"),
        ('{"id": 1, "question": "a", "answer": "1"}\n' * 2, r"line 2: id '1' was used on line 1 already"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(text, message, tmp_path, grader):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_problems(path, grader=grader)


def test_a_file_that_is_no_text_or_not_there(tmp_path, grader):
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"line 1: expected a JSON object"):
        load_problems(tmp_path / "rows.jsonl", grader=grader)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl: expected a JSON Lines file"):
        load_problems(tmp_path / "nowhere.jsonl", grader=grader)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_problems(tmp_path, grader=grader)


def as_number(answer):
    fraction = re.fullmatch(r"\\frac\{(\d+)\}\{(\d+)\}", answer)
    return Fraction(*map(int, fraction.groups())) if fraction else Fraction(answer)


def test_the_built_in_answers_are_right(grader):
    path = Path(math_task.__file__).with_name("math_problems.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["id"], row["question"], row["answer"], row["level"]) for row in rows] == [
        (p.id, p.question, p.answer, p.level) for p in builtin_problems()
    ]
    for row in rows:
        assert eval(row["check"], {"math": math, "Fraction": Fraction}) == as_number(row["answer"]), row
        assert grader.is_parseable(row["answer"])


def test_the_built_in_set_goes_from_easy_to_hard():
    levels = [problem.level for problem in builtin_problems()]
    assert len(levels) >= 40
    assert levels == sorted(levels)
    assert set(levels) == {1, 2, 3, 4, 5}


def test_the_examples_are_right_and_give_nothing_away():
    easy = {problem.answer for problem in builtin_problems() if problem.level == 1}
    for question, solution in EXAMPLES:
        assert question not in {problem.question for problem in builtin_problems()}
        assert extract_answer(solution) not in easy  # an answer copied from an example must not be a right one
        sums = re.findall(r"(\d+ [-+*] \d+) = (\d+)", solution)
        assert sums
        assert all(eval(left) == int(right) for left, right in sums)
        assert sums[-1][1] == extract_answer(solution)
        assert all(paragraph for paragraph in solution.split(STOP[0]))


def test_the_opening_shows_as_many_examples_as_asked_for(grader):
    opening = MathEnvironment(grader).reset(PENS)
    assert opening.messages == build_opening(PENS.question)
    assert not opening.done
    for num_examples in range(len(EXAMPLES) + 1):
        messages = MathEnvironment(grader, num_examples=num_examples).reset(PENS).messages
        assert [m.role for m in messages] == ["system", *["user", "assistant"] * num_examples, "user"]
        assert messages[-1].content == PENS.question
    for num_examples in (-1, len(EXAMPLES) + 1):
        with pytest.raises(ValueError, match=f"`num_examples`: expected 0 to {len(EXAMPLES)}, got {num_examples}"):
            MathEnvironment(grader, num_examples=num_examples)


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        (Action(r"\boxed{12}", ended=True), 1.0),
        (Action(r"So \boxed{12}.", ended=False, stop="\n\n"), 1.0),  # the box ends it, not the turn
        (Action(r"So \boxed{12} and", ended=False), 1.0),
        (Action(r"\boxed{13}", ended=True), 0.0),
        (Action(r"Not \boxed{13} but \boxed{12}.", ended=True), 1.0),
        (Action("The answer is 12.", ended=True), 0.0),  # no box, no answer
        (Action("", ended=True), 0.0),
        (Action(r"\boxed{12", ended=True), 0.0),
        (Action("", ended=False, last=True), 0.0),
        (Action(r"\boxed{12}", ended=True, last=True), 1.0),
        (Action(r"\boxed{" + "9" * 100_000 + "}", ended=True), 0.0),
    ],
)
def test_how_an_episode_ends(environment, action, reward):
    assert not environment.step(STEP).done
    observation = environment.step(action)
    assert (observation.done, observation.reward, observation.messages) == (True, reward, ())


def test_an_unfinished_solution_goes_on_without_an_observation(environment):
    for action in (STEP, Action("", ended=False, stop="\n\n"), Action(r"And \boxed{1", ended=False)):
        observation = environment.step(action)
        assert (observation.messages, observation.reward, observation.done) == ((), 0.0, False)
        assert observation.num_transitions == 1


def test_the_stop_string_is_put_back_between_steps_and_nowhere_else(environment):
    environment.step(STEP)
    environment.step(Action(r"That is \boxed{1", ended=False))  # the token limit fell into the box
    assert json.loads(environment.snapshot())["solution"] == "There are 3 * 4 pens.\n\nThat is \\boxed{1"
    assert environment.step(Action("2}.", ended=True)).reward == 1.0


def test_b38_a_broken_grader_is_a_failure_and_leaves_the_state_alone():
    environment = MathEnvironment(NoGrader())
    environment.reset(PENS)
    environment.step(STEP)
    before = environment.snapshot()
    with pytest.raises(GraderFailure, match="broken"):
        environment.step(Action(r"\boxed{12}", ended=True))
    assert environment.snapshot() == before
    assert environment.step(Action("I give up.", ended=True)).reward == 0.0  # nothing to grade, so nothing broke


def test_steps_before_the_start_and_after_the_end_are_refused(environment):
    with pytest.raises(EnvironmentFailure, match="none was started"):
        MathEnvironment(NoGrader()).step(STEP)
    environment.step(Action("", ended=True))
    with pytest.raises(EnvironmentFailure, match="the episode is over"):
        environment.step(STEP)
    environment.reset(PENS)
    assert environment.step(Action(r"\boxed{12}", ended=True)).reward == 1.0


def test_b42_a_snapshot_restored_twice_gives_two_independent_children(grader, environment):
    environment.step(STEP)
    saved = environment.snapshot()
    assert len(saved) < 500
    first, second = MathEnvironment(grader, num_examples=0), MathEnvironment(grader)
    first.restore(saved)
    second.restore(saved)
    assert first.step(Action(r"So \boxed{13}.", ended=True)).reward == 0.0
    assert second.snapshot() == environment.snapshot() == saved
    answer = Action(r"So \boxed{12}.", ended=True)
    assert second.step(answer) == environment.step(answer)
    second.restore(saved)
    assert not second.step(STEP).done


@pytest.mark.parametrize("end", [Action(r"So \boxed{12}.", ended=False, stop="\n\n"), Action("", ended=True)])
def test_the_environment_passes_the_conformance_kit(grader, end):
    actions = [STEP, Action("", ended=False, stop="\n\n"), Action("cut o", ended=False), end]
    check_environment(lambda: MathEnvironment(grader), [PENS, *builtin_problems()[:2]], actions)


@pytest.mark.parametrize(("submission", "reward"), [(r"\boxed{12}", 1.0), ("no idea", 0.0)])
def test_a_policy_that_only_writes_empty_steps_meets_the_turn_cap(grader, submission, reward):
    tokenizer = ByteTokenizer()
    sampler = ScriptedSampler({FINAL_REQUEST: submission, PENS.question: Reply("\n\n", ended=False)}, tokenizer)
    params = SamplingParams(max_tokens=64, stop=STOP)
    agent = Agent(sampler, ChatRenderer(tokenizer), params, max_turns=3, max_tokens=256, final_request=FINAL_REQUEST)

    async def solve():
        environment = MathEnvironment(grader)
        state = await agent.start(environment, PENS)
        segments = []
        while not segments or segments[-1].status == "open":
            segment, state = await agent.segment(environment, state, seed=0, charge=lambda tokens: None)
            segments.append(segment)
        return segments

    segments = asyncio.run(solve())
    assert [segment.status for segment in segments] == ["open"] * (len(segments) - 1) + ["terminal"]
    assert len(segments) <= 4
    assert sum(segment.reward for segment in segments) == reward
