"""Roles of a PostgreSQL schema: a sender, a worker and an onlooker have the rights they need."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import psycopg
import pytest
from psycopg import errors, sql

import qdo
from qdo.broker_errors import PostgresqlRightsError, PostgresqlUnsuitableError
from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.brokers.postgresql.writer import TOO_MANY_QUEUES
from qdo.brokers.registry import open_broker
from qdo.brokers.requests import IN_STEPS, PAUSED, RUNNING, NewRequest
from qdo.brokers.streams import first_shards, split
from qdo.coordination.client import connect
from qdo.errors import QueueLimitError, RequestExistsError
from qdo.postgresql.schema import grants
from qdo.testing.contracts.fixtures import dead_letter
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlDatabase

TABLES = (
    "about",
    "apps",
    "position_lock",
    "queues",
    "messages",
    "outgoing",
    "delayed",
    "dedup",
    "dead_letters",
    "requests",
    "pools",
    "streams",
)
CANCEL = '{"cancel": ""}'
STAGE = """
SELECT qdo.stage((SELECT node FROM qdo.about), 'app', ARRAY['a'], NULL, NULL,
    ARRAY['staged'::bytea], ARRAY['id'], NULL, NULL, NULL)
"""


class Roles:
    """Roles of the test's own, and brokers that log in as one."""

    def __init__(self, database: PostgresqlDatabase) -> None:
        self.database = database
        self._owner = database.connect()
        self._suffix = uuid.uuid4().hex[:12]
        self._brokers: list[Broker] = []
        self.names: list[str] = []

    def create(self, kind: str, without: str = "-") -> str:
        """Create a role with its rights, except those of one statement; return its name."""
        name = f"{kind}_{self._suffix}"
        if name not in self.names:
            self.names.append(name)
            self._owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        for statement in grants("qdo", name, kind):
            if statement != without:
                self._owner.execute(statement.encode())
        return name

    def run(self, statement: str) -> None:
        self._owner.execute(statement.encode())

    def grant(self, right: str) -> None:
        self.run(f"GRANT {right}")

    def rename_shard(self, queue: str, name: str) -> None:
        for table, column in (("streams", "queue"), ("queues", "name")):
            change = f"UPDATE qdo.{table} SET {column} = %s WHERE {column} = %s"
            self._owner.execute(change.encode(), (name, queue))

    def take(self, name: str) -> None:
        """Take all rights away."""
        self._owner.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))

    def broker(self, name: str) -> Broker:
        """Open a broker as a role."""
        self._brokers.append(open_broker(self.database.url(name), "app"))
        return self._brokers[-1]

    def connect(self, name: str) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.database.conninfo(name), autocommit=True)

    def close(self) -> None:
        for broker in self._brokers:
            broker.close()
        for name in self.names:
            self.take(name)
            self._owner.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))
        self._owner.close()


@pytest.fixture
def roles(postgresql: PostgresqlDatabase) -> Iterator[Roles]:
    found = Roles(postgresql)
    yield found
    found.close()


def send_all(broker: Broker) -> None:
    """Send in every way that `App.send` knows."""
    broker.send(Outgoing("a", b"plain"))
    broker.send_many([Outgoing("a", b"1"), Outgoing("b", b"2")])
    broker.send(Outgoing("a", b"keyed", terms=SendOptions(dedup_key="k", dedup_seconds=60.0)))
    broker.send(Outgoing("a", b"later", terms=SendOptions(due=time.time() + 3600)))
    broker.streams.add(first_shards("s", 2))
    assert len(broker.streams.shards("s")) >= 2


def ask_all(broker: Broker) -> tuple[str, str]:
    """Ask, and do all that those who ask may do; return the ids, one of them cancelled."""
    waits, cancelled = uuid.uuid4().hex, uuid.uuid4().hex
    assert broker.requests.ask([request(waits), request(cancelled)]) == [True, True]
    waiting = broker.requests.find(cancelled)
    assert waiting is not None
    assert broker.requests.end(waiting.take, "cancelled", messages=[Outgoing("a", b"told")])
    assert not broker.requests.mark(waits, "{}")
    return waits, cancelled


def request(id: str) -> NewRequest:
    return NewRequest("p", id, (b"1", None), b"digest", keep_seconds=0.0)


