"""Shows the steps of the demo and, below the steps, a live picture of the workers."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

# Interval between two lines if the output is not a terminal.
PLAIN_SECONDS = 1.0
_BAR = 20
_WIDTH = 84


class Display:
    """Prints the steps and updates the picture below them."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._live: Live | None = None
        self._printed_at = float("-inf")

    def title(self, text: str) -> None:
        self.console.print(Text(text, style="bold"), soft_wrap=True)

    def step(self, number: int, title: str, text: str) -> None:
        self.console.print()
        self.console.print(Text(f"{number}. {title}", style="bold cyan"), soft_wrap=True)
        for line in textwrap.wrap(text, min(self.console.width, _WIDTH) - 4):
            self.console.print(Text(f"   {line}", style="dim"), soft_wrap=True)

    def result(self, text: str, good: bool | None = None) -> None:
        """Print a result. `good` tells whether a check has passed; None for other results."""
        mark, style = {None: ("·", ""), True: ("✓", "green"), False: ("✗", "bold red")}[good]
        self.console.print(Text(f"   {mark} {text}", style=style), soft_wrap=True)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the picture below the steps during the block."""
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as self._live:
            yield
        self._live = None

    def update(self, progress: str, owned: Mapping[str, int]) -> None:
        """Show the progress and, on a terminal, the number of queues that each worker owns."""
        if self._live is not None:
            most = max(owned.values(), default=0) or 1
            bars = [
                f"   {worker}  {'█' * round(count / most * _BAR):{_BAR}} {count:>6,} queues"
                for worker, count in owned.items()
            ]
            self._live.update(Text("\n".join(["", f"   {progress}", *bars])), refresh=True)
        elif not self.console.is_terminal and time.monotonic() - self._printed_at >= PLAIN_SECONDS:
            self._printed_at = time.monotonic()
            self.console.print(Text(f"   {progress}"), soft_wrap=True)
