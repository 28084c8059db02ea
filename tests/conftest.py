"""Fixtures that all tests share: coordinators, embedded and real, and servers for AWS."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import logging
import os
import signal
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from tests.support import zookeeper
from tests.support.app_runs import AppRuns
from tests.support.aws import clients
from tests.support.aws.fault_proxy import Proxy, proxying
from tests.support.aws.kinesis_server import KinesisStub, kinesis_stub
from tests.support.aws.server_process import ServerProcess, serving
from tests.support.coordinator_process import connected
from tests.support.forks.processes import choice
from tests.support.paths import ROOT
from tests.support.postgresql import commands
from tests.support.postgresql.server import PostgresqlAddress, PostgresqlDatabase, PostgresqlServer
from tests.support.runs.levels import CHECK, REST, SELECTED, SEVERAL_PARTS, TEST, levels, reasons
from tests.support.runs.marks import MARKS, add_marks, in_order, unmarked
from tests.support.shared_servers import (
    SharedPostgresql,
    SharedZooKeeper,
    shared,
    start_postgresql,
    start_zookeeper,
)
from tests.support.zookeeper import Ensemble

if TYPE_CHECKING:
    from qdo.coordination.client import Client
    from tests.support.sqs_workers import SqsWorkers

LEVELS = pytest.StashKey[dict[pytest.Item, str]]()
"""The level of each item that was collected."""
LEVEL = pytest.StashKey[str]()
"""The level of one item."""
LEFT_OUT = pytest.StashKey[Counter[str]]()
"""How many items `make test` has left out, by reason."""
_running: list[Ensemble | SharedZooKeeper] = []
_running_postgresql: list[PostgresqlServer | SharedPostgresql] = []

# How long an example takes depends on the other processes of the machine, not on qdo.
hypothesis.settings.register_profile("qdo", deadline=None)
hypothesis.settings.register_profile(CHECK, deadline=None, max_examples=25)
hypothesis.settings.load_profile("qdo")


pytest_plugins = ["tests.support.runs.processes"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options that let `make check` run a part of enumerated or seeded tests."""
    group = parser.getgroup("qdo's own tests")
    group.addoption(
        "--level",
        choices=[CHECK, TEST, REST],
        help="run the items of `make check`, `make test` or `make test-rest`; default: all",
    )
    group.addoption(
        "--fault-stride",
        type=int,
        default=1,
        metavar="N",
        help="run every N-th fault point, others each day; default 1, all of them",
    )
    group.addoption(
        "--histories",
        type=int,
        metavar="N",
        help="play N histories in each test of the simulation; default: as many as it says",
    )
    group.addoption(
        "--fuzz",
        type=int,
        default=2000,
        metavar="N",
        help="try N inputs for each reader of foreign bytes; default 2000",
    )


gc.disable()  # until all tests are collected: 1 s of 7 for each process of pytest


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over the half million objects that every test keeps."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shorten long texts: programs get the name of the test in an environment variable."""
    if isinstance(val, (str, bytes)) and len(val) > 200:
        data = val if isinstance(val, bytes) else val.encode(errors="backslashreplace")
        return f"{val[:40]!a}... {len(val)} {zlib.crc32(data):x}"
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Let `make check` not even import tests of several parts."""
    is_left_out = config.option.level == CHECK and collection_path == ROOT / SEVERAL_PARTS
    return True if is_left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the servers they use, order them, and leave out those of other levels."""
    add_marks(items)
    if config.option.processes:
        items[:] = in_order(items)
    config.stash[LEVELS] = known = levels(items)
    chosen = config.getoption("--level")
    stride = config.getoption("--fault-stride")
    kept, others = [], []
    for item in items:
        item.stash[LEVEL] = known[item]
        is_chosen = not chosen or known[item] in SELECTED[chosen]
        (kept if is_chosen and not _is_skipped_step(item, stride) else others).append(item)
    if chosen == TEST:
        config.stash[LEFT_OUT] = Counter(reasons(items).values())
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = kept