def stage(roles: Roles, name: str) -> None:
    with roles.connect(name) as connection:
        connection.execute(STAGE)
        connection.execute("SELECT qdo.qdo_send('app', 'a', '2')")


def work_all(roles: Roles, name: str) -> None:
    """Do all that workers and commands do."""
    broker = roles.broker(name)
    send_all(broker)
    stage(roles, name)
    run_requests(broker)
    shards = broker.streams.shards("s")
    children = split(shards, shards[-1].queue)
    broker.streams.add(children)
    broker.streams.open([each.queue for each in children])
    broker.send(Outgoing("a", b"soon", terms=SendOptions(due=time.time() + 0.01)))
    broker.listen(lambda names: None)()
    rows = broker.reader("a", 0).fetch(10)
    read_all(broker)
    for position in (rows[0][0], rows[1][0]):
        broker.dead_letters.store(dead_letter("a", position))
    broker.dead_letters.retry([("a", rows[0][0])])
    broker.dead_letters.discard([("a", rows[1][0])])
    broker.dead_letters.prune("a", keep=1, before=1.0)
    broker.trim("a", rows[0][0], 0.0)
    broker.delayed.discard("a", broker.delayed.numbers("a"))
    broker.delayed.free("a", None, "key", "id")
    for letter in broker.dead_letters.find("a"):
        broker.dead_letters.discard([("a", letter.position)])
    broker.delete_queue("a", broker.catalog.head("a"))
    assert broker.catalog.claim_app("fleet here", "/app")
    client = connect(roles.database.url(name))  # of the coordinator
    client.open()
    client.stop()
    client.close()
    with roles.connect(name) as connection:
        connection.execute("SELECT qdo.drop_partitions()")
        connection.execute("SELECT qdo.tidy(0)")
        connection.execute("SELECT qdo.move_due('app', 1, 1)")


def run_requests(broker: Broker) -> None:
    """Do all that workers and operators do with requests."""
    waits, cancelled = ask_all(broker)
    assert broker.requests.retry(cancelled)
    taken = broker.requests.take(waits, "p", 99, []).requests
    ends = {each.take.id: each.take for each in taken}
    assert broker.requests.end(ends[waits], "done", messages=[Outgoing("a", b"told")])
    assert broker.requests.give_back(waits) >= 1
    assert not broker.requests.note(ends[cancelled], IN_STEPS, None)
    assert broker.requests.records()
    assert broker.requests.expire() >= 1
    assert broker.requests.expire(["none"]) == 0


def read_all(broker: Broker) -> None:
    broker.catalog.names()
    broker.catalog.backlog("a", 0)
    broker.reader("a", 0).fetch(10)
    broker.dead_letters.counts()
    broker.dead_letters.records("a")
    broker.delayed.find("a", 10)
    broker.requests.counts()
    broker.requests.find("none")
    broker.requests.owners()
    broker.requests.due()
    broker.requests.records()
    broker.streams.shards()
    broker.streams.resharded()


def denied(roles: Roles, name: str, verb: str) -> set[str]:
    """Return the tables that a role may not read, or change."""
    statements = {"read": "SELECT FROM qdo.{}", "delete": "DELETE FROM qdo.{} WHERE false"}
    found = set()
    with roles.connect(name) as connection:
        for table in TABLES:
            try:
                connection.execute(statements[verb].format(table).encode())
            except errors.InsufficientPrivilege:
                found.add(table)
    return found


def test_a_sender_sends_and_reads_nothing(roles: Roles) -> None:
    name = roles.create("sender")
    broker = roles.broker(name)
    send_all(broker)
    ask_all(broker)
    stage(roles, name)
    assert denied(roles, name, "read") == set(TABLES) - {"about", "streams"}
    assert denied(roles, name, "delete") == set(TABLES)
    with pytest.raises(PostgresqlRightsError):
        broker.reader("a", 0).fetch(1)
    with pytest.raises(PostgresqlRightsError):
        broker.streams.add(split(broker.streams.shards("s"), "s.-80"))
    with pytest.raises(PostgresqlRightsError):
        broker.streams.open(["s.-80"])
    with pytest.raises(PostgresqlRightsError):
        broker.delete_queue("a", 0)
    reader = roles.broker("postgres").reader("a", 0)
    assert [row[1] for row in reader.fetch(9)] == [
        b"plain",
        b"1",
        b"keyed",
        b"told",
        b"staged",
        b"2",
    ]


