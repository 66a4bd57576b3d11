"""`detour`: a search that can follow a misleading lead and recover; text pages, one reward at the end, exact values.

The agent stands before one page at a time and wants `num_hops` right leads in a row. A wrong lead takes it off the track,
where pages look alike and evidence is mostly bad; going back undoes one hop. What stands on a page is another with every
reply, so that what helps is a skill and not a page known by heart. The agent never sees whether it is on the track, only the
page: so a policy on pages has values that dynamic programming computes exactly. Source: ours, in the spirit of the
project page's "a search that follows a misleading lead, and the step that recovers from it".

A page is seven characters, such as "3cBDA+.":

    3     depth, right and wrong hops together (a base-36 digit)
    c     what is looked for, one of a to f
    BDA   three leads; the right one matches what is looked for under a permutation that the page does not show
    +     evidence: "-" speaks against being on the track
    .     the lead that was followed last since the last right hop, 1 to 3, or "."

Replies are "1", "2" or "3" to follow a lead and "<" to go back; anything else loses a step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from focus_jax.agents import Action, Message, Observation

ACTIONS = "123<"
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
"""For the agent's renderer: a page, and ">" to ask for a reply."""
PAGE_LENGTH = 7

_MAX_WRONG = 3
_NUM_KINDS, _NUM_LEADS = 6, 3
_MATCH = np.array([2, 4, 0, 5, 1, 3])  # which lead matches what is looked for; policies have to learn it


@dataclass(frozen=True)
class Level:
    """How hard a search is.

    Attributes:
        num_hops: right leads to find, at most 32.
        max_steps: replies after which the episode ends with reward 0.
        bad_evidence: how often a page shows bad evidence, by the number of wrong hops to it, 0 to 3.
        false_match: how often a page off the track shows a lead that seems right.
        num_views: contents that every page has, shown in turn, one after each reply.
    """

    num_hops: int
    max_steps: int
    bad_evidence: tuple[float, float, float, float] = (0.1, 0.6, 0.8, 0.9)
    false_match: float = 0.5
    num_views: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.num_hops <= 32:
            raise ValueError(f"Level: expected `num_hops` from 1 to 32, got {self.num_hops}")
        if self.num_views < 1:
            raise ValueError(f"Level: expected `num_views` of at least 1, got {self.num_views}")
        if self.max_steps < self.num_hops:
            raise ValueError(f"Level: expected `max_steps` of at least `num_hops`, {self.num_hops}, got {self.max_steps}")
        object.__setattr__(self, "bad_evidence", tuple(self.bad_evidence))
        if len(self.bad_evidence) != _MAX_WRONG + 1 or not all(0 <= p <= 1 for p in (*self.bad_evidence, self.false_match)):
            raise ValueError(f"Level: expected four `bad_evidence` and a `false_match` in [0, 1], got {self}")

    @property
    def num_pages(self) -> int:
        """Pages of one search: views x right hops x wrong hops x lead followed last."""
        return self.num_views * self.num_hops * (_MAX_WRONG + 1) * (_NUM_LEADS + 1)


LEVELS = {"short": Level(5, 24), "medium": Level(7, 32), "long": Level(10, 48), "longest": Level(10, 64)}


@dataclass(frozen=True)
class Search:
    """One search, laid out as tables over its pages (S) and actions; page 0 is the start, "page" S the goal.

    Attributes:
        text: uint8 [S, 7], the pages' characters.
        next: int32 [S, 4], where each action leads.
        hops: int32 [S], right hops so far.
        wrong: int32 [S], wrong hops since.
    """

    text: np.ndarray
    next: np.ndarray
    hops: np.ndarray
    wrong: np.ndarray


@dataclass(frozen=True)
class Problem:
    """A search to start: fixed by its level and a seed, which is a whole number of at least 0."""

    level: Level
    seed: int


@lru_cache(maxsize=4096)
def make_search(problem: Problem) -> Search:
    """Draw the pages of a problem; read-only, kept for the problems asked for last.

    Example:
        >>> search = make_search(Problem(LEVELS["short"], seed=0))
        >>> search.text[0].tobytes().decode(), search.next[0].tolist()
        ('0fBDF+.', [85, 96, 87, 80])
    """
    level = problem.level
    rng = np.random.default_rng(problem.seed)
    sites = (level.num_views, level.num_hops, _MAX_WRONG + 1)
    wanted = rng.integers(_NUM_KINDS, size=sites)
    match = _MATCH[wanted][..., None]
    leads = (match + rng.integers(1, _NUM_KINDS, size=(*sites, _NUM_LEADS))) % _NUM_KINDS  # none of them matches
    place = rng.integers(_NUM_LEADS, size=sites)
    matching = rng.random(sites) < level.false_match
    matching[..., 0] = True
    leads = np.where((np.arange(_NUM_LEADS) == place[..., None]) & matching[..., None], match, leads)
    bad = rng.random(sites) < level.bad_evidence

    view, hops, wrong, last = (axis.ravel() for axis in np.indices((*sites, _NUM_LEADS + 1)))
    here = (view, hops, wrong)

    def page(hops: np.ndarray, wrong: np.ndarray | int = 0, last: np.ndarray | int = 0) -> np.ndarray:
        return np.ravel_multi_index(
            np.broadcast_arrays((view + 1) % level.num_views, hops, wrong, last), (*sites, _NUM_LEADS + 1)
        )

    onward = np.where(hops + 1 < level.num_hops, page(np.minimum(hops + 1, level.num_hops - 1)), level.num_pages)
    off = [page(hops, np.minimum(wrong + 1, _MAX_WRONG), lead) for lead in range(1, _NUM_LEADS + 1)]
    back = np.where(wrong > 0, page(hops, np.maximum(wrong - 1, 0), last), page(np.maximum(hops - 1, 0)))
    is_right = [(wrong == 0) & (place[here] == lead) for lead in range(_NUM_LEADS)]
    follow = np.where(is_right, onward, off)
    columns = (
        _digits(hops + wrong),
        ord("a") + wanted[here],
        *(ord("A") + leads[here].T),
        np.where(bad[here], ord("-"), ord("+")),
        np.where(last > 0, ord("0") + last, ord(".")),
    )
    tables = (np.stack(columns, 1).astype(np.uint8), np.column_stack([*follow, back]), hops, wrong)
    text, *numbers = tables
    search = Search(text, *(np.asarray(table, np.int32) for table in numbers))
    for table in vars(search).values():
        table.flags.writeable = False
    return search


