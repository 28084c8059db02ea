"""A plugin of pytest that prints the cost of tests, and compares it with a table.

The cost of an item is the processor time of its process and of the children that ended meanwhile,
those included that a warm interpreter has forked. What items share is the row `shared`: collection
and servers. A folder that costs more than its row of the table by 15 % and 5 s fails the run.

A fixed loop tells the speed of the machine while it runs the items. The table has the seconds of a
machine whose loop takes 10 ms. The loop is not slowed down by all that slows tests down, such as
system calls; so if most folders cost more than their rows, each may. Beside other programs the
folders differ by a quarter, so a run is not compared if these used the processors for more than a
tenth of its time. A slow or busy machine is thus not taken for a costly test.

    pytest -p tests.support.runs.costs --level test --costs tests/golden/costs.txt
    pytest -p tests.support.runs.costs --level test --write-costs tests/golden/costs.txt
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks.processes import choice

DEAREST = 20
LOOP = 200_000
"""Additions of the loop."""
LOOP_SECONDS = 0.010
"""Its processor time on the machine of the table."""
LOOP_EVERY = 100
"""Items of a process between two of these loops: busy processors are slower than idle ones."""
MORE = 1.15
MORE_SECONDS = 5.0
"""By how much the cost of a folder may exceed its row; runs of the same tests differ by this."""
MOST_OTHERS = 0.1
"""The share of the time of all processors that other programs may use, more than in the table."""
FOLDERS = 5
"""How many folders tell together how slow the machine is."""
OTHERS = "others"
"""The row of other programs, and of servers that outlast their tests."""
HEAD = "# Processor seconds of `make test` by folder; written by: make test COSTS=--write-costs"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("costs of tests")
    group.addoption("--costs", type=Path, metavar="FILE", help="compare with the table in FILE")
    group.addoption("--write-costs", type=Path, metavar="FILE", help="write this table")


def pytest_configure(config: pytest.Config) -> None:
    """Begin."""
    config.pluginmanager.register(Meter())
    config.pluginmanager.register(Costs(config))


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def machine_seconds() -> float:
    """Return the time that all processors have worked since the machine started (Linux)."""
    head = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, _, _, *interrupts = map(int, head.split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _spent() -> float:
    return processor_seconds() + choice.forked_seconds


def loop_seconds() -> float:
    """Return the processor time of the fixed loop."""
    began = time.process_time()
    total = 0
    for number in range(LOOP):
        total += number
    return time.process_time() - began


def folder_of(file: str) -> str:
    """Return the folder under which a file counts, such as "unit" or "integration/cli"."""
    parts = Path(file).parts[1:-1]
    return "/".join(parts[:2] if parts[:1] in (("contract",), ("integration",)) else parts[:1])


def read_table(text: str) -> dict[str, float]:
    """Return the seconds of each folder."""
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {folder: float(seconds) for folder, seconds in rows}


def dearer(found: Mapping[str, float], table: Mapping[str, float]) -> dict[str, float]:
    """Return the folders that cost more than the table allows, with their seconds."""
    ratios = [seconds / table[folder] for folder, seconds in found.items() if table.get(folder)]
    machine = max(1.0, statistics.median(ratios)) if len(ratios) >= FOLDERS else 1.0
    rows = {folder: machine * table.get(folder, 0.0) for folder in found}
    return {
        folder: seconds
        for folder, seconds in found.items()
        if seconds > max(MORE * rows[folder], MORE_SECONDS + rows[folder])
    }


class Meter:
    """Measures in the processes that run items; the last report of an item has its cost."""

    def __init__(self) -> None:
        self._count = 0
        self._loop: float | None = None
        self._began = 0.0, 0.0
        self._ended: float | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Begin with an item."""
        self._loop = loop_seconds() if self._count % LOOP_EVERY == 0 else None
        self._count += 1
        self._began = _spent(), time.monotonic()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> None:
        """Leave out the end of what items share, which is in the last teardown of a process."""
        self._ended = _spent() if nextitem is None else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> Iterator[None]:
        """Add processor seconds, wall seconds and perhaps the time of the loop."""
        report: Any = yield
        if call.when == "teardown":
            processor, wall = self._began
            ended = _spent() if self._ended is None else self._ended
            report.cost = [ended - processor, time.monotonic() - wall, self._loop]
        return report  # type: ignore[no-any-return]


