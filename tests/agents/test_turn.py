"""The agent's turns: what a segment records, where it ends, what it costs, and who failed."""

import asyncio
import random
import threading

import numpy as np
import pytest
from agent_fakes import CHATML, QWEN3, CountingEnvironment, ScriptedPolicy, ToyTokenizer, make_agent, make_sample, run

from focus_jax.agents import (
    Agent,
    AttemptFailure,
    ChatRenderer,
    EnvironmentFailure,
    GraderFailure,
    Message,
    Observation,
    SamplerError,
    SamplingParams,
    Summarize,
    classify_failure,
)

END = 258  # <|im_end|>


def say(text):
    return ScriptedPolicy([]).say(text)


def start(agent, task=None, environment=None):
    return asyncio.run(agent.start(environment or CountingEnvironment(), task or {}))


def segment(agent, state, environment=None, seed=0, charge=lambda n: None):
    return asyncio.run(agent.segment(environment or CountingEnvironment(), state, seed=seed, charge=charge))


def test_root_is_the_opening():
    agent = make_agent([])
    root = start(agent, {"opening": [["system", "s"], ["user", "q"]]})
    text = agent.renderer.tokenizer.decode(root.context)
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    seed = agent.renderer.tokenizer.decode(root.context[: root.seed_length])
    assert text == seed + "<|im_start|>assistant\n"
    assert not root.context.flags.writeable
    assert (root.num_turns, root.num_tokens, root.resumable) == (0, 0, True)


def test_segments_chain_and_masks_align():
    """B05: a training row is parent context + token_ids; every array lines up with the ids that were sampled."""
    agent = make_agent(["one", "done"], version=7)
    segments, states, charged = run(agent)
    for parent, piece, child, prompt, sample in zip(
        states, segments, states[1:], agent.sampler.prompts, agent.sampler.samples, strict=False
    ):
        assert child.context.tolist() == [*parent.context, *piece.token_ids]
        # Labels are the row without its first id: the trained labels are the sampled ids, each with its own log-prob.
        row = np.concatenate([parent.context, piece.token_ids])
        trained = np.concatenate([np.zeros(len(parent.context), bool), piece.generated])[1:]
        assert row[1:][trained].tolist() == sample.ids.tolist()
        assert piece.logprobs[piece.generated].tolist() == sample.logprobs.tolist()
        assert row[: len(prompt)].tolist() == prompt.tolist()
        assert np.flatnonzero(piece.generated)[0] == len(prompt) - len(parent.context)
        assert (piece.logprobs[~piece.generated] == 0).all()
        assert piece.versions.tolist() == [7 if g else -1 for g in piece.generated]
        assert (piece.task == piece.generated).all()
        assert [a.dtype for a in (piece.token_ids, piece.generated, piece.task, piece.logprobs, piece.versions)] == [
            np.int32, bool, bool, np.float32, np.int32
        ]  # fmt: skip
    assert [p.status for p in segments] == ["open", "terminal"]
    assert [p.reason for p in segments] == ["turn", "done"]
    assert [p.num_generated for p in segments] == charged == [4, 5]
    assert states[-1].num_tokens == 9
    assert states[-1].num_turns == 2


def test_rows_are_what_was_sent_and_received():
    """B01: template that strips reasoning, 7 + 5 sampled tokens: 12 trained, none lost, none twice."""
    think = make_sample([60, 61, 62, 63, 64, 65, END], "<think>r</think>A1")
    agent = make_agent([think, make_sample([70, 71, 72, 73, END], "done")], template=QWEN3)
    segments, states, _ = run(agent)
    context, trained = states[0].context, 0
    for piece, prompt, sample in zip(segments, agent.sampler.prompts, agent.sampler.samples, strict=True):
        row = np.concatenate([context, piece.token_ids])
        sent = prompt.tolist() + sample.ids.tolist()
        assert row[: len(sent)].tolist() == sent
        trained += piece.num_generated
        context = row
    assert trained == 12


