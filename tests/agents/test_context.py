"""Context managers: where the branch points are, and what survives a summary."""

import re

import numpy as np
import pytest
from agent_fakes import CHATML, QWEN3, CountingEnvironment, make_agent, make_sample, run

from focus_jax.agents import AppendOnly, EnvironmentFailure, LatestOnly, Message, Summarize

NOTES = "State: s\n## Evidence\ne\n**Open questions**\n4. next steps\nn"
END = "<|im_end|>\n<|im_start|>assistant\n"
GO_ON = f"<|im_end|>\n<|im_start|>user\nThe transcript up to these notes of yours has been cleared. Go on from here.{END}"


def text_of(agent, ids):
    return agent.renderer.tokenizer.decode(ids)


def test_append_only_branches_after_every_turn():
    segments, states, _ = run(make_agent(["a", "b", "done"], context_manager=AppendOnly()))
    assert [(p.status, p.reason, p.num_steps) for p in segments] == [
        ("open", "turn", 1),
        ("open", "turn", 1),
        ("terminal", "done", 1),
    ]
    assert [s.num_turns for s in states] == [0, 1, 2, 3]


def test_summary_replaces_the_transcript_and_is_trained():
    agent = make_agent(["a", "b", NOTES, "done"], context_manager=Summarize(trigger_calls=2, summary_tokens=200))
    segments, states, charged = run(agent, {"opening": [["system", "s"], ["user", "q"]]})
    first, second = segments
    assert (first.status, first.reason, first.num_steps, first.reward) == ("open", "compaction", 2, 0.0)
    # Two task turns and the summary, all trained; only the task turns are task tokens.
    assert first.num_generated == sum(charged[:3]) == 2 + 2 + len(NOTES) + 1
    assert int(first.task.sum()) == 4
    assert first.token_ids[first.generated & ~first.task].tolist() == agent.sampler.samples[2].ids.tolist()
    assert np.isfinite(first.logprobs).all()
    # The request came with the observation, in one user message.
    transcript = text_of(agent, first.token_ids)
    assert "user\nturn 2\n\nYour transcript is about to be cleared." in transcript
    assert "Use these headings: State, Evidence, Open questions, Next steps.<|im_end|>" in transcript
    # What the next segment sees: the opening and the notes.
    state = states[1]
    assert state.context.tolist() == first.resets[0].context.tolist() == agent.sampler.prompts[3].tolist()
    opening = text_of(agent, states[0].context[: states[0].seed_length])
    assert text_of(agent, state.context) == f"{opening}<|im_start|>assistant\n{NOTES}{GO_ON}"
    assert (state.seed_length, state.num_turns) == (states[0].seed_length, 2)
    assert (second.status, second.num_steps) == ("terminal", 1)


def test_environment_and_workspace_survive():
    environment = CountingEnvironment()
    manager = Summarize(trigger_calls=2, summary_tokens=200, workspace=lambda env: f"log: {env.log}")
    agent = make_agent(["a", "b", NOTES, "done"], context_manager=manager)
    _, states, _ = run(agent, environment=environment)
    assert text_of(agent, states[1].context).endswith(f"Go on from here.\n\nYour workspace:\n\nlog: ['a', 'b']{END}")
    assert environment.log == ["a", "b", "done"]


def test_trigger_by_prompt_tokens():
    manager = Summarize(trigger_tokens=300, summary_tokens=200)
    agent = make_agent(["a", "b", "c", NOTES, "done"], context_manager=manager)
    segments, _, _ = run(agent, {"observation": [["user", "o" * 90]]})
    assert [p.num_steps for p in segments] == [3, 1]
    prompts = [len(p) for p in agent.sampler.prompts]
    assert prompts[2] < 300 < prompts[3]


def test_segment_spans_turns_until_the_trigger_and_counts_start_anew():
    agent = make_agent(["a", "b", NOTES, "c", "d", NOTES, "done"], context_manager=Summarize(trigger_calls=2, summary_tokens=200))
    segments, states, _ = run(agent)
    assert [(p.num_steps, p.reason) for p in segments] == [(2, "compaction"), (2, "compaction"), (1, "done")]
    assert [s.num_turns for s in states] == [0, 2, 4, 5]
    assert text_of(agent, states[2].context).count("these notes of yours") == 1


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ("", "they are empty"),
        ("<think>State\nEvidence\nOpen questions\nNext steps</think>", "they are empty"),
        (make_sample([65] * 50, NOTES, "length"), "they were cut off at 200 tokens"),
        ("State\nEvidence\nNext steps", "the heading 'Open questions' is missing"),
        ("The State, Evidence, Open questions and Next steps", "the heading 'State' is missing"),
    ],
)
def test_malformed_summary_gets_one_repair(bad, fault):
    agent = make_agent(["a", bad, NOTES, "done"], context_manager=Summarize(trigger_calls=1, summary_tokens=200))
    (first, _), states, charged = run(agent)
    assert f"user\nThese notes cannot be used: {fault}. Write them again, complete.<|im_end|>" in text_of(agent, first.token_ids)
    assert text_of(agent, states[1].context).endswith(NOTES + GO_ON)
    assert first.reward == 0.0
    assert first.num_steps == 1
    assert first.num_generated == sum(charged[:3])


