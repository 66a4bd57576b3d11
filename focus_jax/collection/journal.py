"""The append-only record of a collection round: every launch, finish and failure, in an SQLite file.

Killing the process at any moment loses at most the attempts in flight; `focus_jax.collection.replay` rebuilds the same
trees from the file, bit for bit.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from focus_jax.agents import Reset, Segment, State
from focus_jax.collection.tree import Continuation

FORMAT = 0x464F4303  # "FOC" and a version: no other SQLite file has it
_INT, _FLOAT = "<i4", "<f4"  # the same bytes on every machine

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE roots (problem INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, context BLOB, seed_length INTEGER,
    environment BLOB, num_turns INTEGER, num_tokens INTEGER, resumable INTEGER, value REAL, price INTEGER, error TEXT,
    retry INTEGER);
CREATE TABLE launches (attempt INTEGER PRIMARY KEY, problem INTEGER NOT NULL, node INTEGER NOT NULL, pass INTEGER NOT NULL,
    number INTEGER NOT NULL, seed INTEGER NOT NULL, policy_version INTEGER NOT NULL, reserved INTEGER NOT NULL,
    score REAL, time REAL NOT NULL);
CREATE TABLE outcomes (seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL UNIQUE, kind TEXT NOT NULL, message TEXT,
    tokens INTEGER NOT NULL, num_launched INTEGER NOT NULL, time REAL NOT NULL);
CREATE TABLE segments (attempt INTEGER NOT NULL, position INTEGER NOT NULL, token_ids BLOB, flags BLOB, logprobs BLOB,
    versions BLOB, reward REAL, num_steps INTEGER, status TEXT, reason TEXT, resets BLOB,
    environment BLOB, num_turns INTEGER, num_tokens INTEGER, resumable INTEGER, value REAL, price INTEGER,
    PRIMARY KEY (attempt, position)) WITHOUT ROWID;
"""


class JournalError(Exception):
    """The journal cannot be opened, read or written, or belongs to another run."""


