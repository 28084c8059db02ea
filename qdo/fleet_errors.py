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


class LimitNotFoundError(QdoError):
    """limit {name!r} does not exist{hint}; see `qdo limits list`"""

    exit_code = 6


# --- holds -----------------------------------------------------------------------


class HoldsUnreadableError(QdoError):
    """the holds of the fleet cannot be read: {reason}; remove all of them with
    `qdo resume --all`"""

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
