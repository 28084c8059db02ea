"""Every error qdo raises on purpose: one tree, branched by the person who must act.

::

    QdoError                          exit code 1
        UsageError                    2: the caller corrects a command, a call or a setting
            SettingsError
            QueueNameError
            MessageTooLargeError
            JobImportError
        UnreachableError              3: the operator corrects a server, a network or a file
            CoordinatorUnreachableError
            DatabaseError
        PartialFailureError           4: the rest is repeated
            PartialSendError
        RejectedError                 5: the state of the app or a right forbids it
            NotFailingError
        NotFoundError                 6: the name does not exist
        BodyDecodeError               an attempt of a job fails
        JobTimeoutError, JobCrashedError, WorkerCrashedError

The docstring of an error is its message: a template that is filled with the error's keyword
arguments, which `details` keeps. It states the problem and ends with the remedy. ``exit_code`` is
the exit code of the command line for it, and ``kind`` tells loops over many rows which of them it
concerns. `broker_errors` has the errors of PostgreSQL and AWS.
"""

from __future__ import annotations

import enum
import inspect
from typing import Any, ClassVar


class FailureKind(enum.Enum):
    """The reach of a failure, see `refusals`."""

    REFUSED = "refused"
    BUSY = "busy"
    UNREACHABLE = "unreachable"


class QdoError(Exception):
    """qdo failed: {reason}"""

    exit_code: ClassVar[int] = 1
    kind: ClassVar[FailureKind] = FailureKind.REFUSED

    def __init__(self, **details: Any) -> None:
        self.details = details
        super().__init__(_one_line(type(self)).format(**details))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.details)


class BlockedLoopWarning(RuntimeWarning):
    """A call of qdo that waits was made on a thread whose asyncio loop runs.

    The call works, but all other coroutines of the thread wait for it. Python shows the warning
    once for each line. ``warnings.simplefilter("error", qdo.errors.BlockedLoopWarning)`` makes it
    an error.
    """


def _rebuild(kind: type[QdoError], details: dict[str, Any]) -> QdoError:
    return kind(**details)


def _one_line(kind: type[QdoError]) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


class UsageError(QdoError):
    """{reason}"""

    exit_code = 2


class RejectedError(QdoError):
    """{reason}"""

    exit_code = 5


class PartialFailureError(QdoError):
    """{done} of {total} {what}; not: {rest}"""

    exit_code = 4


class NotFoundError(QdoError):
    """{what} {name!r} does not exist"""

    exit_code = 6


class SettingsError(UsageError):
    """setting {name}: {reason}"""


class UnknownSettingError(SettingsError):
    """unknown setting {name!r} in {origin}{hint}; `qdo config` lists every setting"""


class SettingsSyntaxError(SettingsError):
    """{origin} must be TOML: {reason}"""


class JobImportError(UsageError):
    """cannot import {target!r}: {reason}; write MODULE:APP, or --app NAME --job
    MODULE:FUNCTION, and start in the folder that contains the module, or install it"""


class JobModuleError(JobImportError):
    """the module of {target!r} failed during import: {reason}; fix the module,
    or install what it needs"""


class NotSettledError(UsageError):
    """the app must {goal}, but {waiting}; {remedy}"""


class NoJobError(UsageError):
    """the app has no job for {waiting}; register a job whose glob matches, or expect this with
    without_job=[{globs}]"""


class PolicyError(UsageError):
    """{where}: {reason}"""


class QueueNameError(UsageError):
    """{name!r} cannot be a queue name: {reason}; use 1 to 200 characters without '/',
    control characters and emoji; '.', '..' and 'zookeeper' are reserved"""


class InputLineError(UsageError):
    """{where}: {reason}; {sent} messages before it were sent"""


class MessageTooLargeError(UsageError):
    """the body for queue {queue!r} must be at most {limit} bytes with this broker, got {size};
    store it elsewhere and send a reference"""


class BodyLimitError(MessageTooLargeError):
    """the body for queue {queue!r} must be at most {limit} bytes (setting max_body_bytes), got
    {size}; raise the setting, up to {most}, or store the body elsewhere and send a reference"""


