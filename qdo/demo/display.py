"""The output of the demo: a live picture on a terminal, otherwise one line per second."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_SECONDS = 1.0
"""How often a line is printed without a terminal."""
_BAR = 20
_WIDTH = 84


@dataclass(frozen=True, slots=True)
class TableRow:
    """A worker in the picture."""

    name: str
    pid: int
    queues: int
    messages: int
    state: str


@dataclass(frozen=True, slots=True)
class Picture:
    """The state of the demo at one moment."""

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
        """Print the title."""
        self.console.print(Text(text, style="bold"), soft_wrap=True)

    def act(self, number: int, title: str, text: str) -> None:
        """Print the heading and the explanation of a step."""
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
    head = Table.grid(padding=(0, 1))
    head.add_row(
        f"   {picture.seconds:5.1f} s",
        ProgressBar(total=picture.total, completed=picture.done, width=_BAR),
        f"{picture.done:,} of {picture.total:,} messages",
        f"{picture.rate:,.0f}/s",
        f"{picture.moves} moves",
    )
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
    return Group(Text(), head, workers)
