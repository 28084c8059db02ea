"""Rows that cannot succeed, beside a fleet of real workers: each costs itself only, and is listed.

Roles put them in that may: a sender, a worker, the app in its own database, an operator who repairs
a table by hand. Meanwhile queues, pools, timers, an outbox, a stream and delayed messages go on.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from sqlalchemy import create_engine

import qdo
from qdo.brokers.base import Outgoing, SendOptions
from qdo.brokers.registry import open_broker
from qdo.brokers.requests import NewRequest
from qdo.brokers.streams import first_shards
from qdo.errors import UsageError
from qdo.outbox import Outbox
from qdo.postgresql.schema import grants
from tests.support.app_runs import AppRuns
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import children, wait_until, whole_lines

WORKERS = 2
SEND_EVERY = 0.1
CALM_SECONDS, AFTER_SECONDS, LISTED_SECONDS = 4.0, 5.0, 20.0
PAUSE_SECONDS = 1.0
"""How long untouched work may pause; a slow machine gets the usual pause before in addition."""
QUEUES = ("plain", "later", "boxed", "ticks", "answers", "spoilt", "user.-80", "user.80-")
KINDS = {"plain": 0, "later": 0, "boxed": 0, "ticks": 1, "answers": 0, "work": 0, "user": 0}
"""Untouched work, with the seconds of its period if it is longer than `SEND_EVERY`."""
NUMBERS = {
    "embedded": (
        f"INSERT INTO session VALUES (4711, x'00', {2**31 - 1}, 1, 4711, 'another boot')",
        f"UPDATE node SET version = {2**63 - 1} WHERE name = 'spoilt'",
        f"INSERT INTO change VALUES ({2**63 - 1}, '[]')",
    ),
    "database": (
        "INSERT INTO sessions (id, password, timeout, generation, age)"
        f" SELECT 4711, '', {2**31 - 1}, 1, server FROM tree",
        f"UPDATE znodes SET version = {2**63 - 1} WHERE name = 'spoilt'",
        f"INSERT INTO changes VALUES ({2**63 - 1}, '[]')",
    ),
}
"""Statements that put numbers at the end of their range into the tables of coordinators."""
SOURCE = f"""
import time

import qdo
from qdo.outbox import Outbox
from sqlalchemy import create_engine

app = qdo.App("shop", attempts=1, max_queues={len(QUEUES)})
Outbox(app, create_engine("sqlite:///orders.db"))
app.timer("ticks", every_seconds=1, queue="ticks")
app.timer("too-many", every_seconds=1, queue="of-a-timer")


@app.job("work", pool=True, concurrency=1)
@app.job("*")
def job(message, context):
    with open("out", "a") as out:
        out.write(f"{{time.monotonic()}} {{message.queue.partition('.')[0]}}\\n")
