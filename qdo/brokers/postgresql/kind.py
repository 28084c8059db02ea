"""The registry entry of PostgreSQL: ``postgresql://USER@HOST/DATABASE``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from qdo.brokers.base import Broker
from qdo.brokers.registry import BrokerKind, BrokerSchema, missing_library, parse_error
from qdo.postgresql.url import SchemaAddress, connection_name, postgresql_address


def _loaded(url: str) -> tuple[SchemaAddress, Any, Any]:
    """Return the address, and the modules `session` and `schema`."""
    address = postgresql_address(url)  # reports a wrong address even without psycopg
    try:
        from qdo.postgresql import schema, session
    except ImportError as error:
        raise missing_library(error, "postgresql") from error
    return address, session, schema


def _open(url: str, app: str) -> Broker:
    address, _, _ = _loaded(url)
    from qdo.brokers.postgresql.broker import PostgresqlBroker

    return PostgresqlBroker(address, app)


def _script(url: str, partition_seconds: int) -> str:
    address, _, schema = _loaded(url)
    return str(schema.script(address.schema, partition_seconds))


def _change(url: str) -> str:
    address, _, schema = _loaded(url)
    return str(_in_session(url, lambda connection: schema.change(connection, address)))


def _create(url: str, partition_seconds: int) -> bool:
    address, _, schema = _loaded(url)
    return bool(
        _in_session(url, lambda connection: schema.create(connection, address, partition_seconds))
    )


def _in_session(url: str, work: Callable[[Any], Any]) -> Any:
    address, session, _ = _loaded(url)
    with contextlib.closing(session.PostgresqlSession(address)) as opened:
        return opened.run(work)


def _grants(url: str, role: str, kind: str) -> list[str]:
    address, _, schema = _loaded(url)
    found: list[str] = schema.grants(address.schema, role, kind)
    return found


def _connector(url: str) -> Callable[[], Any]:
    address, session, _ = _loaded(url)

    def open_connection() -> Any:
        connection = session.connect(address, name=connection_name("-", "history"))
        connection.execute("RESET search_path")  # the statements name no schema
        connection.autocommit = False
        return connection

    return open_connection


KIND = BrokerKind(
    open=_open,
    address_error=partial(parse_error, postgresql_address),
    form="postgresql://USER@HOST/DATABASE",
    schema=BrokerSchema(script=_script, change=_change, create=_create, grants=_grants),
    connector=_connector,
    foreign_senders=True,
    stores_nul=False,
)
