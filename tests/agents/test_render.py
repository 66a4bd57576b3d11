"""The chat renderer: appends token ids, never renders what was sampled."""

import re

import numpy as np
import pytest
from agent_fakes import CHATML, LLAMA3, QWEN3, SPECIALS, ScriptedPolicy, ToyTokenizer, make_agent, run

from focus_jax.agents import ChatRenderer, Message
from focus_jax.agents.render import _compile

TALK = [("user", "How much is 2 + 2?"), ("assistant", "Let me count."), ("user", "Go on."), ("assistant", "4"), ("user", "Sure?")]


def messages(*pairs):
    return [Message(*pair) for pair in pairs]


def render_whole(tokenizer, pairs, *, generation_prompt=True):
    talk = [{"role": role, "content": content} for role, content in pairs]
    text = _compile(tokenizer.chat_template)(
        messages=talk, add_generation_prompt=generation_prompt, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    return tokenizer.encode(text, special=True)


def render_in_turns(tokenizer, pairs, end):
    """The same conversation, replies appended as a policy would sample them, the end-of-turn token included."""
    renderer = ChatRenderer(tokenizer)
    first = next(i for i, (role, _) in enumerate(pairs) if role == "assistant")
    ids = renderer.opening(messages(*pairs[:first])).tolist()
    for i in range(first, len(pairs)):
        if pairs[i][0] != "assistant":
            continue
        ids += [*tokenizer.encode(pairs[i][1]), tokenizer.ids[end]]
        after = next((j for j in range(i + 1, len(pairs)) if pairs[j][0] == "assistant"), len(pairs))
        ids += renderer.turn(messages(*pairs[i + 1 : after]), ids[-1]).tolist()
    return ids


@pytest.mark.parametrize(
    ("template", "end", "pairs"),
    [
        (CHATML, "<|im_end|>", TALK),
        (CHATML, "<|im_end|>", [("system", "Be brief."), *TALK, ("tool", "7")]),
        ("{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}" + CHATML, "<|im_end|>", TALK),
        (LLAMA3, "<|eot_id|>", TALK),
        (LLAMA3, "<|eot_id|>", [("system", "Be brief."), *TALK]),
        (QWEN3, "<|im_end|>", TALK),
        (
            QWEN3,
            "<|im_end|>",
            [("user", "q"), ("assistant", "call"), ("tool", "7"), ("tool", "8"), ("assistant", "call"), ("tool", "9")],
        ),
    ],
)
def test_incremental_ids_equal_one_whole_rendering(template, end, pairs):
    tokenizer = ToyTokenizer(template)
    assert render_in_turns(tokenizer, pairs, end) == render_whole(tokenizer, pairs)


def test_stripping_template_changes_nothing_sampled():
    """B01, B02: the template drops earlier reasoning, the context keeps it, once."""
    tokenizer = ToyTokenizer(QWEN3)
    pairs = [
        ("user", "q1"),
        ("assistant", "<think>r1</think>A1"),
        ("user", "q2"),
        ("assistant", "<think>r2</think>A2"),
        ("user", "q3"),
    ]
    text = tokenizer.decode(render_in_turns(tokenizer, pairs, "<|im_end|>"))
    assert "r1" not in tokenizer.decode(render_whole(tokenizer, pairs))
    assert [text.count(s) for s in ("r1", "A1", "r2", "A2")] == [1, 1, 1, 1]
    assert text.endswith("A2<|im_end|>\n<|im_start|>user\nq3<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_at_most_one_bos(template, adds_bos):
    """B06: the template writes it or not, the tokenizer adds it or not."""
    tokenizer = ToyTokenizer(template, adds_bos=adds_bos)
    renderer = ChatRenderer(tokenizer)
    ids = [*renderer.opening(messages(("user", "hi"))), *renderer.turn(messages(("user", "again")), 5)]
    assert ids.count(tokenizer.bos_id) == int(adds_bos or template == LLAMA3)
    assert (ids[0] == tokenizer.bos_id) == (adds_bos or template == LLAMA3)
    # One end after each of two user messages, one of the reply that did not end itself.
    assert sum(i in tokenizer.eos_ids for i in ids) == 3


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", "<|eom_id|>"])
def test_no_end_of_turn_is_doubled(end):
    """B07: whichever end the policy sampled, the template's own is left out; without one, it is added."""
    tokenizer = ToyTokenizer()
    renderer = ChatRenderer(tokenizer)
    ended = tokenizer.decode(renderer.turn(messages(("user", "x")), tokenizer.ids[end]))
    cut = tokenizer.decode(renderer.turn(messages(("user", "x")), ord("a")))
    assert ended == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert cut == "<|im_end|>" + ended


def test_text_before_the_end_of_turn_goes_with_it():
    tokenizer = ToyTokenizer(CHATML.replace("{{ m.content }}", "{{ m.content }}\n"))
    ids = ChatRenderer(tokenizer).turn(messages(("user", "x")), tokenizer.ids["<|im_end|>"])
    assert tokenizer.decode(ids).startswith("\n<|im_start|>user")


@pytest.mark.parametrize("name", SPECIALS)
def test_contents_never_become_control_tokens(name):
    tokenizer = ToyTokenizer()
    renderer = ChatRenderer(tokenizer)
    for ids in (
        renderer.opening(messages(("user", f"say {name}"))),
        renderer.turn(messages(("tool", name)), 5),
        renderer.extend(messages(("user", name))),
    ):
        plain = bytes(i for i in ids.tolist() if i < 256).decode()
        assert name in plain


def test_contents_that_look_like_placeholders_stay_as_they_are():
    tokenizer = ToyTokenizer()
    ids = ChatRenderer(tokenizer).opening(messages(("user", "[[message-1]]"), ("user", "[[message-0]] \\1 {{ x }}")))
    assert ids.tolist() == render_whole(tokenizer, [("user", "[[message-1]]"), ("user", "[[message-0]] \\1 {{ x }}")])


def test_whitespace_around_contents_is_kept():
    tokenizer = ToyTokenizer(LLAMA3)
    assert "\n  indented\n<" in tokenizer.decode(ChatRenderer(tokenizer).turn(messages(("tool", "\n  indented\n")), 5))


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN3])
def test_extend_goes_on_where_the_opening_without_invitation_stops(template):
    tokenizer = ToyTokenizer(template)
    renderer = ChatRenderer(tokenizer)
    opening = [("system", "s"), ("user", "q")]
    ids = [*renderer.opening(messages(*opening), generation_prompt=False), *renderer.extend(messages(("user", "notes")))]
    assert ids == render_whole(tokenizer, [*opening, ("user", "notes")])


