"""The errors of PostgreSQL; see `errors`."""

from __future__ import annotations

from qdo.errors import DatabaseError, UnreachableError, UsageError


class PostgresqlError(UnreachableError):
    """PostgreSQL at {server}: {reason}"""


class PostgresqlUnreachableError(PostgresqlError):
    """cannot reach PostgreSQL at {server}: {reason}; check the address, the network and the
    server"""


class PostgresqlUnansweredError(PostgresqlError):
    """PostgreSQL at {server} did not answer ({reason}), so it is not known whether the messages
    of this call were stored; send again with a dedup_key, or look for them with `qdo queues`"""


class PostgresqlReadOnlyError(PostgresqlError):
    """PostgreSQL at {server} accepts no writes: {reason}; name all servers in the address, or wait
    for a primary server"""


class PostgresqlFullError(PostgresqlError):
    """PostgreSQL at {server} has no space left ({reason}), so nothing of this call was stored; free
    disk space there; running workers continue by themselves"""


class PostgresqlBusyError(PostgresqlError):
    """PostgreSQL at {server} gave up a statement ({reason}), so nothing of this call was stored;
    find the transaction that holds its lock in pg_stat_activity"""


class PostgresqlLoginError(UsageError):
    """PostgreSQL at {server} refuses the login: {reason}; name the role in the address, and give
    its password in PGPASSWORD, in ~/.pgpass, or in a service file"""


class PostgresqlRightsError(UsageError):
    """PostgreSQL at {server} denies {role} a right: {reason}; as the owner, run {remedy};
    `qdo broker grants` prints all rights that a role needs"""


class PostgresqlUnsuitableError(UsageError):
    """PostgreSQL at {server} cannot be used: {reason}"""


class SchemaMissingError(UsageError):
    """database {server} has no schema {schema} of qdo; create it with `qdo broker init`"""


class SchemaOlderError(UsageError):
    """schema {schema} in database {server} has format {found}, and this version of qdo needs
    format {known}; upgrade it with `qdo broker init`"""


class SchemaNewerError(DatabaseError):
    """schema {schema} in database {path} has format {found}, but this version of qdo supports
    formats up to {known}; upgrade qdo"""
