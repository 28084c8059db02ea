"""Sends messages to a stream. Each message goes to the shard of its key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from qdo.brokers.base import Broker, Outgoing
from qdo.brokers.streams import ShardMap, check_stream_name, first_shards
from qdo.encoding import is_utf8
from qdo.errors import UsageError
from qdo.message import Message
from qdo.sending.messages import (
    MAX_KEY,
    MessageOptions,
    NewMessage,
    TypeOf,
    build_outgoing,
    check_key,
    names_error,
)
from qdo.system.twins import in_thread, twin, warn_if_blocking

if TYPE_CHECKING:
    from qdo.fleet.owners import Owner
    from qdo.sending.sender import Sender

# Time for which a sender uses its copy of the map of shards. With an outdated copy, each send costs
# the broker a lookup.
MAP_SECONDS = 5.0


def check_stream_key(key: Any) -> None:
    check_key(key)
    if not key or not is_utf8(key):
        rule = f"text of 1 to {MAX_KEY} characters, without surrogates"
        raise UsageError(reason=f"the key of a message for a stream must be {rule}, got {key!r}")


def _outgoing(message: NewMessage, shards: ShardMap, type_of: TypeOf | None) -> Outgoing:
    """Return a checked message for the shard of its key."""
    check_stream_key(message.key)
    # First use the stream's name as the queue. Then the digest of ``once=`` is the same after a
    # split.
    shard = shards.queue_of(message.key or "")
    outgoing = build_outgoing(message, type_of and (lambda _, *rest: type_of(shard, *rest)))
    return replace(outgoing, queue=shard)


class Stream:
    """Queues that divide the range of keys. `App.stream` makes a stream.

    Messages of a key keep their order, even while `qdo streams split` and `merge` move keys to
    other queues. Any number of threads may use a stream.

    >>> users = app.stream("user", shards=4)
    >>> id = users.send("ada@example.org", {"op": "visit"})
    >>> users.queue("ada@example.org")
    'user.c0-'
    """

    def __init__(
        self, app: Sender, name: str, shards: int, owner: Callable[[str], Owner | None]
    ) -> None:
        self.name = check_stream_name(name)
        self._first = first_shards(name, shards)
        self._app = app
        self._owner = owner
        self._map: tuple[Broker, float, ShardMap] | None = None

    def send(
        self,
        key: str,
        body: Any,
        headers: Mapping[str, str] | None = None,
        *,
        connection: Any = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """Store one message for a key and return its id, like `App.send`.

        A deduplication key applies to messages with the same key, in any shard.

        :param key: 1 to 1000 characters. The job gets the key as `message.key`.
        :param options: `delay_seconds`, `at`, `dedup_key`, `dedup_seconds`, `after`, `once`,
            `priority` and `kind`, as in `App.send`.
        :raises UnsupportedError: the broker does not support streams.
        """
        warn_if_blocking(connection)
        message = self._message({"key": key, "body": body, "headers": headers, **options})
        outgoing = _outgoing(message, self._read(), self._app.type_of)
        return self._app._store([outgoing], connection)[0]

    def send_many(
        self,
        messages: Iterable[Mapping[str, Any] | tuple[Any, ...]],
        *,
        once: Message | None = None,
        connection: Any = None,
    ) -> list[str]:
        """Store many messages at once, all or none, and return their ids, like `App.send_many`.

        :param messages: tuples ``(key, body)`` or ``(key, body, headers)``, or dicts with the
            parameters of `send`. Messages with the same key keep their order.
        """
        warn_if_blocking(connection)
        return self._app._store(self._many(messages, once), connection)

    async def asend(
        self,
        key: str,
        body: Any,
        headers: Mapping[str, str] | None = None,
        *,
        connection: Any = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """Send like `send`, from a coroutine, without blocking its loop."""
        message = {"key": key, "body": body, "headers": headers, **options}
        return (await self.asend_many([message], connection=connection))[0]

    async def asend_many(
        self,
        messages: Iterable[Mapping[str, Any] | tuple[Any, ...]],
        *,
        once: Message | None = None,
        connection: Any = None,
    ) -> list[str]:
        """Send like `send_many`, from a coroutine (see `asend`)."""
        await in_thread(self._read)  # reads the map from the broker
        if connection is not None:
            return await self._app._within(
                connection, lambda plain: self.send_many(messages, once=once, connection=plain)
            )
        return await self._app._astore(self._many(messages, once))

    def queue(self, key: str) -> str:
        """Return the queue that now gets the messages of a key. Asks the broker."""
        warn_if_blocking()
        self._map = None
        return self._queue_of(key)

    aqueue = twin(queue)

    def _queue_of(self, key: Any) -> str:
        check_stream_key(key)
        return self._read().queue_of(key)

    def owner(self, key: str) -> Owner | None:
        """Return the worker that now owns the queue of a key, like `App.owner`."""
        warn_if_blocking()
        return self._owner(self.queue(key))

    aowner = twin(owner)

    def _read(self) -> ShardMap:
        """Return the map. Read an old map again. The first use creates the stream."""
        broker = self._app.broker
        now = time.monotonic()
        if self._map is None or self._map[0] is not broker or self._map[1] < now:
            streams = broker.streams
            if not (shards := streams.shards(self.name)):
                streams.add(self._first)
                shards = streams.shards(self.name)
            open_shards = ShardMap.of((each.low, each.queue) for each in shards if each.end is None)
            self._map = broker, now + MAP_SECONDS, open_shards
        return self._map[2]

    def _many(
        self, messages: Iterable[Mapping[str, Any] | tuple[Any, ...]], once: Message | None
    ) -> Iterator[Outgoing]:
        shards = self._read()
        for each in messages:
            if isinstance(each, tuple | list) and 2 <= len(each) <= 3:
                headers = each[2] if len(each) == 3 else None
                message = NewMessage(self.name, each[1], each[0], headers, once=once)
            elif isinstance(each, Mapping):
                message = self._message({"once": once, **each})
            else:
                rule = "(key, body), (key, body, headers) or a dict"
                raise UsageError(reason=f"a message for a stream must be {rule}, got {each!r:.80}")
            yield _outgoing(message, shards, self._app.type_of)

    def _message(self, values: Mapping[str, Any]) -> NewMessage:
        if "queue" in values or not {"key", "body"} <= values.keys():
            rule = "a message for a stream must have a key and a body, and no queue"
            raise UsageError(reason=f"{rule}, got {', '.join(map(str, values))}")
        try:
            return NewMessage(self.name, **values)
        except TypeError as error:
            known = [each for each in NewMessage.__slots__ if each != "queue"]
            raise names_error("the parameters of a message for a stream", values, known) from error

    def __repr__(self) -> str:
        return f"<Stream {self.name!r}>"