class FailedNames:
    """Name a failed test at once: a run that is ended from outside prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print its name and the last line of its error."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message.splitlines()[:1] if crash else []
            reporter.ensure_newline()
            reporter.write_line(f"failed: {report.nodeid} ({report.when}) {''.join(reason)}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what `make test` has left out, with the command that runs it."""
    if found := config.stash.get(LEFT_OUT, {}):
        parts = ", ".join(f"{count} ({reason})" for reason, count in found.items())
        terminalreporter.write_line(f"left out, for `make test-rest`: {parts}")


def _is_skipped_step(item: pytest.Item, stride: int) -> bool:
    """Return whether a test is one of a step that is not run today.

    A week of runs with a stride of up to 7 covers every step.
    """
    callspec = getattr(item, "callspec", None)
    if stride == 1 or callspec is None or not {"mode", "number"} <= callspec.params.keys():
        return False
    day = datetime.date.today().timetuple().tm_yday
    return bool((callspec.params["number"] + day) % stride)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the mark `exec` of a test decide how its processes start."""
    choice.exec_now = item.get_closest_marker("exec") is not None


def _end_later(item: pytest.Item) -> None:
    """End this process, with the stacks of its threads, if the test takes twice its timeout.

    pytest-timeout interrupts a test once. Without this, a teardown that then waits for a thread
    holds the whole run; with it, the run reports that test and goes on in a new process.
    """
    mark = item.get_closest_marker("timeout")
    seconds = mark.args[0] if mark else float(item.config.getini("timeout"))
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=stderr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Bound the time of a test and its fixtures."""
    _end_later(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test of `make check` that has used a server, for which it then lacks the mark."""
    yield
    if item.stash[LEVEL] == CHECK and (missing := unmarked(item)):
        pytest.fail(f"it needs the marks of {sorted(missing)}; see tests/support/runs/marks.py")


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Set the bound again, which pytest has just taken away because the test has failed."""
    if isinstance(node, pytest.Item):
        _end_later(node)


def pytest_sessionfinish() -> None:
    """End the server that forks processes."""
    choice.close()


@pytest.fixture(scope="session")
def histories(request: pytest.FixtureRequest) -> int | None:
    """Number of histories to play; None for the number in each test."""
    chosen: int | None = request.config.getoption("--histories")
    return chosen


def pytest_configure(config: pytest.Config) -> None:
    """Let tests interrupt their child processes, even in the background of a script.

    A shell without job control has its background jobs ignore SIGINT, and nohup ignores SIGHUP;
    child processes inherit both. Also, no test but those for AWS itself may find credentials
    that mean something.
    """
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.pluginmanager.register(FailedNames(config))
    if config.option.processes and config.option.level != CHECK:
        choice.start()  # one for all processes, and ready when collection has ended
    if config.getoption("--level") == CHECK:
        hypothesis.settings.load_profile(CHECK)
    if os.environ.get(clients.REAL) != "1":
        clients.stand_in(os.environ)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo how a test has configured the log of this process: its level is for all later tests."""
    loggers = [logging.getLogger(name) for name in (None, "kazoo", "botocore", "urllib3")]
    levels = [each.level for each in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    root = loggers[0]
    root.handlers[:] = [each for each in root.handlers if each.name != "qdo.system.logs"]


@pytest.fixture(autouse=True)
def _nothing_in_the_checkout() -> Iterator[None]:
    """Fail a test that leaves default files here: a later run would find those of another qdo."""
    left = ROOT / "qdo-data"
    existed = left.exists()
    yield
    assert existed or not left.exists(), f"the test has made {left}; give it a broker of its own"


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's own, without the lines of kazoo that qdo does not show either.

    A client that a former test has closed may still print them, from its thread.
    """

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or not record.name.startswith("kazoo")

    caplog.handler.addFilter(is_shown)
    yield caplog
    caplog.handler.removeFilter(is_shown)


def _ensemble(folder: Path, size: int) -> Iterator[Ensemble]:
    zookeeper.require()
    ensemble = Ensemble(folder, size)
    ensemble.start()
    _running.append(ensemble)
    yield ensemble
    _running.remove(ensemble)
    ensemble.close()


@pytest.fixture(scope="session")
def shared_zookeeper(
    shared_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedZooKeeper]:
    """One ZooKeeper server for all tests of a run; nothing may stop it."""
    zookeeper.require()
    folder = tmp_path_factory.mktemp("shared-zookeeper")
    with shared(shared_folder, "zookeeper", lambda: start_zookeeper(folder)) as found:
        server = SharedZooKeeper(found["port"], found["log"])
        _running.append(server)
        yield server
        _running.remove(server)


@pytest.fixture(scope="session")
def zookeeper_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """A ZooKeeper server for tests that stop it, and start it again, or read its files."""
    yield from _ensemble(tmp_path_factory.mktemp("zookeeper"), 1)


@pytest.fixture(scope="session")
def zookeeper_ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """Three ZooKeeper servers; a test that stops one must start it again."""
    yield from _ensemble(tmp_path_factory.mktemp("ensemble"), 3)


@pytest.fixture(scope="session")
def shared_postgresql(shared_folder: Path) -> Iterator[SharedPostgresql]:
    """One PostgreSQL server for all tests of a run; nothing may stop it."""
    commands.require()
    with (
        shared(shared_folder, "postgresql", start_postgresql) as found,
        pytest.MonkeyPatch.context() as patch,
    ):
        # A busy machine may stop the process of the tests for a second in a transaction. The server
        # then ends its connection, and a call that does not retry fails.
        patch.setattr("qdo.coordination.sql.postgresql_store.IDLE_SECONDS", 5.0)
        folder = str(Path(found["log"]).parent)
        server = SharedPostgresql(PostgresqlAddress(found["port"], folder), found["log"])
        _running_postgresql.append(server)
        yield server
        _running_postgresql.remove(server)


def _database(server: SharedPostgresql, template: str) -> Iterator[PostgresqlDatabase]:
    name = server.address.create_database(template)
    yield PostgresqlDatabase(server.address, name)
    server.address.drop_database(name)


@pytest.fixture
def postgresql(shared_postgresql: SharedPostgresql) -> Iterator[PostgresqlDatabase]:
    """A database of the test's own with qdo's schema, on the shared server."""
    yield from _database(shared_postgresql, shared_postgresql.template)


@pytest.fixture
def postgresql_url(postgresql: PostgresqlDatabase) -> str:
    """The address of that database."""
    return postgresql.url()


@pytest.fixture
def bare_database(shared_postgresql: SharedPostgresql) -> Iterator[PostgresqlDatabase]:
    """An empty database of the test's own, on the shared server."""
    yield from _database(shared_postgresql, "template1")


@pytest.fixture
def bare_database_url(bare_database: PostgresqlDatabase) -> str:
    """The address of that database."""
    return bare_database.url()


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgresqlServer]:
    """A durable PostgreSQL server for tests that stop, kill or freeze it; each starts it again."""
    commands.require()
    server = PostgresqlServer()
    _running_postgresql.append(server)
    try:
        server.start()
        yield server
    finally:
        _running_postgresql.remove(server)
        server.close()


