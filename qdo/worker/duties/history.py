"""The duty "history": writes what the attempts of this worker came to, and what it owned."""

from __future__ import annotations

import json

import gevent

from qdo.fleet.protocol.audit_entries import AuditEntry
from qdo.history.recorder import MAX_KEPT, RecordedAction, Recorder
from qdo.history.writer import HistoryWriter
from qdo.settings.hosts import host_shown
from qdo.settings.settings import Settings
from qdo.worker.duties.runner import Duty


class HistoryDuty(Duty):
    """Runs the thread that writes the history, until the last message of the worker has ended.

    :param app: name of the app.
    :raises SettingsError: a library is missing.
    """

    name = "history"
    ends_at_drain = False

    def __init__(self, settings: Settings, app: str, recorder: Recorder) -> None:
        self._writer = HistoryWriter(settings.history, app, recorder, host=host_shown(settings))

    def run(self) -> None:
        self._writer.start()
        try:
            while True:
                gevent.sleep(3600.0)
        finally:
            self._writer.close()


def keep_action(recorder: Recorder, entry: AuditEntry) -> bool:
    """Let an entry of the action log be stored; return whether there was room for it."""
    if len(recorder.actions) >= MAX_KEPT:
        return False
    before, after = (
        None if values is None else json.dumps(dict(values))
        for values in (entry.before, entry.after)
    )
    recorder.actions.append(
        RecordedAction(
            entry.id,
            entry.at,
            entry.by,
            entry.account,
            entry.command,
            entry.target,
            before,
            after,
            entry.reason,
        )
    )
    return True