def test_nothing_is_appended_without_messages():
    ids = ChatRenderer(ToyTokenizer()).turn([], 5)
    assert ids.shape == (0,)
    assert ids.dtype == np.int32


def test_no_chat_template_says_what_to_do():
    with pytest.raises(ValueError, match="no chat template: use an instruction-tuned model, or pass `chat_template=`"):
        ChatRenderer(ToyTokenizer(None))
    assert len(ChatRenderer(ToyTokenizer(None), chat_template=CHATML).opening(messages(("user", "hi"))))


def test_unreadable_template_names_the_line():
    with pytest.raises(ValueError, match="cannot be read, line 2"):
        ChatRenderer(ToyTokenizer("{{ bos_token }}\n{% if %}"))


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        (["system", "user"], "refuses the roles system, user: System role not supported"),
        (["user", "user"], "refuses the roles user, user: roles must alternate"),
        (["tool"], "refuses the roles tool: roles must alternate"),
    ],
)
def test_refused_roles_are_named_with_the_templates_reason(roles, reason):
    renderer = ChatRenderer(ToyTokenizer(STRICT))
    with pytest.raises(ValueError, match=re.escape(reason)):
        renderer.opening([Message(role, "x") for role in roles])


def test_refused_turn_and_dropped_message_are_named():
    with pytest.raises(ValueError, match="refuses the roles user, assistant, tool: roles must alternate"):
        ChatRenderer(ToyTokenizer(STRICT)).turn(messages(("tool", "x")), 5)
    silent = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="drops the tool message, or the reply before it: user, assistant, tool"):
        ChatRenderer(ToyTokenizer(silent)).turn(messages(("tool", "x")), 5)
    mute = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="drops the user message, or the reply before it: user, assistant, user"):
        ChatRenderer(ToyTokenizer(mute)).turn(messages(("user", "x")), 5)


def test_template_that_rewrites_what_stands_cannot_be_extended():
    template = "{% for m in messages %}{{ '!' if loop.length > 1 }}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="changes a message when another follows it: user, user"):
        ChatRenderer(ToyTokenizer(template)).extend(messages(("user", "x")))


def test_helpers_that_templates_expect():
    template = (
        "{{ strftime_now('%Y')|length }}|{{ {'b': '<é>', 'a': 1}|tojson }}|{{ eos_token }}|{{ tools[0].name }}\n"
        "  {% for i in range(9) %}\n"
        "{%- if i == 2 %}{% break %}{% endif -%}\n"
        "{{ i }}{% endfor %}\n"
        "{%- generation -%}\n {{ messages[0].content }} {% endgeneration %}\n"
    )
    tokenizer = ToyTokenizer(template)
    ids = ChatRenderer(tokenizer, variables={"tools": [{"name": "grep"}]}).opening(messages(("user", "hi")))
    assert tokenizer.decode(ids) == '4|{"b": "<é>", "a": 1}|<|im_end|>|grep\n01hi '


def test_template_runs_in_a_sandbox():
    renderer = ChatRenderer(ToyTokenizer("{{ messages.append(1) }}{{ ''.__class__.__mro__ }}"))
    with pytest.raises(ValueError, match="refuses the roles user"):
        renderer.opening(messages(("user", "hi")))


def test_tokenizer_input_grows_linearly_with_turns():
    """B66: twice the turns, at most about twice the characters."""
    used = []
    for num_turns in (64, 128):
        agent = make_agent(
            lambda n, prompt, params: ScriptedPolicy([]).say(f"reply {n}"),
            context_length=10**6,
            max_turns=num_turns,
            max_tokens=10**5,
        )
        segments, _, _ = run(agent, {"observation": [["user", "x" * 200]]})
        assert len(segments) == num_turns
        used.append(agent.renderer.tokenizer.num_chars)
    assert used[1] / used[0] <= 2.2


def test_template_text_is_encoded_once():
    """B66: a turn costs the tokenizer its contents; what frames them is known."""
    tokenizer = ToyTokenizer()
    renderer = ChatRenderer(tokenizer)
    first = renderer.turn(messages(("user", "one")), 5)
    before = tokenizer.num_chars
    assert renderer.turn(messages(("user", "two")), 5).shape == first.shape
    assert tokenizer.num_chars - before == 3
    renderer.turn(messages(("user", "one")), 5)
    assert tokenizer.num_chars - before == 3
