"""Holds a lock or a permit, says when it is lost, and takes it again."""

from __future__ import annotations

import sys
import time
from functools import partial

from qdo import App
from qdo.errors import LockLostError, PermitLostError

app = App("shop", coordinator=sys.argv[1], session_timeout_seconds=3)
take = partial(app.lock, "export") if sys.argv[2] == "lock" else partial(app.limit, "crm")
with take() as held:
    print("held", flush=True)
    try:
        while True:
            held.check()
            time.sleep(0.001)
    except (LockLostError, PermitLostError):
        print("lost", flush=True)
with take() as held:
    held.check()
    print("again", flush=True)
