"""A plugin of pytest that prints the cost of tests: ``-p tests.support.runs.costs``.

The cost of an item is the processor time of its process and of the children that ended meanwhile.
Servers that items share end last, with collection and start-up: they are the row `shared`.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COSTS = pytest.StashKey["Costs"]()
DEAREST = 20
LOOP = 200_000
"""Additions of the loop whose time tells the speed of the machine; 10 ms."""
LOOP_EVERY = 100
"""Items between two of these loops: busy processors are slower than idle ones."""


def pytest_configure(config: pytest.Config) -> None:
    """Count in each process that runs items, and print in the first one."""
    costs = Costs()
    config.stash[COSTS] = costs
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meter(config, costs))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Printer(costs))


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def loop_seconds() -> float:
    """Return the processor time of a fixed loop."""
    began = time.process_time()
    total = 0
    for number in range(LOOP):
        total += number
    return time.process_time() - began


def folder_of(file: str) -> str:
    """Return the folder under which a file counts.

    >>> folder_of("tests/integration/cli/messages/test_peek.py")
    'integration/cli'
    >>> folder_of("tests/unit/jobs/test_retry.py")
    'unit'
    """
    parts = Path(file).parts[1:-1]
    return "/".join(parts[:2] if parts[:1] in (("contract",), ("integration",)) else parts[:1])


class Costs:
    """The costs of a process, or of all.

    :ivar files: items, processor seconds and wall seconds of each file.
    :ivar loops: times of the fixed loop.
    """

    def __init__(self) -> None:
        self.files = defaultdict[str, list[float]](lambda: [0, 0.0, 0.0])
        self.loops: list[float] = []

    def add(self, file: str, *costs: float) -> None:
        """Add items, processor seconds and wall seconds."""
        self.files[file] = [old + new for old, new in zip(self.files[file], costs, strict=True)]

    def by_folder(self) -> dict[str, list[float]]:
        """Return the sums of files by folder."""
        folders = Costs()
        for file, costs in self.files.items():
            folders.add(folder_of(file), *costs)
        return dict(folders.files)


class Meter:
    """Counts in a process that runs items."""

    def __init__(self, config: pytest.Config, costs: Costs) -> None:
        self._config = config
        self._costs = costs
        self._count = 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count an item with its fixtures."""
        if self._count % LOOP_EVERY == 0:
            self._costs.loops.append(loop_seconds())
        self._count += 1
        processor = processor_seconds()
        wall = time.monotonic()
        result = yield
        spent = processor_seconds() - processor
        self._costs.add(item.location[0], 1, spent, time.monotonic() - wall)
        return result

    def pytest_sessionfinish(self) -> None:
        """Pass the costs on to the first process."""
        output: dict[str, Any] | None = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["costs"] = {"files": dict(self._costs.files), "loops": self._costs.loops}


class Printer:
    """Prints the costs of all processes."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._began = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the costs of a process that has ended; a lost one has told none."""
        found = getattr(node, "workeroutput", {}).get("costs")
        if found:
            self._costs.loops += found["loops"]
            for file, costs in found["files"].items():
                self._costs.add(file, *costs)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print processor and wall seconds by folder, and the files that cost most."""
        if not self._costs.loops:
            return
        write = terminalreporter.write_line
        wall = time.monotonic() - self._began
        whole = processor_seconds()
        loop = 1000 * statistics.median(self._costs.loops)
        folders = self._costs.by_folder()
        items = sum(costs[0] for costs in folders.values())
        shared = whole - sum(costs[1] for costs in folders.values())
        rows = [*folders.items(), ("shared", [0, shared, 0.0]), ("all", [items, whole, wall])]
        terminalreporter.section(f"costs; the fixed loop takes {loop:.1f} ms")
        write(f"{'folder':40} {'items':>7} {'processor s':>12} {'wall s':>8}")
        for folder, costs in sorted(rows, key=lambda row: row[1][1]):
            write(_row(folder, costs))
        write("")
        dearest = sorted(self._costs.files.items(), key=lambda file: -file[1][1])
        for file, costs in dearest[:DEAREST]:
            write(_row(file.removeprefix("tests/"), costs))


def _row(name: str, costs: list[float]) -> str:
    items, processor, wall = costs
    return f"{name:40} {items:7.0f} {processor:12.1f} {wall:8.1f}"
