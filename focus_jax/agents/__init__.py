"""What acts: states and segments, environments, context managers, and one agent's turns."""

from focus_jax.agents.conformance import ConformanceError, check_environment, pickle_restore, pickle_snapshot
from focus_jax.agents.context import AppendOnly, ContextManager, LatestOnly, Summarize
from focus_jax.agents.environment import Action, Environment, EnvironmentFailure, GraderFailure, Message, Observation
from focus_jax.agents.render import ChatRenderer
from focus_jax.agents.sampler import Sample, Sampler, SamplerError, SamplingParams
from focus_jax.agents.seeds import derive_seed
from focus_jax.agents.segment import SegmentBuilder
from focus_jax.agents.state import AttemptFailure, Reset, Segment, State, classify_failure
from focus_jax.agents.tokenizer import Tokenizer
from focus_jax.agents.turn import Agent

__all__ = [
    "Action",
    "Agent",
    "AppendOnly",
    "AttemptFailure",
    "ChatRenderer",
    "ConformanceError",
    "ContextManager",
    "Environment",
    "EnvironmentFailure",
    "GraderFailure",
    "LatestOnly",
    "Message",
    "Observation",
    "Reset",
    "Sample",
    "Sampler",
    "SamplerError",
    "SamplingParams",
    "Segment",
    "SegmentBuilder",
    "State",
    "Summarize",
    "Tokenizer",
    "check_environment",
    "classify_failure",
    "derive_seed",
    "pickle_restore",
    "pickle_snapshot",
]
