"""The steps of `qdo demo`, and their progress as the display shows it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from qdo.brokers.base import Outgoing
from qdo.demo.ledger import LedgerReader
from qdo.demo.report import DemoReport, Display, KilledWorker, Picture, TableRow, print_report
from qdo.demo.sandbox import DemoError, Sandbox, WatchedFleet
from qdo.ops.status import queue_statuses

_RATE_SECONDS = 2.0


class DemoProgress:
    """Follows the fleet and the ledger; `messages` counts messages by process id."""

    def __init__(self, fleet: WatchedFleet, ledger: LedgerReader, total: int) -> None:
        self.messages: Counter[int] = Counter()
        self._fleet = fleet
        self._ledger = ledger
        self._total = total
        self._began = time.monotonic()
        self._rates: list[tuple[float, int]] = []

    def read(self) -> None:
        self.messages.update(record.pid for record in self._ledger.read())

    def look(self) -> Picture:
        """Read new lines of the ledger; return the present state."""
        self.read()
        now = time.monotonic()
        rows = self.rows(self._fleet.counts(), "running")
        done = self._ledger.distinct
        return Picture(
            now - self._began, done, self._total, self._rate(now, done), self._fleet.moves, rows
        )

    def rows(self, counts: Mapping[str, int], state: str) -> tuple[TableRow, ...]:
        """Return all workers: those with a count in this state, the others as killed."""
        return tuple(
            TableRow(
                worker,
                pid,
                counts.get(worker, 0),
                self.messages[pid],
                state if worker in counts else "killed",
            )
            for worker, pid in sorted(self._fleet.pids().items())
        )

    def _rate(self, now: float, done: int) -> float:
        self._rates = [each for each in self._rates if each[0] > now - _RATE_SECONDS]
        self._rates.append((now, done))
        earlier, before = self._rates[0]
        return (done - before) / (now - earlier) if now > earlier else 0.0


PATIENCE_SECONDS = 60.0
"""Time limit of each wait; then the demo fails."""
_LOOK_SECONDS = 0.1
_CHUNK = 5000


@dataclass(frozen=True, slots=True)
class Size:
    queues: int = 300
    messages: int = 60_000
    processes: int = 3

    @property
    def sent(self) -> dict[str, int]:
        share, rest = divmod(self.messages, self.queues)
        return {f"tenant-{n:04}": share + (n < rest) for n in range(self.queues)}


class Scenario:
    """One run of the demo; set `stopped` to end it early, for instance in a signal handler."""

    def __init__(self, sandbox: Sandbox, display: Display, size: Size) -> None:
        self.stopped = False
        self._sandbox = sandbox
        self._display = display
        self._size = size
        self._fleet = WatchedFleet(sandbox.client, sandbox.layout)
        self._ledger = LedgerReader(sandbox.ledger)
        self._progress = DemoProgress(self._fleet, self._ledger, size.messages)
        self._killed: KilledWorker | None = None
        self._required_moves = 0
        self._final_queues: dict[str, int] = {}
        self._final_moves = 0

    def perform(self) -> bool:
        """Run all steps; return whether every check passed."""
        self._send()
        with self._display.live():
            self._assign()
            self._kill()
            self._grow()
            self._drain()
        self._progress.read()
        return print_report(self._display, self._report())

    # --- steps ---

    def _send(self) -> None:
        size = self._size
        self._display.act(
            1,
            "Send",
            f"Store {size.messages:,} messages in {size.queues} queues, numbered within each "
            "queue. Once send() returns, a message is safe on disk. No worker needs to be running.",
        )
        sent = size.sent
        messages = (
            Outgoing(queue, b'{"number":%d}' % number)
            for number in range(1, max(sent.values()) + 1)
            for queue, count in sent.items()
            if number <= count
        )
        began = time.monotonic()
        while chunk := list(islice(messages, _CHUNK)):
            self._sandbox.broker.send_many(chunk)
        took = time.monotonic() - began
        self._display.tell(f"stored {size.messages:,} messages in {took:.2f} s")

    def _assign(self) -> None:
        """Start the first workers; wait until they own all queues."""
        processes = self._size.processes
        self._display.act(
            2,
            "Assign",
            f"Run `qdo-worker --processes {processes}`. The workers elect a leader, which assigns "
            "the queues. Each queue has one owner at a time, which processes its messages in "
            "order.",
        )
        began = time.monotonic()
        self._start_workers(processes)
        self._wait_until(lambda: self._is_balanced(processes), "the queues were not assigned")
        self._display.tell(
            f"{self._size.queues} queues assigned as {self._shares()}, "
            f"{time.monotonic() - began:.1f} s after the start"
        )
        self._wait_until(lambda: self._is_done(0.25), "a quarter of the messages was not processed")

    def _kill(self) -> None:
        """Kill a worker process; measure how long its queues have no owner."""
        worker, pid = self._busiest()
        queues = self._fleet.queues_of(worker)
        self._display.act(
            3,
            "Kill",
            f"Run `kill -9 {pid}` on {worker}, which owns {len(queues)} queues. The parent process "
            "closes the worker's session immediately and starts a replacement. Otherwise the "
            "queues would wait for the session timeout, 10 s. The kill counts as a failed attempt "
            "of each message in flight, so its retry waits for 0.25 to 0.5 s.",
        )
        killed = self._killed = KilledWorker(worker, pid, queues, time.monotonic())
        os.kill(pid, signal.SIGKILL)
        owned_at = self._fleet.wait_owned(queues, PATIENCE_SECONDS, but=worker)
        if owned_at is None:
            raise DemoError(
                reason=f"the queues of {worker} did not get new owners within "
                f"{PATIENCE_SECONDS:g} s\n{self._sandbox.last_log()}"
            )
        killed.owned_seconds = owned_at - killed.at
        self._display.tell(
            f"all {len(queues)} queues have a new owner {killed.owned_seconds * 1000:.0f} ms "
            "after the kill"
        )
        size = self._size.processes
        self._wait_until(lambda: self._is_balanced(size), "the queues were not assigned again")
        self._required_moves += len(queues) + self._newest_share()
        self._display.tell(
            f"the replacement has joined: {self._shares()}, "
            f"{time.monotonic() - killed.at:.1f} s after the kill"
        )
        self._wait_until(lambda: self._is_done(0.55), "half of the messages were not processed")

    def _grow(self) -> None:
        """Add a worker while the others continue."""
        moves = self._fleet.moves
        self._display.act(
            4,
            "Grow",
            "Start another `qdo-worker`. Only its share of the queues moves, each between two "
            "messages. All other queues continue without a pause.",
        )
        self._start_workers(1)
        size = self._size.processes + 1
        self._wait_until(lambda: self._is_balanced(size), "the new worker did not get its queues")
        self._required_moves += self._newest_share()
        self._display.tell(f"now {self._shares()}, after {self._fleet.moves - moves} moves")

    def _drain(self) -> None:
        """Wait for the last message; then stop all workers."""
        self._wait_until(lambda: self._is_done(1.0), "some messages were not processed")
        self._fleet.pids()
        self._final_queues = self._fleet.counts()
        self._final_moves = self._fleet.moves
        self._display.act(
            5,
            "Drain",
            "Send SIGTERM. Each worker finishes its current messages, records its progress, "
            "releases its queues and exits.",
        )
        began = time.monotonic()
        codes = self._sandbox.drain(PATIENCE_SECONDS)
        self._display.tell(
            f"drained in {time.monotonic() - began:.1f} s, exit codes {', '.join(map(str, codes))}",
            good=not any(codes),
        )
        if any(codes):
            raise DemoError(reason=f"workers failed\n{self._sandbox.last_log()}")

    def _report(self) -> DemoReport:
        sandbox = self._sandbox
        return DemoReport(
            records=self._ledger.records,
            sent=self._size.sent,
            kill=self._killed,
            workers=self._progress.rows(self._final_queues, "drained"),
            moves=self._final_moves,
            required_moves=self._required_moves,
            statuses=queue_statuses(sandbox.client, sandbox.layout, sandbox.broker).queues,
        )

    def _start_workers(self, processes: int) -> None:
        # Every process could run all queues at once. With the default of 100, the queues of a
        # worker that owns 150 take turns, and those that stay appear to pause for 50 ms.
        self._sandbox.start_workers(processes, concurrency=self._size.queues)

    # --- waiting ---

    def _wait_until(self, condition: Callable[[], bool], failure: str) -> None:
        """Update the display until `condition` holds; raise DemoError if the demo must end."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        pause = threading.Event()
        while True:
            self._display.update(self._progress.look())
            if condition():
                return
            self._sandbox.check()
            if self.stopped:
                raise DemoError(reason="it received a stop signal")
            if time.monotonic() > deadline:
                raise DemoError(
                    reason=f"{failure} within {PATIENCE_SECONDS:g} s\n{self._sandbox.last_log()}"
                )
            pause.wait(_LOOK_SECONDS)

    def _busiest(self) -> tuple[str, int]:
        """Return the worker that owns most queues, and its process id."""
        counts = self._fleet.counts()
        worker = max(counts, key=lambda name: counts[name])
        return worker, self._fleet.pids()[worker]

    def _is_balanced(self, size: int) -> bool:
        """Return whether `size` workers own all queues, as evenly as possible."""
        counts = self._fleet.counts().values()
        return (
            len(counts) == size
            and sum(counts) == self._size.queues
            and max(counts) - min(counts) <= 1
        )

    def _newest_share(self) -> int:
        """Return how many queues the newest worker owns, which all had to move."""
        return [*self._fleet.counts().values()][-1]

    def _shares(self) -> str:
        return " + ".join(str(count) for count in self._fleet.counts().values())

    def _is_done(self, share: float) -> bool:
        return self._ledger.distinct >= share * self._size.messages
