"""Recognize the connections of Django, without importing Django."""

from __future__ import annotations

import sys
from typing import Any

from qdo.errors import UsageError
from qdo.text import did_you_mean


def django_connection(connection: Any) -> Any | None:
    """Return Django's wrapper of a caller's `connection`, None if it is not Django's.

    :param connection: an alias of ``DATABASES``, `django.db.connection`, one of
        `django.db.connections`, or the driver's connection of one of them.
    :raises UsageError: the alias is unknown, or the program does not use Django.
    """
    # `django.db.connection` is a proxy, whose class is not the class of wrappers.
    if hasattr(connection, "ensure_connection"):
        return connection
    conf: Any = sys.modules.get("django.conf")
    db: Any = sys.modules.get("django.db")
    known = db.connections if db is not None and conf.settings.configured else None
    if not isinstance(connection, str):
        opened = [] if known is None else known.all(initialized_only=True)
        return next((each for each in opened if each.connection is connection), None)
    aliases = [] if known is None else list(known)
    if known is None or connection not in aliases:
        raise UsageError(
            reason="connection as text must be an alias of Django's DATABASES, got "
            f"{connection!r}{did_you_mean(connection, aliases)}"
        )
    return known[connection]


def driver_connection(wrapper: Any) -> Any:
    """Return the driver's open connection of a wrapper, which Django opens at the first query."""
    if wrapper.vendor != "postgresql":
        raise UsageError(
            reason=f"Django's database {wrapper.alias!r} must be PostgreSQL, the database of the"
            f" app's broker, got {wrapper.vendor}; send in transaction.on_commit, which loses"
            " messages if the process ends right after the commit"
        )
    wrapper.ensure_connection()
    return wrapper.connection
