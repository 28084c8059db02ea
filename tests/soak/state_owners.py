"""Owners of one queue that are killed and frozen while they keep state by key.

``python -m tests.soak.state_owners URL SEED KILLS [MUTANT]`` plays owners one after the other.
Each is a process of its own. It processes messages from the recorded progress on, and is killed at
a random place: before, within or after a transaction. A quarter is frozen first, and continues
beside a successor. The app's database has a ledger beside the states: each effect in the order of
its key. The program prints the violations of K1 and K2 as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
from typing import Any

from sqlalchemy import create_engine

from qdo.errors import StaleClaimError
from qdo.message import Message
from tests.simulation.mutants.edits import mutated

NEW = "message.position > written.get(str(message.priority), -1)"
MUTANTS = {
    "K2: the fence stays": ("WHEN excluded.fence > {table}.fence", "WHEN 1 = 0"),
    "K2: a former owner is admitted": ("fence > message.fence", "fence < 0"),
    "K1: a repetition is new": (NEW, "True"),
    "K1: a repetition is saved": ("if state.new:", "if True:"),
    "K1: the position is not saved": ("[str(message.priority)] = ", "[''] = "),
    "K1: positions of all priorities": (
        NEW,
        "message.position > max([*written.values(), -1])",
    ),
}
"""Rules left out; each must be found."""
KEYS = ("ada", "bob", "eve")
WINDOW = 12
"""Messages of a window arrive in the order of their priorities, and windows one after the other."""
STALE = 3
"""Exit code of an owner that was refused."""
FREEZE = 4
"""The place before a transaction; the others are before, within and after one."""
LEDGER = """
    CREATE TABLE ledger (
        name VARCHAR(20), place INT, fence BIGINT, position BIGINT, PRIMARY KEY (name, place))
"""
PROCESSES = multiprocessing.get_context("fork")


def messages(window: int, fence: int = 0) -> list[Message]:
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

    def __init__(self, url: str, dice: random.Random, states: Any) -> None:
        self._engine = create_engine(url)
        self._dice = dice
        self._states = states
        self._fence = 0
        self.recorded = 0
        with self._engine.begin() as session:
            session.exec_driver_sql(LEDGER)
            states.create(session)

    def play(self) -> bool:
        """Play an owner until it is dead; return whether it was refused."""
        if self._dice.random() < 0.75:
            return self._end(
                self._started(self._dice.randrange(3 * WINDOW), self._dice.randrange(4))
            )
        frozen = self._started(self._dice.randrange(WINDOW), FREEZE)
        os.waitpid(frozen.pid, os.WUNTRACED)
        self._end(self._started(self._dice.randrange(1, 2 * WINDOW), 0))
        os.kill(frozen.pid, signal.SIGCONT)
        return self._end(frozen)

    def _started(self, count: int, place: int) -> Any:
        """Start an owner that processes `count` messages, and then dies or freezes at a place."""
        self._fence += 1
        owner = PROCESSES.Process(target=self._own, args=(count, place))
        owner.start()
        return owner

    def _end(self, owner: Any) -> bool:
        """Wait for an owner's death, and record some of its progress, as a checkpoint does."""
        owner.join()
        if owner.exitcode not in (0, STALE, -signal.SIGKILL):
            raise RuntimeError(f"an owner ended with {owner.exitcode}")
        with self._engine.begin() as session:
            done = session.exec_driver_sql("SELECT count(*) FROM ledger").scalar_one()
        self.recorded = self._dice.randint(self.recorded, max(self.recorded, done // WINDOW))
        return bool(owner.exitcode == STALE)

    def _own(self, count: int, place: int) -> None:
        self._engine.dispose(close=False)
        windows = range(self.recorded, self.recorded + 10)
        given = [each for window in windows for each in messages(window, self._fence)]
        try:
            for number, message in enumerate(given):
                self._process(message, place if number == count else None)
        except StaleClaimError:
            sys.exit(STALE)

    def _process(self, message: Message, place: int | None) -> None:
        def die(here: int) -> None:
            if place == here:
                os.kill(os.getpid(), signal.SIGSTOP if place == FREEZE else signal.SIGKILL)

        die(FREEZE)
        with self._engine.begin() as session:
            die(0)
            with self._states.of(session, message) as state:
                die(1)
                if state.new:
                    row = f"'{message.key}', count(*), {message.fence}, {message.position}"
                    ledger = f"SELECT {row} FROM ledger WHERE name = '{message.key}'"
                    session.exec_driver_sql(f"INSERT INTO ledger {ledger}")
                state["seen"] = [*state.get("seen", []), message.position]
            die(2)
        die(3)

    def violations(self) -> list[str]:
        """Return where the ledger and the states break K1 or K2."""
        found = []
        due = [each for window in range(self.recorded + 20) for each in messages(window)]
        query = "SELECT fence, position FROM ledger WHERE name = '{}' ORDER BY place"
        with self._engine.begin() as session:
            for key in KEYS:
                rows = session.exec_driver_sql(query.format(key)).all()
                fences, positions = [row[0] for row in rows], [row[1] for row in rows]
                if fences != sorted(fences):
                    found.append(f"{key}: a former owner wrote after its successor")
                if positions != [each.position for each in due if each.key == key][: len(rows)]:
                    found.append(f"{key}: messages are missing, doubled or out of order")
                if self._states.read(session, "q", key).get("seen", []) != positions:
                    found.append(f"{key}: the state is not that of its messages")
        return found


if __name__ == "__main__":
    url, seed, kills, *mutant = sys.argv[1:]
    changes = [MUTANTS[each] for each in mutant]
    states = mutated("qdo/state.py", *changes).KeyedState()
    owners = Owners(url, random.Random(int(seed)), states)
    refused = sum(owners.play() for _ in range(int(kills)))
    played = {"windows": owners.recorded, "refused": refused}
    print(json.dumps({"violations": owners.violations(), **played}))