class QueueLimitError(UsageError):
    """queue or pool {queue!r} cannot be created: the app has {limit} already (setting max_queues);
    raise max_queues, or delete queues with `qdo delete`"""


class CheckpointFileError(UsageError):
    """{where} is damaged: {reason}; nothing was changed; use another copy of the file"""


class CoordinatorAccountError(UsageError):
    """the coordinator {url} rejects {account}; correct coordinator_auth and the password in
    coordinator_password_file or QDO_COORDINATOR_PASSWORD, or add the account to the servers"""


class UnsupportedError(RejectedError):
    """{broker} cannot {what}: {remedy}"""


class BodyDecodeError(QdoError):
    """the body or the headers of message {id} in queue {queue!r} are not valid JSON: {reason}; a
    retry would fail again, so the message's policy ends it at once; send valid JSON"""


class LargeBodyError(BodyDecodeError):
    """the body of message {id} in queue {queue!r} must have at most {limit} bytes (setting
    max_body_bytes of its worker), got {size}, so the message's policy ends it at once; raise the
    setting, then retry the dead letter, or let its sender split it"""


class BodyTypeError(BodyDecodeError):
    """the body of message {id} in queue {queue!r} must fit {type}: {reason}; a retry would fail
    again, so the message's policy ends it at once; correct its sender, or the type, and then retry
    the dead letter"""


class UnknownKindError(BodyDecodeError):
    """message {id} in queue {queue!r} must have one of the kinds {known}, got {kind!r}; the
    message's policy ends it at once; deploy a job for this kind, then retry the dead letter"""


class BodyAuthenticationError(BodyDecodeError):
    """the body of a message in queue {queue!r} cannot be decrypted with key {key!r}: it was
    changed, or encrypted for another queue or app, so the message's policy ends it at once; find
    out which program wrote it"""


class ClearBodyError(BodyDecodeError):
    """the body of a message in queue {queue!r} is not encrypted, which require_encryption demands,
    so the message's policy ends it at once; encrypt it where it is sent"""


class KeyMissingError(RejectedError):
    """a message in queue {queue!r} is encrypted with key {key!r}, which {place} does not have; add
    the key to the file: the message waits for it"""


class UnreachableError(QdoError):
    """cannot reach {what}: {reason}"""

    exit_code = 3
    kind = FailureKind.UNREACHABLE


class CoordinatorUnreachableError(UnreachableError):
    """cannot reach the coordinator {url}: {reason}; check that it is running and that
    the address is correct"""


class CoordinatorDatabaseError(CoordinatorUnreachableError):
    """cannot use the coordinator {url}: {reason}"""


class CoordinatorTlsError(CoordinatorUnreachableError):
    """cannot connect to the coordinator {url} with TLS: {reason}; check that its port is the
    secure one, that both certificates are valid, and that coordinator_ca has issued its own"""


class DatabaseError(UnreachableError):
    """database {path}: {reason}"""


class BrokerMissingError(UnreachableError):
    """the broker's file {path} does not exist, and {why}, so messages are unknown; restore it, or
    name the true broker with --broker or --app MODULE:APP"""


class DatabaseCorruptError(DatabaseError):
    """database {path} is damaged or not an SQLite file ({reason}); qdo left it unchanged;
    restore a backup, or use another file"""


class NotAQdoDatabaseError(DatabaseError):
    """database {path} belongs to another program or has another purpose ({reason}); qdo left
    it unchanged; use another file"""


class DatabaseNewerError(DatabaseError):
    """database {path} has format {found}, but this version of qdo supports formats up to
    {known}; upgrade qdo, or use another file"""


class DatabaseFullError(DatabaseError):
    """database {path} cannot grow ({reason}), so nothing of this call was stored; free disk space,
    then repeat the command; running workers continue by themselves"""


class DatabaseBusyError(DatabaseError):
    """database {path} was locked by another process for {seconds:g} s; nothing from this call
    was stored; check whether a process that uses it is suspended, and send again"""


