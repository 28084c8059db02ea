"""The schema of the PostgreSQL broker: an append-only log, and functions that write to the log.

**The order of a queue is the order of its commits.** If a sender took its position long before its
commit, a reader could see a later position first, and would skip the message. Therefore:

1. A sender locks the row of its queue. Then the sender takes a position that is larger than all
   others, and inserts the message. PostgreSQL releases the lock when readers can see the commit. So
   a reader that sees a message of a queue also sees all earlier messages of the queue.
2. A transaction of an app keeps its messages in `outgoing`. A deferred trigger sends these messages
   as the last step before the commit. So no sender has to wait for a transaction that stays open
   for an hour.
3. Positions come from one sequence. A sender advances the sequence to the current time under a
   short lock. Rollbacks and snapshots do not affect a sequence. So the rule is true at every
   isolation level, and even if the server's clock is set back. Positions and the ids made from
   positions are unique in the schema.

The lock is `FOR NO KEY UPDATE`, which does not create a version of the row. Senders to different
queues only share the sequence, for a few microseconds.

Positions do not show which queues have changed, because a transaction with a smaller position may
commit later in another queue. Instead, `look` compares snapshots. New messages belong to
transactions that were not visible before.

The coordinator stores the progress, so workers neither update nor delete a processed message.
`trim` moves the start of the visible part of a queue (`queues.trimmed`). A worker drops a partition
when `trim` has hidden all its messages. Autovacuum ignores the partitions.

The storage of requests differs: few rows, which change, in one table that autovacuum cleans often.

**Formats.** ``format-1.sql`` is the text of the first format, and each later ``format-N.sql``
changes it. A new schema and an upgrade run the same texts, so they have the same tables. All
functions are replaced each time. The table `about` keeps digests of the texts, which tell a schema
of an unreleased version from one of these.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import logging
import re
from typing import Any

from psycopg import errors

from qdo.broker_errors import (
    PostgresqlUnsuitableError,
    SchemaDiffersError,
    SchemaMissingError,
    SchemaNewerError,
    SchemaOlderError,
)
from qdo.errors import UsageError
from qdo.postgresql.session import PostgresqlConnection
from qdo.postgresql.url import SchemaAddress

_log = logging.getLogger(__name__)

FORMAT = 1
# The oldest format whose versions of qdo can use a schema of `FORMAT`: the format before, so that
# their workers continue during an upgrade, unless they could lose a message. Workers of older
# formats release their queues and end.
OLDEST_CLIENT = 1
OLDEST_SERVER = 15
# The time for which an upgrade waits for a lock, and for which senders may wait for the upgrade.
UPGRADE_LOCK_SECONDS = 5
# The default duration of a partition. The space of processed messages becomes free after the
# retention time plus at most the duration of two partitions.
PARTITION_SECONDS = 3600
# The texts that replace all functions and views.
_REPLACED = ("functions.sql", "views.sql")
VIEWS = tuple(
    f"qdo_{each}" for each in ("queues", "messages", "requests", "failed", "timers", "workers")
)
_TABLES: dict[str, dict[str, str]] = {
    "sender": dict.fromkeys(("about", "streams"), "SELECT"),
    "worker": {
        **dict.fromkeys(("about", "queues", "messages", "streams"), "SELECT"),
        "delayed": "SELECT, DELETE",
        "dead_letters": "SELECT, UPDATE, DELETE",
        "requests": "SELECT",
        "tree": "SELECT, UPDATE",
        **dict.fromkeys(("znodes", "sessions", "changes"), "SELECT, INSERT, UPDATE, DELETE"),
    },
    "onlooker": dict.fromkeys(
        (
            *("about", "queues", "messages", "delayed", "dead_letters", "requests", "streams"),
            *("tree", "znodes", "sessions", "changes", *VIEWS),
        ),
        "SELECT",
    ),
    "viewer": dict.fromkeys(VIEWS, "SELECT"),
}
_MESSAGES = "text[], text[], text[], bytea[], text[], bigint[], text[], bigint[]"
_SENDING = (
    "append(text, text[], text[], text[], bytea[], integer)",
    "ask_requests(bigint, text, text[], text[], integer[], float8[], text[], float8[], bytea[],"
    " text[], bytea[], text[], float8[], integer[], integer)",
    f"end_request(text, text, integer, text, text, text, bytea, {_MESSAGES})",
    "channel(text)",
    "create_stream(text, text, integer)",
    "find_request(text, text)",
    "mark_request(text, text, text, text)",
    "qdo_send(text, text, jsonb, text, jsonb, text, interval, text, interval)",
    f"send(text, {_MESSAGES}, integer)",
    f"stage(bigint, text, {_MESSAGES})",
)
# Views call these with the rights of the reader.
_READING = ("json_of(bytea)", "qdo_message(text)", "time_of(text)")
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "sender": _SENDING,
    "worker": (
        *_SENDING,
        "add_shards(text, text, integer, text[], text)",
        "advance(bigint)",
        "claim_app(text, text, text)",
        "bury(text, text, bigint, bytea, text, text, text, text, integer, text, bigint, float8)",
        "delete_queue(text, text, bigint)",
        "discard_requests(text, text[])",
        "drop_partitions()",
        "expire_requests(text)",
        "free_key(text, text, text, text, text)",
        "give_back_requests(text, text)",
        "limit_queues(text, integer)",
        "look(text, bigint, bigint[], bigint)",
        "move_due(text, integer, bigint)",
        "open_shards(text, text[])",
        "report_requests(text, text[], text[], integer[], integer[], text[], integer[], float8[],"
        f" text[], text[], text[], bytea[], integer[], {_MESSAGES}, integer)",
        "retry_request(text, text, text[])",
        "spans(bigint)",
        "suspend_request(text, text, text, integer, text)",
        "tidy(bigint)",
        "take_requests(text, text, text, integer, text[], bigint, float8, bigint[], boolean,"
        " integer)",
        "trim(text, text, bigint, bigint)",
    ),
    "onlooker": ("find_request(text, text)", "spans(bigint)", *_READING),
    "viewer": _READING,
}
_OWNERS = """
SELECT pg_get_userbyid(nspowner), pg_get_userbyid(owner) FROM pg_namespace JOIN (
    SELECT relnamespace AS place, relowner AS owner FROM pg_class WHERE relname = 'about'
    UNION SELECT pronamespace, proowner FROM pg_proc
) AS parts ON place = pg_namespace.oid WHERE nspname = %s AND nspowner <> owner LIMIT 1
"""
FOREIGN_SCHEMA = "QD003"


def grants(schema: str, role: str, kind: str) -> list[str]:
    """Return the statements that give a role exactly the necessary rights.

    :param role: the name of the role, without quotes.
    :param kind: sender, worker, onlooker or viewer.
    :raises UsageError: the name means all roles, or is not a valid name of a role.
    """
    # A sender may send messages, store requests and find requests by their ids, but may not read
    # messages. A worker may run `qdo-worker` and every command. An onlooker may read all tables but
    # not change them. A viewer may read the views for people, which show it no bodies.
    if role == "public" or not role or "\0" in role:
        raise UsageError(
            reason=f"the role must be one role of PostgreSQL, got {role!r}; create one with"
            " `createuser NAME`"
        )
    role = '"' + role.replace('"', '""') + '"'
    tables = _TABLES[kind].items()
    literal = role.replace("'", "''")
    return [
        f"GRANT USAGE ON SCHEMA {schema} TO {role}",
        *(f"GRANT {rights} ON {schema}.{table} TO {role}" for table, rights in tables),
        *(f"GRANT EXECUTE ON FUNCTION {schema}.{each} TO {role}" for each in _FUNCTIONS[kind]),
        *([f"SELECT {schema}.limit_idle('{literal}')"] if kind == "sender" else []),
    ]


def script(schema: str, partition_seconds: int, have: int = 0) -> str:
    """Return the statements that create the schema, or upgrade the schema from format `have`."""
    about = {
        "format": FORMAT,
        "oldest": OLDEST_CLIENT,
        "tables": tables_digest(FORMAT),
        "functions": digest(),
    }
    values = ", ".join(f"{name} = '{value}'" for name, value in about.items())
    texts = (
        *(_text(f"format-{number}.sql") for number in range(have + 1, FORMAT + 1)),
        *map(_text, _REPLACED),
        f"UPDATE {{schema}}.about SET {values};\n",  # noqa: S608 - constants
    )
    text = "\n".join(texts)
    return text.replace("{schema}", schema).replace("{seconds}", str(partition_seconds))


def tables_digest(number: int) -> str:
    """Return a digest of the texts that make the tables of a format."""
    return _digest(*(f"format-{each}.sql" for each in range(1, number + 1)))


def digest() -> str:
    """Return a digest of this version's functions and views."""
    return _digest(*_REPLACED)