def test_observation_is_kept_whole_and_untrained():
    """B03: reasoning of 10 tokens, observation of 20: all 20 in the context, mask 0."""
    agent = make_agent([make_sample([*range(40, 50), END], "think"), "done"], template=QWEN3)
    (first, _), states, _ = run(agent, {"observation": [["tool", "#" * 20]]})
    assert (first.token_ids == ord("#")).sum() == 20
    assert not first.generated[first.token_ids == ord("#")].any()
    assert agent.renderer.tokenizer.decode(states[1].context).count("#" * 20) == 1


def test_sampled_tool_call_is_never_rewritten():
    """B09: the next prompt holds the sampled ids as they are."""
    call = '<tool_call>{"b": 1,"a":2}</tool_call>'
    agent = make_agent([call, "done"], template=QWEN3)
    run(agent, {"observation": [["tool", "ok"]]})
    assert call in agent.renderer.tokenizer.decode(agent.sampler.prompts[1])


def test_stop_string_inside_a_token_keeps_the_token():
    """B34: the environment sees the trimmed text, the record keeps the last id as sampled."""
    wide = make_sample([65, 66, 250], "ABC", stop="DE")  # 250 stands for a token that holds "CDEF"
    agent = make_agent([wide, "done"], stop=("DE",))
    environment = CountingEnvironment()
    (first, _), _, _ = run(agent, environment=environment)
    assert environment.log[0] == "ABC"
    assert first.token_ids[:3].tolist() == [65, 66, 250]
    # The policy did not end its turn, so the template does.
    assert first.token_ids[3] == END
    assert agent.sampler.params[0].stop == ("DE",)


def test_action_says_how_the_reply_ended():
    actions = []

    class Watching(CountingEnvironment):
        def step(self, action):
            actions.append(action)
            return super().step(action)

    replies = [make_sample([65], "A", stop="\n"), make_sample([65] * 100, "A" * 100, "length"), say("x")]
    run(make_agent([*replies, "last"], max_turns=3), environment=Watching())
    assert [(a.ended, a.stop, a.last) for a in actions] == [
        (False, "\n", False), (False, None, False), (True, None, False), (True, None, True)
    ]  # fmt: skip


def test_policy_goes_on_within_its_own_message():
    agent = make_agent([make_sample([65, 10], "A", stop="\n"), make_sample([66, 10], "B", stop="\n"), "done"])
    segments, states, _ = run(agent, {"observation": []})
    assert agent.renderer.tokenizer.decode(states[-1].context).endswith("<|im_start|>assistant\nA\nB\ndone<|im_end|>")
    assert all(p.generated.all() for p in segments)
    assert len(segments) == 3


def test_empty_reply_is_a_turn():
    agent = make_agent([make_sample([], ""), "done"])
    segments, states, charged = run(agent)
    assert charged == [0, 5]
    assert segments[0].num_generated == 0
    assert states[1].num_turns == 1
    text = agent.renderer.tokenizer.decode(segments[0].token_ids)
    assert text == "<|im_end|>\n<|im_start|>user\nturn 1<|im_end|>\n<|im_start|>assistant\n"
    last, _ = segment(make_agent([make_sample([], "done")]), states[0])
    assert (last.status, len(last.token_ids), last.token_ids.dtype) == ("terminal", 0, np.int32)


def test_resuming_twice_gives_independent_continuations():
    def reply(number, prompt, params):
        return say(f"s{params.seed}")

    agent = make_agent(reply)
    _, state = segment(agent, start(agent))
    before = (state.context.tolist(), state.environment)
    (a, after_a), (b, after_b), (again, _) = (segment(agent, state, seed=s) for s in (1, 2, 1))
    assert a.token_ids.tolist() != b.token_ids.tolist()
    assert a.token_ids.tolist() == again.token_ids.tolist()
    assert after_a.environment != after_b.environment
    assert (state.context.tolist(), state.environment) == before


