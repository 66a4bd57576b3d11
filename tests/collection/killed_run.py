"""Collects with one worker into the journal it is given; the test kills it at random moments."""

import asyncio
import sys

from simulated import LetterEnvironment, letter_agent

from focus_jax.collection import Budget, Pass, RandomCritic, RootRollouts, Uniform, ValueRefinement, collect

passes = [
    Pass(RootRollouts(2), Budget(continuations=2)),
    Pass(Uniform(), Budget(tokens=120)),
    Pass(ValueRefinement(), Budget(tokens=200)),
]
print("collecting", flush=True)
asyncio.run(
    collect(
        letter_agent(delay=0.001, failing=0.03),
        RandomCritic(1),
        {f"p{i}": f"task {i}" for i in range(6)},
        passes,
        make_environment=LetterEnvironment,
        num_workers=1,
        max_failures=1000,
        journal=sys.argv[1],
    )
)
