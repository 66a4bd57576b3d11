"""Training end to end: it goes on as if nothing had happened, and says what stands in its way."""

import gc
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import train
import train_collect
import train_setup
from tiny_training import TINY, lines_of, parameters_of, updated
from train_config import Config, check

from focus_jax.agents import SamplerError
from focus_jax.collection import AllAttemptsFailed, replay
from focus_jax.models import Decoder, ModelConfig, save_hf
from focus_jax.sampling import ByteTokenizer
from focus_jax.sampling.flax_sampler import FlaxSampler
from focus_jax.training.checkpoint import CheckpointError

CHILD = Path(__file__).with_name("train_child.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to: its folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train.main(replace(TINY, run_folder=folder))
    return folder


def copy_of(folder, to):
    subprocess.run(["cp", "-r", folder, to], check=True)
    return to


def same_run(folder, whole):
    assert parameters_of(folder) == parameters_of(whole)
    assert lines_of(folder) == lines_of(whole)


def test_a_run_folder_holds_all_there_is_to_know(whole):
    assert sorted(path.name for path in whole.iterdir()) == [
        "checkpoints",
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "rounds",
    ]
    assert sorted(path.name for path in (whole / "rounds").glob("*.sqlite")) == [f"{n:06d}.sqlite" for n in (1, 2, 3)]
    lines = lines_of(whole)
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert ["success" in line for line in lines] == [True, False, True, True]
    for number, line in enumerate(lines[1:], 1):
        round_ = replay(whole / "rounds" / f"{number:06d}.sqlite")
        assert line["tokens_generated"] == round_.tokens()
        assert line["staleness"] == line["failures"] == 0
        assert all(np.isfinite(value) for value in line.values())
    # One round for the critic alone; afterwards the policy that is trained is the one that sampled.
    assert ["actor_loss" in line for line in lines] == [False, False, True, True]
    assert all(line["actor_num_tokens"] == line["tokens_generated"] for line in lines[2:])
    assert all(abs(line["actor_behaviour_kl_before"]) < 1e-5 for line in lines[2:])


def test_what_a_round_leaves_unspent_is_added_to_the_next(whole):
    budgets = []
    for number in (1, 2, 3):
        round_ = replay(whole / "rounds" / f"{number:06d}.sqlite")
        budgets.append(48 + round_.passes[1].budget.tokens)
        left = budgets[-1] - round_.tokens() // 2
        assert budgets[0] == 96
        if number < 3:
            following = replay(whole / "rounds" / f"{number + 1:06d}.sqlite")
            assert 48 + following.passes[1].budget.tokens == 96 + min(left, 96)


@pytest.mark.parametrize("method", ["grpo", "vineppo"])
def test_the_other_methods_train_the_actor_alone_on_the_same_budget(tmp_path, method):
    config = replace(TINY, method=method, budget=120, rounds=2, run_folder=tmp_path)
    train.main(config)
    lines = lines_of(tmp_path)
    assert all("actor_loss" in line and "critic_loss" not in line and "error_critic" not in line for line in lines[1:])
    assert 0 < lines[1]["tokens_generated"] <= 2 * 120
    assert lines[1]["tokens_generated"] + lines[2]["tokens_generated"] <= 4 * 120


@pytest.mark.slow
def test_a_model_folder_is_trained_through_adapters_near_the_model_without_them(tmp_path, monkeypatch):
    """The folder's own weights stay; the reference is the model without adapters, so there is no copy of it to save."""
    shape = ModelConfig("qwen3", 260, 16, 32, 2, 2, 8, ("full_attention",), tied=True, max_positions=128)
    save_hf(Decoder(shape, key=jax.random.key(5)), tmp_path / "model")
    monkeypatch.setattr(train_setup, "HFTokenizer", lambda folder: ByteTokenizer())
    config = replace(TINY, model=tmp_path / "model", lora_rank=2, kl=0.1, rounds=2, run_folder=tmp_path / "run")
    train.main(config)
    step, saved = parameters_of(tmp_path / "run", config)
    with train_setup.open_task(config) as task:
        fresh = train_setup.fresh_learner(config, task)
    before = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in jax.tree_util.tree_leaves_with_path(fresh)}
    changed = {name for name in saved if ".actor." in name and saved[name] != before[name]}
    assert step == 2
    assert changed
    assert all("lora_" in name for name in changed)
    assert not any("reference" in name for name in saved)
    assert lines_of(tmp_path / "run")[2]["actor_kl"] >= 0


@pytest.mark.slow
def test_math_is_trained_on_and_judged_by_rollouts(tmp_path):
    config = replace(TINY, task="math", num_examples=0, step_tokens=4, max_steps=2, budget=48, rounds=2, tokens_per_batch=4096)
    train.main(replace(config, run_folder=tmp_path))
    lines = lines_of(tmp_path)
    assert [line["success"] for line in lines if "success" in line] == [0, 0]  # random bytes solve nothing
    assert lines[2]["actor_num_tokens"] == lines[2]["tokens_generated"] > 0
    assert not any("error_" in name for line in lines for name in line)  # nobody knows exact values here


