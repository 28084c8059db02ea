"""Owners of one queue that are killed and frozen while they keep state by key.

``python -m tests.soak.state_owners URL SEED KILLS [MUTANT]`` plays owners one after the other.
Each is a process of its own. It processes messages from the recorded progress on, and is killed at
a random place: before, within or after a transaction. A quarter is frozen first, and continues
beside a successor. The app's database has a ledger beside the states: each effect in the order of
its key. The program prints the violations of K1 and K2 as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import sys
import traceback
import types
from typing import Any

from qdo.errors import StaleClaimError
from qdo.message import Message
from tests.support.paths import ROOT

STATE = "qdo/state.py"
NEW = "message.position > known.get(str(message.priority), -1)"
MUTANTS = {
    "K2: the fence stays": ("excluded.fence > {table}.fence", "1 = 0"),
    "K2: a former owner is admitted": ("fence > message.fence", "fence < 0"),
    "K1: a repetition is new": (NEW, "True"),
    "K1: a repetition is saved": ("if state.new:", "if True:"),
    "K1: the position is not saved": ("[str(message.priority)] = ", "[''] = "),
    "K1: a position of all priorities": ("str(message.priority)", "'5'"),
}
"""Rules left out; each must be found."""
KEYS = ("ada", "bob", "eve")
WINDOW = 12
"""Messages of a window arrive in the order of their priorities, and windows one after the other."""
STALE = 3
"""Exit code of an owner that was refused."""


def _state(mutant: str | None = None) -> Any:
    """Return the class `KeyedState`, with one rule left out if `mutant` names it."""
    text, module = (ROOT / STATE).read_text(), types.ModuleType("mutated_state")
    if mutant is not None:
        old, new = MUTANTS[mutant]
        if old not in text:
            raise ValueError(f"{STATE} must contain {old!r}")
        text = text.replace(old, new)
    exec(compile(text, STATE, "exec"), module.__dict__)
    return module.KeyedState()


def _messages(window: int, fence: int) -> list[Message]:
    """Return the messages of a window as an owner gets them: by priority, then by position."""
    dice = random.Random(window)
    found = []
    for position in range(window * WINDOW, (window + 1) * WINDOW):
        headers = {"qdo-priority": dice.choice("059")}
        found.append(Message("q", position, None, dice.choice(KEYS), headers, fence=fence))
    return sorted(found, key=lambda each: each.priority)


class Owners:
    """Plays the owners of one queue.

    :ivar recorded: number of windows that are recorded as done.
    """

    def __init__(self, url: str, seed: int, states: Any) -> None:
        self._url = url
        self._dice = random.Random(seed)
        self._states = states
        self._fence = 0
        self.recorded = 0
        ledger = "CREATE TABLE ledger (name VARCHAR(20), place INT, fence BIGINT, position BIGINT)"
        with contextlib.closing(self._connect()) as session, session:
            session.execute(ledger)
            states.create(session)

    def _connect(self) -> Any:
        if self._url.startswith("sqlite:"):
            return sqlite3.connect(self._url.removeprefix("sqlite:"), timeout=30)
        import psycopg

        return psycopg.connect(self._url)

    def _read(self, query: str) -> Any:
        with contextlib.closing(self._connect()) as session:
            return session.execute(query).fetchall()

    def play(self) -> bool:
        """Play an owner until it is dead; return whether it was refused."""
        if self._dice.random() < 0.75:
            return self._wait(
                self._start(self._dice.randrange(3 * WINDOW), self._dice.randrange(4))
            )
        frozen = self._start(self._dice.randrange(WINDOW), None)
        os.waitpid(frozen, os.WUNTRACED)
        self._wait(self._start(self._dice.randrange(1, 2 * WINDOW), 0))
        os.kill(frozen, signal.SIGCONT)
        return self._wait(frozen)

    def _start(self, count: int, place: int | None) -> int:
        """Fork an owner that processes `count` messages, and then dies at a place or freezes."""
        self._fence += 1
        pid = os.fork()
        if pid == 0:
            try:
                self._own(count, place)
            except StaleClaimError:
                os._exit(STALE)
            except BaseException:  # noqa: BLE001 - a child ends here
                traceback.print_exc()
                os._exit(4)
            os._exit(0)
        return pid

    def _wait(self, pid: int) -> bool:
        """Wait for an owner's death, and record some of its progress, as a checkpoint does."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, STALE, -signal.SIGKILL):
            raise RuntimeError(f"an owner ended with {code}")
        ((done,),) = self._read("SELECT count(*) FROM ledger")
        self.recorded = self._dice.randint(self.recorded, max(self.recorded, done // WINDOW))
        return code == STALE

    def _own(self, count: int, place: int | None) -> None:
        connection = self._connect()
        embedded = isinstance(connection, sqlite3.Connection)
        windows = range(self.recorded, self.recorded + 10)
        messages = [each for window in windows for each in _messages(window, self._fence)]
        for number, message in enumerate(messages):
            if number == count and place is None:
                os.kill(os.getpid(), signal.SIGSTOP)
            at = place if number == count else None
            with connection if embedded else connection.transaction():
                _die(at == 0)
                with self._states.of(connection, message) as state:
                    _die(at == 1)
                    if state.new:
                        row = f"'{message.key}', count(*), {message.fence}, {message.position}"
                        ledger = f"FROM ledger WHERE name = '{message.key}'"
                        connection.execute(f"INSERT INTO ledger SELECT {row} {ledger}")
                    state["seen"] = [*state.get("seen", []), message.position]
                _die(at == 2)
            _die(at == 3)

    def violations(self) -> list[str]:
        """Return where the ledger and the states break K1 or K2."""
        found = []
        windows = range(self.recorded + 20)
        due = [each for window in windows for each in _messages(window, 0)]
        for key in KEYS:
            rows = self._read(
                f"SELECT fence, position FROM ledger WHERE name = '{key}' ORDER BY place"
            )
            fences, positions = [row[0] for row in rows], [row[1] for row in rows]
            if fences != sorted(fences):
                found.append(f"{key}: a former owner wrote after its successor")
            if positions != [each.position for each in due if each.key == key][: len(rows)]:
                found.append(f"{key}: messages are missing, doubled or out of order")
            ((value,),) = self._read(f"SELECT value FROM qdo_state WHERE name = '{key}'")
            if json.loads(value).get("seen", []) != positions:
                found.append(f"{key}: the state is not that of its messages")
        return found


def _die(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    url, seed, kills, *mutant = sys.argv[1:]
    owners = Owners(url, int(seed), _state(*mutant))
    refused = sum(owners.play() for _ in range(int(kills)))
    played = {"windows": owners.recorded, "refused": refused}
    print(json.dumps({"violations": owners.violations(), **played}))
