"""Making the requests of a shard poller, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable

from qdo.aws_errors import PositionTrimmedError
from qdo.brokers.aws.errors import (
    BOTO_ERRORS,
    code_of,
    is_not_found,
    is_throttling,
    is_transient,
    translation,
)
from qdo.brokers.catalog import Backlog
from qdo.brokers.kinesis.api import KinesisApi
from qdo.brokers.kinesis.clock_skew import SKEW_SECONDS
from qdo.brokers.kinesis.positions import CHILD_START, POSITIONS, sequence_of, time_in
from qdo.brokers.kinesis.requests import (
    GetIterator,
    GetRecords,
    PositionTrimmed,
    RetentionPeriod,
    Taken,
)
from qdo.brokers.kinesis.shard_poller import ShardPoller
from qdo.errors import QdoError
from qdo.positions import format_position, position_of_time

log = logging.getLogger(__name__)

PATIENCE = 3
"""Transient failures in a row that are only logged, not raised."""

_INVALID = "InvalidArgumentException"
_EXPIRED = "ExpiredIteratorException"
LEAST_RETENTION_SECONDS = 86_400.0
"""No stream keeps its records for less."""


class ShardReader:
    """Makes the requests of a `ShardPoller` and handles their failures.

    :param hash_keys: of the shard. If None, which means unknown, messages that belong to other
        shards are kept.
    :param trimmed: what to do if the position is gone. ``stop``: raise an error. ``oldest``:
        continue with the oldest record. ``look``: the same without logging, for callers that
        process nothing.
    :param is_listed: returns whether the stream still has the shard.
    :ivar failure: the error of the latest request, None if it succeeded.
    :ivar gap: the error for the position, if its record is gone; also without ``stop``.
    """

    def __init__(
        self,
        source: KinesisApi,
        shard: str,
        hash_keys: tuple[int, int] | None,
        poll: ShardPoller,
        trimmed: str,
        is_listed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._api = source
        self._shard = shard
        self._hash_keys = hash_keys
        self.poll = poll
        self._trimmed = trimmed
        self._is_listed = is_listed
        self.failure: QdoError | None = None
        self.gap: PositionTrimmedError | None = None

    def step(self, request: GetIterator | GetRecords, now: float) -> list[Taken]:
        """Make one request of the poller; return the messages received.

        :param now: Unix time.
        :raises PositionTrimmedError: the record to resume after is gone.
        :raises QdoError: a failure that is permanent, or that repeated too often.
        """
        self.failure = None
        try:
            if isinstance(request, GetIterator):
                self.poll.iterator_received(self._api.seek(self._shard, request))
                return []
            return self.poll.records_received(self._api.read(request, self._hash_keys), now)
        except PositionTrimmed:
            self._position_trimmed(now)
        except BOTO_ERRORS as error:
            self._failed(error, request, now)
        return []

    def backlog(self, oldest: int | None, now: float) -> Backlog:
        """Return the backlog of the shard, as far as it is known.

        The head is the present time at Kinesis, whose clock dates the messages. A later head would
        include messages that have not arrived yet.

        :param oldest: position of the oldest waiting message that was read.
        :param now: Unix time.
        """
        behind = self.poll.behind_seconds(now, oldest)
        empty = oldest is None and (self.poll.ended or self.poll.tip.reached)
        head = position_of_time(now - self._api.ahead_seconds)
        return Backlog(
            0 if empty else 1,
            oldest,
            head,
            approximate=True,
            behind_seconds=behind,
            retention_seconds=self._retention_seconds(behind),
        )

    def _retention_seconds(self, behind: float | None) -> float | None:
        """Return the stream's retention, if it may matter to messages of this age."""
        if behind is None or behind < LEAST_RETENTION_SECONDS / 2:
            return None
        try:
            return self._api.retention().seconds
        except QdoError as error:
            log.debug("the retention of the stream cannot be read: %s", error)
            return None

    def _failed(self, error: Exception, request: GetIterator | GetRecords, now: float) -> None:
        address = self._api.address
        found = translation(error, address.place, "shard", f"{address.stream}/{self._shard}")
        if code_of(error) == _EXPIRED:
            log.info("queue %s: the shard iterator expired; requesting a new one", self._shard)
            self.poll.iterator_expired()
        elif code_of(error) == _INVALID and isinstance(request, GetIterator) and request.sequence:
            self._position_trimmed(now)
        elif code_of(error) == _INVALID and _has_time(request) and self.poll.timestamp_rejected():
            log.warning(
                "queue %s: the clock of this machine is ahead of the clock of Kinesis; reading"
                " from a time %g minutes earlier. Correct the clock",
                self._shard,
                SKEW_SECONDS / 60,
            )
        elif is_throttling(error):
            self.failure = found
            pause = self.poll.request_throttled(now)
            # An occasional one is harmless: another process read the shard, such as a CLI command.
            level = logging.WARNING if self.poll.consecutive_errors >= PATIENCE else logging.INFO
            log.log(level, "queue %s: throttled by Kinesis; retrying in %.1f s", self._shard, pause)
        else:
            pause = self.poll.request_failed(now)
            if is_not_found(error) and not self._is_listed():
                self.expired()
                return
            self.failure = found
            if not is_transient(error) or self.poll.failures > PATIENCE:
                raise found from error
            log.warning("queue %s: %s; retrying in %.1f s", self._shard, found, pause)

    def _position_trimmed(self, now: float) -> None:
        retention = self._api.retention()
        poll = self.poll
        if poll.proves_complete(now, retention):
            log.info(
                "queue %s: its last record was deleted because of its age; no message was missed",
                self._shard,
            )
            poll.resume_at_oldest()
            return
        self.gap = error = self._trimmed_error(retention)
        if self._trimmed == "stop":
            poll.request_failed(now)
            raise error
        if self._trimmed == "oldest":
            log.warning("%s: continuing with the oldest record", error)
        poll.resume_at_oldest()

    def expired(self) -> None:
        """Finish the shard, which is gone with all its records.

        If the position is the seek target "oldest", no message is left to read.

        :raises PositionTrimmedError: the shard was not processed to its end.
        """
        poll = self.poll
        if poll.ended:
            return
        sought_oldest = poll.after == POSITIONS.earliest
        if self._trimmed == "stop" and not sought_oldest:
            raise self._trimmed_error(self._api.retention())
        if self._trimmed != "look":
            log.warning("queue %s: the shard has expired; the queue ends here", self._shard)
        poll.finish()

    def _trimmed_error(self, retention: RetentionPeriod) -> PositionTrimmedError:
        after = self.poll.after
        return PositionTrimmedError(
            queue=self._shard,
            position=sequence_of(after),
            time=format_position(time_in(after)) if after > CHILD_START else "never",
            stream=self._api.address.stream,
            hours=f"{retention.seconds / 3600:g}",
        )


def _has_time(request: GetIterator | GetRecords) -> bool:
    return isinstance(request, GetIterator) and request.time is not None
