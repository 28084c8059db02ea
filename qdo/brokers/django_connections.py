"""Recognize the connections of Django, by its alias or its wrapper, without importing Django."""

from __future__ import annotations

import sys
from typing import Any

from qdo.errors import UsageError
from qdo.text import did_you_mean


def django_connection(connection: Any) -> Any | None:
    """Return Django's wrapper that a caller gave as `connection`, None if it is another object.

    :param connection: an alias of ``DATABASES``, `django.db.connection`, or one of
        `django.db.connections`.
    :raises UsageError: the alias is unknown, or the program does not use Django.
    """
    if isinstance(connection, str):
        django: Any = sys.modules.get("django.db")
        known = [] if django is None else list(django.connections)
        if connection not in known:
            raise UsageError(
                reason="connection as text must be an alias of Django's DATABASES, got "
                f"{connection!r}{did_you_mean(connection, known)}"
            )
        return django.connections[connection]
    # `django.db.connection` is a proxy, whose class is not the class of wrappers.
    return connection if hasattr(connection, "ensure_connection") else None


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
