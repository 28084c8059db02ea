"""The databases of Django as addresses of brokers and coordinators: ``django:ALIAS``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from django.conf import settings
from django.db import connections

from qdo.errors import SettingsError
from qdo.postgresql.url import LIBPQ, SchemaAddress, postgresql_address
from qdo.text import did_you_mean

if TYPE_CHECKING:
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor
    from django.db.migrations.state import StateApps

PREFIX = "django:"
FILES = {"broker": "messages.db", "coordinator": "coordination.db"}
"""The settings that may name a database of Django, with qdo's files beside one of SQLite."""


def resolved_address(url: str, setting: str) -> str | None:
    """Return the address of the database that ``django:ALIAS?OPTION=VALUE`` names.

    The password of the database is used for this address in this process. In SQLite a second
    writer would wait for the transactions of the first, so qdo has files of its own: in the folder
    ``qdo-data`` beside Django's, or None if that is in memory.

    :raises SettingsError: the alias is unknown, or the database is neither PostgreSQL nor SQLite.
    """
    alias, _, options = url.removeprefix(PREFIX).partition("?")
    if alias not in connections:
        hint = did_you_mean(alias, list(connections))
        reason = f"{url!r} must name an alias of DATABASES, got {alias!r}{hint}"
        raise SettingsError(name=setting, reason=reason)
    wrapper = connections[alias]
    if wrapper.vendor == "sqlite":
        return _file_beside(str(wrapper.settings_dict["NAME"]), setting)
    if wrapper.vendor != "postgresql":
        reason = f"{url!r} must be a PostgreSQL database, got {wrapper.vendor}; write an address"
        raise SettingsError(name=setting, reason=f"{reason} such as postgresql://USER@HOST/NAME")
    database = wrapper.settings_dict
    address = _address(database, options)
    if database["PASSWORD"]:
        from qdo.postgresql.session import use_password  # needs psycopg

        use_password(postgresql_address(address, setting), database["PASSWORD"])
    return address


def _file_beside(database: str, setting: str) -> str | None:
    if not os.path.isabs(database):
        return None
    return f"sqlite:{os.path.dirname(database)}/qdo-data/{FILES[setting]}"


def _address(database: dict[str, Any], options: str) -> str:
    """Return the address of an entry of DATABASES; Django's own OPTIONS are left out."""
    query = {name: value for name, value in database["OPTIONS"].items() if name in LIBPQ}
    host = str(database["HOST"])
    port = str(database["PORT"])
    place = f"{host}:{port}" if port else host
    if set(host) & set("/,:"):  # the folder of a socket, several hosts, or IPv6
        query |= {"host": host} | ({"port": port} if port else {})
        place = ""
    user = f"{quote(database['USER'], safe='')}@" if database["USER"] else ""
    parameters = "&".join(filter(None, (urlencode(query), options)))
    name = quote(database["NAME"] or "", safe="")
    return f"postgresql://{user}{place}/{name}" + f"?{parameters}" * bool(parameters)


def upgrade_schema(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    """Create or upgrade qdo's schema if the database of a migration is one of qdo's."""
    for name in FILES:
        url = str(getattr(settings, "QDO", {}).get(name, ""))
        alias = url.removeprefix(PREFIX).partition("?")[0]
        if url.startswith(PREFIX) and alias == editor.connection.alias:
            address = resolved_address(url, name)
            if address is not None and address.startswith("postgresql:"):
                _upgrade(editor.connection.connection, postgresql_address(address, name))


def _upgrade(connection: Any, address: SchemaAddress) -> None:
    # In the transaction of the migration: the connection is psycopg's, with Django's cursors.
    from qdo.postgresql.schema import PARTITION_SECONDS, create

    create(connection, address, PARTITION_SECONDS)
