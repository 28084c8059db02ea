"""Errors of what the processes of an app share beside queues; see `qdo.errors`."""

from __future__ import annotations

from qdo.errors import QdoError, UnreachableError, UsageError


class SharedNameError(UsageError):
    """the name of a {what} must have 1 to 200 characters without '/', control characters and
    emoji, got {name!r}: {reason}; choose another name"""


# --- documents -------------------------------------------------------------------


class DocumentValueError(UsageError):
    """document {name!r} must be JSON of at most {limit} bytes and 100 levels, got {found}; store
    a reference to a larger value, or split it"""


class SetFullError(UsageError):
    """documents {name!r} must have at most {documents} documents and {mebibytes} MiB, so no other
    one can be created; delete some, or use several sets"""


class DocumentConflictError(QdoError):
    """document {name!r} must {expected} for this change, got {found}{writer}; read it again and
    repeat the change"""

    exit_code = 5


class DocumentUnreadableError(QdoError):
    """document {name!r} cannot be read: {reason}; write it again, or delete it with
    `qdo documents delete`"""

    exit_code = 5


class StaleCopyError(UnreachableError):
    """the copy of {what} must be as new as the call within {seconds:g} s, but the coordinator did
    not respond; the last copy stays readable, try again later"""


# --- locks -----------------------------------------------------------------------


class LockTimeoutError(QdoError):
    """lock {name!r} must be free within {seconds:g} s, but another process holds it{holder}; wait
    longer, or see `qdo locks`"""

    exit_code = 5


class LockLostError(QdoError):
    """lock {name!r} is no longer certain to be held: the coordinator may have ended the session;
    stop the work that needs it, and acquire it again"""

    exit_code = 5


# --- the action log --------------------------------------------------------------


class AuditRefusedError(QdoError):
    """the command must leave an entry in the action log {path}, but {account} may not create one,
    so nothing was changed; use an account with the role operators (acl_operators), start a worker
    of this version, which creates the log, or correct its rights with `qdo acl apply`"""

    exit_code = 5


# --- limits ----------------------------------------------------------------------


class LimitValueError(UsageError):
    """{value} of limit {name!r} must {needs}, got {found!r}; see `qdo limits set --help`"""


class LimitTermsError(UsageError):
    """limit {name!r} must have {needs}; {remedy}"""


class LimitNotFoundError(QdoError):
    """limit {name!r} does not exist{hint}; see `qdo limits list`"""

    exit_code = 6


class LimitTimeoutError(QdoError):
    """limit {name!r} must have a free permit within {seconds:g} s, but all of them are in use;
    wait longer, or see `qdo limits list`"""

    exit_code = 5


class LimitUnusableError(QdoError):
    """limit {name!r} cannot be used: {reason}; see `qdo limits list`"""

    exit_code = 5


class PermitLostError(QdoError):
    """the permit of limit {name!r} is no longer certain to be held: the coordinator may have ended
    the session; stop the work that needs it, and acquire it again"""

    exit_code = 5


# --- holds -----------------------------------------------------------------------


class HoldsUnreadableError(QdoError):
    """the holds of the fleet cannot be read: {reason}; remove all of them with
    `qdo resume --all --yes`"""

    exit_code = 5


class TooManyHoldsError(QdoError):
    """holds must be at most {limit} with globs of {characters} characters together; end some of
    those that `qdo holds` lists"""

    exit_code = 5


class HoldNotObeyedError(QdoError):
    """hold {id} must be obeyed by every worker within {seconds:g} s, but {found} not yet:
    {names}; {consequence}"""

    exit_code = 4


class SectionLostError(QdoError):
    """the section of {queues} is over: {reason}; other jobs of these queues may run, so check what
    was done and repeat it in a new section"""

    exit_code = 5


# --- live settings ---------------------------------------------------------------


class LiveSettingsSizeError(UsageError):
    """live settings must have at most {limit} bytes, got {found}; merge policies, or keep data of
    the app in documents"""


class LiveSettingsUnreadableError(QdoError):
    """the live settings cannot be read: {reason}; replace them with `qdo settings rollback` or
    `qdo settings apply`"""

    exit_code = 5


class LiveSettingsReplacedError(QdoError):
    """{who} has changed the live settings meanwhile, so nothing was changed; look at
    `qdo settings history` and repeat the command"""

    exit_code = 5


class SettingsRefusedError(QdoError):
    """every worker must accept the live settings, but {worker} refuses them, so nothing was
    changed: {reason}; correct them, or update that worker"""

    exit_code = 5


class SettingsUnansweredError(QdoError):
    """every worker must accept the live settings within {seconds:g} s, but {found} of {count} did
    not answer, so nothing was changed: {names}; these may be frozen, or have an older version of
    qdo (`qdo components`). Repeat the command, or do not wait for them with --force"""

    exit_code = 4


# --- versions in a fleet ---------------------------------------------------------


class OldProgramError(QdoError):
    """this version of qdo must have the format level {needed} of the app, got {level} (qdo
    {version}): it would misread what newer workers have written; install their version, which
    `qdo components` lists"""

    exit_code = 5


class OldFleetError(QdoError):
    """every worker must have format level {level} for {what}, but {name} has {version}, which
    would ignore it; update that worker, and repeat the command"""

    exit_code = 5


# --- actions ---------------------------------------------------------------------


class ActionsFailedError(QdoError):
    """action {action} must be done by {total}, but {count} did not do it: {names}; one that is
    unanswered may be stopped or frozen: `qdo workers` shows their state, and `qdo status` names
    those that were lost"""

    exit_code = 4


class MoveRefusedError(QdoError):
    """queue {queue!r} cannot be moved to {worker}: {reason}; `qdo workers` lists the workers and
    what they take"""

    exit_code = 5


class MoveUnfinishedError(QdoError):
    """queue {queue!r} {state} after {seconds:g} s; {worker} gets it when its owner has finished its
    message, and the leader has assigned it; see `qdo ps` and `qdo status`"""


class HistoryUnreadableError(UnreachableError):
    """cannot read the history at {address}: {reason}; check the address, the rights of this user
    and the server"""


# --- dashboard -------------------------------------------------------------------


class SlowReadError(UnreachableError):
    """coordinator or broker did not answer within {seconds:g} s; load the page again"""


class UnreadError(UnreachableError):
    """the dashboard has not read the app yet: {reason}; load the page again"""


class DashboardUnsafeError(UsageError):
    """the dashboard must {rule}; {remedy}"""
