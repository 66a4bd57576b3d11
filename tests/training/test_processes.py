"""What processes do alike: one alone, and two that share a run."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from focus_jax.training.checkpoint import Checkpoints
from focus_jax.training.processes import FailedSomewhereError, everywhere, stop_on_sigterm

CHILD = Path(__file__).with_name("checkpoint_child.py")
ROOT = Path(__file__).parents[2]


def test_a_signal_is_remembered_and_afterwards_the_old_handler_is_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm() as stop_requested:
        assert not stop_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_requested()
        assert stop_requested()
    assert signal.getsignal(signal.SIGTERM) is before
    with stop_on_sigterm() as stop_requested:
        assert not stop_requested()


def test_what_fails_is_told_in_one_line():
    assert everywhere(lambda: 3) == 3
    with pytest.raises(FailedSomewhereError, match=r"^too bad$"):
        everywhere(lambda: (_ for _ in ()).throw(OSError("too\n  bad")))
    with pytest.raises(FailedSomewhereError, match=r"^KeyError$|^''$"):
        everywhere(lambda: {}[""])


@pytest.mark.slow
def test_two_processes_save_together_and_one_alone_goes_on(tmp_path):
    folder = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4"),
    }
    command = [sys.executable, str(CHILD), "distributed", str(folder)]
    runs = [
        subprocess.Popen([*command, str(rank), address], env=environment, stdout=-1, stderr=-1, text=True) for rank in range(2)
    ]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    for rank in range(2):
        assert json.loads(Path(f"{folder}-{rank}.json").read_text()) == [2, 10, 4, True, False, True]
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore({"wide": np.zeros((16, 4), np.float32), "count": np.zeros((), np.int32)})
    np.testing.assert_array_equal(found.state["wide"], 2 * np.arange(64, dtype=np.float32).reshape(16, 4))
    assert found.state["count"] == 10
