"""``settings.QDO`` and ``DATABASES`` as settings of an app."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from django.db.utils import ConnectionHandler
from psycopg import OperationalError, pq

from qdo.contrib.django import databases, project_app
from qdo.errors import SettingsError, UnknownSettingError
from qdo.postgresql import session
from qdo.postgresql.url import postgresql_address

POSTGRESQL = "django.db.backends.postgresql"
USED: dict[str, Any] = {"NAME": "shop", "USER": "ada", "HOST": "db", "PORT": "5433"}
ADDRESSES: dict[str, tuple[dict[str, Any], str]] = {
    "all parts": (USED, "postgresql://ada@db:5433/shop"),
    "a number as port": (USED | {"PORT": 5433}, "postgresql://ada@db:5433/shop"),
    "only a name": ({"NAME": "shop"}, "postgresql:///shop"),
    "odd characters": (
        USED | {"USER": "a@b:c", "NAME": "s/h"},
        "postgresql://a%40b%3Ac@db:5433/s%2Fh",
    ),
    "the folder of a socket": (
        USED | {"HOST": "/run/pg"},
        "postgresql://ada@/shop?host=%2Frun%2Fpg&port=5433",
    ),
    "IPv6": (USED | {"HOST": "::1"}, "postgresql://ada@/shop?host=%3A%3A1&port=5433"),
    "several hosts": (
        USED | {"HOST": "a,b", "PORT": ""},
        "postgresql://ada@/shop?host=a%2Cb",
    ),
    "options of libpq": (
        USED | {"OPTIONS": {"sslmode": "require", "pool": True, "isolation_level": 2}},
        "postgresql://ada@db:5433/shop?sslmode=require",
    ),
    "a service": (
        {"OPTIONS": {"service": "shop"}},
        "postgresql:///?service=shop",
    ),
}


def handler(**database: Any) -> ConnectionHandler:
    """Return Django's connections to one database, which is not opened."""
    return ConnectionHandler({"default": {"ENGINE": POSTGRESQL, **database}})


@pytest.mark.parametrize("case", ADDRESSES)
def test_a_database_of_django_has_an_address(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A valid one, and options of qdo are added to it."""
    database, expected = ADDRESSES[case]
    monkeypatch.setattr(databases, "connections", handler(**database))
    assert databases.resolved_address("django:default", "broker") == expected
    found = databases.resolved_address("django:default?schema=other", "broker")
    assert found is not None
    assert postgresql_address(found).schema == "other"


def test_a_password_is_used_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no address, but reaches libpq whole."""
    asked: list[bytes] = []

    def start(conninfo: bytes) -> Any:
        asked.append(conninfo)
        raise OperationalError

    libpq = types.SimpleNamespace(PGconn=types.SimpleNamespace(connect_start=start))
    monkeypatch.setattr(session, "pq", libpq)
    monkeypatch.setattr(databases, "connections", handler(**USED, PASSWORD="a&b %=ö"))
    url = databases.resolved_address("django:default", "broker")
    assert url == "postgresql://ada@db:5433/shop"
    with pytest.raises(OperationalError):
        session.connect(postgresql_address(url))
    (conninfo,) = asked
    options = {each.keyword: each.val for each in pq.Conninfo.parse(conninfo)}
    assert options[b"password"] == "a&b %=ö".encode()


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("/srv/db.sqlite3", "sqlite:/srv/qdo-data/"),
        (Path("/srv/db.sqlite3"), "sqlite:/srv/qdo-data/"),
        (":memory:", None),
        ("file:memory?mode=memory", None),
    ],
)
def test_sqlite_has_files_beside_it(
    name: str | Path, folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for every process of the project, whatever its current folder."""
    engine = "django.db.backends.sqlite3"
    monkeypatch.setattr(databases, "connections", handler(ENGINE=engine, NAME=name))
    for setting, file in databases.FILES.items():
        expected = None if folder is None else folder + file
        assert databases.resolved_address("django:default", setting) == expected


@pytest.mark.parametrize("url", ["django:other", "django:", "django:Default?schema=x"])
def test_unknown_aliases_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name of the setting."""
    monkeypatch.setattr(databases, "connections", handler(**USED))
    with pytest.raises(SettingsError) as error:
        databases.resolved_address(url, "coordinator")
    assert error.value.details["name"] == "coordinator"


def test_other_engines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker would be elsewhere than the project believes."""
    monkeypatch.setattr(databases, "connections", handler(ENGINE="django.db.backends.dummy"))
    with pytest.raises(SettingsError, match="PostgreSQL"):
        databases.resolved_address("django:default", "broker")


WRONG: tuple[tuple[Any, type[Exception]], ...] = (
    (None, SettingsError),
    ({}, SettingsError),
    ("shop", SettingsError),
    ({"broker": "django:default"}, SettingsError),
    ({"app": 1}, SettingsError),
    ({"app": "shop", "name": "shop"}, UnknownSettingError),
    ({"app": "shop", "concurency": 1}, UnknownSettingError),
    ({"app": "shop", "concurrency": "many"}, SettingsError),
)


@pytest.mark.parametrize(("given", "error"), WRONG)
def test_wrong_settings_are_refused(
    given: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the app is made, which every process of the project does."""
    monkeypatch.setattr(project_app, "settings", types.SimpleNamespace(QDO=given))
    with pytest.raises(error):
        project_app.project_app.__wrapped__()


def test_settings_are_those_of_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falsy values as well; hooks get back what they decorate."""
    given = {"app": "shop", "broker": "django:default", "backoff_seconds": 0.0, "burst": False}
    monkeypatch.setattr(databases, "connections", handler(**USED))
    monkeypatch.setattr(project_app, "settings", types.SimpleNamespace(QDO=given))
    app = project_app.project_app.__wrapped__()
    assert (app.name, app.given["broker"]) == ("shop", "postgresql://ada@db:5433/shop")
    assert "coordinator" not in app.given
    assert (app.given["backoff_seconds"], app.given["burst"]) == (0.0, False)

    def observe(event: Any) -> None: ...

    async def wait(event: Any) -> None: ...

    assert app.observer(observe) is observe
    assert app.observer(wait) is wait
    assert app.hooks.on_loop  # the worker waits for the second
    local = handler(ENGINE="django.db.backends.sqlite3", NAME="/srv/db.sqlite3")
    monkeypatch.setattr(databases, "connections", local)
    app = project_app.project_app.__wrapped__()
    assert app.given["coordinator"] == "sqlite:/srv/qdo-data/coordination.db"