@pytest.mark.parametrize(
    ("attempts", "kept"), [(("poor", "still poor"), "still poor"), (("poor", ""), "poor"), (("", ""), "(no notes)")]
)
def test_summary_that_stays_malformed_costs_the_penalty(attempts, kept):
    manager = Summarize(trigger_calls=2, summary_tokens=200, penalty=0.25)
    agent = make_agent(["a", "b", *attempts, "done"], context_manager=manager, gamma=0.9)
    (first, _), states, _ = run(agent, {"reward": 1.0})
    assert first.reward == pytest.approx(1.0 + 0.9 - 0.81 * 0.25)
    assert (first.status, first.num_steps) == ("open", 2)
    assert text_of(agent, states[1].context).endswith(f"assistant\n{kept}{GO_ON}")


def test_repair_is_skipped_without_room_for_it():
    manager = Summarize(trigger_calls=1, summary_tokens=200, penalty=0.25)
    agent = make_agent(["a", "poor", "done"], context_manager=manager, max_tokens=205)
    (first, _), states, _ = run(agent)
    assert first.reward == -0.25
    assert text_of(agent, states[1].context).endswith(f"poor{GO_ON}")


def test_sections_may_be_free():
    manager = Summarize(trigger_calls=1, summary_tokens=200, sections=None, request="notes?")
    agent = make_agent(["a", "anything", "done"], context_manager=manager)
    (first, _), states, _ = run(agent)
    assert "notes?<|im_end|>" in text_of(agent, first.token_ids)
    assert first.reward == 0.0
    assert text_of(agent, states[1].context).endswith(f"anything{GO_ON}")


def test_reasoning_is_not_carried_over():
    agent = make_agent(
        ["a", f"<think>hm</think>\n{NOTES}", "done"], context_manager=Summarize(trigger_calls=1, summary_tokens=200)
    )
    (first, _), states, _ = run(agent)
    assert "hm</think>" in text_of(agent, first.token_ids)
    assert text_of(agent, states[1].context).endswith(f"assistant\n{NOTES}{GO_ON}")


def test_stop_strings_hold_for_task_turns_only():
    agent = make_agent(["a", NOTES, "done"], stop=("\n\n",), context_manager=Summarize(trigger_calls=1, summary_tokens=200))
    run(agent)
    assert [p.stop for p in agent.sampler.params] == [("\n\n",), (), ("\n\n",)]
    assert [p.max_tokens for p in agent.sampler.params] == [100, 200, 100]


def test_summary_without_room_is_not_asked_for():
    """The trajectory goes on, unharmed, and runs into its cap."""
    manager = Summarize(trigger_calls=1, summary_tokens=200)
    agent = make_agent(lambda n, prompt, params: "a", context_manager=manager, max_tokens=150, max_turns=3)
    (only,), states, _ = run(agent)
    assert (only.status, only.reason, only.reward) == ("terminal", "turn_cap", 1.0)
    transcript = text_of(agent, states[1].context)
    assert "about to be cleared" not in transcript
    assert [transcript.count(f"turn {i}") for i in (1, 2, 3)] == [1, 1, 1]


def test_summary_of_a_conversation_with_tools():
    """The observation is a tool message, the request a user message after it."""
    agent = make_agent(["a", NOTES, "done"], template=QWEN3, context_manager=Summarize(trigger_calls=1, summary_tokens=200))
    (first, _), _, _ = run(agent, {"observation": [["tool", "7"]]})
    assert re.search(r"7\n</tool_response><\|im_end\|>\n<\|im_start\|>user\nYour transcript", text_of(agent, first.token_ids))


def test_summary_under_a_template_that_wants_alternation():
    strict = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{{ raise_exception('alternate!') if (m.role == 'user') == (loop.index0 % 2 == 1) }}",
    )
    manager = Summarize(trigger_calls=1, summary_tokens=200)
    agent = make_agent(["a", "poor", NOTES, "b", NOTES, "c", "answer"], template=strict, context_manager=manager, max_turns=3)
    segments, _, _ = run(agent)
    assert [p.reason for p in segments] == ["compaction", "compaction", "turn_cap"]


