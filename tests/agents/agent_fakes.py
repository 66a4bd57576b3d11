"""A byte tokenizer, chat templates, a scripted policy and a counting environment for the tests of the agents."""

import asyncio
import json
import re

import numpy as np

from focus_jax.agents import Action, Agent, ChatRenderer, Message, Observation, Sample, SamplingParams

SPECIALS = (
    "<s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Groups tool results into one user turn and keeps reasoning only after the last question.
QWEN3 = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
    {{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
  {%- elif m.role == 'assistant' -%}
    {%- set text = m.content.split('</think>')[-1].lstrip() if loop.index0 < ns.last else m.content -%}
    {{ '<|im_start|>assistant\\n' + text + '<|im_end|>\\n' }}
  {%- else -%}
    {{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


class ToyTokenizer:
    """Bytes are ids 0 to 255, special tokens follow. Counts the characters it was given."""

    def __init__(self, chat_template=CHATML, *, adds_bos=False, eos=("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>")):
        self.ids = {name: 256 + i for i, name in enumerate(SPECIALS)}
        self.bos_token, self.bos_id, self.eos_token = "<s>", self.ids["<s>"], eos[0]
        self.eos_ids = frozenset(self.ids[name] for name in eos)
        self.adds_bos, self.chat_template = adds_bos, chat_template
        self.vocab_size = 256 + len(SPECIALS)
        self.num_chars = 0

    def encode(self, text, *, special=False):
        self.num_chars += len(text)
        parts = re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", text) if special else [text]
        return [i for part in parts for i in ([self.ids[part]] if special and part in self.ids else part.encode())]

    def decode(self, ids):
        names = {i: name.encode() for name, i in self.ids.items()}
        return b"".join(names[i] if i in names else bytes([i]) for i in map(int, ids)).decode(errors="replace")


class ScriptedPolicy:
    """Answers the replies of a list in turn, or what a function of (call number, prompt, params) gives; keeps what it was sent.

    A reply is a text, which the policy ends itself where it fits, a `Sample`, or an exception.
    """

    def __init__(self, replies, *, context_length=4096, tokenizer=None, version=0):
        self.replies, self.context_length, self.version = replies, context_length, version
        self.tokenizer = tokenizer or ToyTokenizer()
        self.prompts, self.params, self.samples = [], [], []

    async def sample(self, prompt_ids, params):
        await asyncio.sleep(0)
        number = len(self.prompts)
        self.prompts.append(prompt_ids)
        self.params.append(params)
        assert len(prompt_ids) + params.max_tokens <= self.context_length
        reply = self.replies(number, prompt_ids, params) if callable(self.replies) else self.replies[number]
        if isinstance(reply, Exception):
            raise reply
        sample = reply if isinstance(reply, Sample) else self.say(reply, params.max_tokens)
        self.samples.append(sample)
        return sample

    def say(self, text, max_tokens=10**6):
        end = self.tokenizer.ids[self.tokenizer.eos_token]
        ids = [*self.tokenizer.encode(text), end][:max_tokens]
        cut = ids[-1] != end
        return make_sample(ids, text[:max_tokens], "length" if cut else "stop", version=self.version)


def make_sample(ids, text, finish="stop", *, version=0, stop=None):
    logprobs = -0.01 * np.arange(1, len(ids) + 1, dtype=np.float32)
    return Sample(np.array(ids, np.int32), logprobs, text, finish, version, stop)


class CountingEnvironment:
    """Counts its turns; a reply "done" ends the episode with reward 1. What it observes and pays comes with the task."""

    def __init__(self):
        self.turns, self.log, self.task = 0, [], {}

    def reset(self, task):
        self.turns, self.log, self.task = 0, [], dict(task)
        return Observation(tuple(Message(*m) for m in task.get("opening", [("user", "count")])))

    def step(self, action: Action):
        self.turns += 1
        self.log.append(action.text)
        reward = self.task.get("reward", 0.0)
        if action.last or action.text == "done":
            return Observation(reward=1.0, done=True)
        messages = tuple(Message(*m) for m in self.task.get("observation", [("user", f"turn {self.turns}")]))
        return Observation(messages, reward=reward, num_transitions=self.task.get("num_transitions", 1))

    def snapshot(self):
        return json.dumps([self.turns, self.log, self.task]).encode()

    def restore(self, snapshot):
        self.turns, self.log, self.task = json.loads(snapshot)


def make_agent(replies, *, template=CHATML, context_length=4096, version=0, reply_tokens=100, stop=(), **options):
    tokenizer = ToyTokenizer(template)
    policy = ScriptedPolicy(replies, context_length=context_length, tokenizer=tokenizer, version=version)
    options = {"final_request": "answer!", "final_tokens": 20, "max_turns": 8, "max_tokens": 2000} | options
    return Agent(policy, ChatRenderer(tokenizer), SamplingParams(max_tokens=reply_tokens, stop=stop), **options)


def run(agent, task=None, *, environment=None, seed=0):
    """One trajectory: the root, the segments, the states, and what was charged."""

    async def go():
        env = environment or CountingEnvironment()
        root = await agent.start(env, task or {})
        segments, states, charged = [], [root], []
        while not segments or segments[-1].status == "open":
            segment, state = await agent.segment(env, states[-1], seed=seed + len(segments), charge=charged.append)
            segments.append(segment)
            states.append(state)
        return segments, states, charged

    return asyncio.run(go())
