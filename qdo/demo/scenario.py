"""The steps of `qdo demo`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from qdo.brokers.base import Outgoing
from qdo.demo.display import Display
from qdo.demo.ledger import LedgerCheck
from qdo.demo.sandbox import DemoError, Sandbox
from qdo.ops.status import QueueStatus, queue_statuses
from qdo.ops.worker_status import worker_statuses

# Time limit of each wait. The demo fails after a longer wait.
PATIENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_CHUNK = 5000
_FAULTS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Size:
    queues: int = 300
    messages: int = 60_000
    processes: int = 3

    @property
    def sent(self) -> dict[str, int]:
        share, extra = divmod(self.messages, self.queues)
        return {f"tenant-{n:04}": share + (n < extra) for n in range(self.queues)}


class Scenario:
    """One run of the demo. A signal handler may set `stopped` to end the run early."""

    def __init__(self, sandbox: Sandbox, display: Display, size: Size) -> None:
        self.stopped = False
        self._sandbox = sandbox
        self._display = display
        self._size = size
        self._check = LedgerCheck(sandbox.ledger, size.sent)
        self._owned: dict[str, int] = {}
        self._began = time.monotonic()

    def perform(self) -> bool:
        """Run all steps; return whether every check passed."""
        self._send()
        with self._display.live():
            self._assign()
            self._kill()
            self._grow()
            self._drain()
        self._check.read()
        sandbox = self._sandbox
        statuses = queue_statuses(sandbox.client, sandbox.layout, sandbox.broker).queues
        return print_report(self._display, self._check, statuses)

    def _send(self) -> None:
        size = self._size
        self._display.step(
            1,
            "Send",
            f"Store {size.messages:,} messages in {size.queues} queues, numbered within each "
            "queue. Once send() returns, a message is safe on disk. No worker needs to be running.",
        )
        sent = self._check.sent
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
        self._display.result(f"stored {size.messages:,} messages in {took:.2f} s")

    def _assign(self) -> None:
        """Start the first workers, and wait until they own all queues."""
        processes = self._size.processes
        self._display.step(
            2,
            "Assign",
            f"Run `qdo-worker --processes {processes}`. The workers elect a leader, which assigns "
            "the queues. Each queue has one owner at a time, which processes its messages in "
            "order.",
        )
        began = time.monotonic()
        self._start_workers(processes)
        self._wait_until(lambda: self._is_balanced(processes), "the queues were not assigned")
        self._display.result(
            f"{self._size.queues} queues assigned as {self._shares()}, "
            f"{time.monotonic() - began:.1f} s after the start"
        )
        self._wait_until(lambda: self._is_done(0.25), "a quarter of the messages was not processed")

    def _kill(self) -> None:
        """Kill the busiest worker, and measure the time until its queues continue."""
        victim = max(
            worker_statuses(self._sandbox.client, self._sandbox.layout),
            key=lambda each: each.queues,
        )
        pid = victim.report.pid
        if pid is None:
            raise self._sandbox.failure(f"{victim.worker} has not reported its process id")
        self._display.step(
            3,
            "Kill",
            f"Run `kill -9 {pid}` on {victim.worker}, which owns {victim.queues} queues. The "
            "parent process closes the worker's session immediately and starts a replacement. "
            "Otherwise the queues would wait for the session timeout, 10 s. The kill counts as a "
            "failed attempt of each message in flight, so its retry waits for 0.25 to 0.5 s.",
        )
        self._check.killed.add(pid)  # before the kill, because repetitions may follow immediately
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self._check.read()
        before = dict(self._check.done)  # includes the last messages of the killed worker
        self._wait_until(
            lambda: self._is_owned_without(victim.worker),
            f"the queues of {victim.worker} did not get new owners",
        )
        owned = time.monotonic() - killed_at
        self._wait_until(lambda: self._have_continued(before), "some queues did not continue")
        continued = time.monotonic() - killed_at
        self._display.result(
            f"all {victim.queues} queues have a new owner after {owned * 1000:.0f} ms, and new "
            f"messages after {continued * 1000:.0f} ms"
        )
        size = self._size.processes
        self._wait_until(lambda: self._is_balanced(size), "the queues were not assigned again")
        self._display.result(
            f"the replacement has joined: {self._shares()}, "
            f"{time.monotonic() - killed_at:.1f} s after the kill"
        )
        self._wait_until(lambda: self._is_done(0.55), "half of the messages were not processed")

    def _grow(self) -> None:
        """Add a worker while the other workers continue."""
        self._display.step(
            4,
            "Grow",
            "Start another `qdo-worker`. Only its share of the queues moves, each between two "
            "messages. All other queues continue without a pause.",
        )
        self._start_workers(1)
        size = self._size.processes + 1
        self._wait_until(lambda: self._is_balanced(size), "the new worker did not get its queues")
        self._display.result(f"now {self._shares()}")

    def _drain(self) -> None:
        """Wait for the last message, and then stop all workers."""
        self._wait_until(lambda: self._is_done(1.0), "some messages were not processed")
        self._display.step(
            5,
            "Drain",
            "Send SIGTERM. Each worker finishes its current messages, records its progress, "
            "releases its queues and exits.",
        )
        began = time.monotonic()
        codes = self._sandbox.drain(PATIENCE_SECONDS)
        self._display.result(
            f"drained in {time.monotonic() - began:.1f} s, exit codes {', '.join(map(str, codes))}",
            good=not any(codes),
        )
        if any(codes):
            raise self._sandbox.failure("workers failed")

    def _start_workers(self, processes: int) -> None:
        # Let every process run all queues at once. With the default concurrency of 100, the queues
        # of a worker with 150 queues take turns. Unaffected queues would appear to pause for 50 ms.
        self._sandbox.start_workers(processes, concurrency=self._size.queues)

    def _wait_until(self, condition: Callable[[], bool], failure: str) -> None:
        """Update the display until `condition` holds; raise DemoError if the demo must end."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        pause = threading.Event()
        while True:
            self._look()
            if condition():
                return
            self._sandbox.check()
            if self.stopped:
                raise DemoError(reason="it received a stop signal")
            if time.monotonic() > deadline:
                raise self._sandbox.failure(f"{failure} within {PATIENCE_SECONDS:g} s")
            pause.wait(_LOOK_SECONDS)

    def _look(self) -> None:
        """Read the workers and the ledger, and update the display."""
        self._check.read()
        workers = worker_statuses(self._sandbox.client, self._sandbox.layout)
        self._owned = {each.worker: each.queues for each in workers}
        self._display.update(
            f"{time.monotonic() - self._began:5.1f} s  {self._check.processed:>7,} of "
            f"{self._size.messages:,} messages  queues {self._shares() or '-'}",
            self._owned,
        )

    def _is_balanced(self, size: int) -> bool:
        """Return whether `size` workers own all queues, as evenly as possible."""
        counts = self._owned.values()
        return (
            len(counts) == size
            and sum(counts) == self._size.queues
            and max(counts) - min(counts) <= 1
        )

    def _is_owned_without(self, worker: str) -> bool:
        counts = [count for name, count in self._owned.items() if name != worker]
        return sum(counts) == self._size.queues

    def _have_continued(self, before: dict[str, int]) -> bool:
        """Return whether every queue has a new message or has finished."""
        return all(
            self._check.done[queue] > number or number == self._check.sent[queue]
            for queue, number in before.items()
        )

    def _shares(self) -> str:
        return " + ".join(map(str, self._owned.values()))

    def _is_done(self, share: float) -> bool:
        return self._check.processed >= share * self._size.messages


def print_report(display: Display, check: LedgerCheck, statuses: Sequence[QueueStatus]) -> bool:
    """Print the checks; return whether all passed."""
    display.step(
        6, "Check", "Each worker logged the queue, number, fence and times of every message."
    )
    display.result(
        f"{check.repeats} messages repeated: processed, but not yet recorded at the kill"
    )
    is_complete = check.done == check.sent
    total = sum(check.sent.values())
    display.result(f"{check.processed:,} of {total:,} messages processed", is_complete)
    words = "each queue in order, no gaps, one worker at a time, increasing fences"
    if check.faults:
        words = f"{len(check.faults)} errors in order, gaps, owners or fences"
    display.result(words, not check.faults)
    released = sum(each.backlog == 0 and each.owner is None for each in statuses)
    is_released = released == len(statuses) == len(check.sent)
    display.result(
        f"{released} of {len(check.sent)} queues recorded as processed and released", is_released
    )
    for fault in check.faults[:_FAULTS_SHOWN]:
        display.result(fault, good=False)
    return is_complete and not check.faults and is_released
