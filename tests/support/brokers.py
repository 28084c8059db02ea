"""The brokers that the contract tests run on, by name."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from qdo.brokers import open_broker
from qdo.brokers.base import Broker
from qdo.testing.broker import MemoryBroker, MemoryStore

KINDS = ["embedded", "memory"]
TICK_SECONDS = 0.005


@contextlib.contextmanager
def opening(kind: str, folder: Path) -> Iterator[Callable[..., Broker]]:
    """Give a function that opens a further connection to one broker; closes them in the end."""
    opened: list[Broker] = []
    store = MemoryStore()

    def connect(app: str = "app") -> Broker:
        url = f"sqlite:{folder / 'messages.db'}"
        opened.append(open_broker(url, app) if kind == "embedded" else MemoryBroker(store, app))
        return opened[-1]

    with _ticking(store) if kind == "memory" else contextlib.nullcontext():
        yield connect
        for broker in opened:
            broker.close()


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
