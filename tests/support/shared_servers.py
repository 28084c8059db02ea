"""Servers that all processes of one test run use together.

The first process that needs a server starts it, and the last one ends it. Address and number of
users are in a file, which a lock protects. A process that is killed never counts itself off: so the
process that has begun the run ends at its end what is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlAddress, PostgresqlServer, end_shared
from tests.support.processes import log_tail
from tests.support.zookeeper import Ensemble

TEMPLATE = "template_qdo"
_STATE = "-server.json"


class Started(NamedTuple):
    """A server that runs.

    :ivar process: a child of the process that has started it, which another one may end.
    """

    port: int
    log: str
    process: subprocess.Popen[bytes]


class SharedZooKeeper(NamedTuple):
    """The ZooKeeper server of a test run; nothing stops it before the end."""

    port: int
    log: str

    def url(self, chroot: str) -> str:
        """Return the address of a root of the test's own."""
        return f"zookeeper://127.0.0.1:{self.port}{chroot}"

    def logs(self) -> str:
        """Return the end of the server's log."""
        return log_tail(Path(self.log))


class SharedPostgresql(NamedTuple):
    """The PostgreSQL server of a test run; nothing stops it before the end.

    :ivar template: the name of a database with qdo's schema, to which nothing connects.
    """

    address: PostgresqlAddress
    log: str
    template: str = TEMPLATE

    def logs(self) -> str:
        """Return the end of the server's log."""
        return log_tail(Path(self.log))


def end_left(folder: Path) -> None:
    """End the servers of a run whose users were lost, after all its processes have ended."""
    for path in folder.glob(f"*{_STATE}"):
        with _locked(path) as state:
            if state:
                _end(path, state)


@contextlib.contextmanager
def shared(folder: Path, name: str, start: Callable[[], Started]) -> Iterator[dict[str, Any]]:
    """Use a server that is started at most once a run; yield its `port`, `pid` and `log`.

    :param folder: one for all processes of the run.
    :param name: "postgresql", or that of a server that has nothing to clean up.
    """
    path = folder / f"{name}{_STATE}"
    process: subprocess.Popen[bytes] | None = None
    with _locked(path) as state:
        if not state:
            port, log, process = start()
            state.update(port=port, pid=process.pid, log=log, users=0)
        state["users"] += 1
        found = dict(state)
    try:
        yield found
    finally:
        with _locked(path) as state:
            state["users"] -= 1
            if not state["users"]:
                _end(path, state)
            if process is not None:
                # It is not waited for, also by its last user: the processor time of the server
                # (160 s) would belong to the tests in some runs. Popen would warn that it runs.
                process.returncode = 0


def _end(path: Path, state: dict[str, Any]) -> None:
    """End the server of a state, whichever process has started it."""
    if path.name == f"postgresql{_STATE}":
        end_shared(state["pid"], Path(state["log"]).parent)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["pid"], signal.SIGKILL)
    state.clear()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of a file as JSON, and write it back, while no other process does."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        state: dict[str, Any] = json.loads(file.read() or "{}")
        yield state
        file.truncate(0)
        file.write(json.dumps(state))


def start_zookeeper(folder: Path) -> Started:
    """Start one ZooKeeper server."""
    ensemble = Ensemble(folder, 1)
    ensemble.start()
    (server,) = ensemble.servers
    return Started(server.port, str(server.log), server.process)


def start_postgresql() -> Started:
    """Start one PostgreSQL server, which does not wait for the disk, with its template."""
    server = PostgresqlServer(durable=False)
    try:
        server.start()
        prepared(server.address.url(server.address.create_database(name=TEMPLATE)))
    except BaseException:
        server.close()
        raise
    return Started(server.port, str(server.log), server.process)
