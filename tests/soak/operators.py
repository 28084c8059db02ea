"""An operator of a soak: ``python -m tests.soak.operators SEED LEDGER``, until it is killed.

It makes one request after the other, with the functions that the commands use, and notes each of
them in a ledger. A share of the requests goes through the commands themselves.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qdo.brokers.base import Broker
from qdo.brokers.registry import open_broker
from qdo.coordination.client import connect
from qdo.coordination.queue_admin import Which
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QdoError
from qdo.fleet.actions import list_workers
from qdo.fleet.pauses import new_pause, pause_queues, read_pauses, resume_pause, wait_in_force
from qdo.ops import dead_letters
from qdo.ops.cancel import cancel
from qdo.ops.checkpoints import Checkpoint, execute_step, plan_import, read_checkpoints
from qdo.ops.decisions import OperatorDecision, decide
from qdo.ops.delete import delete, plan_deletion
from qdo.ops.fleet import Fleet, read_queue
from qdo.ops.peek import waiting_rows
from qdo.ops.placement import execute_move, plan_move
from qdo.ops.seek import EARLIEST, execute, plan_purge, plan_seek, purge
from tests.soak.app import DELETED, KEPT
from tests.soak.ledger import RequestLedger

OBEY_SECONDS = 10.0
"""Longer than a message that blocks, and than the session of a frozen process."""
MOST_ROWS = 20_000
COMMANDS = 0.1
"""Share of the requests that a command makes."""
UNCHANGED = (4, 6)
"""Exit codes of commands that found nothing to change."""


class CommandEndedError(Exception):
    """A command ended with an error."""


class SoakOperator:
    """Makes requests at random."""

    def __init__(self, seed: int, ledger: RequestLedger) -> None:
        self._random = random.Random(seed)
        self._ledger = ledger
        self._layout = Layout.of("soak")
        self._client = connect(os.environ["QDO_COORDINATOR"], handler="threading")
        self._client.open(30.0)
        self._broker = self._opened()
        self._fleet = Fleet(self._client, self._layout, self._broker)
        self._exported: list[tuple[str, Checkpoint]] = []
        self._requests: list[Callable[[], None]] = [
            *(self._pause,) * 2,
            *(self._resume, self._move, self._seek_back, self._seek_forward, self._purge),
            *(self._cancel,) * 5,
            *(self._cancel_delayed,) * 3,
            *(self._decide,) * 4,
            *(self._letters,) * 2,
            *(self._export, self._import, self._delete),
        ]

    def _opened(self) -> Broker:
        """Return the broker once it is reachable."""
        while True:
            try:
                return open_broker(os.environ["QDO_BROKER"], "soak")
            except QdoError as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                time.sleep(0.5)

    def run(self) -> None:
        """Make requests for ever."""
        while True:
            try:
                self._random.choice(self._requests)()
            except QdoError as error:  # of the reads that come before a request
                print(f"{type(error).__name__}: {error}", flush=True)
            time.sleep(self._random.uniform(0.0, 0.1))

    @contextmanager
    def _request(self, what: str, queue: str, **args: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        id, answer = self._ledger.asks(what, queue, **args), dict[str, Any]()
        try:
            yield id, answer
        except (QdoError, CommandEndedError) as error:
            self._ledger.failed(id, error)
        else:
            self._ledger.told(id, **answer)

    def _queue(self) -> str:
        return self._random.choice(KEPT)

    def _rows(self, queue: str, after: int = 0) -> list[Any]:
        return list(waiting_rows(self._broker, queue, after, MOST_ROWS))

    def _last(self, queue: str) -> int:
        node = self._fleet.node(queue)
        return 0 if node is None else node.last

    def _by_command(self, id: str, *argv: str) -> list[dict[str, Any]] | None:
        """Let the command make a request, sometimes; return its rows then."""
        if self._random.random() >= COMMANDS:
            return None
        arguments = [sys.executable, "-m", "qdo", *argv, "--reason", id, "-o", "jsonl"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode not in (0, *UNCHANGED):
            raise CommandEndedError(f"{argv}: {done.returncode} {done.stderr.strip()}")
        return [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]

    # --- queues ---------------------------------------------------------------------------

    def _pause(self) -> None:
        queue = self._random.choice((self._queue(), "ops-*", "ops*-0"))
        pause = new_pause([queue], seconds=self._random.choice((None, 3.0)))
        with self._request("pause", queue, hold=pause.id, until=pause.until) as (id, answer):
            pause = new_pause([queue], id, pause.until and 3.0, pause.id)
            zxid = pause_queues(self._client, self._layout, pause)
            wait_in_force(self._client, self._layout, pause, zxid, OBEY_SECONDS)
            answer["in_force"] = time.monotonic()
        time.sleep(self._random.uniform(0.1, 1.0))
        if self._random.random() < 0.7:
            self._end(pause.id, queue)

    def _resume(self) -> None:
        pauses = [
            each for each in read_pauses(self._client, self._layout).node.pauses if not each.by
        ]
        if pauses:
            pause = self._random.choice(pauses)
            self._end(pause.id, " ".join(pause.queues))

    def _end(self, pause: str, queue: str) -> None:
        with self._request("resume", queue, hold=pause) as (id, _):
            resume_pause(self._client, self._layout, pause, id)

    def _move(self) -> None:
        queue = self._queue()
        worker = self._random.choice(list_workers(self._client, self._layout) or ["none"])
        move = plan_move(self._client, self._layout, queue, worker)
        with self._request("move", queue, worker=worker, changes=move.changes) as (id, _):
            execute_move(self._client, self._layout, move, id)

    def _delete(self) -> None:
        queue = self._random.choice(DELETED)
        found = plan_deletion(self._fleet, queue, with_messages=True)
        with self._request("delete", queue) as (id, _):
            delete(self._fleet, found, timeout_seconds=OBEY_SECONDS, reason=id)

    # --- positions ------------------------------------------------------------------------

    def _seek_back(self) -> None:
        queue = self._queue()
        last = self._last(queue)
        before = [row.position for row in self._rows(queue) if row.position <= last]
        back = before[-self._random.randint(2, 20) :][:1]
        self._seek(queue, str(back[0]) if back else EARLIEST)

    def _seek_forward(self) -> None:
        queue = self._queue()
        waiting = self._rows(queue, self._last(queue))
        if waiting:
            self._seek(queue, str(self._random.choice(waiting[:5]).position))

    def _seek(self, queue: str, target: str) -> None:
        plan = plan_seek(self._fleet, queue, target)
        with self._request("seek", queue, last=plan.after.last) as (id, _):
            if self._by_command(id, "seek", queue, target, "--yes") is None:
                execute(self._client, self._layout, plan, id)

    def _purge(self) -> None:
        queue = self._queue()
        delayed = self._random.random() < 0.5
        plan = plan_purge(self._fleet, queue, delayed=delayed)
        numbers = self._delayed_numbers(queue) if delayed else []
        last = plan.seek.after.last
        with self._request("purge", queue, last=last, numbers=numbers) as (id, answer):
            answer["delayed"] = purge(self._fleet, plan, id)

    def _export(self) -> None:
        for each in read_checkpoints(self._client, self._layout, self._queue()).checkpoints:
            self._exported.append((f"file{os.getpid()}{len(self._exported)}", each))

    def _import(self) -> None:
        if not self._exported:
            return
        index = self._random.randrange(len(self._exported))
        file, point = self._exported[index]
        steps = plan_import(self._fleet, [point], file)
        for step in steps:
            args = {"file": file, "last": point.last}
            with self._request("import", step.queue, **args) as (id, answer):
                done = execute_step(self._fleet, step, file, id)
                answer.update(done=done.done, outcome=done.outcome)

    # --- messages -------------------------------------------------------------------------

    def _cancel(self) -> None:
        queue = self._queue()
        rows = self._rows(queue, self._last(queue))
        chosen = self._random.sample(rows[:30], min(len(rows), self._random.randint(1, 4)))
        named = {}
        for row in chosen:
            name = str(row.position)
            if self._random.random() < 0.5:
                name = dead_letters.message_id(self._broker, row.position, row.headers)
            named[name] = json.loads(row.body)["n"]
        if named:
            self._cancel_named(queue, named)

    def _cancel_delayed(self) -> None:
        queue = self._queue()
        found = self._broker.delayed.find(queue, 100)
        chosen = self._random.sample(found, min(len(found), 2))
        if chosen:
            self._cancel_named(queue, {each.id: json.loads(each.body)["n"] for each in chosen})

    def _cancel_named(self, queue: str, named: dict[str, int]) -> None:
        with self._request("cancel", queue, named=named) as (id, answer):
            rows = self._by_command(id, "cancel", queue, *named, "--yes")
            if rows is not None:
                for row in rows:
                    name = row["id"] if row["id"] in named else row["position"]
                    answer[str(named[name])] = row["outcome"]
                return
            for each in cancel(self._fleet, queue, list(named), reason=id):
                answer[str(named[each.name])] = each.outcome

    def _delayed_numbers(self, queue: str) -> list[int]:
        return [json.loads(each.body)["n"] for each in self._broker.delayed.find(queue, 10_000)]

    def _decide(self) -> None:
        queue = self._queue()
        found = read_queue(self._client, self._layout, queue).failures
        if not found:
            return
        decision: OperatorDecision = self._random.choice(("retry", "skip", "dead-letter"))
        some = tuple(each.position for each in self._random.sample(found, 1))
        which: Which = self._random.choice(("first", "all", some, some))
        with self._request("decide", queue, decision=decision, which=which) as (id, answer):
            decided = decide(self._client, self._layout, queue, decision, which, id)
            answer["positions"] = [each.position for each in decided]

    def _letters(self) -> None:
        queue = self._queue()
        found = dead_letters.find(self._broker, dead_letters.Filter(queue), time.time())
        chosen = self._random.sample(found, min(len(found), 2))
        if not chosen:
            return
        retries = self._random.random() < 0.6
        numbers = [json.loads(dead_letters.read(self._broker, each).body)["n"] for each in chosen]
        what = "retry" if retries else "discard"
        with self._request(what, queue, numbers=numbers) as (_, answer):
            act = dead_letters.retry if retries else dead_letters.discard
            answer["done"] = [each.done for each in act(self._broker, chosen)]


def main() -> None:
    """Make requests until this process is killed."""
    seed, path = sys.argv[1:]
    SoakOperator(int(seed), RequestLedger(Path(path))).run()


if __name__ == "__main__":
    main()
