"""The PostgreSQL server of a soak, and what befalls it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import qdo
from qdo.errors import QdoError
from tests.soak.app import TIMEOUT_SECONDS
from tests.support.postgresql.proxy import CuttingProxy
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlAddress, PostgresqlServer

REPEAT_SECONDS = 0.2


class BrokerServer:
    """A PostgreSQL server behind a proxy; `faults` are called between messages.

    :ivar url: of an empty schema, through the proxy.
    """

    def __init__(self) -> None:
        self._server = PostgresqlServer()
        self._server.start()
        self._proxy = CuttingProxy(self._server.port)
        database = self._server.address.create_database()
        self.url = prepared(PostgresqlAddress(self._proxy.port, "").url(database))

    def faults(self, dice: random.Random) -> Sequence[Callable[[], None]]:
        """Return what may befall the server."""

        def kill_database() -> None:
            self._server.kill()
            time.sleep(dice.choice((0.0, 2.0)))
            self._server.start()

        def restart_database() -> None:
            self._server.restart(dice.choice(("fast", "immediate")))

        def freeze_database() -> None:
            self._server.freeze()
            seconds = TIMEOUT_SECONDS * dice.choice((0.3, 1.5))
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
