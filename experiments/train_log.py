"""Where the numbers of a training run go: metrics.jsonl, and TensorBoard where a writer is installed."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any


class MetricsLog:
    """One line per round in metrics.jsonl, no round twice however often the run is gone on with.

    Args:
        folder: the run's.
        is_writer: whether this process writes; where there are several, the first does.

    Raises:
        ValueError: the file cannot be written, or holds something else.
    """

    def __init__(self, folder: Path, *, is_writer: bool = True):
        self.path = folder / "metrics.jsonl"
        self._is_writer = is_writer
        self._board: Any = None
        if is_writer:
            self._rewrite(self._lines())

    def go_on(self, *, after: int) -> None:
        """Drop the lines of later rounds: they will be written again."""
        if self._is_writer:
            self._rewrite([line for line in self._lines() if json.loads(line)["round"] <= after])
            self._board = _tensorboard(self.path.parent / "tensorboard", after)

    def _lines(self) -> list[str]:
        """The whole ones; a last line without its end was cut short."""
        try:
            text = self.path.read_text() if self.path.exists() else ""
            lines = text[: text.rfind("\n") + 1].splitlines()
            if all(isinstance(json.loads(line)["round"], int) for line in lines):
                return lines
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.path} cannot be read: {error}; mend it, or name another run folder") from error
        raise ValueError(f"{self.path}: expected a whole number for `round` in every line; mend it, or name another run folder")

    def _rewrite(self, lines: list[str]) -> None:
        part = self.path.with_suffix(".part")
        try:
            part.write_text("".join(line + "\n" for line in lines))
            os.replace(part, self.path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise ValueError(f"{self.path} cannot be written: {error}; make room for it, or name another run folder") from error

    def write(self, number: int, metrics: dict[str, Any]) -> None:
        """Add the line of a round."""
        if not self._is_writer:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"round": number, "time": time.time(), **metrics}) + "\n")
        except OSError as error:
            raise ValueError(f"{self.path} cannot be written: {error}; make room, the same command goes on") from error
        for name, value in metrics.items():
            if self._board is not None and isinstance(value, int | float):
                self._board.add_scalar(name, value, number)

    def close(self) -> None:
        """Write out what waits."""
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensorboard(folder: Path, last: int) -> Any:
    """A writer that forgets rounds after the last one, or None where none is installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("tensorboardX").SummaryWriter(str(folder), purge_step=last + 1)
    return None
