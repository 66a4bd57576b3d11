"""What identifies an agent's settings: the same in every process, other for whatever shapes what is collected."""

import json
from dataclasses import dataclass
from functools import partial

import pytest
from agent_fakes import CHATML, LLAMA3, ScriptedPolicy, ToyTokenizer

from focus_jax.agents import Agent, ChatRenderer, SamplingParams, Summarize
from focus_jax.agents.describe import describe


class ServedPolicy(ScriptedPolicy):
    """A policy behind an address, like a server of one's own."""

    def __init__(self, model, address):
        super().__init__([])
        self.model, self.address = model, address


def show_workspace(environment):
    return "notes"


def description(model="small", address="http://127.0.0.1:1", template=CHATML, variables=None, **options):
    renderer = ChatRenderer(ToyTokenizer(template), variables=variables)
    return Agent(ServedPolicy(model, address), renderer, SamplingParams(), **options).describe()


def test_the_same_settings_at_another_address_are_the_same_run():
    ours = description()
    assert ours == description(address="http://127.0.0.1:2")
    assert ours["policy"] == "small"
    assert "127.0.0.1" not in json.dumps(ours)
    assert json.loads(json.dumps(ours)) == ours
    assert ours["params"].items() >= {"class": "SamplingParams", "max_tokens": 256, "temperature": 1.0}.items()


@pytest.mark.parametrize(
    "other",
    [
        {"model": "large"},
        {"template": LLAMA3},
        {"variables": {"enable_thinking": False}},
        {"context_manager": Summarize(trigger_calls=1)},
        {"max_turns": 3},
    ],
)
def test_whatever_shapes_the_run_tells_it_apart(other):
    assert description(**other) != description()


def test_a_sampler_without_a_model_is_known_by_its_class():
    agent = Agent(ScriptedPolicy([]), ChatRenderer(ToyTokenizer()), SamplingParams())
    assert agent.describe()["policy"] == "ScriptedPolicy"


def test_functions_are_known_by_their_names():
    told = description(context_manager=Summarize(trigger_calls=1, workspace=show_workspace))["context_manager"]
    assert told["class"] == "Summarize"
    assert told["workspace"] == f"{__name__}.show_workspace"
    assert description(context_manager=Summarize(trigger_calls=1, workspace=repr))["context_manager"] != told


@dataclass(frozen=True)
class Nested:
    inner: object


class Nameless:
    async def after_turn(self, segment):
        return False


class Named(Nameless):
    def __repr__(self):
        return "Named(every=2)"


@pytest.mark.parametrize("manager", [Nameless(), Nested(partial(show_workspace, 1)), Nested({"a": [object()]})])
def test_what_only_an_address_tells_apart_is_refused(manager):
    with pytest.raises(TypeError, match="make it a frozen dataclass or give it a __repr__"):
        description(context_manager=manager)


def test_a_repr_of_its_own_is_enough():
    assert description(context_manager=Named())["context_manager"] == "Named(every=2)"


def test_plain_data_stays_as_it_is():
    assert describe({"a": (1, 2.5, None, True), 3: Nested("x")}) == {
        "a": [1, 2.5, None, True],
        "3": {"class": "Nested", "inner": "x"},
    }
