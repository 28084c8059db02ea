"""What people read and send with SQL in PostgreSQL: views, plans, rights, and `docs/sql.rst`."""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import errors

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.brokers.registry import open_broker
from qdo.brokers.requests import NewRequest
from qdo.coordination.client import Client, connect
from qdo.coordination.session_setup import check_fleet
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, QueueNode
from qdo.coordination.znodes.values import encode
from qdo.fleet.timer_node import TimerNode
from qdo.postgresql.schema import VIEWS, grants
from qdo.testing.contracts.fixtures import dead_letter
from tests.support.paths import ROOT
from tests.support.postgresql.server import PostgresqlDatabase

Row = dict[str, Any]
LAYOUT = Layout.of("shop")
BLOCKS = re.compile(r"^\.\. code-block:: (?:postgre)?sql\n\n((?: {3}.*\n|\n)+)", re.MULTILINE)
PAGE = (ROOT / "docs" / "sql.rst").read_text(encoding="utf-8")
SQL = [textwrap.dedent(each).strip() for each in BLOCKS.findall(PAGE)]
LISTED = {
    view: re.findall(r"`(\w+)`", columns)
    for view, columns in re.findall(r"^- `(qdo_\w+)`: (.*)$", PAGE, re.MULTILINE)
}


class ShopInSql:
    """A broker, a coordinator in the same schema, and a connection of its owner."""

    def __init__(self, database: PostgresqlDatabase, stack: contextlib.ExitStack) -> None:
        self.database = database
        self.broker: Broker = stack.enter_context(
            contextlib.closing(open_broker(database.url(), "shop"))
        )
        self.owner = stack.enter_context(database.connect())
        self.client: Client = connect(database.url())
        self.client.open(10.0)
        stack.callback(self.client.close)
        stack.callback(self.client.stop)

    def put(self, path: str, data: bytes) -> None:
        self.client.create(path, data, makepath=True)

    def rows(self, query: str, role: str | None = None) -> list[Row]:
        opened = psycopg.connect(
            self.database.conninfo(role or "postgres"),
            autocommit=True,
            row_factory=psycopg.rows.dict_row,
        )
        with contextlib.closing(opened) as connection:
            return connection.execute(query.encode(), prepare=False).fetchall()


@pytest.fixture
def shop(postgresql: PostgresqlDatabase) -> Iterator[ShopInSql]:
    with contextlib.ExitStack() as stack:
        yield ShopInSql(postgresql, stack)


@pytest.fixture
def filled(shop: ShopInSql) -> ShopInSql:
    """Queue `a` has one message done, one failed and one waiting, `b` only a delayed one."""
    broker = shop.broker
    where = "postgresql://here", "host"
    check_fleet(shop.client, LAYOUT, broker.catalog.claim_app, *where, 10.0)
    bodies = [b'{"n": 1}', b'{"n": 2}', b"q1.sealed"]
    broker.send_many([Outgoing("a", body, "k") for body in bodies])
    broker.send(Outgoing("b", b"[3]", terms=SendOptions(due=time.time() + 3600)))
    first, second, _ = (row[0] for row in broker.reader("a", 0).fetch(9))
    broker.dead_letters.store(dead_letter("a", second))
    blocked = FailureRecord(second, 2, "ValueError: no", blocked_since=1.0)
    shop.put(LAYOUT.queue("a"), QueueNode(first, owner="worker-1", failure=blocked).encode())
    shop.put(LAYOUT.queue("b"), b"\xff no json")
    timer = TimerNode(1_790_000_000, 1_790_003_600, when="0 * * * *", queue="a")
    shop.put(f"{LAYOUT.fleet.timers}/hourly", timer.encode())
    report = {"worker": "worker-1", "host": "h", "state": "running", "queues": 2, "busy": "no"}
    shop.put(f"{LAYOUT.components}/worker/h-1", encode(report))
    assert broker.requests.ask([NewRequest("p", "fails", (b'{"id": 1}', None), b"d")]) == [True]
    (taken,) = broker.requests.take("worker-1", "p", 1, []).requests
    assert broker.requests.end(taken.take, "failed", error="KeyError: vat", failed=3)
    assert broker.requests.ask([NewRequest("p", "waits", (b"\xff", None), b"d")]) == [True]
    return shop