def _digest(*names: str) -> str:
    # Comments and line breaks do not matter.
    words = re.sub(r"--[^\n]*", "", "\n".join(map(_text, names))).split()
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def _text(name: str) -> str:
    return importlib.resources.files("qdo.postgresql").joinpath(name).read_text(encoding="utf-8")


def check_server(connection: PostgresqlConnection, address: SchemaAddress) -> None:
    """Raise PostgresqlUnsuitableError for an old server, a wrong encoding, or a reserved name."""
    version = connection.info.server_version // 10_000
    if version < OLDEST_SERVER:
        raise PostgresqlUnsuitableError(
            server=address.server,
            reason=f"its version must be {OLDEST_SERVER} or later, got {version}; upgrade it",
        )
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise PostgresqlUnsuitableError(
            server=address.server,
            reason=f"the encoding of the database must be UTF8, got {encoding}; create another"
            " with `createdb --encoding UTF8 --template template0 NAME`",
        )
    query = "SELECT FROM pg_get_keywords() WHERE word = %s AND catcode IN ('R', 'T')"
    if connection.execute(query, (address.schema,)).fetchone() is not None:
        raise PostgresqlUnsuitableError(
            server=address.server,
            reason=f"the schema must not be a reserved word of SQL, got {address.schema}",
        )


