"""Threads that take permits, and write into a database how many processes have one at once."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time

from qdo import App
from qdo.errors import PermitLostError

app = App("shop", coordinator=sys.argv[1], session_timeout_seconds=1)


def call() -> None:
    db = sqlite3.connect(sys.argv[2], timeout=30, isolation_level=None)
    me = f"{os.getpid()} {threading.get_ident()}"
    while True:
        with app.limit("crm") as held:
            db.execute("BEGIN IMMEDIATE")
            try:
                held.check()
            except PermitLostError:
                db.execute("ROLLBACK")
                continue
            db.execute("INSERT INTO busy VALUES (?, ?)", (os.getpid(), me))
            rows = db.execute("SELECT pid FROM busy").fetchall()
            now = sum(os.path.exists(f"/proc/{pid}") for (pid,) in rows)
            db.execute("INSERT INTO seen VALUES (?, ?)", (now, os.getpid()))
            db.execute("COMMIT")
            time.sleep(0.005)
            db.execute("DELETE FROM busy WHERE who = ?", (me,))


for _ in range(3):
    threading.Thread(target=call).start()
