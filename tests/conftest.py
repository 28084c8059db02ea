"""Fixtures that all tests share: coordinators, embedded and real, and servers for AWS."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import zookeeper
from tests.support.aws import clients
from tests.support.aws.kinesis_stub import KinesisStub, kinesis_stub
from tests.support.aws.moto import moto_server as running_moto
from tests.support.aws.proxy import Proxy, proxying
from tests.support.aws.server import ServerProcess, serving
from tests.support.zookeeper import Ensemble

if TYPE_CHECKING:
    from tests.support.sqs_stage import Stage

_running: list[Ensemble] = []


def pytest_configure() -> None:
    """Let tests interrupt what they start, even if they run in the background of a script.

    A shell without job control has its background jobs ignore SIGINT, and they pass that on to
    the processes that they start. Also, no test but those for AWS itself may find credentials
    that mean something.
    """
    if os.environ.get(clients.REAL) != "1":
        clients.stand_in(os.environ)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _ensemble(folder: Path, size: int) -> Iterator[Ensemble]:
    reason = zookeeper.missing()
    if reason is not None:
        if zookeeper.required():
            pytest.fail(f"these tests need ZooKeeper: {reason}")
        pytest.skip(f"needs ZooKeeper: {reason}")
    ensemble = Ensemble(folder, size)
    ensemble.start()
    _running.append(ensemble)
    yield ensemble
    _running.remove(ensemble)
    ensemble.close()


@pytest.fixture(scope="session")
def zookeeper_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """One ZooKeeper server for all tests; a test that stops it must start it again."""
    yield from _ensemble(tmp_path_factory.mktemp("zookeeper"), 1)


@pytest.fixture(scope="session")
def zookeeper_ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """Three ZooKeeper servers for all tests; a test that stops one must start it again."""
    yield from _ensemble(tmp_path_factory.mktemp("ensemble"), 3)


@pytest.fixture
def zookeeper_url(zookeeper_server: Ensemble) -> str:
    """The address of the single server, below a root of the test's own."""
    return zookeeper_server.url(f"/test-{uuid.uuid4().hex[:12]}")


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
    """One moto_server process for all tests; each uses names of its own."""
    with running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def moto_url(moto_server: ServerProcess) -> str:
    """The endpoint of moto's SQS, Kinesis and S3."""
    return moto_server.url


@pytest.fixture(scope="session")
def sqs_stub() -> Iterator[ServerProcess]:
    """One fast SQS server for all tests (`tests.support.aws.sqs_stub`), with its `ask`."""
    with serving("tests.support.aws.sqs_stub") as server:
        yield server


@pytest.fixture(scope="session")
def sqs_url(sqs_stub: ServerProcess) -> str:
    """The endpoint of the fast SQS server."""
    return sqs_stub.url


@pytest.fixture(scope="session")
def kinesis_process() -> Iterator[KinesisStub]:
    """One faithful Kinesis server for all tests (`tests.support.aws.kinesis_stub`)."""
    with kinesis_stub() as stub:
        yield stub


@pytest.fixture
def kinesis(kinesis_process: KinesisStub) -> KinesisStub:
    """That server, as it is at first; tests use streams of their own."""
    kinesis_process.reset()
    return kinesis_process


@pytest.fixture
def sqs_stage(tmp_path: Path, sqs_stub: ServerProcess, aws_prefix: str) -> Iterator[Stage]:
    """Whole workers on queues of the fast SQS server."""
    from tests.support.sqs_stage import Stage  # imports boto3, and most tests do without

    with contextlib.closing(Stage(tmp_path, sqs_stub, aws_prefix)) as stage:
        yield stage


@pytest.fixture(scope="session")
def sqs_proxy(sqs_stub: ServerProcess) -> Iterator[Proxy]:
    """A proxy before the fast SQS server, for all tests."""
    with proxying(sqs_stub.url) as proxy:
        yield proxy


@pytest.fixture
def sqs_proxied(sqs_stage: Stage, sqs_proxy: Proxy) -> Iterator[Stage]:
    """The same with the proxy between workers and server."""
    sqs_proxy.clear()
    sqs_stage.take_proxy(sqs_proxy)
    yield sqs_stage
    sqs_proxy.clear()


@pytest.fixture
def aws_prefix() -> str:
    """A prefix of SQS queues of the test's own."""
    return f"test-{uuid.uuid4().hex[:12]}-"


@pytest.fixture
def aws_stream() -> str:
    """The name of a Kinesis stream of the test's own; nobody has made it yet."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def aws_bucket() -> str:
    """The name of an S3 bucket of the test's own; nobody has made it yet."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["embedded", "zookeeper"])
def coordinator_url(request: pytest.FixtureRequest) -> str:
    """The address of a coordinator of the test's own: the test runs once on each kind."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Add the servers' logs to the report of a failed test that used them."""
    outcome: Any = yield
    report = outcome.get_result()
    names = getattr(item, "fixturenames", ())
    if report.failed and any(name.startswith(("zookeeper", "ensemble")) for name in names):
        for ensemble in _running:
            report.sections.append(("ZooKeeper", ensemble.logs()))
