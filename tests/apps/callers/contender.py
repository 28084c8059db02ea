"""Takes a lock again and again; writes two lines while it has it.

They follow each other, unless another process had the lock in between.
"""

from __future__ import annotations

import os
import sys

from qdo import App

app = App("shop", coordinator=sys.argv[1], session_timeout_seconds=1)
said = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
while True:
    with app.lock("export") as held:
        for word in ("in", "out"):
            held.check()
            os.write(said, f"{word} {os.getpid()} {held.fence}\n".encode())
