"""What operators intend and what they are told, in one file that outlives them.

A line is written and flushed to the disk before a request and after its answer. So after a SIGKILL
the rules know every request, and which of them were answered.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIMELESS = float("inf")


@dataclass
class OperatorRequest:
    """A request of an operator.

    :ivar id: the reason of its entries in the action log.
    :ivar what: such as "seek".
    :ivar args: what was asked for.
    :ivar asked: when, on `time.monotonic`, which all processes share.
    :ivar told: when it was answered; infinite if it never was.
    :ivar answer: the answer; None without one, and after an error.
    :ivar error: the error that was the answer.
    """

    id: str
    what: str
    queue: str
    args: dict[str, Any]
    asked: float
    told: float = TIMELESS
    answer: dict[str, Any] | None = None
    error: str = ""


@dataclass
class RequestLedger:
    """Writes the requests of one process."""

    path: Path
    _count: int = 0
    _file: int = field(init=False)

    def __post_init__(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def asks(self, what: str, queue: str, **args: Any) -> str:
        """Write down a request before it is made; return its id."""
        self._count += 1
        id = f"soak-{os.getpid()}-{self._count}"
        self._write(id=id, what=what, queue=queue, args=args)
        return id

    def told(self, id: str, **answer: Any) -> None:
        """Write down the answer."""
        self._write(id=id, answer=answer)

    def failed(self, id: str, error: BaseException) -> None:
        """Write down an error."""
        self._write(id=id, error=f"{type(error).__name__}: {error}")

    def _write(self, **values: Any) -> None:
        line = json.dumps({"at": time.monotonic(), **values}) + "\n"
        os.write(self._file, line.encode())
        os.fsync(self._file)


def read_ledger(lines: Iterable[str]) -> list[OperatorRequest]:
    """Return the requests in their order."""
    found: dict[str, OperatorRequest] = {}
    for line in lines:
        value = json.loads(line)
        id, at = value["id"], value["at"]
        if "what" in value:
            found[id] = OperatorRequest(id, value["what"], value["queue"], value["args"], at)
        else:
            each = found[id]
            each.told, each.answer = at, value.get("answer")
            each.error = value.get("error", "")
    return list(found.values())