@dataclass(frozen=True)
class Launch:
    """One attempt as it was started.

    Attributes:
        attempt: running number over the journal.
        problem: index of the problem.
        node: starting node.
        pass_index: which pass bought it.
        number: how many attempts from this node ended before or were in flight; with the run's seed it fixes `seed`.
        seed: seed of the attempt.
        policy_version: weights that were acting when it was launched.
        reserved: generated tokens set aside.
        score: what the rule scored it (the benefit, for value refinement).
    """

    attempt: int
    problem: int
    node: int
    pass_index: int
    number: int
    seed: int
    policy_version: int
    reserved: int
    score: float


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: `kind` is "finished", a failure kind, or "interrupted" (the process ended first).

    `num_launched` counts the attempts launched by then; a journal fills it in.
    """

    attempt: int
    kind: str
    message: str | None
    tokens: int
    continuation: Continuation | None
    num_launched: int = 0


@dataclass(frozen=True)
class Root:
    """How a problem started: its root state, value and price, or the error that kept it from starting.

    `retry` says that the machinery failed, not the problem: it is started again when the journal is continued.
    """

    problem: int
    id: str
    state: State | None
    value: float = 0.0
    price: int = 0
    error: str | None = None
    retry: bool = False


class Journal:
    """One collection round on disk (or in memory, where `path` is None).

    Args:
        path: the SQLite file; made when missing, continued when there.
        settings: plain data that fixes the run (seed, passes, sampling, problems); another run's file is refused.

    Raises:
        JournalError: another process is writing to the file, the file is no journal, or `settings` differ.
    """

    def __init__(self, path: Path | str | None, settings: dict[str, Any]):
        self._lock = _lock(Path(path)) if path is not None else None
        try:
            self._db = _open(path)
            self._check(settings)
            self._num_launched = len(self.launches())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file and let others write to it."""
        if hasattr(self, "_db"):
            self._db.close()
        if self._lock is not None:
            self._lock.close()

    def add_roots(self, roots: list[Root]) -> None:
        """Record how problems started."""
        rows = []
        for root in roots:
            s = root.state
            columns = (
                (None,) * 6
                if s is None
                else (_bytes(s.context, _INT), s.seed_length, s.environment, s.num_turns, s.num_tokens, s.resumable)
            )
            rows.append((root.problem, root.id, *columns, root.value, root.price, _storable(root.error), root.retry))
        self._write([(f"INSERT OR REPLACE INTO roots VALUES ({','.join('?' * 12)})", rows)])

    def write(self, outcomes: list[Outcome], launches: list[Launch]) -> None:
        """Record how attempts ended, with all that they found, and the attempts that start then: all of it or nothing."""
        now = time.time()
        segments = [row for o in outcomes if o.continuation is not None for row in _segment_rows(o.attempt, o.continuation)]
        ends = [(o.attempt, o.kind, _storable(o.message), o.tokens, self._num_launched, now) for o in outcomes]
        starts = [
            (a.attempt, a.problem, a.node, a.pass_index, a.number, a.seed, a.policy_version, a.reserved, a.score, now)
            for a in launches
        ]
        self._write([(_INSERT_SEGMENT, segments), (_INSERT_OUTCOME, ends), (_INSERT_LAUNCH, starts)])
        self._num_launched += len(launches)

    def roots(self) -> list[Root]:
        """Every problem that was started, by index."""
        return [
            Root(
                r["problem"],
                r["id"],
                None
                if r["context"] is None
                else State(
                    _array(r["context"], _INT),
                    r["seed_length"],
                    r["environment"],
                    r["num_turns"],
                    r["num_tokens"],
                    bool(r["resumable"]),
                ),
                r["value"],
                r["price"],
                r["error"],
                bool(r["retry"]),
            )
            for r in self._read("SELECT * FROM roots ORDER BY problem")
        ]

    def launches(self) -> list[Launch]:
        """Every attempt, in the order of launch."""
        return [Launch(*r[:9]) for r in self._read("SELECT * FROM launches ORDER BY attempt")]

    def outcomes(self) -> Iterator[Outcome]:
        """Every ended attempt, in the order in which they ended. States of continuations carry no context."""
        for r in self._read("SELECT * FROM outcomes ORDER BY seq"):
            continuation = self._continuation(r["attempt"]) if r["kind"] == "finished" else None
            yield Outcome(r["attempt"], r["kind"], r["message"], r["tokens"], continuation, r["num_launched"])

    def settings(self) -> dict[str, Any]:
        """The settings the journal was made with."""
        stored = self._settings()
        if stored is None:
            raise JournalError("the journal holds no round yet: its process ended before the first problem; collect into it")
        return stored

    def _settings(self) -> dict[str, Any] | None:
        rows = self._read("SELECT value FROM meta WHERE key = 'settings'")
        try:
            return json.loads(rows[0][0]) if rows else None
        except ValueError as error:
            raise JournalError(f"the journal is damaged, its settings cannot be read: {error}") from error

    def _continuation(self, attempt: int) -> Continuation:
        segments, states, values, prices = [], [], [], []
        for r in self._read("SELECT * FROM segments WHERE attempt = ? ORDER BY position", attempt):
            flags = _array(r["flags"], "u1")
            segments.append(
                Segment(
                    token_ids=_array(r["token_ids"], _INT),
                    generated=(flags & 1).astype(bool),
                    task=(flags & 2).astype(bool),
                    logprobs=_array(r["logprobs"], _FLOAT),
                    versions=_array(r["versions"], _INT),
                    reward=r["reward"],
                    num_steps=r["num_steps"],
                    status=r["status"],
                    reason=r["reason"],
                    resets=_resets(_array(r["resets"], _INT)),
                )
            )
            states.append(
                State(np.zeros(0, np.int32), 0, r["environment"], r["num_turns"], r["num_tokens"], bool(r["resumable"]))
            )
            values.append(r["value"])
            prices.append(r["price"])
        return Continuation(tuple(segments), tuple(states), tuple(values), tuple(prices))

    def _check(self, settings: dict[str, Any]) -> None:
        wanted = json.loads(json.dumps(settings))
        stored = self._settings()
        if stored is None:
            self._write([("INSERT INTO meta VALUES (?,?)", [("settings", json.dumps(wanted, sort_keys=True))])])
            return
        if changes := _differences(stored, wanted):
            raise JournalError(
                f"the journal was made by another run ({'; '.join(changes)}); resume with the same settings or name a new file"
            )

    def _read(self, query: str, *parameters: Any) -> list[sqlite3.Row]:
        try:
            return self._db.execute(query, parameters).fetchall()
        except sqlite3.Error as error:
            raise JournalError(f"the journal cannot be read: {error}") from error

    def _write(self, statements: list[tuple[str, list[tuple[Any, ...]]]]) -> None:
        """All of it or nothing."""
        try:
            with self._db:
                self._db.execute("BEGIN")
                for statement, rows in statements:
                    self._db.executemany(statement, rows)
        except sqlite3.Error as error:
            raise JournalError(f"the journal cannot be written: {error}") from error