class Costs:
    """The costs of a run, in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._options = config.option
        self._began = time.monotonic()
        self._machine = machine_seconds()
        self._own = processor_seconds()
        self._files = defaultdict[str, list[float]](lambda: [0, 0.0, 0.0])
        self._loops: list[float] = []
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the cost of an item to that of its file."""
        if hasattr(report, "cost"):
            processor, wall, loop = report.cost
            if loop is not None:
                self._loops.append(loop)
            self._add(self._files, report.location[0], [1, processor, wall])

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Compare, or write the table; decide after all others whether the run has failed."""
        choice.close()  # only then do its processes count as ended
        whole = processor_seconds()  # without second runs
        others = machine_seconds() - self._machine - (whole - self._own)
        yield
        is_second_run = getattr(self._options, "only", None) is not None
        if is_second_run or not self._loops:
            return
        folders = defaultdict[str, list[float]](lambda: [0, 0.0, 0.0])
        for file, costs in self._files.items():
            self._add(folders, folder_of(file), costs)
        items = sum(costs[0] for costs in folders.values())
        shared = whole - sum(costs[1] for costs in folders.values())
        folders["shared"] = [0, shared, 0.0]
        scale = LOOP_SECONDS / statistics.median(self._loops)
        seconds = {folder: scale * costs[1] for folder, costs in folders.items()}
        folders["all"] = [items, whole, time.monotonic() - self._began]
        folders[OTHERS] = [0, others, 0.0]
        seconds[OTHERS] = scale * others
        self._print(folders)
        if self._options.write_costs and session.exitstatus == pytest.ExitCode.OK:
            rows = [f"{folder:26}{cost:8.1f}" for folder, cost in sorted(seconds.items())]
            self._options.write_costs.write_text("\n".join([HEAD, *rows, ""]))
        if self._options.costs:
            capacity = (time.monotonic() - self._began) * (os.cpu_count() or 1)
            table = read_table(self._options.costs.read_text())
            if self._compare(seconds, table, scale * capacity):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _compare(
        self, seconds: Mapping[str, float], table: Mapping[str, float], capacity: float
    ) -> bool:
        """Return whether a folder costs more than the table allows.

        :param capacity: processor seconds that the machine had during the run.
        """
        if seconds[OTHERS] - table.get(OTHERS, 0.0) > MOST_OTHERS * capacity:
            self._lines.append(f"not compared: other programs used {seconds[OTHERS]:.0f} s")
            return False
        found = {folder: cost for folder, cost in seconds.items() if folder != OTHERS}
        failed = dearer(found, table)
        for folder, cost in failed.items():
            self._lines.append(
                f"failed: {folder} costs {cost:.1f} s on the machine of the table, which has"
                f" {table.get(folder, 0.0):.1f} s: make its tests cheaper, or write the table anew"
            )
        return bool(failed)

    @staticmethod
    def _add(costs: dict[str, list[float]], name: str, more: list[float]) -> None:
        costs[name] = [old + new for old, new in zip(costs[name], more, strict=True)]

    def _print(self, folders: Mapping[str, list[float]]) -> None:
        loop = 1000 * statistics.median(self._loops)
        self._lines.append(f"the fixed loop takes {loop:.1f} ms")
        self._lines.append(f"{'folder':40} {'items':>7} {'processor s':>12} {'wall s':>8}")
        dearest = sorted(self._files.items(), key=lambda file: -file[1][1])[:DEAREST]
        files = [(file.removeprefix("tests/"), costs) for file, costs in dearest]
        for name, costs in (*sorted(folders.items(), key=lambda row: row[1][1]), *files):
            items, processor, wall = costs
            self._lines.append(f"{name:40} {items:7.0f} {processor:12.1f} {wall:8.1f}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print them."""
        if self._lines:
            terminalreporter.section("costs")
            for line in self._lines:
                terminalreporter.write_line(line)
