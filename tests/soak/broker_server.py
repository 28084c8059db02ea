"""The PostgreSQL or Redis server of a soak, and what befalls it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path

import psycopg

import qdo
from qdo.errors import QdoError
from tests.soak.app import TIMEOUT_SECONDS
from tests.support.postgresql import commands
from tests.support.postgresql.proxy import CuttingProxy
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlAddress, PostgresqlServer
from tests.support.postgresql.standby import catch_up, promote, start_standby, stop_replication
from tests.support.processes import descendants
from tests.support.redis_server import RedisServer, installed_example
from tests.support.zookeeper_txn_log import NodeChange, Txn

REPEAT_SECONDS = 0.2


_RECORD = """
CREATE TABLE change_log (number bigserial, xid bigint, path text, data bytea);
CREATE FUNCTION log_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO public.change_log (xid, path) VALUES
            (pg_current_xact_id()::text::bigint, OLD.parent || '/' || OLD.name);
    ELSIF TG_OP = 'INSERT' OR NEW.mzxid <> OLD.mzxid THEN
        INSERT INTO public.change_log (xid, path, data) VALUES
            (pg_current_xact_id()::text::bigint, NEW.parent || '/' || NEW.name, NEW.data);
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER log_change AFTER INSERT OR UPDATE OR DELETE ON qdo.znodes
FOR EACH ROW EXECUTE FUNCTION log_change()
"""
"""Writers of nodes exclude each other, so the numbers are the order of their commits."""


DISK_MEGABYTES = 1024
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
"""Of Debian's package `libfaketime`. Without it, the clock of the server is not set."""
STEPS = "+0", "+60", "-60", "+86400", "-86400"
"""Seconds between the clock of the server and the true one."""