_INSERT_LAUNCH = f"INSERT INTO launches VALUES ({','.join('?' * 10)})"
_INSERT_OUTCOME = "INSERT INTO outcomes (attempt, kind, message, tokens, num_launched, time) VALUES (?,?,?,?,?,?)"
_INSERT_SEGMENT = f"INSERT INTO segments VALUES ({','.join('?' * 17)})"


def _resets(numbers: np.ndarray) -> tuple[Reset, ...]:
    """Of a row of segments: position, length and context of each, one after the other."""
    resets = []
    while len(numbers):
        position, end = int(numbers[0]), 2 + int(numbers[1])
        resets.append(Reset(position, numbers[2:end]))
        numbers = numbers[end:]
    return tuple(resets)


def _segment_rows(attempt: int, continuation: Continuation) -> list[tuple[Any, ...]]:
    rows = []
    c = continuation
    for i, (g, s, value, price) in enumerate(zip(c.segments, c.states, c.values, c.prices, strict=True)):
        flags = g.generated.astype(np.uint8) | (g.task.astype(np.uint8) << 1)
        rows.append(
            (
                attempt,
                i,
                _bytes(g.token_ids, _INT),
                flags.tobytes(),
                _bytes(g.logprobs, _FLOAT),
                _bytes(g.versions, _INT),
                g.reward,
                g.num_steps,
                g.status,
                g.reason,
                b"".join(_bytes(np.array([a.position, len(a.context), *a.context]), _INT) for a in g.resets),
                s.environment,
                s.num_turns,
                s.num_tokens,
                s.resumable,
                value,
                price,
            )
        )
    return rows


@contextlib.contextmanager
def read_journal(path: Path | str) -> Iterator[Journal]:
    """Open a journal for reading, also while another process writes to it.

    Raises:
        JournalError: there is no journal at `path`.
    """
    if not Path(path).is_file():
        raise JournalError(f"expected a journal file, there is none at {path}")
    journal = Journal.__new__(Journal)
    journal._lock = None
    journal._db = _open(path, read_only=True)
    try:
        journal._db.execute("BEGIN")  # one state of the file, whatever is written meanwhile
        yield journal
    finally:
        journal.close()


def _open(path: Path | str | None, *, read_only: bool = False) -> sqlite3.Connection:
    try:
        if read_only:
            db = sqlite3.connect(f"{Path(str(path)).resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
        else:
            # The collector may be driven from another thread than the one that made the journal, never from two at once.
            db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None, check_same_thread=False)
        db.row_factory = sqlite3.Row
        if not read_only:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version == 0 and tables == 0 and not read_only:
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif version != FORMAT:
            raise JournalError(f"{path} is no journal of this version (expected format {FORMAT}, got {version})")
    except sqlite3.Error as error:
        raise JournalError(f"{path} cannot be opened as a journal: {error}") from error
    return db


def _lock(path: Path) -> IO[str]:
    """An exclusive lock beside the file; the system releases it when the process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(path.with_name(path.name + ".lock"), "w")  # noqa: SIM115
    except OSError as error:
        raise JournalError(f"{path} cannot be written: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise JournalError(f"{path} is being written by another process; wait for it, or name another run folder") from None
    return handle


def _bytes(array: np.ndarray, dtype: str) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _array(blob: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(blob, dtype)


def _storable(message: str | None) -> str | None:
    """The message with '?' for what is no valid text, such as a part of a file name that is not UTF-8."""
    return message and message.encode(errors="replace").decode()


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """What differs between two settings, by the names that lead to it."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = sorted(there.keys() | here.keys())
        return [d for k in keys for d in _differences(there.get(k), here.get(k), f"{name}.{k}" if name else k)]
    return [] if there == here else [f"{name}: {_short(there)} there, {_short(here)} here"]


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 80 else text[:77] + "..."
