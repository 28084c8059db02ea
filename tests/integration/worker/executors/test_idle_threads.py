"""Job threads between two messages."""

from __future__ import annotations

from pathlib import Path

from tests.support.app_runs import AppRuns

APP = """
import qdo
from qdo.system.native import native_lock
from qdo.worker.executors import thread

app = qdo.App("desk")

class Lock:
    def __init__(self):
        self.lock = native_lock()
        self.release = self.lock.release

    def acquire(self, *given, **timeout):
        with open("waits", "a") as file:
            print(given, timeout, file=file)
        return self.lock.acquire(*given, **timeout)

thread.native_lock = Lock

@app.job("q", executor="thread")
def job(message, context):
    pass
"""


def test_threads_set_no_timer_for_each_message(local_runs: AppRuns, tmp_path: Path) -> None:
    """A wait with a timeout cost 4 us of the 35 us of a message."""
    local_runs.app.send_many([("q", number) for number in range(20)])
    assert local_runs.start(APP, "--burst").wait(60.0) == 0
    waits = (tmp_path / "waits").read_text().splitlines()
    assert len(waits) > 20
    assert set(waits) == {"() {}"}