"""


class StrangeRow(NamedTuple):
    """A row, or a few.

    :ivar listed: the command that lists it, without its `qdo`.
    :ivar texts: what the command prints: the row and the reason; or another row, if it works on.
    """

    put: Callable[[], object]
    listed: str
    texts: tuple[str, ...]


class StrangeFleet(AppRuns):
    """A fleet with work of each kind, and a sender outside of it.

    :param guest: address of the broker for a role that may only send.
    :param execute: runs a statement as the owner of the broker's tables.
    """

    def __init__(
        self, folder: Path, coordinator: str, broker: str, guest: str, execute: partial[None]
    ) -> None:
        super().__init__("shop", folder, coordinator, broker)
        self._guest = open_broker(guest, "shop")
        self._execute = execute
        self._engine = create_engine(f"sqlite:///{folder}/orders.db")
        self._outbox = Outbox(self.app, self._engine)
        self._over = threading.Event()
        self._sender = threading.Thread(target=self._send_on)

    def begin(self) -> None:
        """Return once work of each kind runs."""
        with self._engine.begin() as connection:
            self._outbox.create(connection)
        self.app.send_many([qdo.NewMessage(each, None) for each in QUEUES if "." not in each])
        self.app.stream("user", shards=2).send("k", None)
        self._parents = [self.start(SOURCE) for _ in range(WORKERS)]
        self._sender.start()
        wait_until(lambda: set(KINDS) <= {kind for _, kind in self._starts()}, "work", 60.0)
        self._processes = [children(each.pid) for each in self._parents]

    def _starts(self) -> list[tuple[float, str]]:
        """Return when each piece of work started, and its kind."""
        lines = map(str.split, whole_lines(self.folder / "out"))
        return [(float(at), kind) for at, kind in lines]

    def _send_on(self) -> None:
        stream = self.app.stream("user", shards=2)
        while not self._over.wait(SEND_EVERY):
            self.app.send("plain", None)
            self.app.send("later", None, delay_seconds=SEND_EVERY)
            self.app.request("work", None, then="answers", keep_seconds=0)
            stream.send("k", None)
            with self._engine.begin() as connection:
                self._outbox.send(connection, "boxed", None)

    def play(self, rows: Mapping[str, StrangeRow]) -> list[str]:
        """Put rows in, one after the other; return what is wrong then."""
        calm = self._pauses(time.monotonic(), CALM_SECONDS)
        most = PAUSE_SECONDS + statistics.median(pause for pause, _ in calm.values())
        begin = time.monotonic()
        times = {}
        for name, row in rows.items():
            with contextlib.suppress(psycopg.errors.CheckViolation):  # refused at the door
                row.put()
            times[name] = time.monotonic()
        found = self._unlisted(dict(rows))
        for kind, (pause, since) in self._pauses(begin, AFTER_SECONDS).items():
            if pause > most:
                before = [name for name, at in times.items() if at < since + PAUSE_SECONDS]
                found.append(f"{kind} paused for {pause:.1f} s, after {before[-1:]}")
        return found

    def _pauses(self, begin: float, seconds: float) -> dict[str, tuple[float, float]]:
        """Return the longest pause of each kind of work, and its begin; wait some time before."""
        self._over.wait(seconds)
        starts, end, found = self._starts(), time.monotonic(), {}
        for kind, period in KINDS.items():
            times = sorted(at for at, each in starts if each == kind and begin < at < end)
            pairs = pairwise([begin, *times, end])
            found[kind] = max((after - before - period, before) for before, after in pairs)
        return found

    def _unlisted(self, rows: dict[str, StrangeRow]) -> list[str]:
        """Return which rows are not listed in time."""
        end = time.monotonic() + LISTED_SECONDS
        while True:
            found = []
            for name, row in [*rows.items()]:
                ended = self.qdo(*row.listed.split(), QDO_APP="jobs:app")
                if all(each in ended.out for each in row.texts):
                    del rows[name]
                else:
                    found.append(f"{name}: `qdo {row.listed}` says {ended.out}{ended.err}")
            if not found or time.monotonic() > end:
                return found

    def finish(self) -> list[str]:
        """Stop the workers; return what is wrong with their processes."""
        now = [children(each.pid) for each in self._parents]
        for parent in self._parents:
            parent.send(signal.SIGTERM)
        codes = [parent.wait(40.0) for parent in self._parents]
        is_right = (now, codes) == (self._processes, [0] * WORKERS)
        return [] if is_right else [f"processes and exit codes: {now}, {codes}"]

    def close(self) -> None:
        self._over.set()
        if self._sender.ident is not None:
            self._sender.join()
        self._guest.close()
        self._engine.dispose()
        super().close()

    def rows(self) -> dict[str, StrangeRow]:
        """Return rows for timers, requests, delayed messages, streams, the outbox and a node."""
        spoil = partial(self.client.set, self.layout.queue("spoilt"), b"[" * 5000 + b"]" * 5000)
        damage = "headers = '['" if self.broker_url.startswith("sqlite") else "body = NULL"
        return {
            "timer": StrangeRow(bool, "timers list", ("refused", "of-a-timer")),
            "limit": self._request("limit", {"then": "of-a-request"}, "QueueLimitError"),
            "keyless": self._request("keyless", {"then": "user.-80"}, "UsageError"),
            "tag": self._request("tag", {"then": "answers", "tag": "x"}, "UsageError"),
            "damaged": self._request("damaged", {}, "BodyDecodeError", damage),
            "delayed": StrangeRow(self._delay, "dead-letters list", ("user.-80", "key")),
            "circle": StrangeRow(self._circle, "streams list", ("user",)),
            "box-1": self._box("box-1", "QueueLimitError", queue="of-a-box"),
            "box-2": self._box("box-2", "UsageError", queue="user.-80"),
            "box-3": self._box("box-3", "QueueNameError", queue="a/b"),
            "box-4": self._box("box-4", "TypeError", queue="plain", body="text"),
            "node": StrangeRow(spoil, "queues", ("spoilt", "must be a JSON object")),
        }

    def _request(self, id: str, reply: Any, error: str, change: str = "") -> StrangeRow:
        """Ask as a sender who does not use `App.request`; change the stored row by hand."""

        def put() -> None:
            due = time.time() + 1.0 if change else 0.0
            new = NewRequest("work", id, (b"null", None), b"", due=due, reply=json.dumps(reply))
            self._guest.requests.ask([new])
            if change:
                self._execute(f"UPDATE requests SET {change} WHERE id = '{id}'")

        return StrangeRow(put, f"requests show {id}", (f"{id}: failed", error))

    def _delay(self) -> None:
        """Send a delayed message to a shard, and take its key away by hand."""
        soon = SendOptions(due=time.time() + 1.0)
        self._guest.send(Outgoing("user.-80", b"1", "lost", terms=soon))
        self._execute("UPDATE delayed SET key = NULL WHERE key = 'lost'")

    def _circle(self) -> None:
        """Let the shards of two streams have each other's names."""
        (shard,) = first_shards("one", 1)
        soon = SendOptions(due=time.time() + 1.0)
        with contextlib.suppress(UsageError):  # PostgreSQL checks the names
            self._guest.streams.add([replace(shard, queue="two.-")])
            self._guest.send(Outgoing("two.-", b"1", "k", terms=soon))
            self._guest.streams.add([replace(shard, stream="two", queue="one.-")])
            self._guest.send(Outgoing("one.-", b"1", "k"))

    def _box(self, id: str, error: str, **columns: Any) -> StrangeRow:
        """Write into the outbox by SQL."""

        def put() -> None:
            row = {"id": id, "body": b"1", "app": "shop", **columns}
            with self._engine.begin() as connection:
                into = f"qdo_outbox ({', '.join(row)}) VALUES (:{', :'.join(row)})"
                connection.exec_driver_sql(f"INSERT INTO {into}", row)

        return StrangeRow(put, "admin outbox list", (id, error))


