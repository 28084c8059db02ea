"""The errors of PostgreSQL and of AWS: Amazon SQS, Kinesis and S3; see `errors`."""

from __future__ import annotations

from qdo.errors import (
    DatabaseError,
    FailureKind,
    MessageTooLargeError,
    NotFoundError,
    QdoError,
    QueueNameError,
    RejectedError,
    UnreachableError,
    UsageError,
)


class UnusableBrokerError(UsageError):
    """{reason}"""

    kind = FailureKind.UNREACHABLE


class SqsTooLargeError(MessageTooLargeError):
    """the body for queue {queue!r} must be at most {limit} bytes (max_body in the broker's
    address), got {size}; raise max_body, up to {most}, or add bucket=NAME, which stores larger
    bodies in S3"""


class CredentialsError(UnusableBrokerError):
    """the credentials for {service} in region {region} cannot be used: {reason}; provide them
    where boto3 looks for them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a
    role of this machine"""


class ExpiredCredentialsError(CredentialsError):
    """the credentials for {service} in region {region} have expired: {reason}; renew them (aws
    sso login, a new session token), and check that the clock of this machine is correct"""


class ClockError(CredentialsError):
    """{service} in region {region} rejects the requests of this machine because their signatures
    have a wrong time: {reason}; correct the clock of this machine"""

    exit_code = 3


class SqsNameError(QueueNameError):
    """{name!r} cannot be the name of an SQS queue: {reason}; the prefix in the address and the
    name together must be 1 to 80 letters, digits, '-' and '_', with '.fifo' at the end for a FIFO
    queue"""


class AwsUnreachableError(UnreachableError):
    """cannot reach {service} in region {region}: {reason}; check the region, the endpoint
    and the network{hint}"""


class ThrottledError(UnreachableError):
    """{service} throttled {action} on {resource}: {reason}; send fewer requests, or request a
    higher quota"""


class AwsError(QdoError):
    """{service} rejected {action} on {resource}: {code}: {reason}"""


class AccessDeniedError(AwsError):
    """{service} denied {action} on {resource}: {reason}; grant this permission to the
    credentials; docs/sqs.rst and docs/kinesis.rst list the permissions that qdo needs"""

    exit_code = 5


class AwsNotFoundError(NotFoundError):
    """{what} {name!r} does not exist in region {region}: {remedy}"""


class ObjectTooLargeError(RejectedError):
    """the body of a message must be at most {limit} bytes, and S3 object {name} has {size};
    receive its message with another program, or delete it"""


class PositionTrimmedError(RejectedError):
    """queue {queue!r} is stuck: the record at its recorded position ({position}, of {time}) is
    no longer in stream {stream!r}, which keeps records for {hours} hours; messages may be lost.
    Continue with the remaining records by `qdo seek {queue} earliest --yes`, or set
    trimmed=oldest in the broker's address to let all such queues continue"""


class PostgresqlError(UnreachableError):
    """PostgreSQL at {server}: {reason}"""


class PostgresqlUnreachableError(PostgresqlError):
    """cannot reach PostgreSQL at {server}: {reason}; check the address, the network and the
    server"""


class PostgresqlConnectionsError(PostgresqlError):
    """PostgreSQL at {server} gives this process no connection: {reason}; {remedy}; running workers
    continue by themselves"""


class PostgresqlUnansweredError(PostgresqlError):
    """PostgreSQL at {server} did not answer ({reason}), so it is not known whether the messages
    of this call were stored; send again with a dedup_key, or look for them with `qdo queues`"""


class PostgresqlReadOnlyError(PostgresqlError):
    """PostgreSQL at {server} is read-only, because it is a standby or has
    default_transaction_read_only = on ({reason}); name the primary in the address, or all servers,
    or set it off for the server, the database or the role"""


class PostgresqlFullError(PostgresqlError):
    """PostgreSQL at {server} has no space left ({reason}), so nothing of this call was stored; free
    disk space there; running workers continue by themselves"""


class PostgresqlBusyError(PostgresqlError):
    """PostgreSQL at {server} gave up a statement ({reason}), so nothing of this call was stored;
    find the transaction that holds its lock in pg_stat_activity"""

    kind = FailureKind.BUSY


class PostgresqlRefusedError(RejectedError):
    """PostgreSQL at {server} refuses this ({state}): {reason}; nothing of this call was stored, and
    the same call will not succeed"""


class PostgresqlLoginError(UnusableBrokerError):
    """PostgreSQL at {server} refuses the login: {reason}; name the role in the address, and give
    its password in PGPASSWORD, in ~/.pgpass, or in a service file"""


class PostgresqlRightsError(UnusableBrokerError):
    """PostgreSQL at {server} denies {role} a right: {reason}; as the owner, run {remedy};
    `qdo admin broker grants` prints all rights that a role needs"""

    exit_code = 5


class PostgresqlUnsuitableError(UnusableBrokerError):
    """PostgreSQL at {server} cannot be used: {reason}"""


class SchemaMissingError(UnusableBrokerError):
    """database {server} has no schema {schema} of qdo; create it with `qdo admin broker
    init`, with --app MODULE:APP if only the code of the app has the address"""


class SchemaOlderError(UnusableBrokerError):
    """schema {schema} in database {server} has format {found}, and this version of qdo needs format
    {needed}; upgrade it with `qdo admin broker init`, then run the statements of `qdo admin broker
    grants` again for each role"""


class SchemaNewerError(DatabaseError):
    """schema {schema} in database {path} has format {found}, and this version of qdo can use
    formats up to {known}; upgrade qdo"""


class SchemaDiffersError(UnusableBrokerError):
    """schema {schema} in database {server} differs from that of this version of qdo: {reason};
    {remedy}"""
