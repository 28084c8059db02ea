"""The PostgreSQL server of a soak, and what befalls it."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

import qdo
from qdo.errors import QdoError
from tests.soak.app import TIMEOUT_SECONDS
from tests.support.postgresql.proxy import CuttingProxy
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlAddress, PostgresqlServer
from tests.support.postgresql.standby import catch_up, promote, start_standby, stop_replication
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


class BrokerServer:
    """A PostgreSQL server behind a proxy; `faults` are called between messages.

    :ivar url: of an empty schema, through the proxy.
    :ivar outages: when it did not respond: begin and end.
    """

    def __init__(self) -> None:
        self._server = PostgresqlServer()
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
            threading.Timer(seconds, self._server.thaw).start()

        def cut_database() -> None:
            if dice.random() < 0.5:
                self._proxy.cut_all()
            else:  # in the middle of a request or answer
                self._proxy.cut_after(dice.choice(("request", "answer")), dice.randrange(5000))

        return kill_database, restart_database, freeze_database, cut_database, cut_database

    def close(self) -> None:
        """End the server and the proxy."""
        self._proxy.close()
        self._server.close()


def send_surely(app: qdo.App, messages: Sequence[qdo.NewMessage]) -> None:
    """Send until the broker has stored all; the keys against duplicates make a repetition safe."""
    while True:
        try:
            app.send_many(messages)
        except QdoError:  # the server is away, or its answer was lost
            time.sleep(REPEAT_SECONDS)
        else:
            return
