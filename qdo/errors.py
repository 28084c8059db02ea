"""Every error qdo raises on purpose: one tree, branched by who must act.

The docstring of an error is its message: a template filled with the keyword
arguments it is raised with. It states what is wrong and ends with the remedy.
``exit_code`` is what the command line returns for it.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar


class QdoError(Exception):
    """qdo failed: {reason}"""

    exit_code: ClassVar[int] = 1

    def __init__(self, **details: Any) -> None:
        self.details = details
        super().__init__(_one_line(type(self)).format(**details))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.details)


def _rebuild(kind: type[QdoError], details: dict[str, Any]) -> QdoError:
    return kind(**details)


def _one_line(kind: type[QdoError]) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


# --- the caller must act: usage, settings, input ---------------------------------


class UsageError(QdoError):
    """{reason}"""

    exit_code = 2


class SettingsError(UsageError):
    """setting {name}: {reason}"""


class UnknownSettingError(SettingsError):
    """unknown setting {name!r} in {origin}{hint}; `qdo config` lists every setting"""


class JobImportError(UsageError):
    """cannot import {target!r}: {reason}; write MODULE:APP, or --app NAME --job
    MODULE:FUNCTION, and start in the folder that holds the module, or install it"""


class JobModuleError(JobImportError):
    """the module of {target!r} failed while it was imported: {reason}; mend the module,
    or install what it needs"""


class PolicyError(UsageError):
    """{where}: {reason}"""


class QueueNameError(UsageError):
    """{name!r} cannot be a queue name: {reason}; use 1 to 200 characters without
    '/' and control characters, and not '.' or '..'"""


class BodyError(UsageError):
    """{where} is not valid JSON: {reason}; {sent} messages before it were sent"""


class LineError(UsageError):
    """{where}: {reason}; {sent} messages before it were sent"""


class MessageTooLargeError(UsageError):
    """the body for queue {queue!r} has {size} bytes, the limit of this broker is
    {limit}; store it elsewhere and send a reference"""


class SqsTooLargeError(MessageTooLargeError):
    """the body for queue {queue!r} has {size} bytes, the limit of this broker is {limit}, max_body
    of its address; raise that, up to {most}, or add bucket=NAME, which keeps larger bodies in
    S3"""


class CredentialsError(UsageError):
    """the credentials for {service} in region {region} cannot be used: {reason}; give them where
    boto3 looks for them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of
    this machine"""


class ExpiredCredentialsError(CredentialsError):
    """the credentials for {service} in region {region} have expired: {reason}; renew them (aws
    sso login, a new session token), and see that the clock of this machine is right"""


class ClockError(CredentialsError):
    """{service} in region {region} refuses requests of this machine, for they are signed with
    another time than its own: {reason}; set the clock of this machine right"""

    exit_code = 3


class SqsNameError(QueueNameError):
    """{name!r} cannot be a queue of SQS: {reason}; a name and the prefix of the address together
    are 1 to 80 letters, digits, '-' and '_', with '.fifo' at the end of a FIFO queue"""


class UnsupportedError(QdoError):
    """{broker} cannot {what}: {remedy}"""

    exit_code = 5


class BodyDecodeError(QdoError):
    """the body or the headers of message {id} in queue {queue!r} are not valid JSON:
    {reason}; it would fail again, so that its policy ends it at once: send JSON"""


# --- the operator must act: something is out of reach or broken -------------------


class UnreachableError(QdoError):
    """{what} is out of reach: {reason}"""

    exit_code = 3


class CoordinatorUnreachableError(UnreachableError):
    """the coordinator {url} is out of reach: {reason}; check that it runs and that
    the address is right"""


class DatabaseError(UnreachableError):
    """database {path}: {reason}"""


class DatabaseCorruptError(DatabaseError):
    """database {path} is damaged or no SQLite file ({reason}); qdo left it as it is:
    restore a copy, or name another file"""


class DatabaseForeignError(DatabaseError):
    """database {path} belongs to another program or purpose ({reason}); qdo left it
    as it is: name another file"""


class DatabaseNewerError(DatabaseError):
    """database {path} has format {found}, this qdo knows up to {known}; upgrade qdo
    or name another file"""


class DatabaseFullError(DatabaseError):
    """database {path} cannot grow ({reason}); nothing of this call was stored: free
    some disk space and send again"""

    exit_code = 1


class DatabaseBusyError(DatabaseError):
    """database {path} was locked by another process for {seconds:g} s; nothing of this call
    was stored: see whether a process that uses it is stopped, and send again"""


class DatabaseReplacedError(DatabaseError):
    """database {path} was removed or replaced while it was in use ({reason}): put it back
    and restart this process"""


class AwsUnreachableError(UnreachableError):
    """{service} in region {region} is out of reach: {reason}; check the region, the endpoint
    and the network{hint}"""


class ThrottledError(UnreachableError):
    """{service} takes no more requests of this kind for now: {action} on {resource} was
    throttled ({reason}); send fewer, or have the quota raised"""


# --- how an attempt of a job ended ------------------------------------------------


class JobTimeoutError(QdoError):
    """job {job} was stopped: message {id} was not done after {seconds:g} s, its
    timeout_seconds"""


class JobCrashedError(QdoError):
    """the process of job {job} died in message {id}: {reason}"""


class WorkerCrashedError(QdoError):
    """{reason}"""


# --- a broker refused -------------------------------------------------------------


class AwsError(QdoError):
    """{service} refused {action} on {resource}: {code}: {reason}"""


class AccessDeniedError(AwsError):
    """{service} does not allow {action} on {resource}: {reason}; allow it to these credentials,
    docs/sqs.rst and docs/kinesis.rst list what qdo needs"""

    exit_code = 5


class ObjectTooLargeError(QdoError):
    """S3 object {name} has {size} bytes, and a body may have {limit}: have another program receive
    its message, or delete it"""

    exit_code = 5


class PositionTrimmedError(QdoError):
    """queue {queue!r} stands still: the record after which it is to go on ({position}, of
    {time}) is gone from stream {stream!r}, which keeps records for {hours} hours, so that
    messages may be lost; go on with what is left by `qdo seek {queue} earliest --execute`, or
    let all such queues do so: trimmed=oldest in the broker's address"""

    exit_code = 5


