"""Active critic learning for long-horizon language-model agents: the pure functions (arXiv 2610.35801)."""

from focus_jax.advantages import grpo_advantages, leave_one_out_advantages, segment_advantages, vineppo_advantages
from focus_jax.backup import Backup, backup, refine
from focus_jax.losses import kl_penalty, policy_loss, value_loss
from focus_jax.metrics import Interval, paired_bootstrap, value_error
from focus_jax.scheduling import (
    Allocation,
    OutcomeStats,
    allocate,
    benefit,
    benefit_slope,
    benefit_step,
    beta_bernoulli,
    normal,
    token_entropy,
)
from focus_jax.trees import RolloutTrees, pack, validate

__all__ = [  # noqa: RUF022  in the order one meets them
    "RolloutTrees",
    "pack",
    "validate",
    "backup",
    "Backup",
    "refine",
    "segment_advantages",
    "leave_one_out_advantages",
    "grpo_advantages",
    "vineppo_advantages",
    "OutcomeStats",
    "beta_bernoulli",
    "normal",
    "benefit",
    "benefit_slope",
    "benefit_step",
    "allocate",
    "Allocation",
    "token_entropy",
    "policy_loss",
    "value_loss",
    "kl_penalty",
    "value_error",
    "paired_bootstrap",
    "Interval",
]
