"""The filter that a worker announces: its settings, and the globs of its jobs."""

from __future__ import annotations

import logging

from qdo.app import App
from qdo.queues import EVERYTHING, MAX_GLOBS_CHARACTERS, QueueFilter
from qdo.settings.settings import Settings

_log = logging.getLogger(__name__)


def filter_of(app: App, settings: Settings) -> QueueFilter:
    """Return the filter of a worker: it takes the queues of its settings that have a job.

    If the globs of the jobs are too long to announce, it also takes queues without a job.
    """
    globs = sorted(job.queues for job in app.jobs)
    size = sum(map(len, globs))
    jobs = EVERYTHING.jobs if "*" in globs else tuple(globs)
    if size > MAX_GLOBS_CHARACTERS and jobs != EVERYTHING.jobs:
        _log.warning(
            "the globs of the jobs have %d characters, and a worker announces at most %d; queues"
            " without a job may be assigned to this worker, and wait; use fewer globs",
            size,
            MAX_GLOBS_CHARACTERS,
        )
        jobs = EVERYTHING.jobs
    return QueueFilter(settings.queues, settings.exclude, jobs)