# Going on.


def test_a_finished_run_has_nothing_left_to_do(whole, tmp_path):
    folder = copy_of(whole, tmp_path / "run")
    before = (folder / "metrics.jsonl").read_text()
    train.main(replace(TINY, run_folder=folder))
    assert (folder / "metrics.jsonl").read_text() == before


def test_rounds_after_the_checkpoint_are_learned_from_again_and_appear_once(whole, tmp_path):
    folder = copy_of(whole, tmp_path / "run")
    subprocess.run(["rm", "-r", folder / "checkpoints" / "3"], check=True)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"round": 4, "cut sh')
    train.main(replace(TINY, run_folder=folder))
    same_run(folder, whole)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(whole, tmp_path):
    folder = copy_of(whole, tmp_path / "run")
    (folder / "checkpoints" / "3" / "manifest" / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="going on from step 2: step 3: "):
        train.main(replace(TINY, run_folder=folder))
    same_run(folder, whole)


def test_sigterm_in_the_middle_of_a_round_saves_and_the_same_command_goes_on(whole, tmp_path, monkeypatch):
    config, collect, seen = replace(TINY, run_folder=tmp_path / "run"), train_collect.collect, 0

    async def signalled(*arguments, report, **options):
        def look(progress):
            nonlocal seen
            seen += 1
            if seen == 15:
                os.kill(os.getpid(), signal.SIGTERM)
            report(progress)

        return await collect(*arguments, report=look, **options)

    monkeypatch.setattr(train_collect, "collect", signalled)
    with pytest.raises(SystemExit, match="stopped by SIGTERM in round 2; the same command goes on"):
        train.main(config)
    assert parameters_of(config.run_folder)[0] == 1
    train.main(config)
    same_run(config.run_folder, whole)


def test_sigterm_while_it_learns_saves_the_round(whole, tmp_path, monkeypatch):
    config, learn = replace(TINY, run_folder=tmp_path / "run"), train.learn

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return learn(*arguments)

    monkeypatch.setattr(train, "learn", signalled)
    with pytest.raises(SystemExit, match="stopped by SIGTERM after round 1"):
        train.main(config)
    monkeypatch.undo()
    assert parameters_of(config.run_folder)[0] == 1
    train.main(config)
    same_run(config.run_folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [("outcome", 2), ("outcome", 9), ("update", 5), ("line", 3), ("save", 2)], ids=str)
def test_a_killed_run_goes_on_bit_for_bit(whole, tmp_path, moment):
    folder = tmp_path / "run"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(CHILD), "killed", str(folder), *map(str, moment)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    subprocess.run([sys.executable, str(CHILD), "run", str(folder)], env=environment, check=True, capture_output=True)
    same_run(folder, whole)


# What stands in the way.


def test_other_options_or_another_method_are_refused(whole):
    with pytest.raises(Exception, match=r"other options \(kappa: 1\.0 there, 2\.0 here\)"):
        train.main(replace(TINY, run_folder=whole, kappa=2.0))
    with pytest.raises(Exception, match=r"level: \"short\" there, \"medium\" here"):
        train.main(replace(TINY, run_folder=whole, level="medium"))


def test_other_problems_behind_the_same_options_are_refused(whole, monkeypatch):
    monkeypatch.setattr(
        train_setup, "detour_task", lambda *a, task=train_setup.detour_task, **o: replace(task(*a, **o), identity="others")
    )
    with pytest.raises(CheckpointError, match=r"the checkpoint is of another run: problems was 'detour .*, now 'others'"):
        train.main(replace(TINY, run_folder=whole))


