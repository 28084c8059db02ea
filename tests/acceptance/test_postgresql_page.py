"""The broker of the page on PostgreSQL, behind a pooler."""

from __future__ import annotations

import queue

from qdo.app import App
from tests.support.postgresql.pgbouncer import PgBouncer
from tests.support.postgresql.schema import prepared
from tests.support.shared_servers import SharedPostgresql


def test_a_pooler_in_transaction_mode(shared_postgresql: SharedPostgresql) -> None:
    """No notifications and no prepared statements, and the same promises."""
    address = shared_postgresql.address
    database = address.create_database()
    prepared(address.url(database))
    with (
        PgBouncer(address) as pooler,
        App("pooled", broker=pooler.address.url(database, pooler="transaction")) as app,
    ):
        heard: queue.Queue[list[str]] = queue.Queue()
        stop = app.broker.listen(lambda names: heard.put(list(names)))
        app.send("q", 1)
        assert heard.get(timeout=4) == ["q"]  # before the next look of those without a pooler
        app.send("q", 2, delay_seconds=0.2)
        assert heard.get(timeout=4) == ["q"]
        app.send_many([("q", number) for number in range(3, 50)])
        reader = app.broker.reader("q", 0)
        rows = [row for _ in range(10) for row in reader.fetch(10)]
        assert [row[1] for row in rows] == [b"%d" % number for number in range(1, 50)]
        assert app.broker.trim("q", rows[9][0], older_than=-60) == 10
        stop()
    address.drop_database(database)
