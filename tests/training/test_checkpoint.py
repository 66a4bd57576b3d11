"""A run goes on from its checkpoint as if nothing had happened, whatever did."""

import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from focus_jax.models import Decoder, DeltaConfig, ModelConfig, ValueModel, make_mesh
from focus_jax.models.sharding import abstract, param
from focus_jax.training import ActorBatch, CriticBatch, actor_step, critic_step, make_optimizer
from focus_jax.training.checkpoint import CheckpointError, Checkpoints, check_identity

CHILD = Path(__file__).with_name("checkpoint_child.py")
ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig("qwen3", 64, 32, 48, 4, 2, 8, ("full_attention",))
DELTA = replace(
    CONFIG,
    family="qwen3_5",
    layer_types=("linear_attention", "full_attention"),
    partial_rotary=0.5,
    delta=DeltaConfig(2, 4, 8, 8, 4),
)
ADAM = optax.adamw(1e-2)


class Pair(NamedTuple):
    left: object
    right: object


def make_state(seed=0):
    """Arrays of every kind, in containers of every kind."""
    draw = np.random.default_rng(seed)
    return {
        "weights": jnp.asarray(draw.normal(size=(64, 64)).astype(np.float32)),
        "half": jnp.asarray(draw.normal(size=9), jnp.bfloat16),
        "nested": Pair((jnp.array(seed), [jnp.array([True, False])]), {"empty": jnp.zeros((0, 3)), "none": None}),
        "keys": (jax.random.key(seed), jax.random.split(jax.random.key(seed, impl="rbg"), 3)),
        "host": {"long": draw.integers(0, 2**60, 5), "double": draw.normal(size=()), "half": np.ones(3, ml_dtypes.bfloat16)},
    }


