"""The detour task: pages, moves, exact values, and the environment around them."""

import asyncio
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import reference

from focus_jax.agents import Action, Agent, ChatRenderer, LatestOnly, SamplingParams, check_environment
from focus_jax.sampling import ByteTokenizer, ScriptedSampler
from focus_jax.tasks.detour import (
    ACTIONS,
    CHAT_TEMPLATE,
    LEVELS,
    DetourEnvironment,
    Level,
    Problem,
    demonstrations,
    exact_values,
    make_search,
    page_of,
    where_is,
)

LONG = LEVELS["long"]
STILL = replace(LONG, num_views=1)
MATCHES = dict(zip("abcdef", "CEAFBD", strict=True))


def act(environment, reply):
    return environment.step(Action(reply, ended=False))


def test_resumes_like_any_environment():
    check_environment(DetourEnvironment, [Problem(LEVELS["short"], seed) for seed in range(3)])


def test_pages_say_what_they_should():
    searches = [make_search(Problem(LONG, seed)) for seed in range(200)]
    texts = np.stack([s.text for s in searches])
    hops, wrong = searches[0].hops, searches[0].wrong
    assert (texts[:, :, 0] == [ord("0123456789ABC"[d]) for d in hops + wrong]).all()
    wanted = np.vectorize(lambda kind: ord(MATCHES[chr(kind)]))(texts[:, :, 1])
    matching = (texts[:, :, 2:5] == wanted[..., None]).any(-1)
    assert matching[:, wrong == 0].all()
    assert matching[:, wrong > 0].mean() == pytest.approx(0.5, abs=0.03)
    bad = texts[:, :, 5] == ord("-")
    assert [bad[:, wrong == w].mean() for w in range(4)] == pytest.approx([0.1, 0.6, 0.8, 0.9], abs=0.03)
    assert np.isin(texts[:, :, 5], [ord("+"), ord("-")]).all()


def test_moves():
    """The right lead goes forward; a wrong one leads off, going back undoes it, and the page shows what was tried."""
    problem = Problem(STILL, seed=5)
    environment = DetourEnvironment()
    page = environment.reset(problem).messages[0].content
    for hop in range(LONG.num_hops):
        right = page[2:5].index(MATCHES[page[1]]) + 1
        wrong = right % 3 + 1
        off = act(environment, str(wrong)).messages[0].content
        assert where_is(environment.snapshot())[:2] == (hop, 1)
        assert (int(off[0], 36), off[6]) == (hop + 1, str(wrong))
        again = act(environment, "<").messages[0].content
        assert again == page[:6] + str(wrong)
        answer = act(environment, str(right))
        page = answer.messages[0].content if answer.messages else ""
    assert (answer.reward, answer.done) == (1.0, True)


def test_going_back_on_the_track_undoes_a_hop():
    environment = DetourEnvironment()
    page = environment.reset(Problem(STILL, seed=1)).messages[0].content
    act(environment, str(page[2:5].index(MATCHES[page[1]]) + 1))
    assert where_is(environment.snapshot()) == (1, 0, 1)
    assert act(environment, "<").messages[0].content == page
    assert act(environment, "<").messages[0].content == page  # there is nothing before the start
    assert where_is(environment.snapshot()) == (0, 0, 3)


def test_a_page_shows_something_else_each_time_and_all_of_it_again_after_a_while():
    environment = DetourEnvironment()
    seen = [environment.reset(Problem(LONG, seed=1)).messages[0].content]
    seen += [act(environment, "<").messages[0].content for _ in range(7)]
    assert seen[:4] == seen[4:]
    assert len(set(seen)) == LONG.num_views == 4
    assert {page[0] for page in seen} == {"0"}


