"""Kill this process with kill -9 at a point of its code, once in a folder."""

from __future__ import annotations

import os
import signal
from typing import Any

point = os.environ.get("POINT", "")
nth = int(os.environ.get("NTH", "1"))
"""How often the process reaches the point until it dies."""
_reached = 0


def reach(name: str) -> None:
    """Die if this is the point, and the folder has a file `armed`, and no file `killed` yet."""
    global _reached
    if name == point and os.path.exists("armed"):
        _reached += 1
        if _reached == nth and not os.path.exists("killed"):
            os.close(os.open("killed", os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)


def around(kind: type, name: str, what: str) -> None:
    """Let a method reach the points before and after `what`."""
    inner = getattr(kind, name)

    def call(*args: Any, **named: Any) -> Any:
        reach("before-" + what)
        result = inner(*args, **named)
        reach("after-" + what)
        return result

    setattr(kind, name, call)
