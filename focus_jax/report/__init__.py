"""What a person looks at after a run."""

from focus_jax.report.terminal import show_rounds, show_tree, start_depths

__all__ = ["show_rounds", "show_tree", "start_depths"]
