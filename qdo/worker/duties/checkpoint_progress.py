"""The duty "progress": checkpoints long turns while they run."""

from __future__ import annotations

import gevent

from qdo.worker.duties.runner import Duty
from qdo.worker.engine.dispatcher import Dispatcher


class CheckpointProgress(Duty):
    """Checkpoints the progress of long turns every `seconds`."""

    name = "progress"
    ends_at_drain = False

    def __init__(self, dispatcher: Dispatcher, seconds: float) -> None:
        self._dispatcher = dispatcher
        self._seconds = seconds

    def run(self) -> None:
        while True:
            gevent.sleep(self._seconds)
            self._dispatcher.note_progress()
