"""A plugin of pytest that runs items in several processes: ``--processes N``.

pytest collects once, which takes 10 s for all of qdo's tests, and then forks. The first process
gives out *units*, reports what the others have run, and runs none itself. A unit is one item, or
all items of a group (``@pytest.mark.together("name")``), which run in one process, one after the
other. Units begin in the order of collection.

A process that runs an item already has the next one: pytest keeps the fixtures that both use.

======================  =======================================================================
from a process          meaning
======================  =======================================================================
``("next", None)``      it asks for another item; the answer is a number, None at the end
``("start", number)``   it begins an item
``("report", data)``    what pytest reports about it
``("done", number)``    it has ended an item
======================  =======================================================================

A process that is lost fails the item that it was running. A new one gets its other items.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.config import create_terminal_writer


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--processes", type=int, default=0, metavar="N", help="run items in N processes at once"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Add the mark."""
    config.addinivalue_line("markers", "together(name): runs in one process with its group")


@pytest.fixture(scope="session")
def shared_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of temporary files that all processes of a run have in common."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if request.config.option.processes else folder


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all items, if the option is set."""
    options = session.config.option
    if not options.processes or options.collectonly or session.testsfailed:
        return None
    Controller(session).run(min(options.processes, len(session.items)))
    return True


def units(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Return the numbers of the items of each unit, in the order in which units begin."""
    found: dict[str | int, list[int]] = {}
    for number, item in enumerate(items):
        groups = sorted({str(mark.args[0]) for mark in item.iter_markers("together")})
        found.setdefault("+".join(groups) or number, []).append(number)
    return list(found.values())


class RunnerProcess:
    """A process that runs items, as the first one knows it.

    :ivar unit: numbers of the items of its unit that it has not got yet.
    :ivar given: numbers of the items that it has got and not ended.
    :ivar running: the one that it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.unit = deque[int]()
        self.given: list[int] = []
        self.running: int | None = None


class Controller:
    """The process that collects and reports."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._config = session.config
        self._units = deque(units(session.items))
        self._processes: dict[Connection, RunnerProcess] = {}
        self._started = 0

    def run(self, count: int) -> None:
        """Run all items in so many processes."""
        folder = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        plugins: Any = self._config.pluginmanager
        plugins.getplugin("terminalreporter").showfspath = False  # names of files would alternate
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # all processes would write into its files
        try:
            for _ in range(count):
                self._start()
            while self._processes:
                for connection in wait(list(self._processes)):
                    assert isinstance(connection, Connection)
                    self._receive(connection)
        finally:
            for connection in self._processes:
                connection.close()  # a process without a connection ends its fixtures and itself
            for each in self._processes.values():
                os.waitpid(each.pid, 0)
            _end_servers(folder)
            capture.start_global_capturing()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _start(self) -> None:
        if threading.active_count() > 1:
            found = threading.enumerate()
            raise RuntimeError(f"collection must not start threads: a fork loses them; got {found}")
        ours, theirs = Pipe()
        self._started += 1
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            for each in (ours, *self._processes):
                each.close()
            ItemRunner(self._session, theirs).run(f"process{self._started}")
        theirs.close()
        self._processes[ours] = RunnerProcess(pid)

    def _receive(self, connection: Connection) -> None:
        process = self._processes[connection]
        hook = self._config.hook
        try:
            kind, value = connection.recv()
        except (EOFError, ConnectionError):
            self._end(connection)
            return
        if kind == "next":
            self._give(connection, process)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self._config, data=value)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "start":
            process.running = value
            item = self._session.items[value]
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == "done":
            process.running = None
            process.given.remove(value)
            item = self._session.items[value]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _is_stopped(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _give(self, connection: Connection, process: RunnerProcess) -> None:
        if self._is_stopped():
            connection.send(None)
            return
        if not process.unit and self._units:
            process.unit.extend(self._units.popleft())
        number = process.unit.popleft() if process.unit else None
        if number is not None:
            process.given.append(number)
        connection.send(number)

    def _end(self, connection: Connection) -> None:
        """Go on after the end of a process, be it done or lost."""
        process = self._processes.pop(connection)
        connection.close()
        _, status = os.waitpid(process.pid, 0)
        if process.running is not None:
            process.given.remove(process.running)
            self._report_lost(self._session.items[process.running], status)
        elif status:
            raise RuntimeError(f"a process ended with status {status} between two items")
        if left := [*process.given, *process.unit]:
            self._units.appendleft(left)
        if self._units and not self._is_stopped():
            self._start()

    def _report_lost(self, item: pytest.Item, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"the process that ran {item.nodeid} {how}",
            when="call",
        )
        self._config.hook.pytest_runtest_logreport(report=report)


def _end_servers(folder: Path) -> None:
    """End the servers that a lost process has left to all."""
    if any(folder.glob("*-server.json")):
        from tests.support.shared_servers import end_left  # imports all that servers need

        end_left(folder)


class ItemRunner:
    """A process that runs items."""

    def __init__(self, session: pytest.Session, connection: Connection) -> None:
        self._session = session
        self._config = session.config
        self._connection = connection

    def run(self, name: str) -> NoReturn:
        """Run items until the first process has none, and end this process.

        :param name: of its folder of temporary files.
        """
        code = 1
        try:
            self._prepare(name)
            following = self._next()
            while following is not None:
                number, following = following, self._next()
                self._run(number, following)
            code = 0
        except (EOFError, ConnectionError, KeyboardInterrupt):  # the run was interrupted
            self._session._setupstate.teardown_exact(None)
        except Exception:  # noqa: BLE001 - os._exit would hide it
            traceback.print_exc()
        finally:
            os._exit(code)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Pass a report on."""
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def _prepare(self, name: str) -> None:
        manager: Any = self._config.pluginmanager
        manager.unregister(name="terminalreporter")
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(null, stream)
        os.close(null)
        manager.getplugin("capturemanager").start_global_capturing()
        # Without a writer, the report of an item that takes too long, or of a comparison, fails.
        writer = create_terminal_writer(self._config, sys.stderr)
        config: Any = self._config
        config.get_terminal_writer = lambda: writer
        manager.register(self)
        folders: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        folders._basetemp = folders.getbasetemp() / name
        folders._basetemp.mkdir(mode=0o700)

    def _next(self) -> int | None:
        self._connection.send(("next", None))
        number: int | None = self._connection.recv()
        return number

    def _run(self, number: int, following: int | None) -> None:
        items = self._session.items
        self._connection.send(("start", number))
        next_item = None if following is None else items[following]
        self._config.hook.pytest_runtest_protocol(item=items[number], nextitem=next_item)
        self._connection.send(("done", number))