def test_every_call_gets_its_own_seed():
    agent = make_agent(["a", "b", "c", "d", "done"], context_manager=Summarize(trigger_calls=99))
    run(agent, seed=3)
    seeds = [p.seed for p in agent.sampler.params]
    assert len(set(seeds)) == 5
    assert all(0 <= s < 2**31 for s in seeds)
    twin = make_agent(["a", "b", "c", "d", "done"], context_manager=Summarize(trigger_calls=99))
    run(twin, seed=3)
    assert [p.seed for p in twin.sampler.params] == seeds


# Rewards and the discount


@pytest.mark.parametrize("length", [1, 500])
def test_discount_counts_task_transitions_not_tokens(length):
    """B13: R = sum gamma^t r_t and d do not depend on how long an observation is."""
    agent = make_agent(["a", "b", "done"], gamma=0.9, context_manager=Summarize(trigger_calls=99))
    (only,), _, _ = run(agent, {"reward": 0.5, "observation": [["user", "x" * length]]})
    assert only.num_steps == 3
    assert only.reward == pytest.approx(0.5 + 0.9 * 0.5 + 0.81 * 1.0)


def test_environment_says_how_many_transitions_a_turn_counts():
    agent = make_agent(["a", "b", "done"], gamma=0.9, context_manager=Summarize(trigger_calls=99))
    (only,), _, _ = run(agent, {"reward": 0.5, "num_transitions": 2})
    assert only.num_steps == 5
    assert only.reward == pytest.approx(0.5 + 0.9**2 * 0.5 + 0.9**4)


# Caps


def advantage(piece, *, value_start, value_end, gamma):
    """Of a segment under the documented rule: a terminal state is worth 0, any other what the critic says."""
    value = 0.0 if piece.status == "terminal" else value_end
    return piece.reward + gamma**piece.num_steps * value - value_start


def test_turn_cap_forces_one_last_answer():
    """B08: the agent wants a third turn; it is asked for its answer, and the environment ends the episode."""
    agent = make_agent(["call", "call", "answer"], max_turns=2)
    segments, states, _ = run(agent)
    assert [(p.status, p.reason) for p in segments] == [("open", "turn"), ("terminal", "turn_cap")]
    assert segments[-1].reward == 1.0
    assert segments[-1].num_steps == 2
    assert segments[-1].task[segments[-1].generated].all()
    # Observation and request came as one user message, the limit and the stop strings are the last turn's own.
    assert "user\nturn 2\n\nanswer!<|im_end|>\n" in agent.renderer.tokenizer.decode(states[-1].context)
    assert agent.sampler.params[-1].max_tokens == 20
    assert agent.sampler.params[-1].stop == ()


def test_turn_cap_bootstraps():
    """B08, B12: cut off, not terminal; the state is the one after the last observation."""
    agent = make_agent(["call", "call"], max_turns=2, cut_off="bootstrap", gamma=0.9)
    segments, states, _ = run(agent)
    last = segments[-1]
    assert (last.status, last.reason, last.num_steps, last.reward) == ("cut_off", "turn_cap", 1, 0.0)
    assert agent.renderer.tokenizer.decode(states[-1].context).endswith("turn 2<|im_end|>\n<|im_start|>assistant\n")
    assert states[-1].resumable
    assert advantage(last, value_start=0.6, value_end=0.7, gamma=0.9) == pytest.approx(0.03)


def test_terminal_does_not_bootstrap():
    """B12: the same values, but the episode is over, with no reward."""

    class Losing(CountingEnvironment):
        def step(self, action):
            return Observation(done=True)

    (last,), _, _ = run(make_agent(["call"], gamma=0.9), environment=Losing())
    assert last.status == "terminal"
    assert advantage(last, value_start=0.6, value_end=0.7, gamma=0.9) == pytest.approx(-0.6)


def test_token_cap():
    agent = make_agent(["x" * 9, "y" * 50, "answer"], max_tokens=16)
    segments, states, charged = run(agent)
    assert [p.max_tokens for p in agent.sampler.params] == [16, 6, 20]
    assert charged == [10, 6, 7]
    assert segments[-1].reason == "token_cap"
    assert states[-1].num_tokens == 23


