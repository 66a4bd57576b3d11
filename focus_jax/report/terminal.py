"""Rollout trees and rounds on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from focus_jax.collection import Credit, HostTree, Round, focus_credit


def show_tree(
    tree: HostTree, credit: Credit, index: int, *, outcomes: np.ndarray, decode: Callable[[list[int]], str], width: int = 60
) -> Tree:
    """A tree to print with rich: every node with its numbers, after what the segment into it said and earned.

    Args:
        tree: the tree.
        credit: what a method made of it and of others.
        index: which of the trees in `credit` it is.
        outcomes: float [N], observed outcomes (the scheduler's count) of each node.
        decode: token ids to text.
        width: most characters of a segment's text.

    Source: project page, "Watch how the methods assign credit".
    """
    advantages, refined, targets, children = (
        arrays[index] for arrays in (credit.advantages, credit.refined, credit.targets, credit.num_children)
    )

    def label(node: int) -> str:
        segment = tree.nodes[node].segment
        earned, said = "", f"problem {escape(tree.problem)}"
        if segment is not None:
            color = "green" if advantages[node] > 0 else "red" if advantages[node] < 0 else "default"
            earned = f"[bold {color}]A {advantages[node]:+.2f}[/] "
            said = escape(_shorten(decode(segment.token_ids[segment.generated].tolist()), width))
        if tree.status(node) == "terminal":
            return f"{earned}{said}  [bold]reward {tree.reward[node]:g}[/]"
        numbers = f"V {tree.values[node]:.2f}  N {outcomes[node]:.0f}  n {children[node]}  target {targets[node]:.2f}"
        return f"{earned}{said}  [dim]{numbers}[/]  [bold]refined {refined[node]:.2f}[/]"

    branches = {0: Tree(label(0))}
    for node, parent in enumerate(tree.parent.tolist()[1:], 1):
        branches[node] = branches[parent].add(label(node))
    return branches[0]


def show_rounds(rounds: Mapping[str, Round], *, kappa: float = 1.0) -> Table:
    """A table to print with rich: one line per problem and round of the same problems.

    "solved" is the mean return of the rollouts that started at the root, "value" its refined value; the columns between
    count continuations by the depth of the state they started from.

    Args:
        rounds: by name, collected over the same problems.
        kappa: weight of the critic's prediction in the refined value.
    """
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title="Continuations by the depth of the state they started from")
    for name in ("problem", "method"):
        table.add_column(name)
    for name in ("solved", "nodes", "tokens", "root", "1", "2", "3+", "value"):
        table.add_column(name, justify="right")
    for i, problem in enumerate(next(iter(rounds.values())).problems):
        problem = problem if len(problem) <= 20 else "…" + problem[-19:]  # ids of files differ in their ends
        for name, round_ in rounds.items():
            tree = round_.trees[i]
            if tree is None or len(tree) == 1:
                table.add_row(escape(problem), name, "-")
                continue
            starts = start_depths(tree)
            table.add_row(
                escape(problem),
                name,
                f"{round_.stats(i).mean[0]:.2f}",
                str(len(tree)),
                str(sum(n.segment.num_generated for n in tree.nodes if n.segment is not None)),
                *(str(starts[depth]) for depth in range(3)),
                str(sum(count for depth, count in starts.items() if depth >= 3)),
                f"{focus_credit([tree], kappa=kappa).refined[0][0]:.2f}",
            )
    return table


def start_depths(tree: HostTree) -> Counter[int]:
    """How many finished continuations started at each depth of a tree; depth 0 is the root."""
    depth = tree.depth
    # The first node of an attempt hangs under its starting node, and nodes of one attempt are in order.
    starts = {node.attempt: int(depth[node.parent]) for node in reversed(tree.nodes[1:])}
    return Counter(starts.values())


def _shorten(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