def test_a_sender_ends_only_requests_that_wait(roles: Roles) -> None:
    """It knows those whose ids it knows, and runs none."""
    store = roles.broker(roles.create("sender")).requests
    assert store.ask([request("a")]) == [True]
    (taken,) = roles.broker("postgres").requests.take("w", "p", 1, []).requests
    waiting = taken.take._replace(owner="")
    assert not store.end(waiting, "cancelled")
    assert store.mark("a", CANCEL)
    refused: tuple[Callable[[], object], ...] = (
        lambda: store.end(taken.take, "cancelled"),
        lambda: store.end(waiting, "failed"),
        lambda: store.note(taken.take, RUNNING, "note"),
        lambda: store.put_back(taken.take, 0, 0.0, None),
        lambda: store.take("w", "p", 1, []),
        lambda: store.give_back("w"),
        lambda: store.retry("a"),
        store.expire,
        store.records,
        store.counts,
        store.owners,
        store.due,
    )
    for call in refused:
        with pytest.raises(PostgresqlRightsError):
            call()
    found = store.find("a")
    assert found is not None
    assert (found.take, found.state, found.mark) == (taken.take, RUNNING, CANCEL)


def test_requests_belong_to_the_role_that_asked(roles: Roles) -> None:
    """Other senders find, answer and end none of them; members, workers and onlookers do."""
    mine, owner = roles.broker(roles.create("sender")).requests, roles.broker("postgres").requests
    assert mine.ask([request("a"), request("waits")]) == [True, True]
    (taken,) = owner.take("w", "p", 1, []).requests
    assert owner.note(taken.take, PAUSED, "pay?")
    asked = mine.find("a")
    waiting = mine.find("waits")
    assert asked is not None
    assert waiting is not None
    with roles.database.role() as name:
        for statement in grants("qdo", name, "sender"):
            roles.run(statement)
        other = roles.broker(name).requests
        assert other.find("a") is other.find("waits") is None
        assert not other.mark("a", CANCEL)
        assert not other.mark("a", '{"resume": 1}', asked.mark)
        assert not other.end(waiting.take, "cancelled", messages=[Outgoing("a", b"told")])
        with pytest.raises(RequestExistsError):
            other.ask([request("a")])
        assert mine.find("a") == asked
        roles.grant(f'{roles.create("sender")} TO "{name}"')
        assert other.find("a") == asked
        assert other.ask([request("a")]) == [False]
        assert roles.broker(roles.create("onlooker")).requests.find("a") == asked
        worker = roles.broker(roles.create("worker")).requests
        assert worker.mark("a", '{"resume": 1}', asked.mark)
        assert other.end(waiting.take, "cancelled")
        roles.take(name)


def test_an_app_has_as_many_pools_as_queues(roles: Roles) -> None:
    """The server counts them, whoever asks; a pool without requests is not counted for long."""
    worker = roles.broker(roles.create("worker"))
    roles.run("INSERT INTO qdo.apps (name, max_queues) VALUES ('app', 3)")
    store = roles.broker(roles.create("sender")).requests
    many = [replace(request(f"{number}"), pool=f"p-{number}") for number in range(4)]
    with pytest.raises(QueueLimitError):
        store.ask(many)
    assert store.ask([*many[:3], replace(request("more"), pool="p-0")]) == [True] * 4
    with pytest.raises(QueueLimitError):
        store.ask(many[3:])
    (taken,) = worker.requests.take("w", "p-1", 1, []).requests
    assert worker.requests.end(taken.take, "done")
    worker.requests.expire()
    assert store.ask(many[3:]) == [True]


TOO_LARGE_REQUESTS = (
    "'p'::text, 'i'::text, convert_to(repeat('x', 67108865), 'UTF8'), NULL, NULL, 1",
    "'p'::text, 'i'::text, ''::bytea, repeat('h', 131073), NULL, 1",
    "'p'::text, 'i'::text, ''::bytea, NULL, repeat('r', 1048577), 1",
    "'p'::text, repeat('i', 201), ''::bytea, NULL, NULL, 1",
    "'a/b'::text, 'i'::text, ''::bytea, NULL, NULL, 1",
    "'p'::text, 'i'::text, ''::bytea, NULL, NULL, 'NaN'::float8",
)