@pytest.fixture
def zookeeper_url(shared_zookeeper: SharedZooKeeper) -> str:
    """The address of the shared server, below a root of the test's own."""
    return shared_zookeeper.url(f"/test-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def ensemble_url(zookeeper_ensemble: Ensemble) -> str:
    """The address of the three servers, below a root of the test's own."""
    return zookeeper_ensemble.url(f"/test-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def embedded_url(tmp_path: Path) -> str:
    """The address of an embedded coordinator of the test's own."""
    return f"sqlite:{tmp_path / 'coordination.db'}"


@pytest.fixture(scope="session")
def moto_server() -> Iterator[ServerProcess]:
    """One moto_server process for the tests of a process; each uses names of its own."""
    with serving("moto.server", "--host", "127.0.0.1", "--port", "0") as server:
        yield server


@pytest.fixture(scope="session")
def moto_url(moto_server: ServerProcess) -> str:
    """The endpoint of moto's SQS, Kinesis and S3."""
    return moto_server.url


@pytest.fixture(scope="session")
def sqs_stub() -> Iterator[ServerProcess]:
    """One fast SQS server for all tests (`tests.support.aws.sqs_server`), with its `ask`."""
    with serving("tests.support.aws.sqs_server") as server:
        yield server


@pytest.fixture(scope="session")
def sqs_url(sqs_stub: ServerProcess) -> str:
    """The endpoint of the fast SQS server."""
    return sqs_stub.url


@pytest.fixture(scope="session")
def kinesis_process() -> Iterator[KinesisStub]:
    """One faithful Kinesis server for all tests (`tests.support.aws.kinesis_server`)."""
    with kinesis_stub() as stub:
        yield stub


@pytest.fixture
def kinesis(kinesis_process: KinesisStub) -> KinesisStub:
    """That server, as it is at first; tests use streams of their own."""
    kinesis_process.reset()
    return kinesis_process


@pytest.fixture
def sqs_stage(tmp_path: Path, sqs_stub: ServerProcess, aws_prefix: str) -> Iterator[SqsWorkers]:
    """Whole workers on queues of the fast SQS server."""
    from tests.support.sqs_workers import SqsWorkers  # imports boto3, and most tests do without

    with contextlib.closing(SqsWorkers(tmp_path, sqs_stub, aws_prefix)) as stage:
        yield stage
    sqs_stub.ask("/_advance", {})  # later tests need the right clock


@pytest.fixture(scope="session")
def proxies() -> Iterator[Callable[[str], Proxy]]:
    """A function that returns the proxy of a server: one for all tests, without rules."""
    with contextlib.ExitStack() as stack:
        proxy_of = functools.cache(lambda url: stack.enter_context(proxying(url)))

        def cleared(url: str) -> Proxy:
            proxy_of(url).clear()
            return proxy_of(url)

        yield cleared


@pytest.fixture
def sqs_proxy(proxies: Callable[[str], Proxy], sqs_url: str) -> Proxy:
    """Spoils requests to the fast SQS server."""
    return proxies(sqs_url)


@pytest.fixture
def moto_proxy(proxies: Callable[[str], Proxy], moto_url: str) -> Proxy:
    """Spoils requests to moto."""
    return proxies(moto_url)


@pytest.fixture
def kinesis_proxy(proxies: Callable[[str], Proxy], kinesis: KinesisStub) -> Proxy:
    """Spoils requests to the Kinesis server."""
    return proxies(kinesis.url)


@pytest.fixture
def sqs_proxied(sqs_stage: SqsWorkers, sqs_proxy: Proxy) -> Iterator[SqsWorkers]:
    """The same with the proxy between workers and server."""
    sqs_stage.take_proxy(sqs_proxy)
    yield sqs_stage
    sqs_proxy.clear()


@pytest.fixture
def aws_prefix() -> str:
    """A prefix of SQS queues of the test's own."""
    return f"test-{uuid.uuid4().hex[:12]}-"


@pytest.fixture
def aws_stream() -> str:
    """Name of a Kinesis stream of this test, which does not exist yet."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def aws_bucket() -> str:
    """Name of an S3 bucket of this test, which does not exist yet."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def database_url(postgresql_url: str) -> str:
    """The address of a coordinator in PostgreSQL, in a database of the test's own."""
    return postgresql_url


@pytest.fixture(params=["embedded", "zookeeper", "database"])
def coordinator_url(request: pytest.FixtureRequest) -> str:
    """The address of a coordinator of the test's own: the test runs once on each kind."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def runs(tmp_path: Path, coordinator_url: str) -> Iterator[AppRuns]:
    """The app `desk`, and its workers, which end with the test."""
    with contextlib.closing(AppRuns("desk", tmp_path, coordinator_url)) as made:
        yield made


@pytest.fixture
def local_runs(tmp_path: Path, embedded_url: str) -> Iterator[AppRuns]:
    """The same on the embedded coordinator, where the kind does not matter."""
    with contextlib.closing(AppRuns("desk", tmp_path, embedded_url)) as made:
        yield made


@pytest.fixture
def outsider(coordinator_url: str) -> Iterator[Client]:
    """A client of another program, which looks at nodes, or writes and deletes them."""
    with connected(coordinator_url) as client:
        yield client


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Add the servers' logs to the report of a failed test that used them."""
    outcome: Any = yield
    report = outcome.get_result()
    names = getattr(item, "fixturenames", ())
    if report.failed and any(name.startswith(("zookeeper", "ensemble")) for name in names):
        for ensemble in _running:
            report.sections.append(("ZooKeeper", ensemble.logs()))
    if report.failed and any(name.startswith("postgresql") for name in names):
        for server in _running_postgresql:
            report.sections.append(("PostgreSQL", server.logs()))
