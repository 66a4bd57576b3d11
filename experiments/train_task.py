"""The tasks that `train.py` knows: their problems, the agent in them, what the critic reads, and how a policy is judged."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from focus_jax.agents import Agent, ChatRenderer, LatestOnly, Sampler, SamplingParams, State, Tokenizer
from focus_jax.models import Decoder
from focus_jax.sampling import ByteTokenizer
from focus_jax.tasks import detour, math
from focus_jax.tasks.grading import Grader
from focus_jax.training.batches import read_context

_REPLIES = np.frombuffer(detour.ACTIONS.encode(), np.uint8).astype(np.int32)
_HELD_OUT = 10**9  # seeds of searches that no round draws
_SHOWN = 2 * 10**9  # and of those that demonstrations are of


@dataclass(frozen=True)
class Task:
    """What a run needs to know of its task.

    Attributes:
        tokenizer: of the policy.
        make_agent: a sampler and how to sample, temperature and top-p, to the agent.
        make_environment: a fresh environment.
        problems: round's number and how many -> problem id to task.
        held_out: how many -> problems that no round draws.
        read: what the critic reads of a state, int32 [T].
        context_length: most tokens of a context.
        branch_every: task turns between branch points.
        evaluation: temperature and top-p of an evaluation.
        identity: tells these problems from others.
        exact: a policy and problems to exact values [replies so far, page] of each, where there are any.
    """

    tokenizer: Tokenizer
    make_agent: Callable[[Sampler, float, float], Agent]
    make_environment: Callable[[], Any]
    problems: Callable[[int, int], dict[str, Any]]
    held_out: Callable[[int], dict[str, Any]]
    read: Callable[[State], np.ndarray]
    context_length: int
    branch_every: int
    evaluation: tuple[float, float]
    identity: str
    exact: Callable[[Decoder, list[Any]], np.ndarray] | None = None


@dataclass(frozen=True)
class PageAndTurnsLeft:
    """What detour's critic reads: the context, then the turns left in two digits, which the policy is not told."""

    tokenizer: Tokenizer
    max_turns: int

    def __call__(self, state: State) -> np.ndarray:
        left = self.tokenizer.encode(f"{self.max_turns - state.num_turns:02d}")
        return np.concatenate([state.context, np.array(left, np.int32)])


def detour_task(level_name: str, tokenizer: Tokenizer, *, seed: int, branch_every: int, temperature: float) -> Task:
    """Fresh searches every round; exact values where tokens are bytes, so that a reply is one character."""
    if level_name not in detour.LEVELS:
        raise ValueError(f"--level: expected one of {', '.join(detour.LEVELS)}, got {level_name!r}")
    level = detour.LEVELS[level_name]

    def make_agent(sampler: Sampler, temperature: float, top_p: float) -> Agent:
        return Agent(
            sampler,
            ChatRenderer(tokenizer, chat_template=detour.CHAT_TEMPLATE),
            SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p),
            context_manager=LatestOnly(branch_every),
            max_turns=level.max_steps,
            max_tokens=level.max_steps,
            cut_off="bootstrap",  # the search itself ends at its last step, nothing is ever cut off
        )

    def searches(first: int, num: int) -> dict[str, detour.Problem]:
        return {f"{level_name}-{i}": detour.Problem(level, i) for i in range(first, first + num)}

    is_exact = isinstance(tokenizer, ByteTokenizer)
    return Task(
        tokenizer,
        make_agent,
        detour.DetourEnvironment,
        problems=lambda number, num: searches((seed * 10_000 + number) * num, num),
        held_out=lambda num: searches(_HELD_OUT, num),
        read=PageAndTurnsLeft(tokenizer, level.max_steps),
        context_length=32,
        branch_every=branch_every,
        evaluation=(temperature, 1.0),
        identity=f"detour {json.dumps(asdict(level))}",
        exact=(lambda model, problems: detour_values(model, problems, temperature)) if is_exact else None,
    )