def test_a_sender_with_sql_asks_within_limits(roles: Roles) -> None:
    """A request that qdo would refuse stops no worker."""
    ask = """
    SELECT qdo.ask_requests(NULL, 'app', ARRAY[pool], ARRAY[id], ARRAY[5], ARRAY[0.0], ARRAY[reply],
        ARRAY[keep], ARRAY[''::bytea], ARRAY[head::text], ARRAY[body], NULL, NULL, NULL, NULL)
    FROM (SELECT {}) AS given(pool, id, body, head, reply, keep)
    """
    with roles.connect(roles.create("sender")) as connection:
        for part in TOO_LARGE_REQUESTS:
            with pytest.raises(errors.CheckViolation):
                connection.execute(ask.format(part).encode())


TOO_LARGE = (
    "convert_to(repeat('x', 67108865), 'UTF8'), NULL, NULL::text",
    "''::bytea, repeat('k', 1001), NULL",
    "''::bytea, NULL, repeat('h', 131073)",
)


def test_a_sender_with_sql_cannot_exceed_limits_of_sizes(roles: Roles) -> None:
    """The memory of a worker has an end."""
    name = roles.create("sender")
    ways = (
        "qdo.append('app', ARRAY['a'], ARRAY[key::text], ARRAY[head], ARRAY[body], NULL)",
        "qdo.send('app', ARRAY['a'], ARRAY[key::text], ARRAY[head], ARRAY[body], ARRAY['id'],"
        " ARRAY[qdo.clock() + 10000000], NULL, NULL, NULL)",
        "qdo.stage((SELECT node FROM qdo.about), 'app', ARRAY['a'], ARRAY[key::text], ARRAY[head],"
        " ARRAY[body], ARRAY['id'], NULL, NULL, NULL)",
    )
    roles.grant(f"EXECUTE ON FUNCTION qdo.clock() TO {name}")
    with roles.connect(name) as connection:
        for way, part in itertools.product(ways, TOO_LARGE):
            query = f"SELECT {way} FROM (SELECT {part}) AS given(body, key, head)"
            with pytest.raises(errors.CheckViolation):
                connection.execute(query.encode())


def test_a_sender_with_sql_creates_no_more_queues(roles: Roles) -> None:
    """The number that a worker has set holds for all roles of the app."""
    owner = roles.broker("postgres")
    owner.max_queues = 2
    owner.send(Outgoing("a", b"1"))
    with roles.connect(roles.create("sender")) as connection:
        append = "SELECT qdo.append('app', %s, NULL, NULL, ARRAY[''::bytea, ''], NULL)"
        with pytest.raises(errors.Error) as raised:
            connection.execute(append, (["b", "c"],))
        connection.execute(append, (["a", "b"],))
        with pytest.raises(errors.InsufficientPrivilege):
            connection.execute("SELECT qdo.limit_queues('app', 9)")
    assert raised.value.sqlstate == TOO_MANY_QUEUES
    assert owner.catalog.names() == ["a", "b"]


def test_a_sender_changes_no_limit(roles: Roles) -> None:
    """Nor does a command: its settings may be others than those of the workers."""
    owner = roles.broker("postgres")
    owner.max_queues = 1
    owner.send(Outgoing("a", b"1"))
    with qdo.App("app", broker=roles.database.url(), max_queues=9) as app:
        app.send("a", 2)
        with pytest.raises(QueueLimitError):
            app.send("b", 3)


BAD_STREAMS = [
    *(f"create_stream('app', 'new', {number})" for number in ("0", "3", "-4", "8192", "NULL")),
    *(f"create_stream('app', {name}, 1)" for name in ("'a.b'", "''", "'a/b'", "repeat('x', 201)")),
]
BAD_DIVISIONS = [
    *(f"ARRAY['s.-80'], {at}" for at in ("NULL", "''", "'80'", "'90'", "'00'", "'4000'", "'4'")),
    *(f"ARRAY['s.-80'], {at}" for at in ("'zz'", "'\u00e9'", "'40' || chr(10)")),
    *("ARRAY['s.-80', 's.c0-'], NULL", "ARRAY['s.-80', 's.80-c0'], '40'"),
    *("ARRAY['s.-80', 's.-80'], NULL", "ARRAY['s.-80', 't.-'], NULL", "ARRAY['t.-'], '40'"),
    *("ARRAY['s.x'], '40'", "NULL, '40'", "ARRAY[NULL], '40'"),
]


