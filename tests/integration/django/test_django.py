"""qdo in a Django project: real workers, commands, tests and pages of the shop."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from qdo.postgresql.schema import FORMAT, digest
from tests.support.django_shop import DjangoShop
from tests.support.paths import ROOT
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import Proc, wait_until
from tests.support.zookeeper import free_ports

EXECUTORS = ("greenlet", "thread", "process", "async")
JOBS = 20
CONNECTIONS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name = '' AND pid <> pg_backend_pid()"
)
USERS = """
from django.contrib.auth.models import Permission, User

User.objects.create_superuser("ada", password="pw")
bob = User.objects.create_user("bob", password="pw", is_staff=True)
bob.user_permissions.add(Permission.objects.get(codename="view_dashboard"))
User.objects.create_user("eve", password="pw", is_staff=True)
"""


@pytest.fixture
def shop(tmp_path: Path, bare_database: PostgresqlDatabase) -> DjangoShop:
    """The shop with its tables and qdo's schema, in PostgreSQL."""
    found = DjangoShop(tmp_path, bare_database)
    assert found.manage("migrate", "-v0").code == 0
    return found


@pytest.fixture
def site(shop: DjangoShop) -> Iterator[str]:
    """The address of the shop's web server, two processes of gunicorn."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    argv = ("-m", "gunicorn", "-w2", "--threads=4", "-b", address, "shop.wsgi:application")
    with Proc.python(*argv, env=shop.environment, cwd=shop.folder) as server:
        server.wait_for_line("Booting worker", count=2)
        yield f"http://{address}"


def test_own_tests_run_without_servers(tmp_path: Path) -> None:
    """On SQLite, in Django's TestCase and TransactionTestCase, and without a line of qdo."""
    done = DjangoShop(tmp_path).manage("test", "--noinput")
    assert done.code == 0, done.err
    assert re.findall(r"^Ran (\d+) tests", done.err, re.MULTILINE) == ["26"]
    assert "dead letter" not in done.err + done.out
    assert "Traceback" not in done.err


@pytest.mark.long("tests of Django that also run on SQLite")
def test_own_tests_run_on_postgresql(tmp_path: Path, bare_database: PostgresqlDatabase) -> None:
    """In Django's test database."""
    done = DjangoShop(tmp_path, bare_database).manage("test", "--noinput")
    assert done.code == 0, done.err


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


COMMANDS = """
import json
from qdo.contrib.django.management.commands.qdo import Command

codes = []
for arguments in (
    ("send", "marked", "1", "--settings", "checks.settings"),
    ("status", "-o", "json"),
    ("nonsense",),
    ("queues", "none"),
    ("status", "--coordinator", "postgresql://127.0.0.1:1/x", "--connect-seconds", "0.5"),
    ("worker", "--help"),
):
    try:
        Command().run_from_argv(["manage.py", "qdo", *arguments])
    except SystemExit as ending:
        codes.append(ending.code)
print(json.dumps(codes))
"""


def test_commands_have_the_exit_codes_of_qdo(shop: DjangoShop) -> None:
    """With the app of the project; Django's options of all commands are not qdo's."""
    done = shop.manage("shell", "-v0", "-c", COMMANDS)
    assert json.loads(done.out.splitlines()[-1]) == [0, 0, 2, 6, 3, 0], done.err
    assert '"app": "shop"' in done.out


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

        def ask(statement: str) -> Any:
            return (connection.execute(statement.encode()).fetchone() or (None,))[0]

        counts = [0]

        def is_done() -> bool:
            counts.append(ask(CONNECTIONS))
            done = ask("SELECT count(*) FROM orders_order WHERE item = 'marked'")
            return bool(done == len(EXECUTORS) * JOBS)

        wait_until(is_done, lambda: f"every order is marked: {counts}", 60.0)
        worker.wait_for_line("is a dead letter after 3 attempts")
        assert 2 < max(counts) <= 20 + 2  # places of the worker, and processes of jobs
        wait_until(lambda: ask(CONNECTIONS) == 0, "all connections are closed")
        for kind in EXECUTORS:
            found = ask(f"SELECT count(*) FROM orders_order WHERE state = '{kind}'")
            assert found == JOBS, kind
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


class AdminVisitor:
    """A visitor of the admin, logged in."""

    def __init__(self, site: str, user: str) -> None:
        self._site = site
        self._cookies = CookieJar()
        processor = urllib.request.HTTPCookieProcessor(self._cookies)
        self._open = urllib.request.build_opener(processor).open
        _, login = self.ask("/admin/login/")
        found = re.search('csrfmiddlewaretoken" value="([^"]+)', login)
        assert found is not None
        fields = {"csrfmiddlewaretoken": found[1], "username": user, "password": "pw"}
        assert self.ask("/admin/login/", next="/admin/", **fields)[0] == 200

    def ask(self, path: str, **fields: str) -> tuple[int, str]:
        """Get a page, or send a form; return the status and the text of the answer."""
        data = urllib.parse.urlencode(fields).encode() if fields else None
        headers = {"Origin": self._site, "Referer": self._site}
        request = urllib.request.Request(self._site + path, data, headers)
        try:
            with self._open(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


def test_the_admin_has_the_dashboard(shop: DjangoShop, site: str) -> None:
    """For its users by their permissions, and with their names in the action log."""
    assert shop.manage("shell", "-c", USERS).code == 0
    place = urllib.request.Request(f"{site}/orders", b'{"customer": "eva", "item": "book"}')
    with urllib.request.urlopen(place, timeout=30) as answer:
        number = json.load(answer)["order"]
    assert shop.manage("qdo", "worker", "--burst").code == 0
    with urllib.request.urlopen(f"{site}/orders/{number}", timeout=30) as answer:
        assert json.load(answer) == {"state": "shipped"}
    root = "/admin/qdo/dashboard/"
    expected = {"ada": (True, 200, 200), "bob": (True, 200, 403), "eve": (False, 403, 403)}
    for user, (linked, code, acting) in expected.items():
        browser = AdminVisitor(site, user)
        assert (root in browser.ask("/admin/")[1]) == linked, user
        for page in ("", "queues", "api/config", "static/dashboard.css"):
            assert browser.ask(root + page)[0] == code, (user, page)
        found = re.search('name="csrf" value="([^"]+)"', browser.ask(f"{root}login")[1])
        fields = {"csrf": found[1] if found else "x", "glob": "customer-e*", "lasting": "1h"}
        # The same process answers only by chance.
        answers = {
            browser.ask(f"{root}actions/pause", confirmed="1", reason="r", **fields)[0]
            for _ in range(4)
        }
        assert answers == {acting}, user
    pauses = shop.manage("qdo", "audit", "-o", "json").items()
    assert {each["by"] for each in pauses} == {"ada (dashboard, 127.0.0.1)"}
    with urllib.request.urlopen(f"{site}{root}", timeout=30) as answer:
        assert "/admin/login/" in answer.url
