"""The app of a soak of streams, and its senders: ``python -m tests.soak.stream_app SENDER LEDGER``.

The batches of a sender follow from its number, so another process continues where it was killed.
Its ledger has a line for each batch that is stored, and ``?`` for an open transaction. It ends
once there is a file ``over`` beside the ledger, and waits while there is a file ``wait``.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError

import qdo
from qdo.errors import QdoError
from qdo.state import KeyedState
from tests.soak.app import TIMEOUT_SECONDS
from tests.soak.broker_server import REPEAT_SECONDS
from tests.support.processes import whole_lines

KEYS, SIZE = 100, 50
"""Keys of each sender, and messages of a batch."""
STATED = ("0", "4", "8")
"""Keys that end so have a running total."""
SENT = "CREATE TABLE IF NOT EXISTS sent (sender INT, batch INT, PRIMARY KEY (sender, batch))"

app = qdo.App("soak", session_timeout_seconds=TIMEOUT_SECONDS, checkpoint_seconds=0.1)
users = app.stream("user", shards=4)
states = KeyedState()
engine = create_engine(os.environ.get("SOAK_STATES", "sqlite://"), pool_pre_ping=True)
_journal = os.open(os.environ.get("SOAK_JOURNAL", os.devnull), os.O_WRONLY | os.O_APPEND)
_policy = qdo.Policy(attempts=100_000, backoff_seconds=0.02, backoff_max_seconds=0.1)
_order: dict[str, Any] = {"batch": 100} if os.environ.get("SOAK_BATCH") else {"order": "key"}


def batch(sender: int, index: int) -> list[tuple[str, int]]:
    """Return keys and numbers of a batch; the numbers of a key grow."""
    dice = random.Random(f"{sender}/{index}")
    places = range(index * SIZE, (index + 1) * SIZE)
    return [(f"{sender}-{dice.randrange(KEYS)}", place) for place in places]


def _note(kind: str, messages: list[qdo.Message]) -> None:
    """Write lines of `tests.soak.app` at once, with queue and key in place of a queue."""
    end = f"{os.getpid()} {time.monotonic()}\n"
    lines = [f"{kind} {m.queue}/{m.key} {m.body} {m.fence} {m.attempt} {end}" for m in messages]
    os.write(_journal, "".join(lines).encode())


@app.job("user.*", policy=_policy, executor="thread", **_order)
def job(given: Any, context: Any) -> None:
    """Note the start of each message, and add its number to the total of its key."""
    messages = list(given) if isinstance(given, qdo.Batch) else [given]
    _note("S", messages)
    try:
        if stated := [each for each in messages if (each.key or "").endswith(STATED)]:
            with engine.begin() as session:
                for each in stated:
                    with states.of(session, each) as state:
                        if state.new:
                            state["total"] = state.get("total", 0) + each.body
    except BaseException:
        _note("X", messages)
        raise


def send(sender: int, index: int, ledger: int) -> None:
    """Store a batch unless it is; number 0 does it in its own transactions, if there are some."""
    messages = batch(sender, index)
    if sender or engine.dialect.name == "sqlite":
        users.send_many({"key": key, "body": n, "dedup_key": str(n)} for key, n in messages)
        return
    insert = f"INSERT INTO sent VALUES ({sender}, {index}) ON CONFLICT DO NOTHING"
    with engine.begin() as connection:
        if connection.exec_driver_sql(insert).rowcount:
            users.send_many(messages, connection=connection)
            os.write(ledger, b"?\n")
            time.sleep(random.choice((0.0, 0.01, 0.2)))


def main(sender: int, ledger: Path) -> None:
    """Send batch after batch, each until it is stored; the first one may be already."""
    first = index = sum(line != "?" for line in whole_lines(ledger))
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    while index == first or not ledger.with_name("over").exists():
        with contextlib.suppress(QdoError, SQLAlchemyError):  # the server or an answer is lost
            if index == first or not ledger.with_name("wait").exists():
                send(sender, index, file)
                os.write(file, b"%d\n" % index)
                index += 1
                continue
        time.sleep(REPEAT_SECONDS / 10)


if __name__ == "__main__":
    with app:
        main(int(sys.argv[1]), Path(sys.argv[2]))
