"""Which errors are stored and logged with a traceback."""

from __future__ import annotations

import logging

from qdo.outcomes import Outcome
from qdo.text import describe_traceback

_log = logging.getLogger(__name__)


def own_traceback(error: BaseException) -> str:
    """Return the traceback of an error; nothing for an error that was never raised."""
    raised = error.__traceback__ is not None or error.__cause__ is not None
    return describe_traceback(error) if raised else ""


def traceback_for_log(error: BaseException | None, important: bool = True) -> BaseException | None:
    """Return an error whose traceback belongs into the log, None if it does not.

    A message is logged with it at its first failure and at its last, and each time at level debug.
    The traceback of an outcome that the job chose says nothing, unless it has a cause.
    """
    if error is None or not (important or _log.isEnabledFor(logging.DEBUG)):
        return None
    chosen = isinstance(error, Outcome) and error.__cause__ is None
    return None if chosen or error.__traceback__ is None else error
