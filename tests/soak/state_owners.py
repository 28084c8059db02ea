"""Owners of one queue that are killed and frozen while they keep state by key.

``python -m tests.soak.state_owners URL SEED KILLS [MUTANT]`` plays owners one after the other.
Each is a process of its own. It processes messages from the recorded progress on, and is killed at
a random place: before, within or after a transaction. Some owners are frozen instead, and continue
beside their successors. The app's database has a ledger beside the states: each effect in the order
in which it was made. The program prints the violations as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import signal
import sqlite3
import sys
import types
from collections.abc import Iterator
from typing import Any

from qdo.errors import StaleClaimError
from qdo.message import Message
from tests.simulation.mutants.edits import Edit
from tests.support.paths import ROOT

STATE = "qdo/state.py"
MUTANTS = {
    "the fence stays": Edit(
        STATE,
        "WHEN excluded.fence > {table}.fence THEN excluded.fence ELSE {table}.fence END",
        "WHEN 1 = 1 THEN {table}.fence END",
    ),
    "a former owner is admitted": Edit(STATE, "fence > message.fence", "fence < 0"),
    "a repetition is new": Edit(
        STATE, "message.position > known.get(line_of(message), -1)", "True"
    ),
    "a position of all priorities": Edit(STATE, "message.priority", "5"),
    "a repetition is saved": Edit(
        STATE, "if state.new:\n            positions", "if True:\n            positions"
    ),
    "the position is not saved": Edit(
        STATE, "positions[line_of(message)] = message.position", "pass"
    ),
}
"""Rules left out; each must be found."""
KEYS = ("ada", "bob", "eve")
WINDOW = 12
"""Messages of a window arrive in the order of their priorities, and windows one after the other."""
STALE = 3
DATABASE_LEDGER = """
    CREATE TABLE IF NOT EXISTS ledger (
        place {serial}, name VARCHAR(20), fence BIGINT, position BIGINT)
