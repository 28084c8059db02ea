"""The brokers that the contract tests run on, by name.

The contracts are those of `qdo.testing.contracts`. A new broker of qdo is one entry of `ADDRESSES`;
`test_consuming.py` then runs with it. Add its name to `LOGS`, too, if its positions are times and
it keeps keys, headers, delays and dead letters.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from qdo.brokers.base import Broker, Row
from qdo.brokers.registry import open_broker
from qdo.errors import NotFoundError
from qdo.testing.contracts.fixtures import BrokerSetup
from qdo.testing.memory_broker import MemoryBroker, MemoryStore


def _sqlite(folder: Path, name: str, request: pytest.FixtureRequest) -> str:
    return f"sqlite:{folder / 'messages.db'}"


def _sqs(folder: Path, name: str, request: pytest.FixtureRequest, kind: str) -> str:
    options = f"create={kind}&wait_seconds=0&idle_seconds=0"
    return f"sqs://us-east-1/{name}-?endpoint={request.getfixturevalue('sqs_url')}&{options}"


def _kinesis(folder: Path, name: str, request: pytest.FixtureRequest) -> str:
    from tests.support.aws.clients import client  # boto3 takes a while to import

    endpoint = request.getfixturevalue("kinesis").url
    client("kinesis", endpoint).create_stream(StreamName=name, ShardCount=2)
    return f"kinesis://us-east-1/{name}?endpoint={endpoint}&reads_per_second=5"


def _postgresql(folder: Path, name: str, request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("postgresql_url")


ADDRESSES: dict[str, Callable[[Path, str, pytest.FixtureRequest], str]] = {
    "embedded": _sqlite,
    "postgresql": _postgresql,
    "sqs-standard": partial(_sqs, kind="standard"),
    "sqs-fifo": partial(_sqs, kind="fifo"),
    "kinesis": _kinesis,
}
"""By kind: a function that returns an address, given a folder and a unique name."""
KINDS = [*ADDRESSES, "memory"]
LOGS = ["embedded", "postgresql", "memory"]
"""Brokers whose positions are times, with every feature."""
MAILBOXES = ["sqs"]
"""Brokers whose messages only the owner of their queue may see."""
QUEUES = {"kinesis": "shardId-{:012d}", "sqs-fifo": "q{}.fifo"}
"""Names of the numbered queues of a kind, if they are not like "q0"."""
TICK_SECONDS = 0.005


@contextlib.contextmanager
def bench(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[BrokerSetup]:
    """Give a broker of a kind, with two queues that may be used."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    store = MemoryStore()
    url = "" if kind == "memory" else ADDRESSES[kind](folder, name, request)
    opened: list[Broker] = []

    def connect() -> Broker:
        opened.append(open_broker(url, "app") if url else MemoryBroker(store, "app"))
        return opened[-1]

    try:
        yield BrokerSetup(connect, url, kind != "sqs-standard", QUEUES.get(kind, "q{}").format)
    finally:
        for broker in opened:
            broker.close()


@contextlib.contextmanager
def opening(
    kind: str, folder: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Broker]]:
    """Give a function that opens a further connection to one broker; closes them in the end.

    :param request: of a test, for fixtures of servers.
    """
    url = ADDRESSES[kind](folder, "", request) if kind in ("embedded", "postgresql") else ""
    endpoint = request.getfixturevalue("moto_url") if kind in MAILBOXES else ""
    opened: list[Broker] = []
    store = MemoryStore()
    prefix = f"test-{uuid.uuid4().hex[:12]}"

    def connect(app: str = "app") -> Broker:
        if kind == "memory":
            opened.append(MemoryBroker(store, app))
        elif kind == "sqs":
            options = f"endpoint={endpoint}&create=standard&wait_seconds=0"
            opened.append(open_broker(f"sqs://eu-west-1/{prefix}-{app}-?{options}", app))
        else:
            opened.append(open_broker(url, app))
        return opened[-1]

    with _ticking(store) if kind == "memory" else contextlib.nullcontext():
        yield connect
        for broker in opened:
            broker.close()


def rows(broker: Broker, queue: str) -> list[Row]:
    """Return the waiting messages of a queue, in order; a mailbox hides them for a while."""
    if broker.capabilities.peek:
        return [Row(*each) for each in broker.reader(queue, 0).fetch(100)]
    from qdo.brokers.sqs.broker import SqsBroker  # boto3 takes a while to import
    from tests.support.aws.messages import received_all

    if not isinstance(broker, SqsBroker):
        raise TypeError(f"no way to look into {broker!r} is known")
    try:
        return received_all(broker, queue)
    except NotFoundError:
        return []


@contextlib.contextmanager
def _ticking(store: MemoryStore) -> Iterator[None]:
    """Tell a store of the time, which it never looks at by itself."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(TICK_SECONDS):
            store.tick()

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
