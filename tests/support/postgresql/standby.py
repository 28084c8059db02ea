"""A standby of a server, which takes over with or without its last commits."""

from __future__ import annotations

import contextlib
import shutil

from tests.support.postgresql import commands
from tests.support.postgresql.server import PostgresqlServer
from tests.support.processes import wait_until


def start_standby(server: PostgresqlServer) -> PostgresqlServer:
    """Start a hot standby of a server."""
    other = PostgresqlServer()
    other.environment = server.environment
    try:
        shutil.rmtree(other.data)
        program = commands.postgresql_program("pg_basebackup")
        source = f"host={server.folder} port={server.port} user=postgres"
        commands.run(
            (program, "-d", source, "-D", str(other.data), "-R", "--checkpoint=fast"),
            other.folder,
        )
        other.start()
    except BaseException:
        other.close()
        raise
    return other


def standby_of(server: PostgresqlServer) -> contextlib.closing[PostgresqlServer]:
    """Run a hot standby of a server."""
    return contextlib.closing(start_standby(server))


def url_of(url: str, server: PostgresqlServer, *order: PostgresqlServer) -> str:
    """Return the address of a server with the hosts of several, in the order in which to try."""
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in order)
    return url.replace(f"127.0.0.1:{server.port}", hosts)


def catch_up(server: PostgresqlServer, standby: PostgresqlServer) -> None:
    """Wait until the standby has all commits."""
    with server.address.connect() as primary, standby.address.connect() as other:
        written = primary.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        query = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
        wait_until(lambda: other.execute(query, written).fetchone() == (True,), "it has caught up")


def stop_replication(server: PostgresqlServer, standby: PostgresqlServer) -> None:
    """Let the standby miss later commits."""
    with server.address.connect() as primary, standby.address.connect() as other:
        other.execute("ALTER SYSTEM SET primary_conninfo = ''")
        other.execute("SELECT pg_reload_conf()")
        query = "SELECT FROM pg_stat_replication"
        wait_until(lambda: primary.execute(query).fetchone() is None, "the standby has left")


def promote(standby: PostgresqlServer) -> None:
    """Make it the primary."""
    with standby.address.connect() as operator:
        operator.execute("SELECT pg_promote()")