def test_compaction_that_leaves_no_room_is_a_failure():
    manager = Summarize(trigger_calls=1, summary_tokens=200, workspace=lambda env: "w" * 5000)
    with pytest.raises(
        EnvironmentFailure, match=r"after compaction the context would hold 5\d\d\d tokens, at most \d+ leave room"
    ):
        run(make_agent(["a", NOTES], context_manager=manager))


def test_broken_workspace_is_an_environment_failure():
    manager = Summarize(trigger_calls=1, summary_tokens=200, workspace=lambda env: env.nothing)
    with pytest.raises(EnvironmentFailure, match="`workspace` raised AttributeError"):
        run(make_agent(["a", NOTES], context_manager=manager))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected `trigger_tokens`, `trigger_calls` or both, got neither"),
        ({"trigger_calls": 0}, "expected `trigger_calls` of at least 1, got 0"),
        ({"trigger_tokens": -5}, "expected `trigger_tokens` of at least 1, got -5"),
        ({"trigger_calls": 1, "summary_tokens": 0}, "expected `summary_tokens` of at least 1, got 0"),
        ({"trigger_calls": 1, "penalty": -1.0}, "expected a finite `penalty` >= 0, got -1.0"),
        ({"trigger_calls": 1, "penalty": float("nan")}, "expected a finite `penalty` >= 0, got nan"),
    ],
)
def test_bad_numbers_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Summarize(**options)


# A third context manager is a class with one method.


class Forget:
    """Every second turn, starts from the opening alone."""

    async def after_turn(self, segment):
        if segment.num_turns != 2:
            return False
        await segment.replace([Message("user", "Start over.")])
        return True


def test_third_context_manager():
    agent = make_agent(["a", "b", "done"], context_manager=Forget())
    (first, _), states, _ = run(agent)
    assert (first.status, first.reason, first.num_steps) == ("open", "compaction", 2)
    assert text_of(agent, states[1].context).endswith(
        "count<|im_end|>\n<|im_start|>user\nStart over.<|im_end|>\n<|im_start|>assistant\n"
    )
    # The observation that was waiting belongs to the segment.
    assert text_of(agent, first.token_ids).endswith("turn 2<|im_end|>\n<|im_start|>assistant\n")
    assert agent.max_generated(states[0]) == agent.max_tokens + agent.final_tokens


def test_messages_cannot_follow_the_invitation_of_a_new_context():
    class Greedy:
        async def after_turn(self, segment):
            await segment.replace([Message("user", "x")])
            await segment.append([Message("user", "y")])
            return True

    with pytest.raises(RuntimeError, match="has just been replaced and awaits a reply"):
        run(make_agent(["a"], context_manager=Greedy()))


def test_latest_only_shows_one_observation_and_branches_now_and_then():
    agent = make_agent(["a", "b", "c", "d", "done"], context_manager=LatestOnly(branch_every=2))
    segments, states, charged = run(agent)
    assert [(p.status, p.reason, p.num_steps, len(p.resets)) for p in segments] == [
        ("open", "compaction", 2, 2),
        ("open", "compaction", 2, 2),
        ("terminal", "done", 1, 0),
    ]
    prompts = [text_of(agent, p) for p in agent.sampler.prompts]
    assert prompts[1:] == [f"<|im_start|>user\nturn {i}{END}" for i in (1, 2, 3, 4)]
    for segment, state, after in zip(segments, states, states[1:], strict=False):
        rows = list(segment.rows(state.context))
        generated = [segment.token_ids[span][segment.generated[span]].tolist() for _, span in rows]
        first = state.num_turns
        for i in range(segment.num_steps):  # every reply follows the prompt it was sampled from
            assert rows[i][0].tolist() == agent.sampler.prompts[first + i].tolist()
            assert generated[i] == agent.sampler.samples[first + i].ids.tolist()
        if segment.status == "open":
            assert after.context.tolist() == rows[-1][0].tolist()
            assert not generated[-1]
    assert sum(s.num_generated for s in segments) == sum(charged)


def test_latest_only_refuses_no_branch_points():
    with pytest.raises(ValueError, match="`branch_every` of at least 1, got 0"):
        LatestOnly(branch_every=0)


def test_generating_without_room_is_a_mistake():
    class Chatty:
        async def after_turn(self, segment):
            while True:
                await segment.generate(50)
                await segment.append([Message("user", "more")])

    with pytest.raises(RuntimeError, match="no room to generate"):
        run(make_agent(lambda n, prompt, params: "x", context_manager=Chatty(), max_tokens=20))