def executed(connect: Callable[[], Any], statement: str) -> None:
    with contextlib.closing(connect()) as connection, connection:
        connection.execute(statement)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("coordinator", ["embedded", "zookeeper", "database"])
@pytest.mark.parametrize("broker", ["sqlite", "postgresql"])
def test_strange_rows_cost_themselves_only(
    broker: str, coordinator: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Other work goes on, no process ends, and a command lists each row with its reason."""
    files = {"sqlite": tmp_path / "messages.db", "embedded": tmp_path / "coordination.db"}
    urls = {kind: f"sqlite:{path}" for kind, path in files.items()}
    owners: dict[str, Any] = {kind: partial(sqlite3.connect, path) for kind, path in files.items()}
    guests = dict(urls)
    with contextlib.ExitStack() as stack:
        if {broker, coordinator} & {"postgresql", "database"}:
            database: PostgresqlDatabase = request.getfixturevalue("postgresql")
            worker, sender = (stack.enter_context(database.role()) for _ in range(2))
            for role, kind in ((worker, "worker"), (sender, "sender")):
                for statement in grants("qdo", role, kind):
                    executed(database.connect, statement)
            owner = partial(psycopg.connect, database.conninfo(), options="-c search_path=qdo")
            owners |= dict.fromkeys(("postgresql", "database"), owner)
            urls |= dict.fromkeys(("postgresql", "database"), database.url(worker))
            guests["postgresql"] = database.url(sender)
        if coordinator == "zookeeper":
            urls["zookeeper"] = request.getfixturevalue("zookeeper_url")
        execute = partial(executed, owners[broker])
        fleet = StrangeFleet(tmp_path, urls[coordinator], urls[broker], guests[broker], execute)
        stack.enter_context(contextlib.closing(fleet))
        fleet.begin()
        rows = fleet.rows()
        for statement in NUMBERS.get(coordinator, ()):
            put = partial(executed, owners[coordinator], statement)
            rows[statement] = StrangeRow(put, "queues", ("plain",))
        found = fleet.play(rows) + fleet.finish()
        assert found == [], "\n".join(found)
