"""What a person looks at after a run."""

from focus_jax.report.terminal import show_tree, start_depths

__all__ = ["show_tree", "start_depths"]
