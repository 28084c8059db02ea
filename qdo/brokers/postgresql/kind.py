"""PostgreSQL as the registry knows it: ``postgresql://USER@HOST/DATABASE``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from qdo.brokers.base import Broker
from qdo.brokers.postgresql.url import SchemaAddress, postgresql_address
from qdo.brokers.registry import BrokerKind, BrokerSchema, parse_error
from qdo.errors import SettingsError


def _address(url: str) -> SchemaAddress:
    address = postgresql_address(url)  # an invalid one is reported without psycopg, too
    try:
        import psycopg  # noqa: F401 - the extra of this broker
    except ImportError as error:
        raise SettingsError(
            name="broker",
            reason=f"PostgreSQL needs psycopg ({error}): pip install 'qdo[postgresql]'",
        ) from error
    return address


def _open(url: str, app: str) -> Broker:
    address = _address(url)
    from qdo.brokers.postgresql.broker import PostgresqlBroker

    return PostgresqlBroker(address, app)


def _script(url: str, partition_seconds: int) -> str:
    address = _address(url)
    from qdo.brokers.postgresql.schema import script

    return script(address.schema, partition_seconds)


def _is_missing(url: str) -> bool:
    address = _address(url)
    from qdo.brokers.postgresql.schema import is_missing

    return _in_session(address, lambda connection: is_missing(connection, address))


def _create(url: str, partition_seconds: int) -> bool:
    address = _address(url)
    from qdo.brokers.postgresql.schema import create

    return _in_session(address, lambda connection: create(connection, address, partition_seconds))


def _in_session(address: SchemaAddress, work: Callable[[Any], bool]) -> bool:
    from qdo.brokers.postgresql.session import PostgresqlSession

    session = PostgresqlSession(address)
    try:
        return session.run(work)
    finally:
        session.close()


def _grants(url: str, role: str, kind: str) -> list[str]:
    address = _address(url)
    from qdo.brokers.postgresql.schema import grants

    return grants(address.schema, role, kind)


def _connector(url: str) -> Callable[[], Any]:
    address = _address(url)
    from qdo.brokers.postgresql.session import connect

    def open_connection() -> Any:
        connection = connect(address)
        connection.autocommit = False
        return connection

    return open_connection


KIND = BrokerKind(
    open=_open,
    address_error=partial(parse_error, postgresql_address),
    schema=BrokerSchema(script=_script, is_missing=_is_missing, create=_create, grants=_grants),
    connector=_connector,
)