# --- the protocol refused ---------------------------------------------------------


class OversizeError(QdoError):
    """{what} would take {size} bytes and ZooKeeper is sent at most {limit}: run more
    workers, or spread the queues over more apps"""

    exit_code = 5


class StaleClaimError(QdoError):
    """queue {queue!r} is no longer owned under fence {fence}; its next owner goes on
    after the recorded `last`"""


class SpoiltNodeError(QdoError):
    """the node of queue {queue!r} cannot be read: {reason}; repair it with `qdo seek`"""

    exit_code = 5


class PartlyDoneError(QdoError):
    """{done} of {total} {what}; not: {rest}"""

    exit_code = 4


class PartlySentError(PartlyDoneError):
    """{done} of {total} messages were sent; not {rest}: {reason}; send these again"""


class UnconfirmedError(QdoError):
    """{what} cannot be undone: add --yes to do it"""

    exit_code = 5


class NotFoundError(QdoError):
    """{what} {name!r} does not exist"""

    exit_code = 6


class AwsNotFoundError(NotFoundError):
    """{what} {name!r} does not exist in region {region}: {remedy}"""


class NotBlockedError(QdoError):
    """queue {queue!r} is not blocked; nothing was changed: `qdo queues` shows which are"""

    exit_code = 5


class NotBlockingError(NotBlockedError):
    """no message at position {position} blocks queue {queue!r}; nothing was changed:
    `qdo queues -o json` shows the positions of those that do"""
