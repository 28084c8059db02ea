"""PgBouncer processes in front of a server."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence

from tests.support.postgresql import commands
from tests.support.postgresql.server import (
    START_SECONDS,
    SUPERUSER,
    PostgresqlAddress,
)
from tests.support.processes import log_tail, wait_until
from tests.support.zookeeper import free_ports


class PgBouncer:
    """A pooler that gives each transaction, not each client, a connection of the server.

    :ivar address: serves all databases of the server. Only the port is PgBouncer's.
    """

    def __init__(
        self,
        server: PostgresqlAddress,
        *,
        users: Sequence[str] = (SUPERUSER,),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Write the configuration.

        :param users: those who may log in, without a password.
        :param settings: added to the section ``[pgbouncer]``, such as ``pool_mode``.
        """
        self.folder = commands.new_folder()
        self.log = self.folder / "pgbouncer.log"
        (port,) = free_ports(1)
        self.address = PostgresqlAddress(port, str(self.folder))
        self._process: subprocess.Popen[bytes] | None = None
        accounts = self.folder / "users.txt"
        accounts.write_text("".join(f'"{user}" ""\n' for user in users))
        options = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(port),
            "unix_socket_dir": str(self.folder),
            "auth_type": "trust",
            "auth_file": str(accounts),
            "pool_mode": "transaction",
            "default_pool_size": "5",
            "max_client_conn": "500",
            **(settings or {}),
        }
        self._config = self.folder / "pgbouncer.ini"
        self._config.write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in options.items())
        )

    def start(self) -> None:
        """Start the process and wait until it accepts connections."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                commands.unprivileged([commands.pgbouncer_program(), str(self._config)]),
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        wait_until(self._ready, f"PgBouncer at port {self.address.port} is ready", START_SECONDS)

    def __enter__(self) -> PgBouncer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"PgBouncer ended\n{log_tail(self.log)}")
        try:
            socket.create_connection(("127.0.0.1", self.address.port), timeout=2).close()
        except ConnectionRefusedError:
            return False
        return True

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End the process and remove the folder."""
        self.kill()
        shutil.rmtree(self.folder)
