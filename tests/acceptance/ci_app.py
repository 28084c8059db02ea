"""The example `ci` as its soak runs it: with a timer, approvals, and a journal of all runs.

Each end of a build is approved: the decision about it writes a row and a message of the outbox in
the transaction of its state, and some of these transactions are rolled back. The job of the message
asks for an approval, which asks operators two questions in turn.

The journal has the lines of `app`. A run of a request has its id in place of a queue and its take
in place of a fence, and a run for a shard has ``STREAM|KEY`` in place of its queue. A line of kind
``H`` is the begin of a section, and ``R`` its end, if it was still valid.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import qdo
from qdo.outbox import Outbox
from qdo.state import KeyedState, SavedState
from tests.support.paths import ROOT

sys.path.append(str(ROOT / "docs" / "examples"))
import ci

TICK_SECONDS = 5
ROLLED_BACK = 0.05
"""Share of the transactions with a row that are rolled back."""
QUESTIONS = "deploy?", "announce?"
app = ci.app
app.timer("tick", every_seconds=TICK_SECONDS, queue="tick")
_journal = os.open(os.environ.get("SOAK_JOURNAL", os.devnull), os.O_WRONLY | os.O_APPEND)
_exclusive = app.exclusive


def _note(kind: str, *run: object) -> None:
    os.write(_journal, f"{kind} {' '.join(map(str, run))} {time.monotonic()}\n".encode())


many = qdo.Policy(attempts=1000, backoff_seconds=0.1)
outbox = Outbox(app, create_engine(ci.DATABASE, pool_pre_ping=True))


class EndingState(KeyedState):
    """A state whose transaction writes a row, and a message, for each new end of a build."""

    @contextlib.contextmanager
    def of(
        self, session: Session, message: qdo.Message, key: str | None = None
    ) -> Iterator[SavedState]:
        with super().of(session, message, key) as state:
            yield state
            if state.new and message.body["do"] == "end":
                row = {"project": message.key, "number": message.body["number"]}
                insert = "INSERT INTO ended (project, number) VALUES (:project, :number)"
                session.execute(text(insert), row)
                outbox.send(session, "ended", row, message.key)
                if random.random() < ROLLED_BACK:
                    raise ValueError("this transaction is rolled back")


ci.states = EndingState()


@app.job("ended", order="key", policy=ci.strict)
def ended(message: qdo.Message, context: Any) -> None:
    """Ask for an approval."""
    id = f"{message.key}/{message.body['number']}/approval"
    app.request("approval", message.body, id=id, then="approved", key=message.key)


@app.job("approval", pool=True, executor="thread", concurrency=10, policy=many)
def approve(request: qdo.Request, context: Any) -> dict[str, Any]:
    """Ask operators two questions; return each with its answer."""
    questions = [f"{request.id} {request.take} {each}" for each in QUESTIONS]
    return {"take": request.take, "answers": [[each, request.pause(each)] for each in questions]}


@app.job("approved")
@app.job("tick")
def tick(message: qdo.Message, context: Any) -> None:
    """Do nothing."""


@app.middleware
def noted(call_next: Callable[..., None], message: qdo.Message, context: Any) -> None:
    """Note start and end of a run with the process that keeps its session."""
    if message.queue in ("build", "approval"):
        take, pid = message.headers["qdo-take"].partition(" ")[0], os.getpid()
        if message.queue == "build":
            told = Path(f"{os.environ['SOAK_BUILDS']}.{pid}")  # the command's parent
            told.write_text(f"{message.id} {take}")
            pid = os.getppid()
        run: tuple[object, ...] = (message.id, 0, take, message.attempt, pid)
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
