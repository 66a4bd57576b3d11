"""Measure the package: `python experiments/benchmark.py kernels`, or another of the commands below."""

import os
import sys

if "kernels" in sys.argv:  # two host devices for its sharded measurements; read when jax is first used
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

from typing import Any, Union

import tyro
from benchmarks import ahead_of_time, collector, kernels, models, training

from focus_jax.host_memory import keep_freed_memory

# A command is a dataclass of its options and the function that takes them; one line adds one.
COMMANDS: dict[Any, Any] = {
    kernels.Kernels: kernels.main,
    collector.Collector: collector.main,
    models.Models: models.main,
    ahead_of_time.AheadOfTime: ahead_of_time.main,
    training.Training: training.main,
}


def main() -> None:
    """Run the command named on the command line."""
    commands: Any = Union[tuple(COMMANDS)]  # noqa: UP007  known only when it runs
    config = tyro.cli(commands, description=__doc__)
    keep_freed_memory()  # for all that this process measures, torch too
    COMMANDS[type(config)](config)


if __name__ == "__main__":
    main()