def numbers_of(tree):
    """Path -> dtype and bytes."""

    def content(leaf):
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return str(leaf.dtype), leaf.shape, np.asarray(data).tobytes()

    return {jax.tree_util.keystr(path): content(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert numbers_of(a) == numbers_of(b)


def save_all(folder, steps, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"step": step})


# A whole run: actor and critic, both optimizers, a key.


def fresh_run():
    actor = jax.jit(lambda: Decoder(CONFIG, key=jax.random.key(0)))()
    critic = jax.jit(lambda: ValueModel(Decoder(CONFIG, key=jax.random.key(1))))()
    optimizers = make_optimizer(actor, ADAM), make_optimizer(critic, ADAM)
    return {"actor": actor, "critic": critic, "optimizers": optimizers, "key": jax.random.key(2)}


def train_step(run):
    """One update of both, on a batch drawn with the run's key."""
    key, draw = jax.random.split(run["key"])
    tokens = jax.random.randint(draw, (2, 8), 0, CONFIG.vocab_size)
    numbers = jax.random.normal(draw, (2, 8))
    ids, mask, ones = jnp.ones((2, 8), jnp.int32), jnp.ones((2, 8), bool), jnp.ones((2, 8))
    actor, first, _ = actor_step(run["actor"], run["optimizers"][0], ActorBatch(tokens, ids, mask, -4 * ones, numbers, ones))
    critic, second, _ = critic_step(run["critic"], run["optimizers"][1], CriticBatch(tokens, ids, mask, jnp.abs(numbers), ones))
    return {"actor": actor, "critic": critic, "optimizers": (first, second), "key": key}


def compilations():
    return actor_step._cache_size(), critic_step._cache_size()


def start(mode, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(CHILD), mode, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def children(tmp_path_factory):
    """Mode -> process and folder: they start at the same time, while the other tests run."""
    started = {}
    for name in ("endless-1", "endless-2", "stalled", "limited", "terminated"):
        folder = tmp_path_factory.mktemp(name)
        started[name] = start(name.partition("-")[0], folder), folder
    yield started
    for child, _ in started.values():
        child.kill()
        child.communicate()


@pytest.fixture(scope="module", autouse=True)
def _early(children):
    """Children start before the first test."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three steps, a save, two steps here and two in another process."""
    folder = tmp_path_factory.mktemp("trained")
    with Checkpoints(folder) as checkpoints:
        run = fresh_run()
        for _ in range(3):
            run = train_step(run)
        checkpoints.save(3, run, {"cursor": 3})
        for _ in range(2):
            run = train_step(run)  # takes the buffers over while they are being written
        checkpoints.wait()
    return folder, run, start("train", folder)


def test_everything_comes_back_bit_for_bit_in_the_containers_it_was_in(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(make_state()) is None
        checkpoints.save(4, make_state(1), {"cursor": [1, 2.5, None], "name": "é"})
        found = checkpoints.restore(make_state(0))
    assert (found.step, found.info, found.damaged) == (4, {"cursor": [1, 2.5, None], "name": "é"}, {})
    assert_same(found.state, make_state(1))
    assert [type(leaf) for leaf in jax.tree.leaves(found.state)] == [type(leaf) for leaf in jax.tree.leaves(make_state())]
    np.testing.assert_array_equal(jax.random.normal(found.state["keys"][0]), jax.random.normal(jax.random.key(1)))


def test_the_newest_stay(tmp_path):
    save_all(tmp_path, (1, 2, 5, 9, 10), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "10", "9"]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [9, 10]
        assert checkpoints.restore(make_state()).step == 10
    with pytest.raises(ValueError, match="keep: expected at least 1 step, got 0"):
        Checkpoints(tmp_path, keep=0)


def test_a_save_runs_in_the_background_on_what_the_arrays_were(tmp_path, monkeypatch):
    finalize = ocp.StandardCheckpointHandler.finalize
    monkeypatch.setattr(ocp.StandardCheckpointHandler, "finalize", lambda *args: (time.sleep(0.3), finalize(*args)))
    host = np.arange(3)
    device = jax.jit(lambda: jnp.arange(1024.0))()
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"device": device, "host": host}, {})
        assert checkpoints.steps() == []
        host[:] = -1
        for _ in range(3):
            device = overwrite(device)
        found = checkpoints.restore({"device": device, "host": host})
    np.testing.assert_array_equal(found.state["device"], np.arange(1024.0))
    np.testing.assert_array_equal(found.state["host"], [0, 1, 2])


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    x = jnp.zeros(2)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match=r"expected arrays, got float at 'a\.0'; plain data go into `info`"):
            checkpoints.save(1, {"a": [0.5]}, {})
        with pytest.raises(ValueError, match=r"two arrays are called 'a\.0'"):
            checkpoints.save(1, {"a": [x], "a.0": x}, {})
        with pytest.raises(ValueError, match=r"info: expected plain data .*not JSON compliant"):
            checkpoints.save(1, {"x": x}, {"loss": float("nan")})
        with pytest.raises(ValueError, match=r"info: expected plain data .*not JSON serializable"):
            checkpoints.save(1, {"x": x}, {"loss": np.float32(1)})
        with pytest.raises(ValueError, match=r"info: expected what JSON gives back.*\(1, 2\)"):
            checkpoints.save(1, {"x": x}, {"pair": (1, 2)})
        with pytest.raises(ValueError, match="step: expected a number from 0 on, got -1"):
            checkpoints.save(-1, {"x": x}, {})
        with pytest.raises(CheckpointError, match="got complex64"):
            checkpoints.save(1, {"x": jnp.zeros(2, jnp.complex64)}, {})
        checkpoints.save(3, {"x": x}, {})
        with pytest.raises(CheckpointError, match=r"step 3 cannot be saved .*: step 3 is there already"):
            checkpoints.save(3, {"x": x}, {})
        with pytest.raises(CheckpointError, match=r"step 2 cannot be saved .*: step 3 is there already"):
            checkpoints.save(2, {"x": x}, {})
        assert checkpoints.steps() == [3]