def test_context_cap_keeps_room_for_the_answer():
    agent = make_agent(lambda n, prompt, params: "z" * 200, context_length=400)
    segments, states, _ = run(agent)
    assert segments[-1].reason == "context_cap"
    assert segments[-1].status == "terminal"
    assert agent.sampler.params[-1].max_tokens == 20
    assert len(states[-1].context) <= 400


def test_observation_too_long_for_the_context_is_left_out():
    agent = make_agent(["x", "answer"], context_length=300)
    segments, states, _ = run(agent, {"observation": [["user", "o" * 1000]]})
    assert (segments[-1].status, segments[-1].reason) == ("terminal", "context_cap")
    text = agent.renderer.tokenizer.decode(states[-1].context)
    assert "o" * 50 not in text
    assert text.endswith("x<|im_end|>\n<|im_start|>user\nanswer!<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>")
    agent = make_agent(["x"], context_length=300, cut_off="bootstrap")
    (only,), (_, state), _ = run(agent, {"observation": [["user", "o" * 1000]]})
    assert (only.status, only.reason, only.token_ids.tolist()) == ("cut_off", "context_cap", [ord("x"), END])
    assert len(state.context) <= 300


def test_environment_must_end_after_the_last_action():
    class Endless(CountingEnvironment):
        def step(self, action):
            return Observation((Message("user", "more"),))

    with pytest.raises(EnvironmentFailure, match="expected `done=True`, got False"):
        run(make_agent(["a", "b"], max_turns=1), environment=Endless())


@pytest.mark.parametrize("context_manager", ["append", "summarize"])
@pytest.mark.parametrize("cut_off", ["forced_submit", "bootstrap"])
def test_max_generated_bounds_every_continuation(context_manager, cut_off):
    """Whatever the policy does, a continuation stays within what its first state announced, and within the context."""
    reached = set()
    for trial in range(60):
        draw = random.Random(trial)

        def reply(number, prompt, params, draw=draw):
            return draw.choice(["", "State\nEvidence\nOpen questions\nNext steps\n"]) + "z" * draw.choice([0, 3, 30, 300])

        manager = {"context_manager": Summarize(trigger_tokens=250, summary_tokens=50)} if context_manager == "summarize" else {}
        agent = make_agent(
            reply,
            context_length=draw.choice([250, 500, 4000]),
            max_tokens=draw.choice([30, 400, 3000]),
            reply_tokens=draw.choice([10, 100]),
            max_turns=draw.choice([1, 3, 6]),
            final_tokens=draw.choice([1, 25]),
            cut_off=cut_off,
            **manager,
        )
        segments, states, charged = run(agent, {"observation": [["user", "o" * draw.choice([1, 100])]]}, seed=trial)
        bound = agent.max_generated(states[0])
        assert sum(charged) == states[-1].num_tokens <= bound
        for i, state in enumerate(states[:-1]):
            assert sum(p.num_generated for p in segments[i:]) <= agent.max_generated(state)
        assert all(len(s.context) <= agent.sampler.context_length for s in states)
        assert states[-1].num_turns <= agent.max_turns + (cut_off == "forced_submit")
        assert segments[-1].status == ("terminal" if cut_off == "forced_submit" else "cut_off")
        reached.add(segments[-1].reason)
    assert reached == {"turn_cap", "token_cap", "context_cap"}


def test_max_generated_is_reached():
    """The bound is exact: the turns left and the free context are counted, not only the tokens."""
    agent = make_agent(lambda n, prompt, params: "z" * 10_000, max_turns=3)
    _, states, charged = run(agent)
    assert [agent.max_generated(s) for s in states[:-1]] == [320, 220, 120]
    assert sum(charged) == 320
    agent = make_agent(lambda n, prompt, params: "z" * 10_000, reply_tokens=1000, context_length=500)
    _, states, charged = run(agent, {"observation": []})
    assert agent.max_generated(states[0]) == sum(charged) < 500


