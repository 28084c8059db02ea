"""The steps of a request: the requests for which its job asks, and whose results it reads.

The job of such a request is a workflow. It runs again from its beginning whenever its steps are
over. A step that is over returns its stored result, and a new step suspends the request, which then
has no owner and takes no place. The id of a step is the id of the request, the pool and a number,
so each run finds the steps of the runs before.

A run that asks for another step before it has passed all stored ones has taken another way than the
runs before. It ends without a new step, because both ways together would do half of each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

from qdo.brokers.request_store import MOST_STEPS
from qdo.brokers.requests import OVER, RequestRecord
from qdo.errors import UsageError
from qdo.outcomes import DeadLetter
from qdo.requests.calls import MAX_KEEP_SECONDS, RequestCalls, RequestTerms, terms_of
from qdo.sending.messages import Moment

# A step of a request, as its job describes it: (pool, body), or a dict.
Step = tuple[str, Any] | Mapping[str, Any]


class StepTerms(TypedDict, total=False):
    """The optional parameters of `Request.call`."""

    priority: int
    delay_seconds: float | None
    at: Moment | None
    deadline_seconds: float | None
    paused: bool
    kind: str | None


class Suspended(BaseException):
    """The job waits for its steps. This is not an Exception, so that no job handles it."""


class Steps:
    """The steps of one run of a request.

    :ivar waiting: the pools of the steps for which the run waits.
    """

    def __init__(self, app: RequestCalls, id: str) -> None:
        self.waiting: list[str] = []
        self._app = app
        self._id = id
        self._own: RequestRecord | None = None
        self._stored: dict[str, RequestRecord] = {}
        for record in app.broker.requests.records(of=id, limit=MOST_STEPS + 1):
            if record.id == id:
                self._own = record
            else:
                self._stored[record.id] = record
        self._reached: set[str] = set()
        self._numbers = Counter[str]()

    def ended(self, steps: Iterable[Step]) -> list[RequestRecord]:
        """Return the records of steps that are over; otherwise ask for them, and suspend."""
        terms = [self._terms_of(each) for each in steps]
        new = [each for each in terms if each.id not in self._stored]
        self._reached.update(str(each.id) for each in terms)
        if len(self._reached | self._stored.keys()) > MOST_STEPS:
            remedy = "let a step ask for a part of them"
            raise DeadLetter(f"a request must have at most {MOST_STEPS} steps; {remedy}")
        if new:
            self.check_way()
            self._app._ask(new, None, self._id, self._deadline())
        stored = [self._stored.get(str(each.id)) for each in terms]
        found = [each for each in stored if each is not None and each.state == OVER]
        if len(found) < len(terms):
            self.waiting = [each.pool for each in new] + [
                each.pool for each in stored if each is not None and each.state != OVER
            ]
            raise Suspended
        return found

    def has(self, id: str) -> bool:
        return id in self._stored

    def check_way(self) -> None:
        """Raise DeadLetter if an earlier run asked for a step that this run has not reached."""
        missed = sorted(self._stored.keys() - self._reached)
        if missed:
            raise DeadLetter(
                f"this run has not reached {missed[0]!r}, for which an earlier run asked; repeat it"
                f" with `qdo requests retry {self._id} --from STEP`"
            )

    def _terms_of(self, step: Step) -> RequestTerms:
        if isinstance(step, tuple) and len(step) == 2:
            step = {"pool": step[0], "body": step[1]}
        terms = terms_of(step)
        if terms.id is not None:
            raise UsageError(reason=f"a step has no id of its own, got {terms.id!r:.60}")
        self._numbers[terms.pool] += 1
        number = self._numbers[terms.pool]
        id = f"{self._id}/{terms.pool}" + (f"-{number}" if number > 1 else "")
        # A step is deleted with its request; until then no other request may replace it.
        return replace(terms, id=id, keep_seconds=MAX_KEEP_SECONDS)

    def _deadline(self) -> float:
        """Return the deadline of new steps: that of the request if it has passed.

        The leader cancels such a step, and its cancellation tells the job. Later steps undo others.
        """
        late = 0.0 if self._own is None else self._own.deadline
        told = any(
            each.outcome == "cancelled" and each.ended >= late for each in self._stored.values()
        )
        return 0.0 if told or late > time.time() else late