def read_about(connection: PostgresqlConnection, address: SchemaAddress) -> dict[str, Any] | None:
    """Return the row of the table `about`, of which any version may have other columns."""
    name = f"{address.schema}.about"
    (exists,) = connection.execute("SELECT to_regclass(%s)", (name,)).fetchone() or (None,)
    if exists is None:
        return None
    query = f"SELECT to_jsonb(about)::text FROM {name}"  # noqa: S608 - the address allows a-z, 0-9 and _
    # Parse here, because Django's connections return JSON as text.
    (text,) = connection.execute(query).fetchone() or ("null",)
    about: dict[str, Any] | None = json.loads(text)
    return about


def check_format(connection: PostgresqlConnection, address: SchemaAddress) -> None:
    """Raise an error if this version of qdo cannot use the schema.

    :raises SchemaMissingError, SchemaOlderError, SchemaNewerError, SchemaDiffersError:
    :raises PostgresqlUnsuitableError: a part of the schema has another owner.
    """
    about = _checked(connection, address, neighbors=True)
    if about is None:
        raise SchemaMissingError(server=address.server, schema=address.schema)
    found = about["format"]
    if found < FORMAT:
        raise SchemaOlderError(
            server=address.server, schema=address.schema, found=found, needed=FORMAT
        )
    if found == FORMAT and about["functions"] != digest():
        _tell_of_difference(address.server, address.schema)


def _checked(
    connection: PostgresqlConnection, address: SchemaAddress, *, neighbors: bool
) -> dict[str, Any] | None:
    """Return the row of `about`; raise an error unless this version may use or upgrade the schema.

    :param neighbors: accept a newer schema that lets this version use it.
    """
    about = read_about(connection, address)
    if about is None:
        return None
    owners = connection.execute(_OWNERS, (address.schema,)).fetchone()
    if owners is not None:
        raise _foreign_schema(address, *owners)
    found = about["format"]
    if found > FORMAT and "oldest" in about:
        if neighbors and about["oldest"] <= FORMAT:
            return about
        raise SchemaNewerError(
            path=address.server, schema=address.schema, found=found, known=FORMAT
        )
    if about.get("tables") != tables_digest(found):
        raise SchemaDiffersError(
            server=address.server,
            schema=address.schema,
            reason=f"its tables are not those of format {found}: an unreleased version of qdo made"
            " them",
            remedy="process its messages with that version; then drop the schema, or name another"
            " one in the address with ?schema=NAME",
        )
    return about