def test_views_are_walked_in_turn():
    search = make_search(Problem(LONG, seed=3))
    each = LONG.num_pages // LONG.num_views
    view = np.arange(LONG.num_pages) // each
    inside = search.next < LONG.num_pages
    assert (search.next // each == (view[:, None] + 1) % 4)[inside].all()
    assert (~inside).sum(1).max() == 1
    assert set(search.hops[(~inside).any(1)]) == {LONG.num_hops - 1}


@pytest.mark.parametrize("reply", ["", "4", "12", "go", "<<"])
def test_other_replies_lose_a_step(reply):
    environment = DetourEnvironment()
    page = environment.reset(Problem(LEVELS["short"], seed=0)).messages[0].content
    assert act(environment, reply).messages[0].content == page
    assert page_of(environment.snapshot()) == (0, 1)


def test_the_cap_and_the_last_action_end_it_without_reward():
    environment = DetourEnvironment()
    environment.reset(Problem(Level(2, 3), seed=0))
    answers = [act(environment, "x") for _ in range(3)]
    assert [(a.done, a.reward) for a in answers] == [(False, 0.0), (False, 0.0), (True, 0.0)]
    environment.reset(Problem(Level(2, 3), seed=0))
    assert environment.step(Action("x", ended=False, last=True)).done


def test_the_goal_on_the_last_step_counts():
    problem = Problem(Level(1, 1), seed=3)
    page = make_search(problem).text[0].tobytes().decode()
    environment = DetourEnvironment()
    environment.reset(problem)
    answer = act(environment, str(page[2:5].index(MATCHES[page[1]]) + 1))
    assert (answer.done, answer.reward) == (True, 1.0)


def test_exact_values_are_those_of_the_recursion():
    rng = np.random.default_rng(0)
    level = Level(2, 6)
    search = make_search(Problem(level, 4))
    probs = rng.dirichlet(np.ones(5), size=level.num_pages)[:, :4]
    values = exact_values(search.next, jnp.asarray(probs, jnp.float32), level.max_steps)
    np.testing.assert_allclose(values, reference.detour_values(search.next, probs, level.max_steps), atol=1e-6)


def test_exact_values_are_what_episodes_earn():
    rng = np.random.default_rng(1)
    problem = Problem(Level(2, 12), seed=7)
    search = make_search(problem)
    probs = rng.dirichlet(2 * np.ones(5), size=problem.level.num_pages)
    value = float(exact_values(search.next, jnp.asarray(probs[:, :4], jnp.float32), 12)[0, 0])
    environment = DetourEnvironment()
    num, successes = 3000, 0
    for _ in range(num):
        environment.reset(problem)
        done = False
        while not done:
            page, _ = page_of(environment.snapshot())
            answer = act(environment, (ACTIONS + "x")[rng.choice(5, p=probs[page])])
            done = answer.done
        successes += answer.reward
    assert 0.05 < value < 0.95
    assert successes / num == pytest.approx(value, abs=4 * (value * (1 - value) / num) ** 0.5)


def test_demonstrations_without_noise_go_straight_to_the_goal():
    problems = [Problem(LONG, seed) for seed in range(20)]
    pages, replies = demonstrations(problems, noise=0.0, seed=0)
    assert len(pages) == len(replies) == 20 * LONG.num_hops
    for page, reply in zip(pages, replies, strict=True):
        page = page.tobytes().decode()
        assert page[2:5].index(MATCHES[page[1]]) + 1 == int(chr(reply))


def test_noisy_demonstrations_recover():
    problems = [Problem(LONG, seed) for seed in range(40)]
    pages, replies = demonstrations(problems, noise=0.4, seed=0)
    assert 0.2 < np.mean(replies == ord("<")) < 0.6
    assert len(pages) < 40 * LONG.max_steps  # many arrive


def test_an_agent_sees_one_page_at_a_time():
    tokenizer = ByteTokenizer()
    sampler = ScriptedSampler(["1", "2", "<", "3", "1"], tokenizer)
    renderer = ChatRenderer(tokenizer, chat_template=CHAT_TEMPLATE)
    agent = Agent(sampler, renderer, SamplingParams(max_tokens=1), LatestOnly(branch_every=4), max_turns=48)
    environment = DetourEnvironment()

    async def play():
        root = await agent.start(environment, Problem(LONG, 0))
        return root, *await agent.segment(environment, root, seed=0, charge=lambda num: None)

    root, segment, state = asyncio.run(play())
    search = make_search(Problem(LONG, 0))
    pages = [0]
    for reply in "12<3":
        pages.append(int(search.next[pages[-1], ACTIONS.index(reply)]))
    prompts = [search.text[page].tobytes().decode() + ">" for page in pages]
    assert tokenizer.decode(root.context.tolist()) == prompts[0]
    assert [tokenizer.decode(p.tolist()) for p, _ in segment.rows(root.context)] == prompts
    assert (segment.num_generated, segment.num_steps, segment.status) == (4, 4, "open")
    assert page_of(state.environment) == (pages[-1], 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5), "`num_hops` from 1 to 32, got 0"),
        ((33, 50), "`num_hops` from 1 to 32, got 33"),
        ((5, 4), "`max_steps` of at least `num_hops`, 5, got 4"),
        ((5, 9, (0.1, 0.2, 0.3)), "four `bad_evidence`"),
        ((5, 9, (0.1, 0.2, 0.3, 1.5)), "four `bad_evidence`"),
        ((5, 9, (0.1, 0.2, 0.3, 0.4), float("nan")), "four `bad_evidence` and a `false_match`"),
    ],
)
def test_levels_that_mean_nothing_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Level(*arguments)


def test_misuse_is_named():
    with pytest.raises(RuntimeError, match="call `reset` or `restore` first"):
        act(DetourEnvironment(), "1")
    with pytest.raises(TypeError, match=r"expected a detour.Problem, got str"):
        DetourEnvironment().reset("long")