def test_no_role_chooses_names_or_ranges_of_shards(roles: Roles) -> None:
    """Not even that of a worker. Messages of wrong streams are routed to an end."""
    broker = roles.broker("postgres")
    for each in (first_shards("s", 2), first_shards("t", 1)):
        broker.streams.add(each)
    broker.streams.add(split(broker.streams.shards("s"), "s.80-"))
    before = broker.streams.shards()
    with roles.connect(roles.create("sender")) as sender:
        for call in BAD_STREAMS:
            with pytest.raises((errors.DataError, errors.IntegrityError)):
                sender.execute(f"SELECT qdo.{call}".encode())
    with roles.connect(roles.create("worker")) as worker:
        for parents in BAD_DIVISIONS:
            with pytest.raises(errors.Error) as raised:
                worker.execute(f"SELECT qdo.add_shards('app', 's', NULL, {parents})".encode())
            assert raised.value.sqlstate in ("22023", "QD005", "22004"), parents
    assert broker.streams.shards() == before
    for name, other in (("a", "b"), ("b", "a")):
        broker.streams.add(first_shards(name, 1))
        roles.rename_shard(f"{name}.-", f"{other}.x")
    for name in "ab":
        roles.rename_shard(f"{name}.x", f"{name}.-")
    broker.send(Outgoing("a.-", b"1", "key"))
    assert len(broker.reader("a.-", 0).fetch(9)) == 1


def test_all_roles_share_deduplication_keys(roles: Roles) -> None:
    """The window has an end."""
    keyed = "SELECT qdo.send('app', ARRAY['a'], NULL, NULL, ARRAY['forged'::bytea], ARRAY['id'],"
    keyed += " NULL, ARRAY['order-1'], ARRAY[%s::bigint], NULL)"
    with roles.connect(roles.create("sender")) as connection:
        connection.execute(keyed, (366 * 86400 * 10_000_000,))
        with pytest.raises(errors.InvalidParameterValue):
            connection.execute(keyed.replace("order-1", "order-2"), (9_000_000_000_000_000,))
    owner, worker = roles.broker("postgres"), roles.broker(roles.create("worker"))
    message = Outgoing("a", b"order", terms=SendOptions(dedup_key="order-1"))
    assert owner.send(message) == worker.send(message) == "id"
    assert [row[1] for row in owner.reader("a", 0).fetch(9)] == [b"forged"]


def test_a_worker_works(roles: Roles) -> None:
    name = roles.create("worker")
    work_all(roles, name)
    assert denied(roles, name, "delete") == set(TABLES) - {"dead_letters", "delayed"}


def test_an_onlooker_changes_nothing(roles: Roles) -> None:
    send_all(roles.broker("postgres"))
    ask_all(roles.broker("postgres"))
    name = roles.create("onlooker")
    broker = roles.broker(name)
    read_all(broker)
    assert denied(roles, name, "delete") == set(TABLES)
    with pytest.raises(PostgresqlRightsError):
        broker.send(Outgoing("a", b"no"))
    with pytest.raises(PostgresqlRightsError):
        broker.trim("a", 2**60, 0.0)
    with pytest.raises(PostgresqlRightsError):
        broker.requests.mark("any", "{}")


@pytest.mark.parametrize("kind", ["sender", "worker"])
def test_every_right_is_needed(roles: Roles, kind: str) -> None:
    """Without one statement something fails."""
    superfluous = []
    # Without the right to announce, messages are sent, and listeners find them later. Only a
    # server that lost transactions is told to advance. Without the right to limit queues, the
    # limit of another role holds.
    given = grants("qdo", roles.create(kind), kind)
    rare = ("channel", "advance", "limit_queues")
    needed = [each for each in given if not any(name in each for name in (*rare, "limit_idle"))]
    for statement in needed:
        name = f"{kind}_{roles.names[0].rpartition('_')[2]}"
        roles.take(name)
        roles.create(kind, without=statement)
        try:
            if kind == "sender":
                send_all(roles.broker(name))
                ask_all(roles.broker(name))
                stage(roles, name)
            else:
                work_all(roles, name)
        except (PostgresqlRightsError, errors.InsufficientPrivilege):
            continue
        superfluous.append(statement)
    assert superfluous == []