class BrokerServer:
    """A PostgreSQL server behind a proxy; `faults` are called between messages.

    :ivar url: of an empty schema, through the proxy.
    :ivar outages: when it did not respond: begin and end.
    :ivar folders: what workers need on `sys.path`.
    """

    folders: Sequence[str] = ()

    def __init__(self) -> None:
        self._disk = Path(tempfile.mkdtemp(prefix="soak-disk-"))
        size = f"size={DISK_MEGABYTES}m,mode=755"
        mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self._disk)]
        self._is_mounted = subprocess.run(mount, check=False).returncode == 0  # root only
        self._disk.chmod(0o755)
        folder, self._clock = self._disk / "server", self._disk / "clock"
        folder.mkdir()
        commands.hand_over(folder)
        self._server = PostgresqlServer(folder=folder)
        if FAKETIME.exists():
            self._clock.write_text(STEPS[0])
            self._server.environment = {
                "LD_PRELOAD": str(FAKETIME),
                "FAKETIME_TIMESTAMP_FILE": str(self._clock),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        self._server.start()
        self._proxy = CuttingProxy(self._server.port)
        self._database = self._server.address.create_database()
        self.url = prepared(PostgresqlAddress(self._proxy.port, "").url(self._database))
        self.outages: list[tuple[float, float]] = []

    def record(self) -> None:
        """Record the changes of nodes, for `transactions`."""
        with self._server.address.connect(self._database) as connection:
            connection.execute(_RECORD.encode())

    def transactions(self) -> Iterator[Txn]:
        """Return what each transaction changed; its zxid here is only a number."""
        with self._server.address.connect(self._database) as connection:
            rows = connection.execute(
                "SELECT xid, number, path, data FROM change_log ORDER BY number"
            ).fetchall()
        for _, changes in itertools.groupby(rows, key=itemgetter(0)):
            found = list(changes)
            yield Txn(found[-1][1], 0, tuple(NodeChange(*row[2:]) for row in found))

    @contextlib.contextmanager
    def _away(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.outages.append((began, time.monotonic()))

    def fail_over(self) -> None:
        """Let a standby take over that lacks the commits of the last second."""
        self._server.thaw()
        old, new = self._server, start_standby(self._server)
        catch_up(old, new)
        stop_replication(old, new)
        time.sleep(1.0)
        with self._away():
            self._proxy.refusing = True
            self._proxy.cut_all()
            old.close()
            promote(new)
            self._server, self._proxy.upstream = new, new.port
            self._proxy.refusing = False

    def faults(self, dice: random.Random) -> Sequence[Callable[[], None]]:
        """Return what may befall the server."""

        def kill_database() -> None:
            with self._away():
                self._server.kill()
                time.sleep(dice.choice((0.0, 2.0)))
                self._server.start()

        def restart_database() -> None:
            with self._away():
                self._server.restart(dice.choice(("fast", "immediate")))

        def freeze_database() -> None:
            self._server.freeze()
            seconds = TIMEOUT_SECONDS * dice.choice((0.3, 1.5))
            now = time.monotonic()
            self.outages.append((now, now + seconds))
            threading.Timer(seconds, self._thaw).start()

        def cut_database() -> None:
            if dice.random() < 0.5:
                self._proxy.cut_all()
            else:  # in the middle of a request or answer
                self._proxy.cut_after(dice.choice(("request", "answer")), dice.randrange(5000))

        def kill_backend() -> None:
            with self._away():  # the server ends all others, and recovers
                backend = dice.choice(descendants(self._server.pid) or [self._server.pid])
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(backend, signal.SIGKILL)
                self._start_if_ended()

        def delay_database() -> None:
            seconds = TIMEOUT_SECONDS * dice.choice((0.3, 1.5))
            now = time.monotonic()
            self.outages.append((now, now + 2 * seconds))
            self._proxy.late_seconds = seconds
            threading.Timer(seconds, setattr, (self._proxy, "late_seconds", 0.0)).start()

        def set_clock() -> None:
            self._clock.write_text(dice.choice(STEPS))

        def fill_disk() -> None:
            with self._away():
                self._fill_disk(dice.choice((0, 5)))

        faults = [kill_database, restart_database, freeze_database, cut_database, cut_database]
        faults += [kill_backend, delay_database]
        faults += [set_clock] * bool(self._server.environment)
        if self._is_mounted and self._server.folder.is_relative_to(self._disk):
            faults.append(fill_disk)
        return faults

    def _thaw(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was killed meanwhile
            self._server.thaw()

    def _fill_disk(self, segments: int) -> None:
        """Leave no space for a while.

        :param segments: of the log to begin meanwhile; the server ends if one cannot be created.
        """
        filler = self._disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(2**20)):
                pass
        with contextlib.suppress(psycopg.Error), self._server.address.connect() as connection:
            for _ in range(segments):
                connection.execute("SELECT pg_switch_wal(), pg_current_xact_id()")
        time.sleep(TIMEOUT_SECONDS)
        filler.unlink()
        self._start_if_ended()

    def _start_if_ended(self) -> None:
        """Wait until the server accepts connections, and start it if it gave up."""
        while True:
            try:
                self._server.address.connect().close()
            except psycopg.Error:
                if self._server.process.poll() is not None:
                    self._server.start()
                time.sleep(REPEAT_SECONDS)
            else:
                return

    def close(self) -> None:
        """End the server and the proxy."""
        self._proxy.close()
        self._server.close()
        if self._is_mounted:
            subprocess.run(["umount", "--lazy", str(self._disk)], check=True)
        shutil.rmtree(self._disk)


class RedisBroker:
    """A Redis server with the broker of docs/examples/redis_streams; see `BrokerServer`."""

    def __init__(self) -> None:
        self._disk = tempfile.TemporaryDirectory(prefix="soak-redis-")
        self.folders = installed_example(Path(self._disk.name))
        sys.path[:0] = self.folders
        self._server = RedisServer(Path(self._disk.name))
        self.url = self._server.url

    def faults(self, dice: random.Random) -> Sequence[Callable[[], None]]:
        """Return what may befall the server."""

        def kill_redis() -> None:
            self._server.close()
            time.sleep(dice.choice((0.0, 2.0)))
            self._server.start()

        def freeze_redis() -> None:
            frozen = self._server.proc
            frozen.send(signal.SIGSTOP)
            seconds = TIMEOUT_SECONDS * dice.choice((0.3, 1.5, 6.0))
            threading.Timer(seconds, frozen.send, (signal.SIGCONT,)).start()

        def cut_redis() -> None:
            self._server.cut_all()

        return [kill_redis, freeze_redis, cut_redis]

    def close(self) -> None:
        self._server.close()
        self._disk.cleanup()


def send_surely(app: qdo.App, messages: Sequence[qdo.NewMessage]) -> None:
    """Send until the broker has stored all; the keys against duplicates make a repetition safe."""
    while True:
        try:
            app.send_many(messages)
        except QdoError:  # the server is away, or its answer was lost
            time.sleep(REPEAT_SECONDS)
        else:
            return