class DatabaseReplacedError(DatabaseError):
    """database {path} was removed or replaced while it was in use ({reason}); restore it
    and restart this process"""


class JobTimeoutError(QdoError):
    """job {job} was stopped: message {id} was not done after {seconds:g} s, its timeout_seconds"""


class JobCrashedError(QdoError):
    """the process of job {job} died while processing message {id}: {reason}"""


class WorkerCrashedError(QdoError):
    """{reason}"""


class PositionAheadError(RejectedError):
    """queue {queue!r} is not processed: its recorded position {time} is in the future, after its
    last message, so another program wrote it; move the queue to its true position with `qdo
    seek`"""


class StaleClaimError(QdoError):
    """queue {queue!r} is no longer owned under fence {fence}; its next owner resumes
    after the recorded `last`"""


class CorruptNodeError(RejectedError):
    """cannot read the node of queue {queue!r}: {reason}; repair it with `qdo seek`"""


class NodeRefusedError(RejectedError):
    """the coordinator does not allow this on the node {path} with {account}; use an account that
    may (coordinator_auth), or correct the ACL with `qdo admin acl apply`"""


class OpenTreeError(RejectedError):
    """{account} can change the node {path} without a role in the settings, and acl = "required"
    forbids that; stop all workers of the app, and run `qdo admin acl apply`"""


class QueueNotEmptyError(RejectedError):
    """queue {queue!r} is not empty (waiting: {waiting}, delayed: {delayed}, dead letters:
    {dead_letters}); process these messages first, or give --with-messages to delete them, too"""


class ShardStateError(RejectedError):
    """queue {queue!r} {state}; nothing was changed: {remedy}"""


class QueueOwnedError(QdoError):
    """queue {queue!r} still belongs to {owner}, which may be running a job of it; it is marked as
    deleted; run this again when the job has ended"""


class PartialSendError(PartialFailureError):
    """{done} of {total} messages were sent; not {rest}: {reason}; send these again"""


class OnlookerError(RejectedError):
    """this user may read the coordinator {coordinator}, but not write to it; use the account of a
    worker"""


class NotFailingError(RejectedError):
    """no message of queue {queue!r} fails or blocks it; nothing was changed; `qdo queues` shows
    which queues fail"""


class MessageNotFailingError(NotFailingError):
    """message {message} of queue {queue!r} is not failing: it waits, is done, or was retried;
    nothing was changed; `qdo ps QUEUE` and `qdo peek QUEUE` show its messages, and `qdo cancel`
    drops one that waits"""


class AlreadyDecidedError(NotFailingError):
    """message {message} of queue {queue!r} already has the decision {decision!r} of an operator;
    nothing was changed; the owner of the queue carries it out"""


class SharedNameError(UsageError):
    """the name of a {what} must have 1 to 200 characters without '/', control characters and
    emoji, got {name!r}: {reason}; choose another name"""


class DocumentValueError(UsageError):
    """document {name!r} must be JSON of at most {limit} bytes and 100 levels, got {found}; store
    a reference to a larger value, or split it"""


class SetFullError(UsageError):
    """documents {name!r} must have at most {documents} documents and {mebibytes} MiB, so no other
    one can be created; delete some, or use several sets"""


class DocumentConflictError(RejectedError):
    """document {name!r} must {expected} for this change, got {found}{writer}; read it again and
    repeat the change"""


class DocumentUnreadableError(RejectedError):
    """document {name!r} cannot be read: {reason}; write it again, or delete it with
    `qdo documents delete`"""


class StaleCopyError(UnreachableError):
    """the copy of {what} must be as new as the call within {seconds:g} s, but the coordinator did
    not respond; the last copy stays readable, try again later"""


class LockTimeoutError(RejectedError):
    """lock {name!r} must be free within {seconds:g} s, but another process holds it{holder}; wait
    longer, or see `qdo locks`"""


class LockLostError(RejectedError):
    """lock {name!r} is no longer certain to be held: the coordinator may have ended the session;
    stop the work that needs it, and acquire it again"""


