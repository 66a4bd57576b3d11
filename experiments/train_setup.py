"""What a run of `train.py` starts from: processes, task, folder, and the learner, fresh or out of a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from run_folder import open_run
from train_config import FREE, Config
from train_models import (
    Learner,
    adapters_and_head,
    critic_over,
    imitate,
    load_policy,
    make_tx,
    tiny_decoder,
)
from train_task import Task, detour_demonstrations, detour_task, math_task

from focus_jax.models import Decoder, make_mesh
from focus_jax.sampling import ByteTokenizer, HFTokenizer
from focus_jax.training import make_optimizer
from focus_jax.training.checkpoint import Checkpoints, check_identity
from focus_jax.training.processes import everywhere


@contextlib.contextmanager
def several_processes(config: Config) -> Iterator[None]:
    """Join the other processes where there are any, and set the mesh over all of their devices."""
    if config.num_processes > 1:
        jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id)
    is_split = config.fsdp * config.tensor > 1
    with jax.set_mesh(make_mesh(config.fsdp, config.tensor)) if is_split else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def open_task(config: Config) -> Iterator[Task]:
    """The task, with the policy's tokenizer."""
    tokenizer = ByteTokenizer() if config.model is None else HFTokenizer(config.model)
    if config.task == "detour":
        yield detour_task(
            config.level, tokenizer, seed=config.seed, branch_every=config.branch_every, temperature=config.temperature
        )
        return
    with math_task(
        config.data,
        tokenizer,
        seed=config.seed,
        step_tokens=config.step_tokens,
        max_steps=config.max_steps,
        num_held_out=config.evaluate_problems,
        num_examples=config.num_examples,
    ) as task:
        yield task


def open_folder(config: Config) -> Path:
    """The run's folder, made or gone on with by the first process."""

    def open_it() -> None:
        try:
            open_run(config.run_folder, config, free=FREE)
            (config.run_folder / "rounds").mkdir(exist_ok=True)
        except SystemExit as error:  # which the other processes would not hear of
            raise ValueError(str(error)) from error

    everywhere(lambda: open_it() if jax.process_index() == 0 else None)
    return config.run_folder


def begin(config: Config, task: Task, checkpoints: Checkpoints) -> tuple[Learner, int, int]:
    """The learner, the last round it learned from (-1: it is new), and the tokens per problem that were left then.

    Raises:
        CheckpointError: no checkpoint is whole, or they are of other problems or another model.
    """
    learner = fresh_learner(config, task)
    found = checkpoints.restore(learner)
    if found is not None:
        check_identity(found.info["identity"], identity(config, task))
        return found.state, found.step, found.info["unspent"]
    if config.task == "detour" and config.model is None and config.imitation_steps:
        prompts, replies = detour_demonstrations(config.level, 512, noise=config.imitation_noise, seed=config.seed)
        actor = imitate(
            learner.actor, prompts, replies, steps=config.imitation_steps, rows=256, fsdp=config.fsdp, seed=config.seed
        )
        learner = replace(learner, actor=actor)
    if learner.reference is not None:
        learner = replace(learner, reference=jax.tree.map(jnp.copy, learner.actor))
    return learner, -1, 0


def identity(config: Config, task: Task) -> dict[str, str]:
    """What a checkpoint belongs to, beside the options, which the folder's config.toml holds."""
    return {"problems": task.identity, "model": "tiny" if config.model is None else config.model.name, "method": config.method}


def fresh_learner(config: Config, task: Task) -> Learner:
    """Policy, critic and optimizers before the first update."""
    keys = jax.random.split(jax.random.key(config.seed), 4)
    updates = config.rounds * config.epochs

    def optimizer_of(rate: float) -> optax.GradientTransformation:
        return make_tx(config.schedule, rate, warmup=config.lr_warmup, updates=updates)

    def decoder(key: jax.Array, *, lora_rank: int) -> Decoder:
        if config.model is not None:
            return load_policy(config.model, lora_rank=lora_rank, key=key)
        size = {"vocab_size": task.tokenizer.vocab_size, "max_positions": max(128, task.context_length)}
        return tiny_decoder(config.hidden, config.layers, **size, key=key)

    actor = decoder(keys[0], lora_rank=config.lora_rank)
    learner = Learner(
        actor, make_optimizer(actor, optimizer_of(config.actor_lr), nnx.LoRAParam if config.lora_rank else nnx.Param)
    )
    if config.method == "focus":
        critic = critic_over(decoder(keys[1], lora_rank=0), lora_rank=config.lora_rank, key=keys[2])
        wrt = adapters_and_head if config.lora_rank else nnx.Param
        learner = replace(learner, critic=critic, critic_optimizer=make_optimizer(critic, optimizer_of(config.critic_lr), wrt))
    if config.kl and not config.lora_rank:
        learner = replace(learner, reference=jax.tree.map(jnp.copy, actor))
    return learner
