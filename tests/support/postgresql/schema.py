"""qdo's schema in a database of a test."""

from __future__ import annotations

from pathlib import Path

from qdo.postgresql.schema import PARTITION_SECONDS, create
from qdo.postgresql.session import connect
from qdo.postgresql.url import postgresql_address
from tests.support.paths import ROOT


def frozen(number: int) -> Path:
    """Return the file with the statements that created a format when it was released."""
    return ROOT / "tests" / "golden" / f"format-{number}.sql"


def prepared(url: str, partition_seconds: int = PARTITION_SECONDS) -> str:
    """Create the schema of an address, as `qdo admin broker init` does; return the address."""
    address = postgresql_address(url)
    connection = connect(address)
    try:
        is_new = create(connection, address, partition_seconds)
        if partition_seconds != PARTITION_SECONDS and not is_new:
            raise ValueError("partitions of another size need an empty database")
    finally:
        connection.close()
    return url
