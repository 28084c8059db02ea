"""Takes a lock again and again; writes two lines while it has it.

They follow each other, unless another process had the lock in between. A lock that is lost, because
the coordinator did not answer in time, is taken again.
"""

from __future__ import annotations

import contextlib
import os
import sys

import qdo
from qdo.errors import LockLostError

app = qdo.App("shop", coordinator=sys.argv[1], session_timeout_seconds=1)
said = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
while True:
    with contextlib.suppress(LockLostError), app.lock("export") as held:
        for word in ("in", "out"):
            held.check()
            os.write(said, f"{word} {os.getpid()} {held.fence}\n".encode())
