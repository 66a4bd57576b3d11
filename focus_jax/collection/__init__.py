"""Growing rollout trees under a budget: passes, evidence, journal, and the training records read off the trees."""

from focus_jax.collection.budget import Budget, Ledger
from focus_jax.collection.collector import AllAttemptsFailed, Progress, collect
from focus_jax.collection.critic import ConstantCritic, Critic, RandomCritic
from focus_jax.collection.evidence import Evidence, Frontier
from focus_jax.collection.journal import Journal, JournalError
from focus_jax.collection.passes import Pass, Probes, Random, RootRollouts, Rule, TokenEntropy, Uniform, ValueRefinement
from focus_jax.collection.progress import show_progress
from focus_jax.collection.records import (
    Credit,
    CriticExample,
    SegmentRecord,
    focus_credit,
    grpo_credit,
    training_records,
    vineppo_credit,
)
from focus_jax.collection.round import Failure, Round, replay
from focus_jax.collection.tree import Continuation, HostTree, Node

__all__ = [
    "AllAttemptsFailed",
    "Budget",
    "ConstantCritic",
    "Continuation",
    "Credit",
    "Critic",
    "CriticExample",
    "Evidence",
    "Failure",
    "Frontier",
    "HostTree",
    "Journal",
    "JournalError",
    "Ledger",
    "Node",
    "Pass",
    "Probes",
    "Progress",
    "Random",
    "RandomCritic",
    "RootRollouts",
    "Round",
    "Rule",
    "SegmentRecord",
    "TokenEntropy",
    "Uniform",
    "ValueRefinement",
    "collect",
    "focus_credit",
    "grpo_credit",
    "replay",
    "show_progress",
    "training_records",
    "vineppo_credit",
]