# Damage.


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_bit(step):
    file = largest_file(step / "state")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def truncate(step):
    file = largest_file(step / "state")
    os.truncate(file, file.stat().st_size // 2)


def edit_manifest(step):
    path = step / "manifest" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"info": {"step": 7}}))


def take_for_another(step):
    shutil.copy(step.with_name("1") / "manifest" / "manifest.json", step / "manifest" / "manifest.json")


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


DAMAGE = [
    (flip_bit, "1 arrays are not what was saved: weights"),
    (truncate, "."),
    (lambda step: (step / "manifest" / "manifest.json").unlink(), r"it has no manifest \(No such file or directory\)"),
    (lambda step: (step / "manifest" / "manifest.json").write_text("{"), "its manifest is no JSON"),
    (lambda step: (step / "manifest" / "manifest.json").write_bytes(b"\xff"), "its manifest is no JSON"),
    (lambda step: (step / "manifest" / "manifest.json").write_text("[]"), "its manifest does not match its own hash"),
    (edit_manifest, "its manifest does not match its own hash"),
    (take_for_another, "expected format 1 and step 3, got 1 and 1"),
    (lambda step: shutil.rmtree(step / "state"), "."),
    (empty, "it has no manifest"),
]


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    save_all(folder, (1, 2, 3))
    return folder


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_damaged_step_is_passed_over_by_name_and_deleted_never(three_steps, tmp_path, damage, reason):
    folder = tmp_path / "run"
    shutil.copytree(three_steps, folder)
    damage(folder / "3")
    before = sorted(folder.rglob("*"))
    with Checkpoints(folder) as checkpoints, pytest.warns(UserWarning, match=f"going on from step 2: step 3: .*{reason}"):
        found = checkpoints.restore(make_state())
    assert (found.step, found.info, list(found.damaged)) == (2, {"step": 2}, [3])
    assert_same(found.state, make_state(2))
    assert sorted(folder.rglob("*")) == before
    gc.collect()  # orbax leaves coroutines behind where reading fails


def test_a_run_that_went_back_saves_the_damaged_step_again_beside_it(three_steps, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(three_steps, folder)
    flip_bit(folder / "3")
    flip_bit(folder / "2")
    with Checkpoints(folder, keep=1) as checkpoints:
        with pytest.warns(UserWarning, match=r"step 3: .*; step 2: "):
            assert checkpoints.restore(make_state()).step == 1
        checkpoints.save(2, make_state(9), {"step": 2})
        found = checkpoints.restore(make_state())
    assert (found.step, found.damaged) == (2, {})
    assert_same(found.state, make_state(9))
    aside = sorted(path.name.rpartition(".")[0] for path in folder.iterdir() if "damaged" in path.name)
    assert aside == ["2.damaged", "3.damaged"]


def test_where_no_step_is_whole_each_is_named_with_its_reason(three_steps, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(three_steps, folder)
    flip_bit(folder / "3")
    empty(folder / "2")
    edit_manifest(folder / "1")
    reasons = "no step is whole: step 3: 1 arrays .*; step 2: it has no manifest.*; step 1: its manifest does not match.*; start"
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError, match=reasons):
        checkpoints.restore(make_state())


def test_what_is_no_folder_of_checkpoints_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=r"named by their steps, got notes\.txt"):
        checkpoints.restore(make_state())
    with Checkpoints(tmp_path / "notes.txt") as checkpoints:
        with pytest.raises(CheckpointError, match=r"notes\.txt: expected a folder of checkpoints, got a file"):
            checkpoints.restore(make_state())
        with pytest.raises(CheckpointError, match=r"step 1 cannot be saved in .*notes\.txt.*: .*File exists"):
            checkpoints.save(1, make_state(), {})
    with Checkpoints(tmp_path / "missing") as checkpoints:
        assert checkpoints.restore(make_state()) is None
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": jnp.zeros((64, 65))}, r"weights: expected float32\[64, 65\], got float32\[64, 64\]"),
        ({"weights": jnp.zeros((64, 64), jnp.bfloat16)}, r"weights: expected bfloat16\[64, 64\], got float32\[64, 64\]"),
        ({"keys": (jax.random.key(0),)}, r"keys\.1: expected nothing, got key<rbg>\[3\]"),
        ({"more": jnp.zeros(2)}, r"more: expected float32\[2\], got nothing"),
        ({"host": [jnp.zeros(1)] * 9}, r"and \d+ more$"),
    ],
)
def test_another_model_is_refused_by_leaf_expected_and_got(three_steps, change, message):
    with (
        Checkpoints(three_steps) as checkpoints,
        pytest.raises(CheckpointError, match=f"another model or optimizer: .*{message}"),
    ):
        checkpoints.restore(make_state() | change)