def detour_values(model: Decoder, problems: list[detour.Problem], temperature: float) -> np.ndarray:
    """Exact values of a policy over bytes, float32 [P, max_steps + 1, S + 1]: see `detour.exact_values`."""
    searches = [detour.make_search(problem) for problem in problems]
    text, following = (np.stack([getattr(search, name) for search in searches]) for name in ("text", "next"))
    return np.asarray(_detour_values(model, text, following, np.float32(temperature), problems[0].level.max_steps))


@jax.jit(static_argnums=4)
def _detour_values(model: Decoder, text: jax.Array, following: jax.Array, temperature: jax.Array, max_steps: int) -> jax.Array:
    prompts = jnp.pad(text.astype(jnp.int32), ((0, 0), (0, 0), (0, 1)), constant_values=ord(">"))
    hidden = model(prompts.reshape(-1, prompts.shape[-1]))[:, -1]
    probs = jax.nn.softmax(model.logits(hidden) / temperature)[:, _REPLIES].reshape(*text.shape[:2], len(_REPLIES))
    return jax.vmap(lambda one, p: detour.exact_values(one, p, max_steps))(following, probs)


def detour_demonstrations(level_name: str, num: int, *, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts int32 [R, 8] and replies int32 [R] of an expert who errs, as bytes."""
    problems = [detour.Problem(detour.LEVELS[level_name], _SHOWN + seed * num + i) for i in range(num)]
    pages, replies = detour.demonstrations(problems, noise=noise, seed=seed)
    return np.pad(pages.astype(np.int32), ((0, 0), (0, 1)), constant_values=ord(">")), replies.astype(np.int32)


@contextlib.contextmanager
def math_task(
    data: Path | None, tokenizer: Tokenizer, *, seed: int, step_tokens: int, max_steps: int, num_held_out: int, num_examples: int
) -> Iterator[Task]:
    """The built-in problems or those of a file, in an order drawn anew for every epoch."""
    with Grader() as grader:
        problems = math.builtin_problems() if data is None else math.load_problems(data, grader=grader).problems
        if len(problems) <= num_held_out:
            raise ValueError(
                f"--evaluate-problems: expected fewer than the {len(problems)} problems there are, got {num_held_out}"
            )
        shuffled = [problems[i] for i in np.random.default_rng(0).permutation(len(problems))]
        kept, training = shuffled[:num_held_out], shuffled[num_held_out:]

        def draw(number: int, num: int) -> dict[str, math.Problem]:
            if num > len(training):
                raise ValueError(
                    f"--num-problems: expected at most the {len(training)} problems there are to train on, got {num}"
                )
            per_epoch = len(training) // num
            epoch, start = divmod(number - 1, per_epoch)
            order = np.random.default_rng((seed, epoch)).permutation(len(training))
            return {training[i].id: training[i] for i in order[start * num : (start + 1) * num]}

        def make_agent(sampler: Sampler, temperature: float, top_p: float) -> Agent:
            return Agent(
                sampler,
                ChatRenderer(tokenizer),
                SamplingParams(max_tokens=step_tokens, temperature=temperature, top_p=top_p, stop=math.STOP),
                max_turns=max_steps,
                max_tokens=max_steps * step_tokens,
                final_request=math.FINAL_REQUEST,
                final_tokens=step_tokens,
            )

        def opening_length(problem: math.Problem) -> int:
            return len(ChatRenderer(tokenizer).opening(math.build_opening(problem.question, num_examples=num_examples)))

        longest = max(map(opening_length, problems)) + len(tokenizer.encode(math.FINAL_REQUEST)) + 64  # the template's own
        content = json.dumps([asdict(problem) for problem in problems])
        yield Task(
            tokenizer,
            make_agent,
            lambda: math.MathEnvironment(grader, num_examples=num_examples),
            problems=draw,
            held_out=lambda num: {problem.id: problem for problem in kept[:num]},
            read=read_context,
            context_length=longest + (max_steps + 1) * step_tokens,
            branch_every=1,
            evaluation=(0.6, 0.95),
            identity=f"math {hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}",
        )
