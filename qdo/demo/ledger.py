"""The app of the demo, the record of all messages that it processed, and its check.

`qdo demo` runs it as ``qdo-worker qdo.demo.ledger:app``.

Each worker process appends one line per message to its own file. A line is a single write, so
kill -9 never leaves half a line. Times are those of CLOCK_MONOTONIC, which all processes of a
machine share.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import qdo
from qdo.system.files import sqlite_path

_SUFFIX = ".ledger"


class Record(NamedTuple):
    """One message, processed by the process `pid` under a fence."""

    queue: str
    number: int
    fence: int
    started: float
    ended: float
    pid: int


class Ledger:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.getpid()}{_SUFFIX}"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(self, queue: str, number: int, fence: int, started: float) -> None:
        line = f"{queue} {number} {fence} {started:.6f} {time.monotonic():.6f}\n"
        os.write(self._fd, line.encode())

    def close(self) -> None:
        os.close(self._fd)


class LedgerReader:
    """Reads the growing files of all processes.

    :ivar records: all lines read so far; the lines of one process are in order.
    """

    def __init__(self, folder: Path) -> None:
        self.records: list[Record] = []
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._seen: set[tuple[str, int]] = set()

    @property
    def distinct(self) -> int:
        return len(self._seen)

    def read(self) -> Sequence[Record]:
        """Return the lines that were written since the last call."""
        new: list[Record] = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            new += self._read_file(path)
        self.records += new
        self._seen.update((record.queue, record.number) for record in new)
        return new

    def _read_file(self, path: Path) -> Iterable[Record]:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offsets[path] = offset + whole
        pid = int(path.stem)
        for line in data[:whole].decode().splitlines():
            queue, number, fence, started, ended = line.split(" ")
            yield Record(queue, int(number), int(fence), float(started), float(ended), pid)


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of checking the ledger.

    :ivar processed: number of different messages that were processed.
    :ivar claims: number of claims under which messages were processed.
    :ivar pauses: longest time between two messages of a queue, by the event in between: "stayed",
        "handed over" or "killed". A pause after a kill lasts until the first new message: the retry
        of the message in flight, which may come after some repetitions.
    :ivar faults: every violated guarantee, as sentences.
    """

    processed: int
    repeats: int
    claims: int
    pauses: Mapping[str, float]
    faults: tuple[str, ...]


def audit(
    records: Iterable[Record], sent: Mapping[str, int], killed: frozenset[int] = frozenset()
) -> Audit:
    """Check a ledger against the messages sent.

    :param sent: number of messages by queue; messages are numbered from 1.
    :param killed: ids of killed processes: only their messages may be repeated.
    """
    by_queue: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_queue[record.queue].append(record)
    faults = [f"queue {queue} was never sent to" for queue in sorted(by_queue.keys() - sent.keys())]
    pauses = {"stayed": 0.0, "handed over": 0.0, "killed": 0.0}
    for queue, count in sent.items():
        history = sorted(by_queue[queue], key=lambda record: record.ended)
        faults += _missing(queue, history, count)
        faults += _misplaced(queue, history, killed)
        for kind, pause in _pauses(history, killed):
            pauses[kind] = max(pauses[kind], pause)
    total = sum(map(len, by_queue.values()))
    processed = len({(each.queue, each.number) for many in by_queue.values() for each in many})
    claims = len({(each.queue, each.fence) for many in by_queue.values() for each in many})
    return Audit(processed, total - processed, claims, pauses, tuple(faults))


def _missing(queue: str, history: Sequence[Record], count: int) -> list[str]:
    wanted = set(range(1, count + 1))
    found = {record.number for record in history}
    faults = []
    if wanted - found:
        faults.append(f"queue {queue}: {len(wanted - found)} messages were not processed")
    if found - wanted:
        faults.append(f"queue {queue}: {len(found - wanted)} messages were never sent")
    return faults


def _misplaced(queue: str, history: Sequence[Record], killed: frozenset[int]) -> list[str]:
    faults = []
    highest = 0
    before: Record | None = None
    for after in history:
        fault = _fault(before, after, highest, killed)
        if fault:
            faults.append(f"queue {queue}, message {after.number}: {fault}")
        highest = max(highest, after.number)
        before = after
    return faults


def _fault(
    before: Record | None, after: Record, highest: int, killed: frozenset[int]
) -> str | None:
    """Return the guarantee that a message violates, given the message before it."""
    if after.number > highest + 1:
        return f"processed before message {highest + 1}"
    if before is None:
        return None
    if after.started < before.ended:
        return f"started while message {before.number} was being processed"
    if after.fence < before.fence:
        return f"fence {after.fence} is smaller than the previous fence {before.fence}"
    if after.fence == before.fence:
        if after.pid != before.pid:
            return f"two processes used fence {after.fence}"
        if after.number != before.number + 1:
            return f"processed after message {before.number} under the same fence"
    elif after.number <= highest and before.pid not in killed:
        return "repeated after a clean handover of its queue"
    return None


def _pauses(history: Sequence[Record], killed: frozenset[int]) -> Iterator[tuple[str, float]]:
    furthest: Record | None = None
    for before, after in pairwise(history):
        if furthest is None or before.number > furthest.number:
            furthest = before
        if furthest.pid in killed and after.pid != furthest.pid:
            kind = "killed"
        elif before.fence == after.fence:
            kind = "stayed"
        else:
            kind = "handed over"
        yield kind, after.started - before.ended


COST_SECONDS = 0.05
"""Duration of a message: about as long as a call of another service."""
LEDGER_FOLDER = "ledger"
"""Folder beside the file with the messages."""

app = qdo.App("demo")


@app.context
def ledger() -> Iterator[Ledger]:
    messages = Path(sqlite_path(app.settings.broker) or "")
    with closing(Ledger(messages.parent / LEDGER_FOLDER)) as opened:
        yield opened


@app.job()
def note(message: qdo.Message, context: Ledger) -> None:
    """Work for a while, then record the queue and number of the message."""
    started = time.monotonic()
    time.sleep(COST_SECONDS)  # gevent runs other queues during the sleep
    context.note(message.queue, message.body["number"], message.fence, started)