@pytest.mark.parametrize(("caps", "calls"), [({"max_turns": 3}, 2), ({"max_tokens": 4}, 1)])
def test_context_is_not_managed_when_no_turn_follows(caps, calls):
    class Watching:
        turns = ()

        async def after_turn(self, segment):
            self.turns = (*self.turns, segment.num_turns)
            return False

    agent = make_agent(lambda n, prompt, params: "a", context_manager=Watching(), **caps)
    run(agent)
    assert len(agent.context_manager.turns) == calls


# Failures


def test_aborted_reply_is_neither_graded_nor_an_end():
    """B36: 30 tokens charged, the attempt fails, the environment never sees the text."""
    environment, charged = CountingEnvironment(), []
    agent = make_agent([make_sample([65] * 30, "A" * 30, "abort")])
    root = start(agent, environment=environment)
    with pytest.raises(SamplerError, match="broke the reply off after 30 tokens") as error:
        segment(agent, root, environment, charge=charged.append)
    assert charged == [30]
    assert environment.log == []
    assert classify_failure(error.value).kind == "sampler"


def test_versions_are_kept_per_reply():
    """B36: the weights may change between two replies of one segment."""
    replies = [make_sample([65, END], "A", version=1), make_sample([66, END], "done", version=2)]
    (only,), _, _ = run(make_agent(replies, context_manager=Summarize(trigger_calls=9)))
    assert only.versions[only.generated].tolist() == [1, 1, 2, 2]


def test_failed_call_is_charged_what_it_generated():
    charged = []
    agent = make_agent(["a", SamplerError("gone", num_tokens=5)], context_manager=Summarize(trigger_calls=9))
    with pytest.raises(SamplerError, match="gone"):
        segment(agent, start(agent), charge=charged.append)
    assert charged == [2, 5]


def test_sampler_that_ignores_the_limit_is_refused():
    charged = []
    agent = make_agent([make_sample([65] * 101, "A" * 101)])
    with pytest.raises(SamplerError, match="at most 100, the sampler answered 101"):
        segment(agent, start(agent), charge=charged.append)
    assert charged == [101]


