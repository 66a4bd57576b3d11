import numpy as np
from rich.console import Console
from simulated import make_continuation, make_segment, make_tree

from focus_jax.collection import Budget, Pass, RootRollouts, Round, focus_credit
from focus_jax.collection.journal import Launch, Outcome, Root
from focus_jax.report import show_rounds, show_tree, start_depths


def grown():
    tree = make_tree("pens", value=0.8)
    bad = make_segment("[red]no[/] " + "x" * 80, status="terminal")
    tree.add(0, make_continuation(make_segment("go"), bad, values=[0.8, 0.0]), attempt=0)
    tree.add(1, make_continuation(make_segment("yes", reward=1.0, status="terminal")), attempt=1)
    return tree


def test_the_tree_shows_every_number_of_the_worked_example():
    tree = grown()
    console = Console(width=200)

    def decode(ids):
        return "".join(map(chr, ids))

    with console.capture() as capture:
        console.print(show_tree(tree, focus_credit([tree]), 0, outcomes=np.array([1, 2, 1, 1]), decode=decode))
    text = capture.get()
    assert "V 0.80  N 2  n 2  target 0.50  refined 0.60" in text
    assert "A -0.60 [red]no[/] xxx" in text  # a model's text is no markup
    assert "…  reward 0" in text
    assert "A +0.40 yes  reward 1" in text


def test_start_depths_count_continuations_not_nodes():
    assert start_depths(grown()) == {0: 1, 1: 1}


def test_rounds_show_what_was_spent_where():
    round_ = Round([Pass(RootRollouts(), Budget(continuations=9))], ["pens", "broken"])
    round_.start(Root(0, "pens", make_tree().state(0), 0.8))
    round_.start(Root(1, "broken", None, error="no pens"))
    paths = [
        (0, (make_segment("go"), make_segment("no", status="terminal"))),
        (1, (make_segment("y", reward=1.0, status="terminal"),)),
    ]
    for attempt, (node, path) in enumerate(paths):
        round_.launch(Launch(attempt, 0, node, 0, 0, 0, 0, 0, 0.0))
        round_.settle(Outcome(attempt, "finished", None, 3, make_continuation(*path)))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(show_rounds({"focus": round_}))
    rows = [line.split() for line in capture.get().splitlines() if line.strip()]
    # solved at the root, nodes, tokens, continuations from the root, depths 1, 2 and 3+, refined value of the root
    assert ["pens", "focus", "0.00", "4", "5", "1", "1", "0", "0", "0.57"] in rows
    assert ["broken", "focus", "-"] in rows