class DetourEnvironment:
    """The search as text; a task is a `Problem`.

    Example:
        >>> environment = DetourEnvironment()
        >>> environment.reset(Problem(LEVELS["short"], seed=0)).messages[0].content
        '0fBDF+.'
        >>> environment.step(Action("2", ended=True)).messages[0].content[0]
        '1'
    """

    blocking = False

    def __init__(self) -> None:
        self._problem: Problem | None = None
        self._page = self._step = 0

    def reset(self, task: Problem) -> Observation:
        if not isinstance(task, Problem):
            raise TypeError(f"expected a detour.Problem, got {type(task).__name__}")
        self._problem, self._page, self._step = task, 0, 0
        return Observation((self._message(),))

    def step(self, action: Action) -> Observation:
        search = make_search(self._running)
        reply = action.text.strip()
        if len(reply) == 1 and reply in ACTIONS:
            self._page = int(search.next[self._page, ACTIONS.index(reply)])
        self._step += 1
        if self._page == len(search.next):
            return Observation(reward=1.0, done=True)
        if action.last or self._step >= self._running.level.max_steps:
            return Observation(done=True)
        return Observation((self._message(),))

    def snapshot(self) -> bytes:
        return json.dumps([asdict(self._running.level), self._running.seed, self._page, self._step]).encode()

    def restore(self, snapshot: bytes) -> None:
        level, seed, self._page, self._step = json.loads(snapshot)
        self._problem = Problem(Level(**level), seed)

    @property
    def _running(self) -> Problem:
        if self._problem is None:
            raise RuntimeError("no search has been started: call `reset` or `restore` first")
        return self._problem

    def _message(self) -> Message:
        return Message("user", make_search(self._running).text[self._page].tobytes().decode())


def where_is(snapshot: bytes) -> tuple[int, int, int]:
    """What the agent is not told: right hops, wrong hops since, and replies so far, from an environment's snapshot."""
    level, seed, page, step = json.loads(snapshot)
    search = make_search(Problem(Level(**level), seed))
    return int(search.hops[page]), int(search.wrong[page]), step


def page_of(snapshot: bytes) -> tuple[int, int]:
    """Page and replies so far, the indices of `exact_values`, from an environment's snapshot."""
    *_, page, step = json.loads(snapshot)
    return page, step


def exact_values(next_page: ArrayLike, probs: ArrayLike, max_steps: int) -> jax.Array:
    """Chance to reach the goal under a policy on pages, by dynamic programming from the last step back.

        V[t, s] = sum_a p(a | s) V[t + 1, next(s, a)] + (1 - sum_a p(a | s)) V[t + 1, s],  V[t, goal] = 1, V[max_steps, s] = 0

    Args:
        next_page: int32 [S, 4], of a `Search`.
        probs: float32 [S, 4], of the four replies on each page; the rest of the probability loses a step.
        max_steps: of the level.

    Returns:
        float32 [max_steps + 1, S + 1], by replies so far and page, the goal last.

    Example:
        >>> search = make_search(Problem(Level(1, 3), seed=0))
        >>> values = exact_values(search.next, jnp.full((64, 4), 0.25), 3)
        >>> print(values[2, 0], values[1, 0])  # one reply left; two left: the right lead, or back and then the right lead
        0.25 0.3125
    """
    next_page = jnp.asarray(next_page, jnp.int32)
    probs = jnp.asarray(probs, jnp.float32)
    stay = 1 - jnp.sum(probs, -1)

    def back(after: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        pages = jnp.sum(probs * after[next_page], -1) + stay * after[:-1]
        before = jnp.append(pages, 1.0)
        return before, before

    end = jnp.zeros(len(next_page) + 1, jnp.float32).at[len(next_page)].set(1)
    _, values = jax.lax.scan(back, end, length=max_steps)
    return jnp.concatenate([values[::-1], end[None]])


def demonstrations(problems: Sequence[Problem], *, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pages and replies of an expert who knows the track: the right lead, or back; with chance `noise` any reply.

    Returns:
        uint8 [num, 7] pages and uint8 [num] replies (characters), of one episode for every problem.
    """
    rng = np.random.default_rng(seed)
    pages, replies = [], []
    for problem in problems:
        search = make_search(problem)
        goal, page = len(search.next), 0
        for _ in range(problem.level.max_steps):
            after = search.next[page]
            best = int(np.argmax(np.where(after == goal, problem.level.num_hops, search.hops[after % goal])))
            action = 3 if search.wrong[page] else best
            if rng.random() < noise:
                action = int(rng.integers(len(ACTIONS)))
            pages.append(search.text[page])
            replies.append(ord(ACTIONS[action]))
            page = int(search.next[page, action])
            if page == goal:
                break
    return np.stack(pages), np.array(replies, np.uint8)


def _digits(numbers: np.ndarray) -> np.ndarray:
    """Base-36 digits as characters."""
    return np.where(numbers < 10, ord("0") + numbers, ord("A") - 10 + numbers)