def test_other_data_are_refused_with_both_named():
    check_identity({"dataset": "aa", "model": "m"}, {"model": "m", "dataset": "aa"})
    with pytest.raises(CheckpointError, match="dataset was 'aa', now 'bb', seed was None, now 3; give it what it had"):
        check_identity({"dataset": "aa", "model": "m"}, {"dataset": "bb", "model": "m", "seed": 3})


# Faults while saving.


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_told_at_the_next_call_and_the_save_after_it_works(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1), {"step": 1})
        for background in (True, False):
            checkpoints.wait()
            with monkeypatch.context() as patched:
                patched.setattr(ocp.StandardCheckpointHandler, "finalize" if background else "async_save", full)
                message = "step 2 was not saved" if background else "step 2 cannot be saved"
                if background:
                    checkpoints.save(2, make_state(2), {"step": 2})
                with pytest.raises(CheckpointError, match=f"{message} in .*, steps before it stay: .*No space left on device"):
                    checkpoints.save(3 if background else 2, make_state(3), {"step": 3})
                assert checkpoints.steps() == [1]
                assert checkpoints.restore(make_state()).step == 1
        checkpoints.save(3, make_state(3), {"step": 3})
        assert_same(checkpoints.restore(make_state()).state, make_state(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "1", "3"]
    gc.collect()  # orbax leaves coroutines behind where saving fails


def test_an_error_of_the_last_save_comes_out_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(ocp.StandardCheckpointHandler, "finalize", full)
    with pytest.raises(CheckpointError, match="step 1 was not saved"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1), {"step": 1})


def restore_child(folder):
    """The step that a child left, checked for belonging together."""
    from checkpoint_child import state_of

    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(state_of(0))
    assert_same(found.state, state_of(found.step))
    assert found.info == {"step": found.step}
    return found


@pytest.mark.parametrize(("name", "delay"), [("endless-1", 0.0), ("endless-2", 0.02)])
def test_killed_in_the_middle_of_a_save_the_step_before_is_there(children, name, delay):
    """Step 4 has been begun, so 3 is complete; how far 4 has come is chance."""
    child, folder = children[name]
    while child.stdout.readline() != "4\n":
        assert child.poll() is None, child.stderr.read()
    time.sleep(delay)
    child.send_signal(signal.SIGKILL)
    child.wait()
    found = restore_child(folder)
    assert found.step >= 3
    assert not found.damaged


def test_killed_when_all_is_written_but_the_name_the_step_before_is_there_and_one_folder_has_one_writer(children):
    child, folder = children["stalled"]
    assert child.stdout.readline() == "written\n", child.stderr.read()
    other = Checkpoints(folder)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be saved .*: another process saves there; give every run a folder"):
        other.save(2, make_state(), {})
    assert restore_child(folder).step == 1  # reading is free
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert any(".orbax-checkpoint-tmp" in path.name for path in folder.iterdir())
    assert restore_child(folder).step == 1
    with other:
        other.save(2, make_state(2), {"step": 2})
        other.wait()
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "1", "2"]


