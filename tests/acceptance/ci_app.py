"""The example `ci` as its soak runs it: with a timer, and with a journal of all runs.

The journal has the lines of `app`. A run of a request has its id in place of a queue and its take
in place of a fence, and a run for a shard has ``STREAM|KEY`` in place of its queue. A line of kind
``H`` is the begin of a section, and ``R`` its end, if it was still valid.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import qdo
from tests.support.paths import ROOT

sys.path.append(str(ROOT / "docs" / "examples"))
import ci

TICK_SECONDS = 5
app = ci.app
app.timer("tick", every_seconds=TICK_SECONDS, queue="tick")
_journal = os.open(os.environ.get("SOAK_JOURNAL", os.devnull), os.O_WRONLY | os.O_APPEND)
_exclusive = app.exclusive


def _note(kind: str, *run: object) -> None:
    os.write(_journal, f"{kind} {' '.join(map(str, run))} {time.monotonic()}\n".encode())


@app.job("tick")
def tick(message: qdo.Message, context: Any) -> None:
    """Do nothing."""


@app.middleware
def noted(call_next: Callable[..., None], message: qdo.Message, context: Any) -> None:
    """Note start and end of a run with the process that keeps its session."""
    if message.queue == "build":
        take = message.headers["qdo-take"].partition(" ")[0]
        told = Path(f"{os.environ['SOAK_BUILDS']}.{os.getpid()}")  # the command's parent
        told.write_text(f"{message.id} {take}")
        run: tuple[object, ...] = (message.id, 0, take, message.attempt, os.getppid())
    else:
        name = f"{message.stream}|{message.key}" if message.stream else message.queue
        run = (name, message.position, message.fence, message.attempt, os.getpid())
    _note("S", *run)
    try:
        call_next(message, context)
    except BaseException:
        _note("X", *run)
        raise
    _note("E", *run)


@contextlib.contextmanager
def _noted_section(*queues: str, **terms: Any) -> Iterator[Any]:
    with _exclusive(*queues, **terms) as section:
        run = (section.fence, section.fence, section.fence, 1, os.getpid())
        _note("H", *run)
        yield section
        with contextlib.suppress(qdo.QdoError):
            time.sleep(0.2)  # the longer, the more could go wrong
            section.check()
            _note("R", *run)


app.exclusive = _noted_section  # type: ignore[method-assign]
