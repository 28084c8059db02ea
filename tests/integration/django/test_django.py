"""qdo in a Django project: real workers, commands, tests and pages of the shop."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from qdo.postgresql.schema import FORMAT, digest
from tests.support.django_shop import DjangoShop
from tests.support.paths import ROOT
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import Proc, wait_until
from tests.support.zookeeper import free_ports

EXECUTORS = ("greenlet", "thread", "process", "async")
JOBS = 20
CONNECTIONS = b"""
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = '' AND pid <> pg_backend_pid()
"""
MARKED = b"SELECT state, count(*) FROM orders_order WHERE item = 'marked' GROUP BY state"


@pytest.fixture
def shop(tmp_path: Path, bare_database: PostgresqlDatabase) -> DjangoShop:
    """The shop with its tables and qdo's schema, in PostgreSQL."""
    found = DjangoShop(tmp_path, bare_database)
    assert found.manage("migrate", "-v0").code == 0
    return found


@pytest.mark.parametrize(
    "is_postgresql",
    [False, pytest.param(True, marks=pytest.mark.long("tests that also run on SQLite"))],
)
def test_own_tests_run(tmp_path: Path, is_postgresql: bool, request: pytest.FixtureRequest) -> None:
    """In Django's TestCase and TransactionTestCase, and without a line of qdo."""
    database = request.getfixturevalue("bare_database") if is_postgresql else None
    done = DjangoShop(tmp_path, database).manage("test", "--noinput")
    assert done.code == 0, done.err
    assert re.findall(r"^Ran (\d+) tests", done.err, re.MULTILINE) == ["14"]
    assert "dead letter" not in done.err + done.out
    assert "Traceback" not in done.err


def test_migrate_creates_and_upgrades_the_schema(shop: DjangoShop) -> None:
    """From older functions; a reversal keeps the messages."""
    found = "SELECT format, functions FROM qdo.about"
    with shop.connect() as connection:
        assert connection.execute(found).fetchone() == (FORMAT, digest())
        assert shop.manage("migrate", "qdo", "zero", "-v0").code == 0
        assert connection.execute(found).fetchone() == (FORMAT, digest())
        connection.execute("UPDATE qdo.about SET functions = 'older'")
        assert shop.manage("migrate", "-v0").code == 0
        assert connection.execute(found).fetchone() == (FORMAT, digest())


def test_the_last_migration_has_the_current_format() -> None:
    """After a new format, add a migration that calls `upgrade_schema`, and name it here."""
    names = [each.stem for each in (ROOT / "qdo/contrib/django/migrations").glob("0*.py")]
    assert (FORMAT, sorted(names)) == (1, ["0001_initial"])


def test_jobs_leave_no_connections(shop: DjangoShop) -> None:
    """In no executor, although CONN_MAX_AGE keeps connections; nor do hooks of failed jobs."""
    send = f"""
from orders.models import Order
from qdo.contrib.django import app
for kind in {EXECUTORS}:
    for number in range({JOBS}):
        order = Order.objects.create(customer="ada", item="book")
        app.send(f"{{kind}}-{{number}}", {{"order": order.pk}})
app.send("failing", 1)
"""
    assert shop.manage("shell", "-c", send).code == 0
    worker = Proc.python("manage.py", "qdo", "worker", env=shop.environment, cwd=shop.folder)
    with worker, shop.connect() as connection:
        counts: list[int] = []

        def is_done() -> bool:
            counts.extend(connection.execute(CONNECTIONS).fetchone() or ())
            return sorted(connection.execute(MARKED)) == sorted((each, JOBS) for each in EXECUTORS)

        wait_until(is_done, lambda: f"every order is marked: {counts}", 60.0)
        worker.wait_for_line("is a dead letter after 3 attempts")
        assert 2 < max(counts) <= 20 + 2  # places of the worker, and processes of jobs
        wait_until(lambda: is_done() and counts[-1] == 0, "all connections are closed")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


def test_the_page_is_shown(shop: DjangoShop) -> None:
    """An order, the commands with their exit codes, and the dashboard for users of the admin."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    argv = ("-m", "gunicorn", "-b", address, "shop.wsgi:application")
    with Proc.python(*argv, env=shop.environment, cwd=shop.folder) as server:
        server.wait_for_line("Booting worker")
        orders = f"http://{address}/orders"
        order = b'{"customer": "eva", "item": "book"}'
        assert urllib.request.urlopen(orders, order, timeout=30).read() == b'{"order": 1}'
        assert shop.manage("qdo", "worker", "--burst").code == 0
        with urllib.request.urlopen(f"{orders}/1", timeout=30) as answer:
            assert json.load(answer) == {"state": "shipped"}
    status = shop.manage("qdo", "status", "-o", "json", "--settings", "checks.settings")
    assert '"app": "shop"' in status.out
    assert shop.manage("qdo", "nonsense").code == 2
    visit = shop.manage("shell", "-c", "import checks.visits")
    assert visit.code == 0, visit.err
    pauses = shop.manage("qdo", "audit", "-o", "json").items()
    assert [each["by"] for each in pauses] == ["ada (dashboard, 127.0.0.1)"]