def test_a_sender_has_a_limit_of_idle_transactions(roles: Roles) -> None:
    """Unless its role has another. Who may not set it gets the rights and a warning."""
    limit = "SELECT current_setting('idle_in_transaction_session_timeout')"
    for kind, expected in (("sender", "10min"), ("worker", "0"), ("sender", "7s")):
        name = roles.create(kind)
        with roles.connect(name) as connection:
            assert connection.execute(limit).fetchone() == (expected,)
            connection.execute("SET idle_in_transaction_session_timeout = 0")
        if expected == "10min":
            roles.run(f"ALTER ROLE {name} SET idle_in_transaction_session_timeout = '7s'")
    notices: list[str] = []
    roles.grant(f"EXECUTE ON FUNCTION qdo.limit_idle TO {name}")
    with roles.connect(name) as powerless:
        powerless.add_notice_handler(lambda notice: notices.append(notice.sqlstate or ""))
        powerless.execute(grants("qdo", roles.create("worker"), "sender")[-1].encode())
    assert notices == ["01000"]


def test_strangers_may_nothing(roles: Roles) -> None:
    """Rights of PUBLIC were taken away, also from functions."""
    name = roles.create("onlooker")
    roles.take(name)
    assert denied(roles, name, "read") == set(TABLES)


def test_a_schema_that_a_stranger_made_is_refused(
    roles: Roles, postgresql: PostgresqlDatabase
) -> None:
    """Its owner may replace functions that run with the rights of the administrator."""
    name = roles.create("onlooker")
    with postgresql.connect() as owner:
        owner.execute("DROP SCHEMA qdo CASCADE")
        owner.execute(sql.SQL("CREATE SCHEMA qdo AUTHORIZATION {}").format(sql.Identifier(name)))
        with pytest.raises(PostgresqlUnsuitableError):
            prepared(postgresql.url())
        assert owner.execute("SELECT to_regclass('qdo.about')").fetchone() == (None,)


@pytest.mark.parametrize("part", ["SCHEMA qdo", "TABLE qdo.about", "FUNCTION qdo.clock()"])
def test_a_schema_with_two_owners_is_refused(
    part: str, roles: Roles, postgresql: PostgresqlDatabase
) -> None:
    name = roles.create("onlooker")
    with postgresql.connect() as owner:
        owner.execute(f"ALTER {part} OWNER TO {name}".encode())
        with pytest.raises(PostgresqlUnsuitableError):
            roles.broker("postgres")
        owner.execute(f"ALTER {part} OWNER TO postgres".encode())
    roles.broker("postgres").send(Outgoing("q", b"1"))


def test_a_stranger_holds_no_sender_back(roles: Roles, postgresql: PostgresqlDatabase) -> None:
    """The locks of the schema are not numbers, which any role may lock."""
    name = roles.create("sender")
    roles.take(name)
    with postgresql.connect() as owner:
        used = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"
        with owner.transaction():
            for call in ("append('app', ARRAY['new'], NULL, NULL, ARRAY[''::bytea], NULL)",
                         "move_due('app', 9, 9)", "drop_partitions()", "tidy(0)"):  # fmt: skip
                owner.execute(f"SELECT qdo.{call}".encode())
            owner.execute(STAGE)
            owner.execute("SET CONSTRAINTS ALL IMMEDIATE")
            assert owner.execute(used, (owner.info.backend_pid,)).fetchone() == (0,)
    tables = ("position_lock", "about", "apps", "queues", "messages")
    with roles.connect(name) as stranger:
        for table in tables:
            with pytest.raises(errors.InsufficientPrivilege), stranger.transaction():
                stranger.execute(f"LOCK TABLE qdo.{table} IN ACCESS SHARE MODE".encode())
