"""Who processed what and when, written by the demo's workers, and the check of it.

Each worker process appends to a file of its own, a line per message. A line is one write, so
that kill -9 leaves none half written. Times are those of CLOCK_MONOTONIC, which all processes
of a machine share.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

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
    """The file of this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.getpid()}{_SUFFIX}"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(self, queue: str, number: int, fence: int, started: float) -> None:
        """Append that a message has been processed just now."""
        line = f"{queue} {number} {fence} {started:.6f} {time.monotonic():.6f}\n"
        os.write(self._fd, line.encode())

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)


class LedgerReader:
    """Follows the files of all processes while they grow.

    :ivar records: everything read so far, the lines of a process in their order.
    """

    def __init__(self, folder: Path) -> None:
        self.records: list[Record] = []
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._seen: set[tuple[str, int]] = set()

    @property
    def distinct(self) -> int:
        """How many different messages have been processed."""
        return len(self._seen)

    def read(self) -> Sequence[Record]:
        """Take in what has been written since the last call, and return it."""
        fresh: list[Record] = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            fresh += self._read_file(path)
        self.records += fresh
        self._seen.update((record.queue, record.number) for record in fresh)
        return fresh

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
    """What the ledger says.

    :ivar processed: different messages processed.
    :ivar repeats: times that a message was processed once more.
    :ivar claims: how often a queue was claimed and worked on.
    :ivar pauses: longest time between two messages of a queue, by what happened in between:
        "stayed", "handed over" or "killed".
    :ivar faults: every promise found broken, as sentences.
    """

    processed: int
    repeats: int
    claims: int
    pauses: Mapping[str, float]
    faults: tuple[str, ...]


def audit(
    records: Iterable[Record], sent: Mapping[str, int], killed: frozenset[int] = frozenset()
) -> Audit:
    """Check a ledger against what was sent.

    :param sent: messages by queue; they are numbered from 1.
    :param killed: pids of killed processes: only what they had done may be done again.
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
        for before, after in pairwise(history):
            kind = _transition(before, after, killed)
            pauses[kind] = max(pauses[kind], after.started - before.ended)
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
    """Return what is wrong with a message, given the one processed before it."""
    if after.number > highest + 1:
        return f"it came before message {highest + 1}"
    if before is None:
        return None
    if after.started < before.ended:
        return f"it began while message {before.number} was being processed"
    if after.fence < before.fence:
        return f"its fence {after.fence} is smaller than {before.fence} before it"
    if after.fence == before.fence:
        if after.pid != before.pid:
            return f"two processes used the fence {after.fence}"
        if after.number != before.number + 1:
            return f"it followed message {before.number} under the same fence"
    elif after.number <= highest and before.pid not in killed:
        return "it was repeated although its queue was handed over in order"
    return None


def _transition(before: Record, after: Record, killed: frozenset[int]) -> str:
    if before.fence == after.fence:
        return "stayed"
    return "killed" if before.pid in killed else "handed over"
