"""Shows a collection while it runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from focus_jax.collection.collector import Progress


@contextlib.contextmanager
def show_progress(title: str, console: Console, *, every: float = 10.0) -> Iterator[Callable[[Progress], None]]:
    """Yields what `collect(report=...)` takes.

    Args:
        title: stands before the numbers.
        console: where to draw.
        every: seconds between plain lines where `console` is no terminal.
    """
    if not console.is_terminal:
        last = time.monotonic()

        def line(progress: Progress) -> None:
            nonlocal last
            if time.monotonic() - last >= every:
                last = time.monotonic()
                console.print(f"{title}: {summary(progress)}", markup=False, highlight=False, soft_wrap=True)

        yield line
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0, text="")

        def update(progress: Progress) -> None:
            bar.update(task, completed=spent_share(progress), text=summary(progress))

        yield update


def summary(progress: Progress) -> str:
    """One line: finished, failed, in flight, tokens spent and reserved, the score of the last launch."""
    ledgers = [ledger for group in progress.round.ledgers for ledger in group]
    finished = sum(ledger.continuations for ledger in ledgers)
    reserved = sum(ledger.reserved_tokens for ledger in ledgers)
    return (
        f"{finished} finished, {len(progress.round.failures)} failed, {progress.in_flight} in flight, "
        f"{progress.round.tokens()} tokens spent, {reserved} reserved, score {progress.score:.3g}"
    )


def spent_share(progress: Progress) -> float:
    """How much of all passes' budgets is spent, 0 to 1: of the scarcer side of each."""
    shares = []
    for group, cursor in zip(progress.round.ledgers, progress.round.cursor, strict=True):
        for index, ledger in enumerate(group):
            sides = [(ledger.continuations, ledger.budget.continuations), (ledger.tokens, ledger.budget.tokens)]
            shares.append(1.0 if index < cursor else max(spent / limit for spent, limit in sides if limit))
    return min(1.0, sum(shares) / len(shares))