ANSWERS: list[tuple[str, str, list[tuple[Any, ...]]]] = [
    (
        "qdo_queues",
        "queue, worker, waiting, is_blocked, error",
        [("a", "worker-1", 2, True, "ValueError: no"), ("b", None, 0, None, None)],
    ),
    (
        "qdo_messages",
        "queue, state, key, body",
        [
            ("a", "done", "k", {"n": 1}),
            ("a", "failed", "k", {"n": 2}),
            ("a", "waiting", "k", None),
            ("b", "delayed", None, [3]),
        ],
    ),
    (
        "qdo_requests",
        "state, id, pool, worker, failed_attempts, error, body",
        [
            ("failed", "fails", "p", "worker-1", 3, "KeyError: vat", {"id": 1}),
            ("waiting", "waits", "p", None, 0, None, None),
        ],
    ),
    (
        "qdo_failed",
        "kind, queue, error, attempts, body, traceback",
        [
            ("message", "a", "ValueError: no", 10, {"n": 1}, "Traceback ..."),
            ("request", "p", "KeyError: vat", 3, {"id": 1}, None),
        ],
    ),
    (
        "qdo_timers",
        "timer, queue, schedule, extract(epoch FROM next_at)::bigint, error",
        [("hourly", "a", "0 * * * *", 1_790_003_600, None)],
    ),
    (
        "qdo_workers",
        "worker, host, state, queues, busy, heard_at",
        [("worker-1", "h", "running", 2, None, None)],
    ),
]
"""Of each view some columns, with the rows of the shop."""


def test_each_view_answers(filled: ShopInSql) -> None:
    """Bytes, sealed bodies and corrupt nodes are NULL; times have a zone."""
    for view, columns, rows in ANSWERS:
        query = f"SELECT {columns} FROM qdo.{view} WHERE app = 'shop' ORDER BY 1, 2, 3"
        assert [tuple(each.values()) for each in filled.rows(query)] == rows
        found = filled.rows(f"SELECT * FROM qdo.{view}")
        assert [*found[0]] == LISTED[view]
        times = [value for row in found for name, value in row.items() if name.endswith("_at")]
        assert all(value is None or value.tzinfo for value in times)


def test_a_message_is_found_by_the_id_that_send_returned(filled: ShopInSql) -> None:
    """Of a message with a position, and of one that was delayed."""
    delayed = SendOptions(due=time.time() + 3600)
    for queue, terms in (("c", None), ("d", delayed)):
        id = filled.broker.send(Outgoing(queue, b'{"n": 9}', terms=terms))
        (found,) = filled.rows(f"SELECT queue, body FROM qdo.qdo_message('{id}')")
        assert found == {"queue": queue, "body": {"n": 9}}
    assert filled.rows("SELECT FROM qdo.qdo_message('no id')") == []


def test_another_coordinator_leaves_progress_unknown(filled: ShopInSql) -> None:
    """Its nodes of earlier times in this schema are not those of the app."""
    filled.owner.execute("UPDATE qdo.apps SET fleet = '1-1 zookeeper://zk'")
    rows = filled.rows("SELECT waiting, worker FROM qdo.qdo_queues")
    assert [tuple(each.values()) for each in rows] == [(None, None)] * 2
    assert filled.rows("SELECT FROM qdo.qdo_workers") == []
    (states,) = filled.rows("SELECT array_agg(DISTINCT state) AS all FROM qdo.qdo_messages")
    assert {*states["all"]} == {None, "delayed", "failed"}


LARGE = {"queues", "messages", "znodes", "requests", "dead_letters", "delayed"}
PLANS = {
    "qdo_queues WHERE app = 'shop' AND queue = 'a'": {"queues", "znodes", "messages"},
    "qdo_messages WHERE app = 'shop' AND queue = 'a'": {"queues", "znodes", "messages"},
    "qdo_requests WHERE app = 'shop' AND id = 'a'": {"requests"},
    "qdo_requests WHERE app = 'shop' AND pool = 'p' AND state = 'waiting'": {"requests_waiting"},
    "qdo_requests WHERE app = 'shop' AND state = 'running'": {"requests_owned"},
    "qdo_failed WHERE app = 'shop' AND failed_at > now() - interval '1 day'": {
        "dead_letters_failed_at",
        "requests_failed",
    },
    "qdo_timers WHERE app = 'shop'": {"znodes"},
    "qdo_workers WHERE app = 'shop'": {"znodes"},
}
"""What a query of a view searches by a condition of an index: an index, or a table."""


