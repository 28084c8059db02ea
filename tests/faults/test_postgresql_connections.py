"""PostgreSQL gives no connection: no attempt is charged, the log says why, and all resumes."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.app_runs import AppRuns
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlServer
from tests.support.processes import children, wait_until

APP = """
import os
import time

import qdo

app = qdo.App("desk", attempts=1, backoff_seconds=0.05)

def job(message, context):
    open(f"began-{message.queue}", "w").close()
    while os.path.exists("hold"):
        time.sleep(0.01)
    app.send("next", message.attempt)


app.job("greenlet")(job)
app.job("process", executor="process")(job)

@app.job("next")
def ran(message, context):
    with open("out", "a") as file:
        print(message.queue, message.body, message.attempt, os.getpid(), file=file)
"""
QUEUES = ("greenlet", "process")
LEAVE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'worker'"


@pytest.fixture
def server() -> Iterator[PostgresqlServer]:
    server = PostgresqlServer(durable=False, settings={"max_connections": "12"})
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def limit_of_role(server: PostgresqlServer, pid: int) -> Iterator[None]:
    with server.address.connect() as connection:
        connection.autocommit = True
        connection.execute("ALTER ROLE worker CONNECTION LIMIT 0")
        connection.execute(LEAVE)
        yield
        connection.execute("ALTER ROLE worker CONNECTION LIMIT -1")


@contextlib.contextmanager
def limit_of_server(server: PostgresqlServer, pid: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(server.address.connect())
        connection.autocommit = True

        def is_full() -> bool:
            connection.execute(LEAVE)
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    stack.enter_context(server.address.connect())
            return not connection.execute(LEAVE).fetchall()

        wait_until(is_full, "a server without a free connection")
        yield


@contextlib.contextmanager
def limit_of_descriptors(server: PostgresqlServer, pid: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    with server.address.connect() as connection:
        connection.execute(LEAVE)
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [
        (limit_of_role, "raise max_connections or the limit of the role"),
        (limit_of_server, "raise max_connections or the limit of the role"),
        (limit_of_descriptors, "raise the limit of descriptors of this process"),
    ],
)
def test_no_attempt_is_charged_without_a_connection(
    limit: Callable[..., contextlib.AbstractContextManager[None]],
    remedy: str,
    tmp_path: Path,
    server: PostgresqlServer,
) -> None:
    """A job that sent became a dead letter, and the log told to check the network."""
    with server.address.connect() as connection:
        connection.execute("CREATE ROLE worker LOGIN")
        connection.execute("GRANT CREATE ON DATABASE postgres TO worker")
    url = prepared(server.address.url("postgres", user="worker"))
    desk = AppRuns("desk", tmp_path, f"sqlite:{tmp_path / 'coordination.db'}", url)
    with contextlib.closing(desk) as runs:
        hold = tmp_path / "hold"
        hold.touch()
        queues = QUEUES if limit is not limit_of_descriptors else QUEUES[:1]
        runs.app.send_many([(queue, 0) for queue in queues])
        proc = runs.start(APP)
        for queue in queues:
            wait_until((tmp_path / f"began-{queue}").exists, queue)
        runs.app.close()
        runs.broker.close()
        (pid,) = children(proc.pid)
        with limit(server, pid):
            hold.unlink()
            for queue in queues:
                proc.wait_for_line(f"WARNING .* queue {queue}.* no attempt is counted: .*{remedy}")
        wait_until(lambda: len(runs.runs("next")) >= len(queues), "the messages")
        assert set(runs.runs("next")) == {("1", 1)}
    assert len(proc.output) < 30_000
