"""Where a job runs, behind one interface."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, TypeAlias

from qdo.message import Message

JobCall: TypeAlias = Callable[[Message, Any], Any]
"""A job as the pipeline calls it: message and context in; what it returns is ignored, what
it raises says how the attempt ended."""


class Executor(abc.ABC):
    """Runs jobs: in the calling greenlet, in threads, in processes."""

    @abc.abstractmethod
    def bind(self, function: JobCall) -> JobCall:
        """Return what the pipeline calls for every message.

        The call returns when the job has ended and raises what the job raised. It may let
        other greenlets run meanwhile. Bound once per job and worker, not per message.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End what was started for running jobs; no call is made after it."""
