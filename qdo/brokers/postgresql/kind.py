"""PostgreSQL as the registry knows it: ``postgresql://USER@HOST/DATABASE``."""

from __future__ import annotations

from functools import partial

from qdo.brokers.base import Broker
from qdo.brokers.kind import BrokerKind, parse_error
from qdo.brokers.postgresql.url import postgresql_address
from qdo.errors import SettingsError


def _open(url: str, app: str) -> Broker:
    address = postgresql_address(url)  # an invalid one is reported without psycopg, too
    try:
        import psycopg  # noqa: F401 - the extra of this broker
    except ImportError as error:
        raise SettingsError(
            name="broker",
            reason=f"a PostgreSQL broker needs psycopg ({error}): pip install 'qdo[postgresql]'",
        ) from error
    from qdo.brokers.postgresql.broker import PostgresqlBroker

    return PostgresqlBroker(address, app)


KIND = BrokerKind(open=_open, address_error=partial(parse_error, postgresql_address))
