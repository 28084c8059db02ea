"""Real PostgreSQL servers on loopback ports, for tests.

A server has a new cluster in a folder of its own. It listens on a Unix socket in that folder, for
the tests' own statements, and on a TCP port, for the code under test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urlencode

from tests.support.postgresql import commands
from tests.support.processes import alive, descendants, log_tail, stopped, wait_until
from tests.support.zookeeper import free_ports

if TYPE_CHECKING:
    import psycopg

START_SECONDS = 60.0
STOP_SECONDS = 60.0
SUPERUSER = "postgres"
Auth = Literal["trust", "scram-sha-256"]
ShutdownMode = Literal["smart", "fast", "immediate"]
_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
SETTINGS = {
    "shared_buffers": "64MB",
    "max_connections": "300",
    "log_line_prefix": "'%m [%p] %u@%d '",
    "log_min_duration_statement": "-1",
}
"""Settings of all servers of the tests; a server in production has other sizes."""
FAST = {"fsync": "off", "full_page_writes": "off"}
"""What a server may do that no test kills: it would lose data only with the operating system."""


@dataclass(frozen=True, slots=True)
class PostgresqlAddress:
    """Where a running server is.

    :ivar port: of TCP, at 127.0.0.1.
    :ivar folder: with the Unix socket, through which the superuser needs no password.
    """

    port: int
    folder: str

    def url(self, database: str, user: str = SUPERUSER, **options: str) -> str:
        """Return the address of a database, as qdo and libpq take it.

        :param options: parameters after the question mark.
        """
        query = f"?{urlencode(options, quote_via=quote)}" if options else ""
        return f"postgresql://{quote(user, safe='')}@127.0.0.1:{self.port}/{quote(database)}{query}"

    def conninfo(self, database: str, user: str = SUPERUSER) -> str:
        """Return the connection string of a database with the server's Unix socket."""
        return f"host={self.folder} port={self.port} user={user} dbname={database}"

    def connect(self, database: str = SUPERUSER) -> psycopg.Connection[Any]:
        """Connect as superuser, with autocommit, through the Unix socket."""
        import psycopg  # an extra: tests without PostgreSQL do without

        return psycopg.connect(self.conninfo(database), autocommit=True)

    def create_database(self, template: str = "template1", name: str = "") -> str:
        """Create a copy of a database, by default an empty one, and return its name."""
        name = name or f"test_{uuid.uuid4().hex[:12]}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop_database(self, name: str) -> None:
        """Drop a database, and end all connections to it."""
        with self.connect() as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@dataclass(frozen=True, slots=True)
class PostgresqlDatabase:
    """A database of the test's own."""

    server: PostgresqlAddress
    name: str

    def url(self, user: str = SUPERUSER, **options: str) -> str:
        """Return its address, as qdo and libpq take it."""
        return self.server.url(self.name, user, **options)

    def conninfo(self, user: str = SUPERUSER) -> str:
        """Return its connection string with the server's Unix socket."""
        return self.server.conninfo(self.name, user)

    def connect(self) -> psycopg.Connection[Any]:
        """Connect as superuser, with autocommit, through the Unix socket."""
        return self.server.connect(self.name)

    @contextlib.contextmanager
    def role(self, prefix: str = "role", options: str = "LOGIN") -> Iterator[str]:
        """Create a role with a name of its own: all databases of a server share the roles."""
        name = f"{prefix}_{uuid.uuid4().hex[:8]}"
        quoted = '"' + name.replace('"', '""') + '"'
        with self.connect() as connection:
            connection.execute(f"CREATE ROLE {quoted} {options}".encode())
        yield name
        with self.connect() as connection:
            connection.execute(f"DROP OWNED BY {quoted}".encode())
            connection.execute(f"DROP ROLE {quoted}".encode())