def scans(plan: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield the table, the index and whether it has a condition, of each scan of a plan."""
    if "Relation Name" in plan:
        table = re.sub(r"_\d+$", "", plan["Relation Name"])
        yield table, plan.get("Index Name", ""), "Index Cond" in plan
    for each in plan.get("Plans", []):
        yield from scans(each)


def test_each_view_uses_its_indexes(filled: ShopInSql) -> None:
    """No scan of a large table is without a condition of an index."""
    filled.owner.execute(MANY)
    filled.owner.execute("ANALYZE qdo.dead_letters")
    for kind in ("seqscan", "bitmapscan", "hashjoin", "mergejoin"):
        filled.owner.execute(f"SET enable_{kind} = off".encode())
    for query, indexes in PLANS.items():
        explain = f"EXPLAIN (FORMAT JSON) SELECT * FROM qdo.{query}"
        ((plan,),) = filled.owner.execute(explain.encode()).fetchall()
        found = list(scans(plan[0]["Plan"]))
        assert {each for each in found if each[0] in LARGE and not each[2]} <= DELAYED, query
        assert indexes <= {name for *names, by in found if by for name in names}, query


MANY = """
INSERT INTO qdo.dead_letters SELECT id, n, '', '', '', '', '', 1, '', 1, n
FROM qdo.queues, generate_series(1, 3000) AS n
"""
DELAYED = {("delayed", "", False), ("delayed", "delayed_by_queue", False)}


@contextlib.contextmanager
def as_role(shop: ShopInSql, kind: str) -> Iterator[str]:
    with shop.database.role() as role:
        for statement in grants("qdo", role, kind):
            shop.owner.execute(statement.encode())
        yield role
        shop.owner.execute(f'DROP OWNED BY "{role}"'.encode())


def test_a_viewer_reads_the_views_without_bodies(filled: ShopInSql) -> None:
    """And nothing else. An onlooker reads the bodies, too."""
    bodies = "SELECT body FROM qdo.qdo_messages UNION ALL SELECT body FROM qdo.qdo_failed"
    bodies += " UNION ALL SELECT body FROM qdo.qdo_requests"
    with as_role(filled, "viewer") as viewer, as_role(filled, "onlooker") as onlooker:
        for view in VIEWS:
            assert filled.rows(f"SELECT * FROM qdo.{view}", viewer)
        found = filled.rows(bodies, viewer)
        assert [each["body"] for each in found] == [None] * len(found)
        traces = filled.rows("SELECT traceback FROM qdo.qdo_failed", viewer)
        assert traces == [{"traceback": None}] * 2
        assert {json.dumps(each["body"]) for each in filled.rows(bodies, onlooker)} > {"null"}
        tables = "SELECT relname FROM pg_class WHERE relnamespace = 'qdo'::regnamespace"
        for row in filled.rows(f"{tables} AND relkind IN ('r', 'p', 'v')"):
            if row["relname"] not in VIEWS:
                with pytest.raises(errors.InsufficientPrivilege):
                    filled.rows(f"SELECT FROM qdo.{row['relname']} LIMIT 1", viewer)
        with pytest.raises(errors.InsufficientPrivilege):
            filled.rows("SELECT qdo.qdo_send('shop', 'a', '1')", viewer)


def test_the_sql_of_the_page_runs(filled: ShopInSql) -> None:
    """As it is written; what it sends arrives."""
    assert len(SQL) >= 13
    for text in SQL:
        with contextlib.closing(filled.database.connect()) as connection:
            connection.execute(text.encode(), prepare=False)
    (sent, placed) = filled.rows("SELECT id, body FROM qdo.qdo_messages WHERE queue = 'customer-1'"
                                 " AND state = 'waiting' ORDER BY position")  # fmt: skip
    assert (sent["body"], placed["body"]) == ({"order": 1}, {"order": 3})
    (later,) = filled.rows("SELECT headers, due_at - now() AS wait FROM qdo.qdo_messages"
                           " WHERE queue = 'customer-1' AND state = 'delayed'")  # fmt: skip
    assert later["wait"].total_seconds() == pytest.approx(600, abs=60)
    assert {"source": "import", "qdo-kind": "OrderPlaced"}.items() <= later["headers"].items()


def test_a_send_in_sql_is_one_of_its_transaction(shop: ShopInSql) -> None:
    """Of a sender: a rollback sends nothing; workers know the id; a key holds for all senders."""
    send = "SELECT qdo.qdo_send('shop', 'a', %s::jsonb, dedup_key => %s)"
    with as_role(shop, "sender") as role:
        conninfo = shop.database.conninfo(role)
        with psycopg.connect(conninfo) as connection:
            connection.execute(send, ("1", None))
            connection.rollback()
            (id,) = connection.execute(send, ("2", "k")).fetchone() or ("",)
        with psycopg.connect(conninfo) as connection:
            connection.execute(send, ("3", "k"))
            connection.commit()
            for wrong in ('["no"]', '{"qdo-id": "x"}', '{"n": 1}'):
                with pytest.raises(errors.InvalidParameterValue):
                    connection.execute(
                        "SELECT qdo.qdo_send('shop', 'a', '1', headers => %s)", (wrong,)
                    )
                connection.rollback()
    (row,) = shop.broker.reader("a", 0).fetch(9)
    assert (row[1], json.loads(row[3] or "")) == (b"2", {"qdo-id": id})