def test_a_file_that_may_not_grow_is_an_error_and_steps_before_and_after_are_whole(children):
    child, folder = children["limited"]
    out, err = child.communicate(timeout=100)
    assert child.returncode == 0, err
    refused, steps = out.splitlines()
    assert refused.startswith(f"refused: step 2 was not saved in {folder}, steps before it stay: ")
    assert steps == "[1]"
    assert restore_child(folder).step == 3


def test_sigterm_saves_and_ends(children):
    child, folder = children["terminated"]
    assert child.stdout.readline() == "started\n", child.stderr.read()
    child.terminate()
    _, err = child.communicate(timeout=100)
    assert child.returncode == 0, err
    assert restore_child(folder).step > 3


# Going on.


def test_five_steps_are_three_and_two_in_another_process_bit_for_bit(trained):
    """B60: parameters, mu, nu and count of actor and critic."""
    folder, run, child = trained
    _, err = child.communicate(timeout=200)
    assert child.returncode == 0, err
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(run)
    assert (found.step, found.info) == (5, {"cursor": 3})
    assert_same(found.state, run)
    names = " ".join(numbers_of(run))
    assert all(name in names for name in ("mu", "nu", "count", "actor", "critic"))
    moments = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(run) if "nu" in jax.tree_util.keystr(path)]
    assert any(np.any(np.asarray(leaf)) for leaf in moments)


def test_restored_state_is_built_like_a_fresh_one_and_steps_are_not_compiled_again(trained):
    """B61."""
    folder, run, child = trained
    child.wait(timeout=200)
    shutil.rmtree(folder / "5", ignore_errors=True)
    compiled = compilations()
    with Checkpoints(folder) as checkpoints:
        for like in (run, jax.eval_shape(fresh_run)):
            again = checkpoints.restore(like).state
            assert jax.tree.structure(again) == jax.tree.structure(like)
            for _ in range(2):
                again = train_step(again)
            assert_same(again, run)
    assert compilations() == compiled


def fill(tree, seed):
    """Random bits in place of every `ShapeDtypeStruct`, where it wants them."""
    draw = np.random.default_rng(seed)

    def random(leaf):
        return jax.device_put(draw.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(random, tree)


def abstract_run():
    """Shapes of actor and optimizer, bf16 adapters beside them, where they live on the mesh that is set."""
    model = jax.eval_shape(lambda: Decoder(DELTA, dtype=jnp.bfloat16, key=jax.random.key(0)))
    optimizer = jax.eval_shape(lambda model: make_optimizer(model, ADAM), model)
    adapter = jax.eval_shape(lambda: param(jnp.zeros((32, 8), jnp.bfloat16), "fsdp", None))
    return abstract({"model": model, "optimizer": optimizer, "adapter": adapter})


@pytest.mark.slow
def test_it_comes_back_on_any_mesh(tmp_path):
    """Bit for bit, split as the mesh wants it; A_log stays float32 and half precision half (B52)."""
    with Checkpoints(tmp_path) as checkpoints:
        with jax.set_mesh(make_mesh(4, 2)):
            state = fill(abstract_run(), 0)
            checkpoints.save(1, state, {})
        for layout in ((8, 1), (2, 4), (1, 1)):
            with jax.set_mesh(make_mesh(*layout)):
                like = abstract_run()
                found = checkpoints.restore(like)
            assert_same(found.state, state)
            for wanted, got in zip(jax.tree.leaves(like), jax.tree.leaves(found.state), strict=True):
                assert got.sharding == wanted.sharding
        assert any(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(state))
    dtypes = {path: dtype for path, (dtype, *_) in numbers_of(found.state).items()}
    assert {dtype for path, dtype in dtypes.items() if "A_log" in path} == {"float32"}
    assert {dtype for path, dtype in dtypes.items() if "adapter" in path} == {"bfloat16"}