"""


def load_state(mutant: str | None) -> Any:
    """Return `qdo.state`, with one rule left out if `mutant` names it."""
    text = (ROOT / STATE).read_text()
    module = types.ModuleType("mutated_state")
    if mutant is not None:
        text = MUTANTS[mutant].apply(text)
    exec(compile(text, STATE, "exec"), module.__dict__)
    return module


def _messages(window: int, fence: int) -> list[Message]:
    """Return the messages of a window as an owner gets them: by priority, then by position."""
    chosen = random.Random(window)
    found = []
    for position in range(window * WINDOW, (window + 1) * WINDOW):
        priority = chosen.choice("059")
        headers = {} if priority == "5" else {"qdo-priority": priority}
        message = Message("q", position, None, chosen.choice(KEYS), headers, fence=fence)
        found.append((priority, position, message))
    return [message for _, _, message in sorted(found, key=lambda each: each[:2])]


class Owners:
    """Plays the owners of one queue.

    :ivar recorded: number of windows that are recorded as done.
    """

    def __init__(self, url: str, seed: int, states: Any) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._states = states
        self._fence = 0
        self.recorded = 0
        with self._transaction() as session:
            serial = "INTEGER PRIMARY KEY" if self._embedded else "BIGSERIAL PRIMARY KEY"
            session.execute(DATABASE_LEDGER.format(serial=serial))
            states.create(session)

    @property
    def _embedded(self) -> bool:
        return self._url.startswith("sqlite:")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        with contextlib.closing(self._connect()) as connection, connection:
            yield connection

    def _connect(self) -> Any:
        if self._embedded:
            return sqlite3.connect(self._url.removeprefix("sqlite:"), timeout=30)
        import psycopg

        return psycopg.connect(self._url)

    def kill_one(self) -> None:
        """Start an owner that dies after some messages, at a place within one."""
        self._reap(self._start(self._random.randrange(3 * WINDOW), self._random.randrange(4)))

    def freeze_one(self) -> bool:
        """Freeze an owner between two messages, let another begin, and continue the first one.

        Return whether the first one was refused.
        """
        frozen = self._start(self._random.randrange(WINDOW), None)
        progress = self._progress
        os.waitpid(frozen, os.WUNTRACED)
        self._reap(self._start(self._random.randrange(1, 2 * WINDOW), 0))
        os.kill(frozen, signal.SIGCONT)
        _, status = os.waitpid(frozen, 0)
        os.close(progress)
        return os.waitstatus_to_exitcode(status) == STALE

    def _start(self, count: int, place: int | None) -> int:
        """Fork an owner that processes `count` messages, and then dies at a place or freezes."""
        self._fence += 1
        self._progress, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._own(count, place, told)
            except StaleClaimError:
                os._exit(STALE)
            except BaseException as error:  # noqa: BLE001 - a child ends here
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(4)
            os._exit(0)
        os.close(told)
        return pid

    def _reap(self, pid: int) -> None:
        """Wait for an owner's death, and record some of its progress, as a checkpoint does."""
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"an owner ended with {code}")
        with open(self._progress, "rb") as progress:
            done = len(progress.read())
        self.recorded += self._random.randint(0, done)

    def _own(self, count: int, place: int | None, told: int) -> None:
        connection = self._connect()
        for number in range(10 * WINDOW):
            window, place_in_window = divmod(number, WINDOW)
            message = _messages(self.recorded + window, self._fence)[place_in_window]
            if number == count and place is None:
                os.kill(os.getpid(), signal.SIGSTOP)
            self._process(connection, message, place if number == count else None)
            if place_in_window == WINDOW - 1:
                os.write(told, b"w")

    def _process(self, connection: Any, message: Message, place: int | None) -> None:
        with connection if self._embedded else connection.transaction():
            _die(place == 0)
            with self._states.of(connection, message) as state:
                _die(place == 1)
                if state.new:
                    row = f"('{message.key}', {message.fence}, {message.position})"
                    connection.execute(f"INSERT INTO ledger (name, fence, position) VALUES {row}")
                state["chain"] = _chained(state.get("chain", ""), message.position)
            _die(place == 2)
        _die(place == 3)

    def violations(self) -> list[str]:
        """Return where the ledger and the states break K1 or K2."""
        query = "SELECT fence, position FROM ledger WHERE name = '{}' ORDER BY place"
        found = []
        with self._transaction() as session:
            for key in KEYS:
                rows = session.execute(query.format(key)).fetchall()
                fences, positions = [row[0] for row in rows], [row[1] for row in rows]
                due = [each for w in range(self.recorded + 10) for each in _messages(w, 0)]
                due = [each.position for each in due if each.key == key]
                if fences != sorted(fences):
                    found.append(f"{key}: a former owner wrote after its successor")
                if positions != due[: len(positions)]:
                    found.append(f"{key}: messages are missing, doubled or out of order")
                if len(positions) < sum(each < self.recorded * WINDOW for each in due):
                    found.append(f"{key}: messages that are recorded as done were not processed")
                chain = functools.reduce(_chained, positions, "")
                if self._states.read(session, "q", key).get("chain", "") != chain:
                    found.append(f"{key}: the state is not that of its messages")
        return found


def _die(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


def _chained(chain: str, position: int) -> str:
    return hashlib.sha256(f"{chain}{position}".encode()).hexdigest()


def main(url: str, seed: str, kills: str, mutant: str | None = None) -> None:
    """Play owners, and print the violations and what was played."""
    owners = Owners(url, int(seed), load_state(mutant).KeyedState())
    chosen = random.Random(int(seed))
    freezes = refused = 0
    for _ in range(int(kills)):
        if chosen.random() < 0.25:
            freezes += 1
            refused += owners.freeze_one()
        else:
            owners.kill_one()
    played = {"windows": owners.recorded, "freezes": freezes, "refused": refused}
    print(json.dumps({"violations": owners.violations(), **played}))


if __name__ == "__main__":
    main(*sys.argv[1:])
