"""The messages and batches that jobs get.

A position is a UUID version 1 timestamp (RFC 4122, section 4.1.4), which is the number of 100 ns
intervals since 1582-10-15, as a Python int. qdo prints a position as a decimal string.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic

from qdo.encoding import DUE, ID, KIND, SENT, stored_time
from qdo.positions import IdScheme, message_id, time_of_position
from qdo.system.clock import clock
from qdo.system.processes import SIGN

URGENT = 0
HIGH = 3
NORMAL = 5
# Priorities of messages, from 0 to 9. `NORMAL` is the default.
LOW = 7
# The header with a priority other than `NORMAL`.
PRIORITY = "qdo-priority"
# The share of its timeout after which a job should stop.
STOPPING_SHARE = 0.9
_NO_HEADERS: Mapping[str, str] = {}

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # The type of a message's body. Python's own TypeVar has defaults from 3.13 on.
    Body = TypeVar("Body", default=Any)
    # The type of a value that a method returns.
    Value = TypeVar("Value", default=Any)
else:
    from typing import TypeVar

    Body = TypeVar("Body")
    Value = TypeVar("Value")


def priority_of(headers: Mapping[str, Any]) -> int:
    """Return the priority in headers, which another program may have written."""
    text = headers.get(PRIORITY)
    if isinstance(text, str) and len(text) == 1 and "0" <= text <= "9":
        return int(text)
    return NORMAL


@dataclass(frozen=True, slots=True)
class Origin:
    """The data that all messages of a queue share in a worker.

    :ivar app: the app's `Settings.scope`.
    :ivar stream: the stream of a shard; None for any other queue.
    :ivar ids: the source of ids and times (see `Broker.id_scheme`), or the id of one message.
    """

    app: str = ""
    stream: str | None = None
    ids: str | int | IdScheme = 0


UNKNOWN = Origin()


class Message(Generic[Body]):
    """One item of a queue, as delivered to a job.

    ``qdo.Message[OrderPlaced]`` is a message whose body has this type.

    :ivar body: the decoded JSON value, or bytes if the sender sent bytes.
    :ivar key: the sender's key, or None.
    :ivar headers: the sender's headers, a mapping of str to str.
    :ivar position: a number that increases within a queue: the UUIDv1 time of the message, or a
        broker-specific position (`qdo.positions`).
    :ivar attempt: 1 for the first run of the job for this message.
    :ivar fence: number of the claim of this attempt, which increases with every claim of the queue.
        A sink that rejects smaller fences rejects late writes.
    :ivar deadline: time on the worker's clock (CLOCK_BOOTTIME, seconds) by which the job
        must finish, or None.
    """

    body: Body
    _ends: list[bool]
    __slots__ = (
        "_ends",
        "_origin",
        "_registration",
        "_sends",
        "_stop_at",
        "attempt",
        "body",
        "deadline",
        "fence",
        "headers",
        "key",
        "position",
        "queue",
    )

    def __init__(
        self,
        queue: str,
        position: int,
        body: Body,
        key: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        fence: int = 0,
        attempt: int = 1,
        origin: Origin = UNKNOWN,
        id: str | int | IdScheme | None = None,
        deadline: float | None = None,
    ) -> None:
        self.queue = queue
        self.position = position
        self.body = body
        self.key = key
        self.headers = headers
        self.fence = fence
        self.attempt = attempt
        self._origin = origin if id is None else replace(origin, ids=id)
        self.deadline = deadline

    @property
    def id(self) -> str:
        """Unique id, from `send`: the id of the broker, or the UUIDv1 of the position.

        A delayed message keeps its id when it gets its position. A retried dead letter also keeps
        its id. The id is made on demand, because building a UUID takes longer than building the
        rest of a message.
        """
        ids = self._origin.ids
        if isinstance(ids, str):
            return ids
        stored = self.headers.get(ID)
        if stored and isinstance(stored, str):  # another program may write any value
            return stored
        if isinstance(ids, int):
            return message_id(self.position, ids)
        return ids.message_id(self.position, 0)

    @property
    def app(self) -> str:
        """Name of the app, after any namespace other than the default; "" outside workers."""
        return self._origin.app

    @property
    def stream(self) -> str | None:
        """The stream to which the queue belongs; None if the queue is not a shard."""
        return self._origin.stream

    @property
    def stable(self) -> bool:
        """Whether the message has the same `position` in every delivery.

        False with SQS, where the position is the time of receipt.
        """
        ids = self._origin.ids
        return isinstance(ids, (str, int)) or ids.stable

    def limit(self, seconds: float) -> None:
        """Set the deadline to `seconds` from now. Executors call this before the job runs."""
        now = clock()
        self.deadline = now + seconds
        self._stop_at = now + STOPPING_SHARE * seconds

    @property
    def stopping(self) -> bool:
        """Whether the job should stop now, if it can.

        True while the worker drains, once the queue is paused or must move to another worker, and
        after nine tenths of the job's `timeout_seconds`. Also true after the end of the worker's
        lease, because another worker may then run the message. A job that stops early must raise an
        exception, such as ``qdo.Retry(after=0, counts=False)``. If it returns, the message is done.
        """
        if SIGN.raised() or SIGN.claim_ended(self.queue, self.fence) or not self._leased():
            return True
        return self.deadline is not None and clock() >= getattr(self, "_stop_at", self.deadline)

    def _report_end(self) -> None:
        """Report that the end of the request is stored (see `requests.jobs.reporting`)."""
        getattr(self, "_ends", []).append(True)

    @property
    def _equal_sends(self) -> dict[str, int]:
        """The number of equal messages that this attempt has sent, by digest."""
        self._sends: dict[str, int] = getattr(self, "_sends", {})
        return self._sends

    def _copied(self, type: type[_AnyMessage]) -> _AnyMessage:
        """Return a copy of a type, for a job; middleware and hooks keep the original."""
        copy = object.__new__(type)
        # A copy of each slot would take 1.8 us instead of 1.3.
        Message.__init__(
            copy,
            self.queue,
            self.position,
            self.body,
            self.key,
            self.headers,
            self.fence,
            self.attempt,
            self._origin,
            deadline=self.deadline,
        )
        copy._sends = self._equal_sends  # or equal messages of both would have the same number
        for name in ("_ends", "_registration", "_stop_at"):
            if hasattr(self, name):
                setattr(copy, name, getattr(self, name))
        return copy

    def _with_body(self, body: Any) -> Message[Any]:
        """Return a copy with another body."""
        copy = self._copied(Message)
        copy.body = body
        return copy

    def _leased(self) -> bool:
        """Return whether the worker has kept its lease since the first call of this method."""
        # The lease of a later registration does not count, because the worker lost its queues
        # meanwhile.
        registration = SIGN.registration()
        self._registration = getattr(self, "_registration", registration)
        return self._registration == registration and SIGN.leased()

    @property
    def time(self) -> float:
        """Unix time in seconds at which the message was sent."""
        sent = stored_time(self.headers, SENT)
        if sent is not None:
            return sent
        ids = self._origin.ids
        if isinstance(ids, (str, int)):
            return time_of_position(self.position)
        return time_of_position(ids.to_time(self.position))

    @property
    def due(self) -> float | None:
        """Unix time in seconds until which the message was delayed; None without a delay."""
        return stored_time(self.headers, DUE)

    @property
    def kind(self) -> str | None:
        """The kind of message, by which a queue with several jobs chooses one; None without one."""
        kind = self.headers.get(KIND)
        return kind if isinstance(kind, str) else None  # another program may write any value

    @property
    def priority(self) -> int:
        """Priority from 0 to 9. Jobs with ``order="priority"`` run the smallest priority first."""
        return priority_of(self.headers)

    def __repr__(self) -> str:
        return f"<Message {self.id} of {self.queue!r}, attempt {self.attempt}>"


_AnyMessage = typing.TypeVar("_AnyMessage", bound=Message[Any])


class Batch(list[Message[Body]], Generic[Body]):
    """Consecutive messages of one queue, for a job that takes batches.

    The batch has the attributes that all its messages share. `id`, `position` and `attempt` are
    those of the first message.
    """

    # Whether a message may have headers.
    has_headers = False

    @property
    def queue(self) -> str:
        """Name of the queue of all messages."""
        return self[0].queue

    @property
    def id(self) -> str:
        """Id of the first message."""
        return self[0].id

    @property
    def position(self) -> int:
        """Position of the first message."""
        return self[0].position

    @property
    def attempt(self) -> int:
        """Attempt of the first message. Only a batch of one message has an attempt above 1."""
        return self[0].attempt

    @property
    def fence(self) -> int:
        """Number of the claim of this attempt."""
        return self[0].fence

    @property
    def deadline(self) -> float | None:
        """Time at which the job must have finished all messages, or None."""
        return self[0].deadline

    @property
    def stopping(self) -> bool:
        """Whether the job should stop now, if it can."""
        return self[0].stopping

    def _leased(self) -> bool:
        return self[0]._leased()

    @property
    def stable(self) -> bool:
        """Whether the messages have the same positions in every delivery."""
        return self[0].stable

    def limit(self, seconds: float) -> None:
        """Set the deadline of all messages to `seconds` from now."""
        for message in self:
            message.limit(seconds)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} messages{f' of {self.queue!r}' if self else ''}>"
