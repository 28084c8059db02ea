"""An app with everything that commands and the dashboard can show, without any other process."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from kazoo.security import ACL, Id, Permissions
from sqlalchemy import create_engine, update

from qdo import App
from qdo.brokers.requests import PAUSED, RUNNING
from qdo.coordination.session_setup import BrokerNode
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.coordination.znodes.worker_report import WorkerReport
from qdo.fleet.limit_node import LimitNode, ShareHolder
from qdo.fleet.settings_machine import SettingsReport
from qdo.fleet.timer_node import TimerNode
from qdo.history.recorder import RecordedAction, Recorder
from qdo.history.writer import HistoryWriter
from qdo.idempotency import FencedWrites, ProcessedMessages
from qdo.message import Message
from qdo.outbox import Outbox
from qdo.queues import QueueFilter
from qdo.requests.replies import sealed
from tests.support.dashboard.answering_worker import AnsweringWorker
from tests.support.dashboard.shop import LAYOUT, FilledShop
from tests.support.fakes.key_files import key, write_keys

app = App("shop", attempts=4)
app.timer("nightly", "0 2 * * *", queue="reports")
engine = create_engine("sqlite:///app.db", creator=lambda: sqlite3.connect("app.db"))
outbox = Outbox(app, engine)
RUN = {"queue": "owned", "id": "m", "position": "1", "attempt": 1, "seconds": 2.0, "stack": ["x"]}


@app.job("owned", executor="thread", timeout_seconds=9.0, limits=["crm"], per_queue_rate="1/s")
def job(message: Message, context: object) -> None:
    """Let `qdo queues NAME` show a job."""


def whole(kind: Any, **parts: Any) -> Any:
    """Return a value of a type that has all of its parts."""
    inner = get_args(kind)
    if type(None) in inner:
        return whole(inner[0])
    if get_origin(kind) is dict:
        return {"other": whole(inner[1])}
    if get_origin(kind) is tuple:
        return tuple(whole(each) for each in inner if each is not ...)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return kind(**{name: whole(each) for name, each in get_type_hints(kind).items()} | parts)
    return "x" if kind in (str, Any) else kind(1)


@contextmanager
def filled(folder: Path) -> Iterator[tuple[FilledShop, dict[str, str]]]:
    """Yield the app in a folder, which is the current one, and names that commands need."""
    shop = FilledShop(folder, f"sqlite:{folder / 'coordination.db'}")
    takes = QueueFilter(exclude=("none",), pools=("invoice",))
    node = whole(WorkerNode, draining=False, filter=takes)
    report = whole(
        WorkerReport,
        started=time.time() - 60,
        jobs=("*",),
        waits={"*": ("crm",)},
        rests={"*": 1.0},
        live={**SettingsReport(1, why="x").dump(), "pins": {"attempts": "x"}},
        long_runs=(("runs", "m", 1, 40.0, 1.0),),
    )
    answer = json.dumps({"runs": [RUN], "total": 1})
    with (
        closing(shop),
        closing(
            AnsweringWorker(shop.places["coordinator"], answer, "owned", node, report)
        ) as worker,
    ):
        shop.fill()
        names = {"worker": worker.name, **_add_messages(shop)}
        _add_requests(shop)
        _add_nodes(shop, worker.name)
        _add_history(shop)
        _add_tables()
        with shop.app.lock("report", reason="x"):
            yield shop, names
    engine.dispose()


def _add_messages(shop: FilledShop) -> dict[str, str]:
    """Add messages that wait, are delayed, fail and block, of all kinds of bodies; dead letters."""
    shop.app.send_many([("owned", 1), ("runs", 1), ("binary", b"\xff")])
    shop.app.stream("user", shards=2).send("ada", 1)
    terms = {"delay_seconds": 3600, "key": "k", "headers": {"h": "x"}}
    names = {"delayed": str(shop.app.send("fine", 1, **terms))}
    for queue in ("failing", "stuck"):
        shop.app.send_many([(queue, number) for number in range(3)])
        first, second, third = (row[0] for row in shop.app.broker.reader(queue, 0).fetch(3))
        record = whole(FailureRecord, position=first, decision="")
        if queue == "failing":
            record = dataclasses.replace(record, blocked_since=0.0)
        others = (
            dataclasses.replace(record, position=second, blocked_since=1.0),
            dataclasses.replace(record, position=third, decision="skip"),
        )
        node = QueueNode(1, failure=record, out_of_order=OutOfOrderProgress(other_failures=others))
        shop.client.create(LAYOUT.queue(queue), node.encode())
        names[queue] = str(first)
    with _encrypting(shop) as sender:
        sender.send("secret", 1)
    shop.bury("letters", 1, "x", shop.app.broker.reader("secret", 0).fetch(1)[0][1])
    shop.bury("letters", 2, "x", b"\xff", headers='{"h": "x"}')
    return names


def _encrypting(shop: FilledShop) -> App:
    """Return an app whose bodies and results no command can read without `--keys`."""
    keys = write_keys(shop.folder / "keys", key("ab"), key("cd"))
    return App("shop", keys=keys, encrypt=["bodies"], broker=shop.places["broker"])


def _add_requests(shop: FilledShop) -> None:
    """Add a request in each state, with bodies and results of all kinds."""
    ids = ("runs", "rests", "fails", "done", "done-binary", "done-secret")
    for id in ids:
        shop.app.request("invoice", 1, id=id, then="orders", tag={"x": 1}, key="k")
    store = shop.app.broker.requests
    takes = {each.take.id: each.take for each in store.take("w", "invoice", len(ids), ()).requests}
    store.note(takes["runs"], RUNNING, "x")
    store.note(takes["rests"], PAUSED, "x")
    store.end(takes["fails"], "failed", None, "x")
    store.end(takes["done"], "done", sealed(shop.app, "invoice", 1))
    store.end(takes["done-binary"], "done", sealed(shop.app, "invoice", b"\xff"))
    with _encrypting(shop) as sender:
        store.end(takes["done-secret"], "done", sealed(sender, "invoice", 1))
        sender.request("invoice", 1, id="secret")
    shop.app.request("invoice", b"\xff", id="binary")
    shop.app.request("invoice", 1, id="late", delay_seconds=3600.0)


def _add_nodes(shop: FilledShop, worker: str) -> None:
    """Add nodes of queues, a limit, a timer and broker files, and one with other rights."""
    holders = (ShareHolder(worker, 1, 2),)
    nodes = {
        LAYOUT.queue("fine"): QueueNode(),
        **{LAYOUT.queue(name): QueueNode(owner=worker) for name in ("runs", "user.80-")},
        f"{LAYOUT.fleet.limits}/crm": LimitNode(2, 1.0, permits=holders, starts=holders),
        f"{LAYOUT.fleet.timers}/nightly": whole(TimerNode, extra={}),
        LAYOUT.broker: whole(BrokerNode),
        Layout.of("other").broker: whole(BrokerNode),
    }
    for path, node in nodes.items():
        shop.client.create(path, node.encode(), makepath=True)
    shop.client.ensure_path(LAYOUT.fleet.holds)
    rights = Permissions.ALL & ~Permissions.DELETE
    shop.client.set_acls(LAYOUT.fleet.holds, [ACL(rights, Id("world", "anyone"))])


def _add_history(shop: FilledShop) -> None:
    """Add attempts, owners and changes."""
    shop.record("fine", "x")
    recorder = Recorder()
    recorder.owners.claimed("owned", 1, "w")
    recorder.owners.ended("owned", 1, "drained")
    values = {"before": '{"x": 1}', "after": '{"x": 1}', "at": time.time()}
    recorder.actions.append(whole(RecordedAction, **values))
    writer = HistoryWriter(shop.places["history"], "shop", recorder)
    writer.start()
    writer.close()


def _add_tables() -> None:
    """Add the tables in the database of the app, with a message that the broker refused."""
    with engine.begin() as connection:
        outbox.create(connection)
        for each in (ProcessedMessages(), FencedWrites()):
            each.create(connection)
        outbox.send(connection, "boxes", 1, key="k")
        connection.execute(update(outbox.table).values(refused="x"))
