"""The requests of an app in a `MemoryStore`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from qdo.brokers.base import Outgoing
from qdo.brokers.requests import (
    EXPIRED_AT_ONCE,
    NO_CONTENT,
    OVER,
    PAUSED,
    RUNNING,
    TAKEN_BYTES,
    WAITING,
    Content,
    NewRequest,
    PoolCounts,
    RequestRecord,
    RequestStore,
    Take,
    Taken,
    TakenRequest,
    check_content,
    check_request_text,
    check_requests,
    is_resume,
    refuse_connection,
    storable_text,
)
from qdo.encoding import MAX_STORED_BODY_BYTES
from qdo.errors import RequestExistsError
from qdo.positions import time_of_position

_SLACK_SECONDS = 1e-5
"""Tolerance: a Unix time as a float has an error of a microsecond."""


@dataclass(slots=True)
class StoredRequest:
    """A record, and the data that records do not show."""

    asked: NewRequest
    record: RequestRecord
    crashed: bool = False

    def change(self, **values: Any) -> None:
        self.record = replace(self.record, **values)

    def wait(self, number: int, due: float, **values: Any) -> None:
        """Let it wait; `number` is that of its last take."""
        take = Take(self.record.id, "", number)
        self.change(state=WAITING, take=take, due=due, note=None, **values)

    def run(self, owner: str, now: float) -> TakenRequest:
        """Let a worker take it."""
        take = Take(self.record.id, owner, self.record.take.number + 1)
        self.change(state=RUNNING, take=take, started=now, note=None)
        of = self.record
        return TakenRequest(
            *(take, of.pool, of.content, of.priority, of.failed, self.crashed),
            *(of.error, of.asked, of.reply),
        )


@dataclass(slots=True)
class RequestContents:
    """The requests of an app, by id and from the oldest to the newest, and its listeners."""

    rows: dict[str, StoredRequest] = field(default_factory=dict)
    listeners: dict[object, Callable[[], None]] = field(default_factory=dict)


class MemoryRequests(RequestStore):
    """The requests of one app. Safe to use from several threads.

    :param send: stores messages with the lock held; returns a function that wakes the listeners
        of their queues, to be called without the lock.
    """

    def __init__(
        self,
        contents: RequestContents,
        lock: AbstractContextManager[Any],
        clock: Callable[[], int],
        send: Callable[[Sequence[Outgoing]], Callable[[], None]],
    ) -> None:
        self._rows = contents.rows
        self._listeners = contents.listeners
        self._lock = lock
        self._clock = clock
        self._send = send

    def ask(self, requests: Sequence[NewRequest], connection: Any = None) -> list[bool]:
        refuse_connection(connection)
        check_requests(requests, MAX_STORED_BODY_BYTES)
        with self._lock:
            now = self._now()
            added: dict[str, StoredRequest] = {}
            new = []
            for each in requests:
                row = self._rows.get(each.id) or added.get(each.id)
                new.append(row is None)
                if row is None:
                    added[each.id] = StoredRequest(each, _record(each, now))
                elif row.asked.digest != each.digest:
                    raise RequestExistsError(id=each.id)
            self._rows.update(added)
        self._wake()
        return new

    def take(self, owner: str, pool: str, places: int, running: Collection[str]) -> Taken:
        with self._lock:
            now = self._now()
            of_pool = [each for each in self._rows.values() if each.record.pool == pool]
            own = [each for each in of_pool if _owner(each) == owner]
            lost = [each for each in own if each.record.id not in running]
            waiting = [each for each in of_pool if each.record.state == WAITING]
            due = [each for each in waiting if each.record.due <= now + _SLACK_SECONDS]
            due.sort(key=lambda each: each.record.priority)
            chosen = _fitting([*lost, *due[:places]])
            taken = [each.run(owner, now) for each in chosen]
            marks = {each.record.id: each.record.mark for each in of_pool if _owner(each) == owner}
            dues = [each.record.due for each in waiting if each.record.state == WAITING]
        found = {id: mark for id, mark in marks.items() if mark is not None}
        return Taken(taken, found, min(dues, default=None))

    def note(
        self, take: Take, state: int, note: str | None, messages: Sequence[Outgoing] = ()
    ) -> bool:
        def change(row: StoredRequest) -> None:
            mark = row.record.mark
            kept = None if state == RUNNING and is_resume(mark) else mark
            row.change(state=state, note=storable_text(note), mark=kept)

        return self._change(take, (RUNNING, PAUSED), change, messages)

    def end(
        self,
        take: Take,
        outcome: str,
        result: Content | None = None,
        error: str | None = None,
        messages: Sequence[Outgoing] = (),
    ) -> bool:
        check_content(take.id, result, MAX_STORED_BODY_BYTES)

        def change(row: StoredRequest) -> None:
            row.change(
                state=OVER,
                outcome=outcome,
                result=result,
                error=storable_text(error),
                content=NO_CONTENT if outcome == "done" else row.record.content,
                mark=None,
                until=self._now() + row.asked.keep_seconds,
            )

        if self._change(take, (WAITING, RUNNING, PAUSED), change, messages):
            return True
        return self._change(take, (OVER,), lambda row: None)

    def put_back(self, take: Take, failed: int, due: float, error: str | None) -> bool:
        def change(row: StoredRequest) -> None:
            row.crashed = row.crashed and failed == row.record.failed
            kept = row.record.error if error is None else storable_text(error)
            row.wait(take.number, due, failed=failed, error=kept)

        return self._change(take, (RUNNING, PAUSED), change) and self._wake()

    def retry(self, id: str) -> bool:
        check_request_text("the id of a request", id)
        with self._lock:
            row = self._rows.get(id)
            if row is None or row.record.state != OVER or row.record.outcome == "done":
                return False
            row.crashed = False
            number = row.record.take.number + 1
            row.wait(
                number, self._now(), failed=0, outcome=None, result=None, error=None, until=0.0
            )
        return self._wake()

    def mark(self, id: str, mark: str) -> bool:
        check_request_text("the id of a request", id)
        check_request_text("the mark of a request", mark)
        with self._lock:
            row = self._rows.get(id)
            if row is None or not _owner(row):
                return False
            row.change(mark=mark)
        return self._wake()

    def owners(self) -> list[str]:
        with self._lock:
            return sorted({_owner(each) for each in self._rows.values()} - {""})

    def give_back(self, owner: str) -> int:
        with self._lock:
            own = [each for each in self._rows.values() if _owner(each) == owner]
            for each in own:
                each.crashed = True
                failed = each.record.failed + 1
                each.wait(each.record.take.number, self._now(), failed=failed)
        self._wake()
        return len(own)

    def find(self, id: str, *, whole: bool = True) -> RequestRecord | None:
        check_request_text("the id of a request", id)
        with self._lock:
            row = self._rows.get(id)
            if row is None:
                return None
            return row.record if whole else _brief(row.record)

    def records(
        self, pool: str | None = None, states: Collection[int] = (), limit: int = 1000
    ) -> list[RequestRecord]:
        with self._lock:
            return [
                _brief(each)
                for each in (row.record for row in self._rows.values())
                if pool in (None, each.pool) and (not states or each.state in states)
            ][:limit]

    def pools(self) -> list[str]:
        return [pool for pool, each in self.counts().items() if each.waiting]

    def counts(self) -> dict[str, PoolCounts]:
        with self._lock:
            records = [each.record for each in self._rows.values() if each.record.state != OVER]
            now = self._now() + _SLACK_SECONDS
        numbers = Counter((each.pool, each.state) for each in records)
        since: dict[str, list[float]] = {each.pool: [] for each in records}
        for each in records:
            if each.state == WAITING and each.due <= now:
                since[each.pool].append(max(each.asked, each.due))
        return {
            pool: PoolCounts(
                numbers[pool, WAITING],
                numbers[pool, RUNNING],
                numbers[pool, PAUSED],
                min(times, default=None),
            )
            for pool, times in since.items()
        }

    def expire(self) -> int:
        with self._lock:
            now = self._now() + _SLACK_SECONDS
            over = [each.record for each in self._rows.values() if each.record.state == OVER]
            gone = [each.id for each in over if each.until <= now][:EXPIRED_AT_ONCE]
            for id in gone:
                del self._rows[id]
        return len(gone)

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        key = object()
        with self._lock:
            self._listeners[key] = wake

        def stop() -> None:
            with self._lock:
                self._listeners.pop(key, None)

        return stop

    def _now(self) -> float:
        return time_of_position(self._clock())

    def _change(
        self,
        take: Take,
        states: Collection[int],
        change: Callable[[StoredRequest], None],
        messages: Sequence[Outgoing] = (),
    ) -> bool:
        """Change a request in one of some states if the take is valid, and send messages."""
        with self._lock:
            row = self._rows.get(take.id)
            if row is None or row.record.take != take or row.record.state not in states:
                return False
            wake = self._send(messages)  # first: it raises for those that cannot be stored
            change(row)
        wake()
        return True

    def _wake(self) -> bool:
        with self._lock:
            listeners = list(self._listeners.values())
        for wake in listeners:
            wake()
        return True


def _brief(record: RequestRecord) -> RequestRecord:
    return replace(record, content=NO_CONTENT, result=None)


def _owner(row: StoredRequest) -> str:
    """Return the worker that has a request, "" if it waits or is over."""
    return "" if row.record.state == OVER else row.record.take.owner


def _record(request: NewRequest, now: float) -> RequestRecord:
    return RequestRecord(
        take=Take(request.id, "", 0),
        pool=request.pool,
        state=WAITING,
        content=request.content,
        priority=request.priority,
        asked=now,
        due=request.due,
        failed=0,
        started=0.0,
        note=None,
        error=None,
        mark=None,
        reply=request.reply,
        outcome=None,
        result=None,
        until=0.0,
    )


def _fitting(rows: Sequence[StoredRequest]) -> list[StoredRequest]:
    """Return the first rows, up to the one whose body reaches `TAKEN_BYTES`."""
    chosen: list[StoredRequest] = []
    size = 0
    for each in rows:
        if size >= TAKEN_BYTES:
            break
        chosen.append(each)
        size += len(each.record.content[0])
    return chosen
