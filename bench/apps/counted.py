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
    _done[0] += 1


def _write() -> None:
    path = Path(os.environ["QDO_TEST_COUNTED"])
    while True:
        time.sleep(0.1)
        path.write_text(f"{time.time()} {_done[0]}")


if "QDO_TEST_COUNTED" in os.environ:
    threading.Thread(target=_write, daemon=True).start()
