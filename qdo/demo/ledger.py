"""The app of the demo, its record of all processed messages, and the check of this record.

`qdo demo` runs the app as ``qdo-worker qdo.demo.ledger:app``.

All worker processes append to one file, one line per message. A line is a single write, so kill -9
never leaves half a line. Times are from CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import qdo
from qdo.system.files import sqlite_path

# Duration of a message in seconds, similar to a call of another service.
COST_SECONDS = 0.05
# Name of the ledger, a file in the same folder as the file of messages.
LEDGER_FILE = "ledger"


class Record(NamedTuple):
    """A message that the process `pid` has processed, with the fence of the claim."""

    queue: str
    number: int
    fence: int
    started: float
    ended: float
    pid: int


class Ledger:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._pid = os.getpid()

    def note(self, queue: str, number: int, fence: int, started: float) -> None:
        ended = time.monotonic()
        line = f"{queue} {number} {fence} {started:.6f} {ended:.6f} {self._pid}\n"
        os.write(self._fd, line.encode())

    def close(self) -> None:
        os.close(self._fd)


class LedgerCheck:
    """Compares the growing ledger with the sent messages, which are numbered from 1.

    :ivar sent: number of sent messages, by queue.
    :ivar done: highest number of a processed message, by queue.
    :ivar killed: ids of killed processes. Only their messages may be repeated.
    :ivar faults: all violated guarantees, as sentences.
    """

    def __init__(self, path: Path, sent: Mapping[str, int]) -> None:
        self.sent = sent
        self.done = dict.fromkeys(sent, 0)
        self.repeats = 0
        self.killed: set[int] = set()
        self.faults: list[str] = []
        self._path = path
        self._offset = 0

        self._last: dict[str, Record] = {}

    @property
    def processed(self) -> int:
        return sum(self.done.values())

    def read(self) -> None:
        """Check the new lines since the last call."""
        if not self._path.exists():  # no worker has started yet
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].decode().splitlines():
            queue, number, fence, started, ended, pid = line.split(" ")
            self.add(Record(queue, int(number), int(fence), float(started), float(ended), int(pid)))

    def add(self, record: Record) -> None:
        fault = self._fault(record)
        if fault is not None:
            self.faults.append(f"queue {record.queue}, message {record.number}: {fault}")
        highest = self.done.get(record.queue, 0)
        if record.number <= highest:
            self.repeats += 1
        self.done[record.queue] = max(highest, record.number)
        self._last[record.queue] = record

    def _fault(self, after: Record) -> str | None:
        """Return the guarantee that a message violates, or None."""
        if after.number > self.sent.get(after.queue, 0):
            return "it was never sent"
        highest = self.done[after.queue]
        before = self._last.get(after.queue)
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
        elif after.number <= highest and before.pid not in self.killed:
            return "repeated after a clean handover of its queue"
        return None


app = qdo.App("demo")


@app.context
def ledger() -> Iterator[Ledger]:
    messages = Path(sqlite_path(app.settings.broker) or "")
    with closing(Ledger(messages.parent / LEDGER_FILE)) as opened:
        yield opened


@app.job()
def note(message: qdo.Message, context: Ledger) -> None:
    """Work for some time, then record the queue and number of the message."""
    started = time.monotonic()
    time.sleep(COST_SECONDS)  # gevent runs jobs of other queues during the sleep
    context.note(message.queue, message.body["number"], message.fence, started)