class AuditRefusedError(RejectedError):
    """the command must leave an entry in the action log {path}, but {account} may not create one,
    so nothing was changed; use an account with the role operators (acl_operators), start a worker
    of this version, which creates the log, or correct its rights with `qdo admin acl apply`"""


class LimitNotFoundError(NotFoundError):
    """limit {name!r} does not exist{hint}; see `qdo limits list`"""


class LimitTimeoutError(RejectedError):
    """limit {name!r} must have a free permit within {seconds:g} s, but all of them are in use;
    wait longer, or see `qdo limits list`"""


class PermitLostError(RejectedError):
    """the permit of limit {name!r} is no longer certain to be held: the coordinator may have ended
    the session; stop the work that needs it, and acquire it again"""


class PausesUnreadableError(RejectedError):
    """the pauses of the fleet cannot be read: {reason}; remove all of them with
    `qdo resume --all --yes`"""


class PauseNotObeyedError(PartialFailureError):
    """pause {id} must be obeyed by every worker within {seconds:g} s, but {found} not yet:
    {names}; {consequence}"""


class SectionLostError(RejectedError):
    """the section of {queues} is over: {reason}; other jobs of these queues may run, so check what
    was done and repeat it in a new section"""


class RequestExistsError(RejectedError):
    """request {id!r} exists with another pool or body; ask with another id, or ask the same
    again"""


class RequestNotFoundError(NotFoundError):
    """request {id!r} does not exist: it has expired, the transaction that asked for it has not
    committed, or no request of this app had this id"""


class RequestStateError(RejectedError):
    """request {id!r} must be {expected} for this, but is {state}; nothing was changed"""


class RequestFailedError(QdoError):
    """request {id!r} of pool {pool!r} ended as {outcome}: {reason}"""


class RequestCancelledError(RequestFailedError):
    """request {id!r} of pool {pool!r} was cancelled: {reason}"""


class RequestTimeoutError(RejectedError):
    """request {id!r} must be over within {seconds:g} s, but is {state}; call result again, or
    cancel it"""


class LiveSettingsSizeError(UsageError):
    """live settings must have at most {limit} bytes, got {found}; merge policies, or keep data of
    the app in documents"""


class LiveSettingsUnreadableError(RejectedError):
    """the live settings cannot be read: {reason}; replace them with `qdo settings rollback` or
    `qdo settings apply`"""


class LiveSettingsReplacedError(RejectedError):
    """{who} has changed the live settings meanwhile, so nothing was changed; look at
    `qdo settings history` and repeat the command"""


class SettingsRefusedError(RejectedError):
    """every worker must accept the live settings, but {worker} refuses them, so nothing was
    changed: {reason}; correct them, or update that worker"""


class SettingsUnansweredError(PartialFailureError):
    """every worker must accept the live settings within {seconds:g} s, but {found} of {count} did
    not answer, so nothing was changed: {names}; these may be frozen, or have an older version of
    qdo (`qdo workers --all`). Repeat the command, or do not wait for them with --force"""


class ActionsFailedError(PartialFailureError):
    """action {action} must be done by {total}, but {count} did not do it: {names}; one that is
    unanswered may be stopped or frozen: `qdo workers` shows their state, and `qdo status` names
    those that were lost"""


class MoveRefusedError(RejectedError):
    """queue {queue!r} cannot be moved to {worker}: {reason}; `qdo workers` lists the workers and
    what they take"""


class MoveUnfinishedError(QdoError):
    """queue {queue!r} {state} after {seconds:g} s; {worker} gets it when its owner has finished its
    message, and the leader has assigned it; see `qdo ps` and `qdo status`"""


class HistoryUnreadableError(UnreachableError):
    """cannot read the history at {address}: {reason}; check the address, the rights of this user
    and the server"""


class UnreadError(UnreachableError):
    """{reason}; load the page again"""


class DashboardUnsafeError(UsageError):
    """the dashboard must {rule}; {remedy}"""


class WebhookRefusedError(RejectedError):
    """webhook {path} is refused: {reason}; answer its sender with the HTTP status {status}"""