class Breaking(CountingEnvironment):
    """Answers a step with what it was given, raising exceptions."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def step(self, action):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Observation(reward=float("nan")), "`step`: expected a finite reward, got nan"),
        (Observation(reward=float("inf"), done=True), "expected a finite reward, got inf"),
        (Observation(reward=None), "expected a finite reward, got None"),
        (Observation(num_transitions=-1), "expected `num_transitions` >= 0, got -1"),
        (Observation(("text",)), "expected messages with text contents, got 'text'"),
        (None, "expected an Observation, got NoneType"),
        (KeyError("x"), "`step` raised KeyError: 'x'"),
        (StopIteration(), "`step` raised StopIteration"),
        (SystemExit(3), "`step` raised SystemExit: 3"),
        (TimeoutError("tool"), "`step` raised TimeoutError: tool"),
    ],
)
def test_broken_environment_is_a_failure_and_never_a_reward(answer, message):
    with pytest.raises(EnvironmentFailure, match=message) as error:
        run(make_agent(["a"]), environment=Breaking(answer))
    if isinstance(answer, BaseException):
        assert error.value.__cause__ is answer
    assert classify_failure(error.value).kind == "environment"


def test_grader_failure_passes_as_itself():
    with pytest.raises(GraderFailure, match="hung"):
        run(make_agent(["a"]), environment=Breaking(GraderFailure("hung")))


@pytest.mark.parametrize("answer", [Observation(), Observation((Message("user", "x"),), done=True), KeyError("x")])
def test_broken_reset_is_a_failure(answer):
    class Bad(CountingEnvironment):
        def reset(self, task):
            if isinstance(answer, Exception):
                raise answer
            return answer

    with pytest.raises(EnvironmentFailure, match="`reset`"):
        start(make_agent([]), environment=Bad())


def test_environment_that_cannot_be_copied_goes_on_but_is_not_resumable():
    """B43: its states are marked, and a root rollout still runs, in the live environment."""

    class Locked(CountingEnvironment):
        def snapshot(self):
            raise TypeError("`Locked.lock` cannot be copied")

        def restore(self, snapshot):
            raise AssertionError("nothing to restore")

    environment = Locked()
    with pytest.warns(RuntimeWarning, match="Locked cannot be copied, so its states cannot be resumed: `Locked.lock`"):
        segments, states, _ = run(make_agent(["a", "b", "done"]), environment=environment)
    assert [s.resumable for s in states] == [False] * 4
    assert environment.log == ["a", "b", "done"]
    assert segments[-1].reward == 1.0


def test_snapshot_must_be_bytes():
    class Texty(CountingEnvironment):
        def snapshot(self):
            return "text"

    with pytest.raises(EnvironmentFailure, match="`snapshot`: expected bytes, got str"):
        start(make_agent([]), environment=Texty())


def test_blocking_environment_does_not_block_the_loop():
    release = threading.Event()

    class Waiting(CountingEnvironment):
        def step(self, action):
            assert release.wait(20)
            return super().step(action)

    def reply(number, prompt, params):
        # Runs in the loop right before the step; the loop must still turn while the step waits.
        asyncio.get_running_loop().call_soon(release.set)
        return "done"

    (only,), _, _ = run(make_agent(reply), environment=Waiting())
    assert only.status == "terminal"


@pytest.mark.parametrize("blocking", [False, True])
def test_a_tokenizer_that_blocks_is_called_beside_the_loop(blocking):
    callers = set()

    class Asking(ToyTokenizer):
        def encode(self, text, *, special=False):
            callers.add(threading.current_thread() is threading.main_thread())
            return super().encode(text, special=special)

    if blocking:
        Asking.blocking = True
    replies = ["a", "b", "State\nEvidence\nOpen questions\nNext steps", "c", "answer"]
    policy = ScriptedPolicy(replies)  # has a tokenizer of its own
    manager = Summarize(trigger_calls=2, summary_tokens=100)
    agent = Agent(policy, ChatRenderer(Asking()), SamplingParams(), manager, max_turns=3, final_tokens=20)
    segments, states, _ = run(agent)
    assert [piece.reason for piece in segments] == ["compaction", "turn_cap"]
    assert callers == {not blocking}
    # A state of an earlier process may be the first thing this one sees.
    callers.clear()
    policy.prompts.clear()
    segment(Agent(policy, ChatRenderer(Asking()), SamplingParams(), max_turns=3), states[0])
    assert callers == {not blocking}


def test_failures_are_classified():
    kinds = {
        SamplerError("s"): "sampler",
        EnvironmentFailure("e"): "environment",
        GraderFailure("g"): "grader",
        TimeoutError(): "time",
        AttemptFailure("critic", "c"): "critic",
    }
    for error, kind in kinds.items():
        failure = classify_failure(error)
        assert failure.kind == kind
        assert str(failure) == failure.message == (str(error) or "TimeoutError")
    assert classify_failure(TypeError("a mistake")) is None
    assert classify_failure(asyncio.CancelledError()) is None


def test_mistakes_outside_the_environment_propagate():
    with pytest.raises(TypeError, match="a mistake"):
        run(make_agent([TypeError("a mistake")]))


# Bad input


def test_prompt_longer_than_the_context():
    agent = make_agent([], context_length=120)
    with pytest.raises(
        ValueError, match=r"the opening has 2\d\d tokens, at most \d\d leave room .* context of 120: shorten the prompt"
    ):
        start(agent, {"opening": [["user", "q" * 200]]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turns": 0}, "`max_turns`: expected at least 1, got 0"),
        ({"max_tokens": -1}, "`max_tokens`: expected at least 1, got -1"),
        ({"final_tokens": 0}, "`final_tokens`: expected at least 1"),
        ({"cut_off": "stop"}, "`cut_off`: expected 'forced_submit' or 'bootstrap', got 'stop'"),
        ({"gamma": 1.5}, "`gamma`"),
        ({"gamma": float("nan")}, "`gamma`"),
    ],
)
def test_bad_numbers_are_named(options, message):
    tokenizer = ToyTokenizer(CHATML)
    with pytest.raises(ValueError, match=message):
        Agent(ScriptedPolicy([]), ChatRenderer(tokenizer), SamplingParams(), **options)