@functools.cache  # once for each process
def _tell_of_difference(server: str, schema: str) -> None:
    _log.warning(
        "the functions of schema %s in database %s are those of another version of qdo, and"
        " mistakes that this version corrects may be in them; when all processes have this version,"
        " replace them with `qdo admin broker init`",
        schema,
        server,
    )


def _foreign_schema(address: SchemaAddress, owner: str, wanted: str) -> PostgresqlUnsuitableError:
    return PostgresqlUnsuitableError(
        server=address.server,
        reason=f"schema {address.schema} must belong to {wanted}, got {owner}, who may replace its"
        " functions and get the rights of others; drop the schema, or give it to"
        f" {wanted} if you trust every object in it",
    )


def change(connection: PostgresqlConnection, address: SchemaAddress) -> str:
    """Return the action of `create`: "create", "upgrade" or ""; raise the same errors."""
    check_server(connection, address)
    about = _checked(connection, address, neighbors=False)
    if about is None:
        return "create"
    is_current = (about["format"], about["functions"]) == (FORMAT, digest())
    return "" if is_current and not _lacks_functions(connection, address) else "upgrade"


def _lacks_functions(connection: PostgresqlConnection, address: SchemaAddress) -> bool:
    """Return whether functions of this version were dropped from the schema."""
    query = "SELECT proname FROM pg_proc WHERE pronamespace = to_regnamespace(%s)"
    found = {name for (name,) in connection.execute(query, (address.schema,))}
    text = "".join(map(_text, _REPLACED))
    return not found.issuperset(re.findall(r"REPLACE FUNCTION {schema}\.(\w+)", text))


def create(
    connection: PostgresqlConnection, address: SchemaAddress, partition_seconds: int
) -> bool:
    """Create or upgrade the schema if necessary; return whether the schema changed.

    :raises PostgresqlUnsuitableError, SchemaNewerError, SchemaDiffersError: see `check_server` and
        `check_format`.
    :raises psycopg.errors.LockNotAvailable: a transaction holds a lock that the upgrade needs; the
        schema has not changed.
    """
    if change(connection, address):
        exists = read_about(connection, address) is not None
        if exists:
            _check_owner(connection, address)
        try:
            with connection.transaction():
                if exists:
                    # While an upgrade waits for an open transaction, all senders wait too.
                    connection.execute(f"SET LOCAL lock_timeout = '{UPGRADE_LOCK_SECONDS}s'")
                    # Allow one upgrade at a time. If two transactions create a sequence with the
                    # same name, the server renames one of them, and functions do not find it.
                    connection.execute(
                        f"LOCK TABLE {address.schema}.about IN SHARE UPDATE EXCLUSIVE MODE"
                    )
                    if not change(connection, address):
                        return False
                have = (read_about(connection, address) or {"format": 0})["format"]
                connection.execute(script(address.schema, partition_seconds, have), prepare=False)
            return True
        except errors.Error as error:
            if error.sqlstate == FOREIGN_SCHEMA:
                owner = str(error.diag.message_detail)
                raise _foreign_schema(address, owner, connection.info.user) from error
            if change(connection, address):  # unless another process has created it
                raise
    check_format(connection, address)
    return False


def _check_owner(connection: PostgresqlConnection, address: SchemaAddress) -> None:
    """Raise UsageError if this upgrade would create parts of the schema under another role."""
    query = "SELECT pg_get_userbyid(nspowner), current_user FROM pg_namespace WHERE nspname = %s"
    owner, user = connection.execute(query, (address.schema,)).fetchone() or ("", "")
    if owner != user:
        raise UsageError(
            reason=f"the role that upgrades schema {address.schema} must be its owner {owner}, got"
            f" {user}; run this as {owner}"
        )
