"""So many threads that take permits."""

from __future__ import annotations

import sys
import threading
import time

from qdo import App

app = App("shop", coordinator=sys.argv[1])


def call() -> None:
    while True:
        with app.limit("crm"):
            time.sleep(0.002)


for _ in range(int(sys.argv[2])):
    threading.Thread(target=call).start()
