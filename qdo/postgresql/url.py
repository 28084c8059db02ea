"""The address of a PostgreSQL broker: postgresql://USER@HOST:PORT/DATABASE?OPTION=VALUE&..."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from qdo.errors import SettingsError
from qdo.text import did_you_mean, hide_credentials

_FORM = "postgresql://USER@HOST:PORT/DATABASE"
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_POOLERS = ("none", "transaction")
# The options that libpq reads.
LIBPQ = (
    "host", "port", "service", "passfile", "sslmode", "sslrootcert",
    "sslcert", "sslkey", "sslcrl", "channel_binding", "target_session_attrs", "krbsrvname",
    "gssencmode", "keepalives_idle", "keepalives_interval", "keepalives_count",
    "tcp_user_timeout",
)  # fmt: skip
_DEFAULTS = {
    "target_session_attrs": "read-write",
    "tcp_user_timeout": "30000",
    "client_encoding": "UTF8",
}


@dataclass(frozen=True, slots=True)
class SchemaAddress:
    """One schema of a database."""

    # The connection strings for libpq, without a password: one for each host, in order of attempts.
    conninfos: tuple[str, ...]
    schema: str
    # Whether clients connect through a pooler in transaction mode.
    pooled: bool
    # The name of the database in errors and logs: HOST:PORT/DATABASE.
    server: str


def postgresql_address(url: str, setting: str = "broker") -> SchemaAddress:
    """Parse a URL; if it is invalid, raise SettingsError with the name `setting`."""
    try:
        return _parsed(url)
    except SettingsError as error:
        raise SettingsError(name=setting, reason=error.details["reason"]) from error


def connection_name(app: str, purpose: str) -> str:
    """Return the `application_name` of a connection, such as "qdo shop reader on worker-1"."""
    return f"qdo {app} {purpose} on {socket.gethostname()}"


def split_chroot(url: str) -> tuple[str, str]:
    """Split a coordinator's URL into the URL without `chroot`, and the chroot without slashes."""
    base, _, query = url.partition("?")
    pairs = query.split("&") if query else []
    rest = [pair for pair in pairs if not pair.startswith("chroot=")]
    chroot = "".join(pair.removeprefix("chroot=") for pair in pairs if pair not in rest)
    return base + "?" * bool(rest) + "&".join(rest), unquote(chroot).strip("/")


def coordinator_address(url: str) -> tuple[SchemaAddress, str]:
    """Parse a coordinator's URL; return the schema and the chroot, or raise SettingsError."""
    address, chroot = split_chroot(url)
    return postgresql_address(address, "coordinator"), chroot


def _parsed(url: str) -> SchemaAddress:
    shown = hide_credentials(url)
    if not url.startswith("postgresql://"):
        raise _fault(f"{shown!r} must have the form {_FORM}")
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), errors="strict"
        )
    except ValueError as error:
        raise _fault(f"{shown!r} is not {_FORM}?OPTION=VALUE&...: {error}") from error
    user, _, hosts = parts.netloc.rpartition("@")
    if ":" in user or any(name == "password" for name, _ in pairs):
        raise _fault(
            f"an address must not contain a password: write {_FORM}, and give the password in "
            "PGPASSWORD, in ~/.pgpass, or in a service file"
        )
    if parts.fragment:
        raise _fault(f"{shown!r} has a '#': write it as %23, or leave it out")
    options = _options(pairs)
    schema = options.pop("schema", "qdo")
    pooler = options.pop("pooler", "none")
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise _fault(f"schema must be 1 to 63 of a-z, 0-9 and '_', not pg_..., got {schema!r}")
    if pooler not in _POOLERS:
        raise _fault(f"pooler={pooler!r} is not one of {', '.join(_POOLERS)}")
    database = unquote(parts.path.lstrip("/"))
    if not database and "service" not in options:
        raise _fault(f"{shown!r} lacks the database: write {_FORM}")
    server = f"{hosts or options.get('host') or options.get('service', 'local')}/{database}"
    query = urlencode({**_DEFAULTS, **options})
    conninfos = tuple(
        f"postgresql://{user}{'@' * bool(user)}{host}/{quote(database, safe='')}?{query}"
        for host in hosts.split(",")
    )
    return SchemaAddress(conninfos, schema, pooler == "transaction", server)


def _options(pairs: list[tuple[str, str]]) -> dict[str, str]:
    known = ("schema", "pooler", *LIBPQ)
    options: dict[str, str] = {}
    for name, value in pairs:
        if name == "chroot":
            raise _fault("the option 'chroot' belongs to the setting coordinator")
        if name not in known:
            hint = did_you_mean(name, known)
            raise _fault(f"unknown option {name!r}{hint}; valid options: {', '.join(known)}")
        if name in options:
            raise _fault(f"option {name!r} is given twice")
        if "\0" in value:
            raise _fault(f"option {name!r} must not contain NUL")
        options[name] = value
    return options


def _fault(reason: str) -> SettingsError:
    return SettingsError(name="broker", reason=reason)
