"""An app whose worker writes down each tenth of a second how many messages it has run."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import qdo

app = qdo.App("bench")
_done = [0]


@app.job()
def count(message: Any, context: Any) -> None:
    sum(range(5000))  # 70 us: a job that does something, and a backlog that lasts
    if not _done[0]:  # other processes import the app, too
        threading.Thread(target=_write, daemon=True).start()
    _done[0] += 1


def _write() -> None:
    path = Path(os.environ["TESTS_COUNTED"])
    while True:
        time.sleep(0.1)
        path.write_text(f"{time.time()} {_done[0]}")
