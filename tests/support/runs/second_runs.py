"""A plugin of pytest that runs each failed item once more: ``-p tests.support.runs.second_runs``.

The second run is the same command in new processes, reduced to this item, and begins when all
others have ended. An item that then passes is *unstable*: it does not fail the run, whose last
lines name it, and a file has the outputs of both runs. An item that fails twice fails the run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOST = 3
"""If more items fail, all of them fail the run at once: the cause is not bad luck."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of both runs."""
    group = parser.getgroup("second runs of failed items")
    group.addoption(
        "--unstable",
        type=Path,
        metavar="FILE",
        help="run failed items once more, and write the outputs of those that then pass to FILE",
    )
    group.addoption("--only", metavar="ITEM", help="of all items of this command run ITEM only")


def pytest_configure(config: pytest.Config) -> None:
    """Begin, but not in a second run."""
    if config.option.unstable and not config.option.only:
        config.pluginmanager.register(SecondRuns(config))


@pytest.hookimpl(trylast=True)  # whatever selects or checks items by all others has seen them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the item of a second run."""
    if config.option.only:
        items[:] = [each for each in items if each.nodeid == config.option.only]


class SecondRuns:
    """The second runs at the end of a run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._file = Path(config.option.unstable)
        self._file.unlink(missing_ok=True)
        self._unstable: list[str] = []

    @pytest.hookimpl(wrapper=True, trylast=True)  # before the terminal's summary
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Iterator[None]:
        """Run failed items again, and decide by them whether the run has failed."""
        yield
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if exitstatus == pytest.ExitCode.TESTS_FAILED and reporter is not None:
            self._run_again(reporter)
            if self._unstable and not {"failed", "error"} & reporter.stats.keys():
                session.exitstatus = pytest.ExitCode.OK

    def _run_again(self, reporter: Any) -> None:
        stats = reporter.stats
        reports = [*stats.get("failed", ()), *stats.get("error", ())]
        items = dict.fromkeys(each.nodeid for each in reports)
        if len(items) > MOST or not all(isinstance(each, pytest.TestReport) for each in reports):
            return
        reporter.write_line("")
        for item in items:
            reporter.write_line(f"second run, alone: {item}")
            firsts = [each for each in reports if each.nodeid == item]
            is_passed, output = self._second_run(item)
            if not is_passed:
                firsts[0].sections.append(("second run, alone", output))
                continue
            self._unstable.append(item)
            with self._file.open("a") as file:
                file.write("\n".join([*map(_text, firsts), f"=== second run: {item}", output, ""]))
            for kind in {"failed", "error"} & stats.keys():
                stats[kind] = [each for each in stats[kind] if each not in firsts]
                if not stats[kind]:
                    del stats[kind]  # an empty list counts as a failure for the terminal's colors
            stats.setdefault("unstable", []).append(firsts[0])

    def _second_run(self, item: str) -> tuple[bool, str]:
        """Return whether the item has passed, and the output.

        The output goes to a file: a process that the item leaves behind would keep a pipe open.
        """
        invocation = self._config.invocation_params
        command = [sys.executable, "-m", "pytest", *map(str, invocation.args)]
        with tempfile.TemporaryFile() as file:
            ended = subprocess.run(
                [*command, "--processes", "1", "-rA", "--only", item],
                cwd=invocation.dir,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            file.seek(0)
            output = file.read().decode(errors="replace")
        last = output.rstrip().rpartition("\n")[2]
        return ended.returncode == 0 and re.search(r"\b1 passed\b", last) is not None, output

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # below everything but the closing line
    def pytest_terminal_summary(self, terminalreporter: Any) -> Iterator[None]:
        """Name the unstable items."""
        yield
        for item in self._unstable:
            terminalreporter.write_line(f"unstable: {item}")
        if self._unstable:
            terminalreporter.write_line(f"outputs of both runs: {self._file}")


def _text(report: pytest.TestReport) -> str:
    """Return everything that the first run has printed about an item."""
    sections = [f"--- {title}\n{content}" for title, content in report.sections]
    return "\n".join(
        [f"=== {report.nodeid} ({report.when})", report.longreprtext.rstrip(), *sections]
    )
