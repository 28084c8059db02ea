"""Soak streams: ``python -m tests.soak --app streams --broker postgresql``.

Parents with workers process what senders send by key, while an operator splits and merges shards.

The rules are those of `checks.check_streams` and: senders know all messages that were started to
be stored, and no other; in the end no shard is hidden, and every sealed one is done; the running
total of a key is that of its messages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import create_engine

from qdo.brokers import streams
from qdo.brokers.registry import open_broker
from qdo.brokers.streams import StreamShard
from qdo.errors import QdoError
from qdo.ops.fleet import Fleet
from qdo.ops.streams import reshard, shard_items
from qdo.state import KeyedState
from tests.soak.checks import check_streams
from tests.soak.fleet import SoakFleet
from tests.soak.request_rules import spread
from tests.soak.shared import LAYOUT
from tests.soak.stream_app import SENT, SIZE, STATED, batch
from tests.support.cli import QDO, command
from tests.support.processes import Proc, whole_lines

PARENTS, SENDERS = 2, 4
MOST_SHARDS, MOST_HIDDEN, MOST_WAITING = 16, 12, 10_000


class StreamFleet(SoakFleet):
    """A fleet of workers and senders, with the database of the app."""

    app = "tests.soak.stream_app:app"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.journal.touch()
        self.over = threading.Event()
        self.reshards, self._begun, self._looked = 0, set[tuple[str, int]](), 0
        self._takes_batches = itertools.cycle(["", "1"])
        url = self.environment["QDO_BROKER"].replace(":", "+psycopg:", 1)
        url = url if self._database else f"sqlite:///{self.folder}/app.db"
        self.environment["SOAK_STATES"] = url
        self.engine = create_engine(url, pool_pre_ping=True)
        with self.engine.begin() as session:
            session.exec_driver_sql(SENT)
            KeyedState().create(session)
        self.broker = open_broker(self.environment["QDO_BROKER"], "soak")
        self._senders = list(map(self._sender, range(SENDERS)))

    def start_parent(self) -> None:
        self.environment["SOAK_BATCH"] = next(self._takes_batches)
        super().start_parent()

    def _sender(self, number: int) -> Proc:
        argv = "tests.soak.stream_app", str(number), str(self.folder / f"sent-{number}")
        return Proc.python("-m", *argv, env=self.environment)

    def stored(self) -> list[tuple[int, int]]:
        """Return sender and number of the batches that are known to be stored."""
        ledgers = ((each, whole_lines(self.folder / f"sent-{each}")) for each in range(SENDERS))
        return [(each, int(line)) for each, lines in ledgers for line in lines if line != "?"]

    def throttle(self) -> int:
        """Let the senders wait while there is a backlog; return how many messages they sent."""
        entries = self.entries()
        for each in entries[self._looked :]:
            self._begun.add((each.queue.partition("/")[2], each.number))
        self._looked, sent, wait = len(entries), len(self.stored()) * SIZE, self.folder / "wait"
        wait.touch() if sent - len(self._begun) > MOST_WAITING else wait.unlink(missing_ok=True)
        return sent

    def operate(self, most: int, pause: float) -> None:
        """Split and merge, by commands at times."""
        while self.reshards < most and not self.over.wait(self.random.uniform(0.0, 2 * pause)):
            with suppress(QdoError):  # the broker is away
                known = self.broker.streams.shards("user")
                if known and sum(each.hidden for each in known) < MOST_HIDDEN:
                    self.reshards += self._reshard(known)

    def _reshard(self, known: list[StreamShard]) -> bool:
        shards = sorted((each for each in known if each.end is None), key=lambda each: each.low)
        queues, verb = [self.random.choice(shards).queue], "split"
        if len(shards) > 3 and self.random.random() < len(shards) / MOST_SHARDS:
            place, verb = self.random.randrange(len(shards) - 2), "merge"
            queues = [each.queue for each in shards[place : place + self.random.choice((2, 3))]]
        if self.random.random() < 0.1:
            argv = (*QDO, "streams", verb, "--app", self.app, *queues)
            return command(*argv, cwd=self.folder, env=self.environment).code == 0
        reshard(self.broker, getattr(streams, verb)(known, *queues))
        return True

    def _faults(self) -> list[Callable[[], None]]:
        more = [self._kill_leading_worker] * 3 + [self._kill_container] + [self._kill_sender] * 2
        return [*super()._faults(), *more]

    def _kill_sender(self) -> None:
        """Kill one, in an open transaction if it has some; another process continues."""
        number, limit = self.random.randrange(SENDERS), time.monotonic() + 1.0
        while number == 0 and self._database and time.monotonic() < limit:
            limit -= whole_lines(self.folder / "sent-0")[-1:] == ["?"] and 1.0
        self._senders[number].kill()
        self._senders[number] = self._sender(number)

    def end_senders(self) -> list[str]:
        (self.folder / "over").touch()
        return [f"sender: {each.output}" for each in self._senders if each.wait(60.0) != 0]

    def unsettled(self) -> list[str]:
        """Return the shards that are hidden, or not done with their messages."""
        try:
            fleet = Fleet(self.shared.client, LAYOUT, self.broker)
            items = shard_items(fleet, self.broker.streams.shards())
        except QdoError as error:
            return [f"open: {error}"]
        over = "open", "done"
        return [f"open: {each}" for each in items if each["state"] not in over or each["backlog"]]

    def totals(self) -> Counter[str]:
        """Return the total of each key, over all shards."""
        found = Counter[str]()
        with self.engine.connect() as session:
            for name, value in session.exec_driver_sql("SELECT name, value FROM qdo_state"):
                found[name] += json.loads(value).get("total", 0)
        return found

    def close(self) -> None:
        self.over.set()
        for each in self._senders:
            each.__exit__(None, None, None)
        super().close()
        self.broker.close()
        self.engine.dispose()


def play(fleet: StreamFleet, arguments: argparse.Namespace) -> list[str]:
    """Play one round; return the violations."""
    for _ in range(PARENTS):
        fleet.start_parent()
    operator = threading.Thread(target=fleet.operate, args=(arguments.reshards, arguments.pause))
    operator.start()
    limit = time.monotonic() + arguments.seconds
    fleet.suffer(
        lambda: fleet.throttle() < arguments.messages and time.monotonic() < limit, arguments.pause
    )
    fleet.over.set()
    operator.join()
    found = fleet.end_senders()
    fleet.heal(lambda: not fleet.unsettled())
    judged = check_streams(fleet.entries(), fleet.broker.streams.shards(), fleet.facts())
    sent = [message for each in fleet.stored() for message in batch(*each)]
    found += [*fleet.unsettled(), *judged.violations]
    found += [f"lost: {each}" for each in {*sent} - judged.begun.keys()]
    found += [f"not sent: {each}" for each in judged.begun.keys() - {*sent}]
    due, totals = Counter[str](), fleet.totals()
    for key, number in sent:
        due[key] += number * key.endswith(STATED)
    found += [f"state: {key} {totals[key]}" for key in due if due[key] != totals[key]]
    found += fleet.logged()
    took = fleet.entries()[-1].at - fleet.entries()[0].at
    fleet.report(
        found,
        f"{len(sent)} messages in {took:.0f} s, {len(sent) / took:.0f}/s",
        f"{fleet.reshards} reshards",
        f"{fleet.killed_leaders} leaders killed",
        f"repetitions {dict(judged.repeated)}",
        f"parent to child {spread(sorted(judged.gaps))}",
    )
    return found
