"""Mathematics, one paragraph of the solution a turn: the problems, the opening, the environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from focus_jax.agents.environment import Action, EnvironmentFailure, Message, Observation
from focus_jax.tasks.grading import Grader, extract_answer

STOP = ("\n\n",)  # ends a turn, which is one step of the solution
FINAL_REQUEST = r"Stop here. Give the final answer now, as \boxed{answer}, and nothing else."

SYSTEM = r"Solve the problem step by step, one short step per paragraph. End with the answer in \boxed{}."
# A model of 135M parameters copies the form of these closely: two arithmetic chains, a product and a sum told as stories.
EXAMPLES = (
    ("What is 3 + 8 + 2?", "First, 3 + 8 = 11.\n\nThen, 11 + 2 = 13.\n\nThe answer is \\boxed{13}."),
    (
        "One bag holds 4 balls. How many balls do 6 bags hold?",
        "There are 6 bags, and one bag holds 4 balls.\n\nSo there are 6 * 4 = 24 balls in total.\n\nThe answer is \\boxed{24}.",
    ),
    ("What is 9 - 5 + 3?", "First, 9 - 5 = 4.\n\nThen, 4 + 3 = 7.\n\nThe answer is \\boxed{7}."),
    (
        "Tim has 6 red marbles and 5 blue marbles. How many marbles does he have?",
        "There are 6 red marbles and 5 blue marbles.\n\nSo there are 6 + 5 = 11 marbles in total.\n\nThe answer is \\boxed{11}.",
    ),
)


@dataclass(frozen=True)
class Problem:
    r"""One problem and its reference answer.

    Attributes:
        id: unique within its file.
        question: the text, LaTeX allowed.
        answer: the reference answer, without its box.
        level: 1 (easy) to 5 (hard), 0 where the file does not say.
    """

    id: str
    question: str
    answer: str
    level: int = 0


class LoadedProblems(NamedTuple):
    """What `load_problems` found: the problems, and the ids it left out because their reference answer cannot be parsed."""

    problems: tuple[Problem, ...]
    excluded: tuple[str, ...]


def load_problems(path: str | Path, *, grader: Grader) -> LoadedProblems:
    r"""Read problems from a JSON Lines file.

    A row needs `problem` or `question`, and `answer`; `unique_id` or `id` (else the line number serves) and `level` are
    read where they are there. That covers MATH-500 and GSM8K. Of an answer with a box or a `####` mark only what is in the
    box or after the mark counts.

    Args:
        path: the file.
        grader: tells which reference answers can be parsed; the others are left out.

    Returns:
        The problems in the order of the file, and the ids left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an empty file, a row that is not as described, an id twice, or no reference answer that can be parsed.
        GraderFailure: the grader broke.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> rows = '{"question": "2 + 2?", "answer": "4"}\n{"question": "Which one?", "answer": "see figure"}'
        >>> with TemporaryDirectory() as folder, Grader(num_workers=1) as grader:
        ...     _ = Path(folder, "rows.jsonl").write_text(rows)
        ...     load_problems(Path(folder, "rows.jsonl"), grader=grader)
        LoadedProblems(problems=(Problem(id='line-1', question='2 + 2?', answer='4', level=0),), excluded=('line-2',))
    """
    path = Path(path)
    problems: list[Problem] = []
    excluded: list[str] = []
    for problem in _read_problems(path):
        if grader.is_parseable(problem.answer):
            problems.append(problem)
        else:
            excluded.append(problem.id)
    if not problems:
        raise ValueError(
            f"{path}: expected reference answers that are numbers, LaTeX, or words as \\text{{...}}, but none of "
            f"{len(excluded)} can be parsed (ids {', '.join(excluded[:5])}, ...)"
        )
    return LoadedProblems(tuple(problems), tuple(excluded))


def builtin_problems() -> tuple[Problem, ...]:
    """The problems that come with the package, easy to hard, every answer a plain number.

    Example:
        >>> builtin_problems()[0].level
        1
    """
    return tuple(_read_problems(Path(__file__).with_name("math_problems.jsonl")))


def build_opening(question: str, *, num_examples: int = len(EXAMPLES)) -> tuple[Message, ...]:
    """The messages before the policy's first word: system, solved examples, the question.

    Args:
        question: the problem's text.
        num_examples: solved examples to show. A small model needs them for the form; a large one needs none.

    Example:
        >>> [message.role for message in build_opening("What is 2 + 2?", num_examples=1)]
        ['system', 'user', 'assistant', 'user']
    """
    if not 0 <= num_examples <= len(EXAMPLES):
        raise ValueError(f"`num_examples`: expected 0 to {len(EXAMPLES)}, got {num_examples}")
    examples = (
        message for asked, solved in EXAMPLES[:num_examples] for message in (Message("user", asked), Message("assistant", solved))
    )
    return (Message("system", SYSTEM), *examples, Message("user", question))


class MathEnvironment:
    r"""Solving one problem, a paragraph a turn; the reward is 1 for the right answer, else 0.

    The policy goes on within its own message: no observation interrupts it. The episode is over, and graded, when the
    policy ended its turn, when a `\boxed{...}` is complete, or when the action is the last one. No box is a wrong answer.

    Args:
        grader: shared by any number of environments; closed by whoever made it.
        num_examples: solved examples in the opening.

    Example:
        >>> with Grader(num_workers=1) as grader:
        ...     environment = MathEnvironment(grader)
        ...     opening = environment.reset(Problem("sum", "What is 2 + 2?", "4"))
        ...     environment.step(Action("Add them: 2 + 2 = 4.", ended=False, stop="\n\n"))
        ...     environment.step(Action(r"\boxed{4}", ended=True))
        Observation(messages=(), reward=0.0, done=False, num_transitions=1)
        Observation(messages=(), reward=1.0, done=True, num_transitions=1)
    """

    def __init__(self, grader: Grader, *, num_examples: int = len(EXAMPLES)):
        build_opening("", num_examples=num_examples)
        self._grader = grader
        self._num_examples = num_examples
        self._problem: Problem | None = None
        self._solution = ""
        self._done = False

    def reset(self, task: Problem) -> Observation:
        """Start on a problem."""
        self._problem, self._solution, self._done = task, "", False
        return Observation(build_opening(task.question, num_examples=self._num_examples))

    def step(self, action: Action) -> Observation:
        """Take one paragraph, and grade the solution where it is finished.

        Raises:
            GraderFailure: the grader broke; the environment is as before the step.
            EnvironmentFailure: not started, or over already.
        """
        if self._problem is None or self._done:
            raise EnvironmentFailure(
                f"step: expected a problem under way, but {'the episode is over' if self._done else 'none was started'}; "
                "call `reset` or `restore` first"
            )
        solution = self._solution + action.text + (action.stop or "")
        answer = extract_answer(solution)
        done = action.ended or action.last or answer is not None
        correct = done and answer is not None and self._grader.grade(gold=self._problem.answer, answer=answer)
        self._solution, self._done = solution, done
        return Observation(reward=float(correct), done=done)

    def snapshot(self) -> bytes:
        """The problem and the solution so far, as JSON."""
        problem = None if self._problem is None else asdict(self._problem)
        return json.dumps({"problem": problem, "solution": self._solution, "done": self._done}).encode()

    def restore(self, snapshot: bytes) -> None:
        """Go on from a snapshot, also one of another instance."""
        state = json.loads(snapshot)
        problem = None if state["problem"] is None else Problem(**state["problem"])
        self._problem, self._solution, self._done = problem, state["solution"], state["done"]


def _read_problems(path: Path) -> Iterator[Problem]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a JSON Lines file of problems, but there is no such file")
    first_line: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            problem = _read_row(line, f"{path}, line {number}", default_id=f"line-{number}")
            if problem.id in first_line:
                raise ValueError(f"{path}, line {number}: id {problem.id!r} was used on line {first_line[problem.id]} already")
            first_line[problem.id] = number
            yield problem
    if not first_line:
        raise ValueError(f"{path}: expected one JSON object a line, but the file is empty")


def _read_row(line: bytes, where: str, *, default_id: str) -> Problem:
    try:
        row = json.loads(line)
    except ValueError as error:  # bad JSON, or bytes that are not text
        raise ValueError(f"{where}: expected a JSON object, got {line[:80]!r} ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {line[:80]!r}")
    question = _read_text(row, ("problem", "question"), where)
    answer = _read_text(row, ("answer",), where)
    boxed = extract_answer(answer)
    level = row.get("level", 0)
    if not isinstance(level, int) or isinstance(level, bool):
        raise ValueError(f"{where}: expected an integer `level`, got {level!r}")
    return Problem(
        id=next((str(row[name]) for name in ("unique_id", "id") if row.get(name) is not None), default_id),
        question=question,
        answer=answer.rpartition("####")[2].strip() if boxed is None else boxed,
        level=level,
    )


def _read_text(row: dict[str, Any], names: tuple[str, ...], where: str) -> str:
    value = next((row[name] for name in names if name in row), None)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        wanted = " or ".join(f"`{name}`" for name in names)
        raise ValueError(f"{where}: expected {wanted} as text, got {value!r}; the row has {', '.join(row) or 'nothing'}")
    return value.strip()
