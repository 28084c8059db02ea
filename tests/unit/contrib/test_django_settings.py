"""``settings.QDO`` and ``DATABASES`` as settings of an app."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db.utils import ConnectionHandler
from psycopg import OperationalError, pq

from qdo.contrib.django import databases, project_app
from qdo.errors import SettingsError, UnknownSettingError
from qdo.postgresql import session
from qdo.postgresql.url import postgresql_address

USED = {"NAME": "shop", "USER": "ada", "HOST": "db", "PORT": "5433"}
SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": "/srv/db.sqlite3"}
OPTIONS = {"sslmode": "require", "pool": True, "isolation_level": 2}


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Make a database that of Django, without opening it."""

    def use(database: dict[str, Any]) -> None:
        made = ConnectionHandler(
            {"default": {"ENGINE": "django.db.backends.postgresql"} | database}
        )
        monkeypatch.setattr(databases, "connections", made)

    return use


@pytest.mark.parametrize(
    ("database", "address"),
    [
        ({}, "postgresql://ada@db:5433/shop"),
        ({"PORT": 5433}, "postgresql://ada@db:5433/shop"),
        ({"USER": "", "HOST": "", "PORT": ""}, "postgresql:///shop"),
        ({"USER": "a@b:c", "NAME": "s/h"}, "postgresql://a%40b%3Ac@db:5433/s%2Fh"),
        ({"HOST": "/run/pg"}, "postgresql://ada@/shop?host=%2Frun%2Fpg&port=5433"),
        ({"HOST": "::1"}, "postgresql://ada@/shop?host=%3A%3A1&port=5433"),
        ({"HOST": "a,b", "PORT": ""}, "postgresql://ada@/shop?host=a%2Cb"),
        ({"OPTIONS": OPTIONS}, "postgresql://ada@db:5433/shop?sslmode=require"),
        ({**dict.fromkeys(USED, ""), "OPTIONS": {"service": "a"}}, "postgresql:///?service=a"),
        (SQLITE, "sqlite:/srv/qdo-data/messages.db"),
        ({**SQLITE, "NAME": Path("/srv/db")}, "sqlite:/srv/qdo-data/messages.db"),
        ({**SQLITE, "NAME": ":memory:"}, None),
    ],
)
def test_a_database_of_django_has_an_address(use: Any, database: Any, address: str | None) -> None:
    """A valid one; options of qdo are added to one of PostgreSQL. SQLite has files beside it."""
    use({**USED, **database})
    assert databases.resolved_address("django:default", "broker") == address
    if address is not None and "ENGINE" not in database:
        found = databases.resolved_address("django:default?schema=other", "broker")
        assert postgresql_address(str(found)).schema == "other"


def test_a_password_is_used_and_not_shown(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no address, but reaches libpq whole."""
    asked: list[bytes] = []

    def start(conninfo: bytes) -> Any:
        asked.append(conninfo)
        raise OperationalError

    libpq = types.SimpleNamespace(PGconn=types.SimpleNamespace(connect_start=start))
    monkeypatch.setattr(session, "pq", libpq)
    use({**USED, "PASSWORD": "a&b %=ö"})
    url = databases.resolved_address("django:default", "broker")
    assert url == "postgresql://ada@db:5433/shop"
    with pytest.raises(OperationalError):
        session.connect(postgresql_address(url))
    options = {each.keyword: each.val for each in pq.Conninfo.parse(asked[0])}
    assert options[b"password"] == "a&b %=ö".encode()


@pytest.mark.parametrize(
    ("url", "database"),
    [
        ("django:other", USED),
        ("django:", USED),
        ("django:Default?schema=x", USED),
        ("django:default", {"ENGINE": "django.db.backends.dummy"}),
    ],
)
def test_unknown_databases_are_refused(use: Any, url: str, database: Any) -> None:
    """With the name of the setting."""
    use(database)
    with pytest.raises(SettingsError) as error:
        databases.resolved_address(url, "coordinator")
    assert error.value.details["name"] == "coordinator"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (None, SettingsError),
        ("shop", SettingsError),
        ({"broker": "django:default"}, SettingsError),
        ({"app": 1}, SettingsError),
        ({"app": "shop", "name": "shop"}, UnknownSettingError),
        ({"app": "shop", "concurency": 1}, UnknownSettingError),
        ({"app": "shop", "concurrency": "many"}, SettingsError),
    ],
)
def test_wrong_settings_are_refused(
    given: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the app is made, which every process of the project does."""
    monkeypatch.setattr(project_app, "settings", types.SimpleNamespace(QDO=given))
    with pytest.raises(error):
        project_app.project_app.__wrapped__()


def test_settings_are_those_of_the_app(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falsy values as well; hooks get back what they decorate."""
    given = {"app": "shop", "broker": "django:default", "backoff_seconds": 0.0, "burst": False}
    monkeypatch.setattr(project_app, "settings", types.SimpleNamespace(QDO=given))
    use(USED)
    app = project_app.project_app.__wrapped__()
    assert app.name == "shop"
    assert app.given == {**given, "broker": "postgresql://ada@db:5433/shop"}

    def observe(event: Any) -> None: ...

    async def wait(event: Any) -> None: ...

    assert app.observer(observe) is observe
    assert app.observer(wait) is wait
    assert app.hooks.on_loop  # the worker waits for the second
    use(SQLITE)
    app = project_app.project_app.__wrapped__()
    assert app.given["coordinator"] == "sqlite:/srv/qdo-data/coordination.db"