def test_a_metrics_file_that_cannot_be_written_is_found_out_before_anything_is_trained(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").mkdir()
    monkeypatch.setattr(train, "begin", None)  # would be called next
    with pytest.raises(ValueError, match=r"metrics.jsonl cannot be (read|written): .*; .* name another run folder"):
        train.main(replace(TINY, run_folder=tmp_path))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_while_saving_is_an_error_and_earlier_steps_stay(whole, tmp_path, monkeypatch):
    folder = copy_of(whole, tmp_path / "run")
    subprocess.run(["rm", "-r", folder / "checkpoints" / "3"], check=True)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointHandler.async_save", full)
    with pytest.raises(CheckpointError, match=r"step 3 .*: .*No space left on device"):
        train.main(replace(TINY, run_folder=folder))
    monkeypatch.undo()
    gc.collect()  # orbax leaves a coroutine behind
    assert parameters_of(folder)[0] == 2
    train.main(replace(TINY, run_folder=folder))
    same_run(folder, whole)


def test_a_sampler_that_fails_ends_the_run_and_costs_nothing(whole, tmp_path, monkeypatch):
    folder = copy_of(whole, tmp_path / "run")
    for path in (folder / "checkpoints" / "3", *(folder / "rounds").glob("000003.sqlite*")):
        subprocess.run(["rm", "-r", path], check=True)

    async def fail(self, prompt_ids, params):
        raise SamplerError("the server is gone")

    monkeypatch.setattr(FlaxSampler, "sample", fail)
    with pytest.raises(AllAttemptsFailed, match=r"no attempt .*sampler: the server is gone"):
        train.main(replace(TINY, run_folder=folder))
    monkeypatch.undo()
    assert [line["round"] for line in lines_of(folder)] == [0, 1, 2]
    assert parameters_of(folder)[0] == 2
    train.main(replace(TINY, run_folder=folder))  # the server is back
    assert [line["round"] for line in lines_of(folder)] == [0, 1, 2, 3]


def test_a_policy_of_another_version_is_no_part_of_a_round(tmp_path, monkeypatch):
    sample = FlaxSampler.sample

    async def newer(self, prompt_ids, params):
        return replace(await sample(self, prompt_ids, params), policy_version=7)

    monkeypatch.setattr(FlaxSampler, "sample", newer)
    with pytest.raises(AllAttemptsFailed, match="expected samples of policy version 0, got 7"):
        train.main(replace(TINY, run_folder=tmp_path))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *((name, 0, "at least 1") for name in ("rounds", "budget", "num_roots", "epochs", "keep", "fsdp", "num_workers")),
        *((name, value, "finite number above 0") for name in ("kappa", "clip", "actor_lr") for value in (0.0, np.nan, np.inf)),
        ("kl", -1.0, "at least 0"),
        ("lam", 1.5, r"in \[0, 1\]"),
        ("seed", -1, "at least 0"),
        ("lora_rank", 4, "0 without --model"),
        ("data", Path("x"), "none with --task detour"),
        ("num_processes", 2, "an address exactly with several processes"),
        ("process_id", 1, "below --num-processes"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_by_the_name_of_their_option(option, value, message):
    with pytest.raises(ValueError, match=rf"--[a-z-]+: expected .*{message}"):
        check(replace(Config(), **{option: value}))


@pytest.mark.parametrize(("method", "least"), [("focus", 72), ("grpo", 48), ("vineppo", 108)])
def test_a_budget_that_holds_no_round_is_refused(tmp_path, method, least):
    with pytest.raises(ValueError, match=f"--budget: expected at least {least} tokens, .*, got {least - 1}"):
        train.main(replace(TINY, method=method, budget=least - 1, run_folder=tmp_path))


# Overlap.


@pytest.mark.slow
def test_with_overlap_rounds_are_one_update_old_but_those_after_a_checkpoint(tmp_path):
    config = replace(TINY, rounds=6, checkpoint_every=3, evaluate_every=6, overlap=True, run_folder=tmp_path / "run")
    train.main(config)
    assert [line["staleness"] for line in lines_of(config.run_folder)[1:]] == [0, 1, 1, 0, 1, 1]
    versions = [
        replay(path).tree(0).nodes[1].segment.versions.max() for path in sorted((config.run_folder / "rounds").glob("*.sqlite"))
    ]
    assert versions == [0, 0, 1, 3, 3, 4]
    for step in (6,):
        subprocess.run(["rm", "-r", config.run_folder / "checkpoints" / str(step)], check=True)
    again = copy_of(config.run_folder, tmp_path / "again")
    train.main(replace(config, run_folder=again))
    train.main(config)
    assert parameters_of(again, config) == parameters_of(config.run_folder, config)


# Several processes.


def two_processes(mode, target):
    """Run a mode of the children in two processes with four devices each; returns nothing, raises where one fails."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4"),
    }
    runs = [
        subprocess.Popen(
            [sys.executable, str(CHILD), mode, str(target), str(rank), address], env=environment, stdout=-1, stderr=-1, text=True
        )
        for rank in range(2)
    ]
    errors = [run.communicate(timeout=240)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors


@pytest.mark.slow
def test_two_processes_make_the_same_update_as_one(tmp_path):
    two_processes("update", tmp_path / "two")
    expected = updated()
    for rank in range(2):
        with np.load(tmp_path / f"two-{rank}.npz") as found:
            assert sorted(found) == sorted(expected)
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_two_processes_train_one_policy_and_write_one_log(tmp_path):
    folder = tmp_path / "run"
    two_processes("processes", folder)
    lines = lines_of(folder)
    assert [line["round"] for line in lines] == [0, 1, 2]
    rounds = [replay(path) for path in sorted((folder / "rounds").glob("000002-*.sqlite"))]
    assert len(rounds) == 2
    assert lines[2]["tokens_generated"] == lines[2]["actor_num_tokens"] == sum(round_.tokens() for round_ in rounds)
    assert rounds[0].problems != rounds[1].problems
    two_processes("processes", folder)  # nothing is left to do
    assert lines_of(folder) == lines
