"""The story that `qdo demo` tells, act by act."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from qdo.brokers.base import Outgoing
from qdo.demo.books import Books, Kill, close_books
from qdo.demo.fleet import Fleet
from qdo.demo.ledger import LedgerReader
from qdo.demo.show import Picture, Row, Show
from qdo.demo.stage import DemoError, Stage
from qdo.ops.status import queue_statuses

PATIENCE_SECONDS = 60.0
"""How long any one thing may take before the demo gives up."""
_LOOK_SECONDS = 0.1
_CHUNK = 5000
_RATE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Cast:
    """How big the demo is."""

    queues: int = 300
    messages: int = 60_000
    processes: int = 3

    @property
    def sent(self) -> dict[str, int]:
        """How many messages each queue gets."""
        share, rest = divmod(self.messages, self.queues)
        return {f"tenant-{n:04}": share + (n < rest) for n in range(self.queues)}


@dataclass(slots=True)
class Play:
    """One performance."""

    stage: Stage
    show: Show
    cast: Cast
    fleet: Fleet = field(init=False)
    ledger: LedgerReader = field(init=False)
    kill: Kill | None = None
    stopped: bool = False
    """Set it, for instance in a signal handler, to end the play early."""
    _began: float = field(default_factory=time.monotonic)
    _pause: threading.Event = field(default_factory=threading.Event)
    _rates: list[tuple[float, int]] = field(default_factory=list)
    _messages: Counter[int] = field(default_factory=Counter)
    _fewest_moves: int = 0
    _last_shares: dict[str, int] = field(default_factory=dict)
    _last_moves: int = 0

    def __post_init__(self) -> None:
        self.fleet = Fleet(self.stage.client, self.stage.layout)
        self.ledger = LedgerReader(self.stage.ledger)

    def perform(self) -> bool:
        """Play all acts; return whether every promise was kept."""
        self.send()
        with self.show.live():
            self.share_out()
            self.strike()
            self.grow()
            self.finish()
        self._read_ledger()
        return close_books(self.show, self._books())

    # --- acts -----------------------------------------------------------------------------

    def send(self) -> None:
        """Store all messages, queue by turns."""
        cast = self.cast
        self.show.act(
            1,
            "Send",
            f"{cast.messages:,} messages go into {cast.queues} queues, numbered within each. "
            "They are safe on disk when send() returns; no worker has to run for that.",
        )
        sent = cast.sent
        turns = (
            Outgoing(queue, b'{"number":%d}' % number)
            for number in range(1, max(sent.values()) + 1)
            for queue, count in sent.items()
            if number <= count
        )
        began = time.monotonic()
        while chunk := list(islice(turns, _CHUNK)):
            self.stage.broker.send_many(chunk)
        took = time.monotonic() - began
        self.show.tell(f"{cast.messages:,} messages stored in {took:.2f} s")

    def share_out(self) -> None:
        """Start the first workers and wait until they have shared all queues."""
        self.show.act(
            2,
            "Share",
            f"`qdo-worker --processes {self.cast.processes}` starts: one of the workers is elected "
            "and assigns the queues. "
            "Each queue is handled by exactly one of them at a time, in order.",
        )
        began = time.monotonic()
        self.stage.start_workers(self.cast.processes)
        self._until(lambda: self._spread(self.cast.processes), "the queues are shared out")
        self.show.tell(
            f"{self.cast.queues} queues shared as {self._shares()}, "
            f"{time.monotonic() - began:.1f} s after the start"
        )
        self._until(lambda: self._share_done(0.25), "a quarter of the messages are done")

    def strike(self) -> None:
        """Kill a worker process and see how long its queues stand still."""
        worker, pid = self._victim()
        self.show.act(
            3,
            "Kill",
            f"kill -9 {pid}: {worker} dies with {len(self.fleet.queues_of(worker))} queues in "
            "hand. "
            "Its parent closes its session with the coordinator at once, and starts another; "
            "else the others would have to wait for the session time-out, 10 s.",
        )
        queues = self.fleet.queues_of(worker)
        self.kill = Kill(worker, pid, queues, time.monotonic())
        os.kill(pid, signal.SIGKILL)
        owned_at = self.fleet.wait_owned(queues, PATIENCE_SECONDS, but=worker)
        if owned_at is None:
            raise DemoError(reason=f"the queues of {worker} were not taken over")
        self.kill.owned_seconds = owned_at - self.kill.at
        self.show.tell(
            f"all {len(queues)} queues have a new owner {self.kill.owned_seconds * 1000:.0f} ms "
            "after the kill"
        )
        self._until(lambda: self._spread(self.cast.processes), "the queues are shared out again")
        self._fewest_moves += len(queues) + self._newcomers_share()
        self.show.tell(
            f"the replacement has joined: {self._shares()}, "
            f"{time.monotonic() - self.kill.at:.1f} s after the kill"
        )
        self._until(lambda: self._share_done(0.55), "half of the messages are done")

    def grow(self) -> None:
        """Add a worker while all the others go on."""
        moves = self.fleet.moves
        self.show.act(
            4,
            "Grow",
            "Another `qdo-worker` joins. Only its share moves, each queue between two of its "
            "messages; queues that stay where they are do not pause.",
        )
        self.stage.start_workers(1)
        size = self.cast.processes + 1
        self._until(lambda: self._spread(size), "the queues are shared with the newcomer")
        self._fewest_moves += self._newcomers_share()
        self.show.tell(f"now {self._shares()}, after {self.fleet.moves - moves} moves")

    def finish(self) -> None:
        """Wait for the last message, then drain."""
        self._until(lambda: self._share_done(1.0), "all messages are done")
        self.fleet.pids()
        self._last_shares = self.fleet.counts()
        self._last_moves = self.fleet.moves
        self.show.act(
            5,
            "Drain",
            "SIGTERM: each worker finishes the message in hand, records its progress, "
            "gives its queues back and leaves.",
        )
        began = time.monotonic()
        codes = self.stage.drain(PATIENCE_SECONDS)
        self.show.tell(
            f"drained in {time.monotonic() - began:.1f} s, exit codes {', '.join(map(str, codes))}",
            good=not any(codes),
        )
        if any(codes):
            raise DemoError(reason=f"workers ended badly\n{self.stage.last_log()}")

    def _books(self) -> Books:
        killed = None if self.kill is None else self.kill.pid
        stage = self.stage
        return Books(
            records=self.ledger.records,
            sent=self.cast.sent,
            kill=self.kill,
            workers=tuple(
                Row(
                    worker,
                    pid,
                    self._last_shares.get(worker, 0),
                    self._messages[pid],
                    "killed" if pid == killed else "drained",
                )
                for worker, pid in sorted(self.fleet.pids().items())
            ),
            moves=self._last_moves,
            fewest_moves=self._fewest_moves,
            statuses=queue_statuses(stage.client, stage.layout, stage.broker).queues,
        )

    # --- looking ------------------------------------------------------------------------------

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self._look()
            if condition():
                return
            self.stage.check()
            if self.stopped:
                raise DemoError(reason="it was told to stop")
            if time.monotonic() > deadline:
                raise DemoError(
                    reason=f"after {PATIENCE_SECONDS:g} s it is still not so that {what}\n"
                    f"{self.stage.last_log()}"
                )
            self._pause.wait(_LOOK_SECONDS)

    def _look(self) -> None:
        """Read what is new, and show it."""
        self._read_ledger()
        self.show.update(self._picture())

    def _read_ledger(self) -> None:
        self._messages.update(record.pid for record in self.ledger.read())

    def _picture(self) -> Picture:
        now = time.monotonic()
        done = self.ledger.distinct
        self._rates = [each for each in self._rates if each[0] > now - _RATE_SECONDS]
        self._rates.append((now, done))
        (earlier, before) = self._rates[0]
        rate = (done - before) / (now - earlier) if now > earlier else 0.0
        counts = self.fleet.counts()
        rows = [
            Row(
                worker,
                pid,
                counts.get(worker, 0),
                self._messages[pid],
                "running" if worker in counts else "killed",
            )
            for worker, pid in sorted(self.fleet.pids().items())
        ]
        return Picture(
            now - self._began, done, self.cast.messages, rate, self.fleet.moves, tuple(rows)
        )

    def _victim(self) -> tuple[str, int]:
        """Return the worker that has most queues, and its process."""
        counts = self.fleet.counts()
        worker = max(counts, key=lambda name: counts[name])
        return worker, self.fleet.pids()[worker]

    def _spread(self, size: int) -> bool:
        """Whether so many workers handle all queues between them, as evenly as can be."""
        counts = self.fleet.counts().values()
        return (
            len(counts) == size
            and sum(counts) == self.cast.queues
            and max(counts) - min(counts) <= 1
        )

    def _newcomers_share(self) -> int:
        """Return how many queues the worker has that registered last: so many had to move."""
        return [*self.fleet.counts().values()][-1]

    def _shares(self) -> str:
        return " + ".join(str(count) for count in self.fleet.counts().values())

    def _share_done(self, share: float) -> bool:
        return self.ledger.distinct >= share * self.cast.messages