class PostgresqlServer:
    """One server with its cluster; start with `start`, end with `close`."""

    def __init__(
        self,
        *,
        auth: Auth = "trust",
        durable: bool = True,
        settings: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Create the cluster.

        :param auth: how TCP connections log in. The Unix socket needs no password.
        :param durable: sync to disk before each commit; without, tests are faster.
        :param settings: added to postgresql.conf.
        :param folder: to use instead of a new one.
        """
        self.folder = folder or commands.new_folder()
        self.environment: dict[str, str] = {}
        self.data = self.folder / "data"
        self.log = self.folder / "server.log"
        (port,) = free_ports(1)
        self.address = PostgresqlAddress(port, str(self.folder))
        self._process: subprocess.Popen[bytes] | None = None
        options = ("--no-sync", f"--username={SUPERUSER}", "--auth=trust", "--encoding=UTF8")
        commands.run(
            (
                commands.postgresql_program("initdb"),
                *options,
                "--locale=C",
                f"--pgdata={self.data}",
            ),
            self.folder,
        )
        (self.data / "pg_hba.conf").write_text(
            f"local all all trust\nhost all all 127.0.0.1/32 {auth}\n"
            f"local replication all trust\nhost replication all 127.0.0.1/32 {auth}\n"
        )
        self.configure({**SETTINGS, **({} if durable else FAST), **(settings or {})})

    @property
    def port(self) -> int:
        return self.address.port

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The postmaster."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def configure(self, settings: Mapping[str, str]) -> None:
        """Add settings to postgresql.conf. A running server takes them with `reload`, if at all."""
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in settings.items())

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        command = ["env", *(f"{name}={value}" for name, value in self.environment.items())]
        command += [commands.postgresql_program("postgres"), "-D", str(self.data)]
        command += ["-h", "127.0.0.1", "-p", str(self.port), "-k", str(self.folder)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                commands.unprivileged(command),
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            wait_until(self._ready, f"the server at port {self.port} is ready", START_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def _ready(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"the server at port {self.port} ended\n{self.logs()}")
        command = [commands.postgresql_program("pg_isready"), "-q", "-U", SUPERUSER]
        command += ["-h", str(self.folder), "-p", str(self.port)]
        return not subprocess.run(command, check=False).returncode

    def stop(self, mode: ShutdownMode = "fast") -> None:
        """Shut the server down: ``immediate`` is without a checkpoint, as after a crash."""
        if self._process is not None:
            self._process.send_signal(_SIGNALS[mode])
            self._process.wait(STOP_SECONDS)
            self._process = None

    def kill(self) -> None:
        """End all processes at once, as a power cut would; the data stays."""
        if self._process is None:
            return
        family = self._freeze() if self._process.poll() is None else []
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        # A server refuses to start while a process of the old one has its shared memory.
        wait_until(
            lambda: not any(map(alive, family)), "the server's processes ended", STOP_SECONDS
        )

    def restart(self, mode: ShutdownMode = "fast") -> None:
        """Stop the server if it runs, and start it on the data that is there."""
        self.stop(mode)
        self.start()

    def reload(self) -> None:
        """Let the server read its configuration files again."""
        os.kill(self.pid, signal.SIGHUP)

    def freeze(self) -> None:
        """Freeze all processes (SIGSTOP): connections stay, and nobody answers."""
        family = self._freeze()
        wait_until(
            lambda: all(stopped(pid) or not alive(pid) for pid in family),
            f"the server at port {self.port} is frozen",
            STOP_SECONDS,
        )

    def _freeze(self) -> list[int]:
        """Freeze the postmaster first, so that it starts no further process; return all ids."""
        os.kill(self.pid, signal.SIGSTOP)
        family = [self.pid, *descendants(self.pid)]
        for pid in family[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        return family

    def thaw(self) -> None:
        """Resume all frozen processes (SIGCONT)."""
        for pid in (*descendants(self.pid), self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def logs(self) -> str:
        """Return the end of the server's log."""
        return log_tail(self.log)

    def close(self) -> None:
        """End all processes and remove the folder."""
        self.kill()
        shutil.rmtree(self.folder)


def end_shared(pid: int, folder: Path) -> None:
    """End a server that another process may have started, and remove its folder."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, _SIGNALS["immediate"])
    wait_until(lambda: not alive(pid), f"the server in {folder} has ended", STOP_SECONDS)
    shutil.rmtree(folder)
