"""Show the demo: a live picture while it runs, then whether every guarantee held."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qdo.demo.ledger import Audit, Record, audit
from qdo.ops.status import QueueStatus

PLAIN_SECONDS = 1.0
"""How often a line is printed without a terminal."""
_BAR = 20
_WIDTH = 84


@dataclass(frozen=True, slots=True)
class TableRow:
    name: str
    pid: int
    queues: int
    messages: int
    state: str


@dataclass(frozen=True, slots=True)
class Picture:
    seconds: float
    done: int
    total: int
    rate: float
    moves: int
    workers: tuple[TableRow, ...]


class Display:
    """Prints the steps, and updates the picture below them."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._live: Live | None = None
        self._printed_at = float("-inf")

    def title(self, text: str) -> None:
        self.console.print(Text(text, style="bold"), soft_wrap=True)

    def act(self, number: int, title: str, text: str) -> None:
        self.console.print()
        self.console.print(Text.assemble((f"{number}. {title}", "bold cyan")), soft_wrap=True)
        for line in textwrap.wrap(text, min(self.console.width, _WIDTH) - 4):
            self.console.print(Text(f"   {line}", style="dim"), soft_wrap=True)

    def tell(self, text: str, good: bool | None = None) -> None:
        """Print a result; `good` marks it as passed or failed."""
        mark, style = {None: ("·", ""), True: ("✓", "green"), False: ("✗", "bold red")}[good]
        self.console.print(Text(f"   {mark} {text}", style=style), soft_wrap=True)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show a picture below the steps during the block."""
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as self._live:
            yield
        self._live = None

    def update(self, picture: Picture) -> None:
        """Show the present state; without a terminal at most once per second."""
        if self._live is not None:
            self._live.update(_drawn(picture), refresh=True)
        elif not self.console.is_terminal and time.monotonic() - self._printed_at >= PLAIN_SECONDS:
            self._printed_at = time.monotonic()
            self.console.print(_line(picture), soft_wrap=True)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table in which every column but the first two is numeric."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="left" if index < 2 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.console.print()
        self.console.print(table)


def _line(picture: Picture) -> Text:
    shares = " + ".join(str(row.queues) for row in picture.workers if row.state == "running")
    return Text(
        f"   {picture.seconds:5.1f} s  {picture.done:>7,} of {picture.total:,} messages"
        f"  {picture.rate:>6,.0f}/s  queues {shares or '-'}  moves {picture.moves}"
    )


def _drawn(picture: Picture) -> RenderableType:
    bar = Columns([Text("  "), ProgressBar(picture.total, picture.done, width=_BAR)])
    most = max((row.queues for row in picture.workers), default=0) or 1
    workers = Table.grid(padding=(0, 1))
    for row in picture.workers:
        style = "" if row.state == "running" else "dim"
        workers.add_row(
            Text(f"   {row.name}", style=style),
            Text("█" * round(row.queues / most * _BAR) or "·", style=style or "cyan"),
            Text(f"{row.queues} queues", style=style, justify="right"),
            Text(f"{row.messages:,}", style=style, justify="right"),
            Text("" if row.state == "running" else row.state, style="red"),
        )
    return Group(Text(), bar, _line(picture), workers)


_ERRORS_SHOWN = 10


@dataclass(slots=True)
class KilledWorker:
    """The worker that was killed.

    :ivar at: time (CLOCK_MONOTONIC) of the kill.
    :ivar owned_seconds: from the kill until every queue had a new owner.
    """

    worker: str
    pid: int
    queues: frozenset[str]
    at: float
    owned_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The results of the demo.

    :ivar workers: all workers, with their queues before the drain.
    :ivar moves: how many queues moved from one worker to another before the drain.
    """

    records: Sequence[Record]
    sent: Mapping[str, int]
    kill: KilledWorker | None
    workers: Sequence[TableRow]
    moves: int
    required_moves: int
    statuses: Sequence[QueueStatus]


def print_report(display: Display, report: DemoReport) -> bool:
    """Print the table, the figures and the checks; return whether all checks passed."""
    killed = frozenset({report.kill.pid}) if report.kill else frozenset[int]()
    found = audit(report.records, report.sent, killed)
    display.table(
        ("worker", "end", "pid", "messages", "queues before the drain"),
        [
            (
                row.name,
                row.state,
                str(row.pid),
                f"{row.messages:,}",
                "-" if row.state == "killed" else str(row.queues),
            )
            for row in report.workers
        ],
    )
    display.act(
        6, "Check", "Each worker logged the queue, number, fence and times of every message."
    )
    _print_figures(display, report, found)
    checks = list(_checks(report, found))
    for text, good in checks:
        display.tell(text, good)
    for error in found.faults[:_ERRORS_SHOWN]:
        display.tell(error, good=False)
    return all(good for _, good in checks)


def _checks(report: DemoReport, found: Audit) -> Iterator[tuple[str, bool]]:
    total = sum(report.sent.values())
    yield f"{found.processed:,} of {total:,} messages processed", found.processed == total
    words = "in order, no gaps, one worker at a time, increasing fences"
    if found.faults:
        words = f"{len(found.faults)} errors in order, gaps, owners or fences"
    yield f"{found.claims} claims: {words}", not found.faults
    done = sum(each.backlog == 0 and each.owner is None for each in report.statuses)
    text = f"{done} of {len(report.sent)} queues recorded as processed and released"
    yield text, done == len(report.statuses) == len(report.sent)


def _print_figures(display: Display, report: DemoReport, found: Audit) -> None:
    kill = report.kill
    if kill is not None:
        running_seconds = running_again(report.records, kill) - kill.at
        display.tell(
            f"kill -9: {len(kill.queues)} queues owned again after {_ms(kill.owned_seconds)}, "
            f"all with new messages after {_ms(running_seconds)}"
        )
    display.tell(
        f"longest pause of a queue: {_ms(found.pauses['handed over'])} during a handover, "
        f"{_ms(found.pauses['stayed'])} without one"
    )
    fewest = report.moves == report.required_moves
    words = "the minimum" if fewest else f"the minimum is {report.required_moves}"
    display.tell(f"{report.moves} moves of queues, {words}")
    display.tell(f"{found.repeats} messages repeated: processed, but not yet recorded at the kill")


def running_again(records: Sequence[Record], kill: KilledWorker) -> float:
    """Return when the last queue of the killed worker, of those with work left, resumed.

    A queue resumes with its first new message, not with a repetition.
    """
    done = {(record.queue, record.number) for record in records if record.pid == kill.pid}
    first: dict[str, float] = {}
    for record in records:
        if record.queue not in kill.queues or record.started <= kill.at:
            continue
        if (record.queue, record.number) not in done:
            first[record.queue] = min(record.started, first.get(record.queue, record.started))
    return max(first.values(), default=kill.at)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
