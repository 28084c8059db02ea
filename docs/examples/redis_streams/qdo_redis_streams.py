"""A broker for qdo that keeps each queue in a stream of one Redis server.

An entry of a stream is a message. Its id is ``TIME-NUMBER``: the microsecond of its storage, unique
in the app, and its number in the queue. Redis runs each Lua script as one transaction.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import redis

from qdo import brokers
from qdo.brokers import DeadLetterRecord, DelayedMessage, Outgoing
from qdo.errors import QueueLimitError, QueueNotEmptyError, UnreachableError, UsageError
from qdo.positions import position_of_time

log = logging.getLogger(__name__)
FORM = "redis://HOST:PORT/DATABASE"
# Listeners look for messages this often, because Redis may lose its notices.
LOOK_SECONDS = 1.0
ANSWER_SECONDS = 10.0
FETCH_BYTES = 16 * 1024 * 1024
EPOCH = position_of_time(0.0)
pack = msgspec.msgpack.encode
unpack_row = msgspec.msgpack.Decoder(tuple[bytes, str | None, str | None]).decode
unpack_letter = msgspec.msgpack.Decoder(DeadLetterRecord).decode

# KEYS[1] begins the name of every key. No name of an app or queue contains a slash.
COMMON = """
local call, app = redis.call, KEYS[1]
local heads, delayed, all_due = app .. '//heads', app .. '//delayed', app .. '//due'
local clock, newest = call('TIME'), tonumber(call('GET', app .. '//newest') or 0)
local now = clock[1] * 1000000 + clock[2]
local function text(number) return string.format('%.0f', number) end
local function append(queue, row)
    local key = app .. '/' .. queue
    newest = math.max(now, newest + 1)
    call('SET', app .. '//newest', text(newest))
    call('ZADD', heads, text(newest), queue)
    local largest = tonumber(call('HGET', key, 'largest') or 0)
    if #row > largest then call('HSET', key, 'largest', #row) end
    local id = text(newest) .. '-' .. call('HINCRBY', key, 'sent', 1)
    call('XADD', key .. '/messages', id, 'row', row)
    return text(newest)
end
local function waiting(key, start)
    local first = call('XRANGE', key .. '/messages', start, '+', 'COUNT', 1)[1]
    if not first then return 0, '' end
    return call('HGET', key, 'sent') - string.match(first[1], '-(%d+)') + 1, first[1]
end
local function undelay(queue, member)
    call('ZREM', all_due, member)
    call('HDEL', delayed, member)
    return call('ZREM', app .. '/' .. queue .. '/due', member)
end
"""
SCRIPTS = {
    # A limit of queues; then for each message its queue, row, due time, id, deduplication key and
    # the milliseconds of that key.
    "send": """
local count, new = call('ZCARD', heads), {}
for i = 2, ARGV[1] ~= '' and #ARGV or 0, 6 do
    local queue = ARGV[i]
    if not new[queue] and not call('ZSCORE', heads, queue) then
        new[queue], count = true, count + 1
        if count > tonumber(ARGV[1]) then return {'limit', queue} end
    end
end
local function send(queue, row, due, id, once, milliseconds)
    local key = app .. '/' .. queue
    if once ~= '' then
        call('HSETNX', key, 'born', text(now))  -- a queue that is created again has new keys
        once = key .. '/once/' .. call('HGET', key, 'born') .. '/' .. once
        local sent = call('GET', once)
        if sent then return sent end
    end
    due = tonumber(due)
    if due and due < 0 then due = now - due end
    if due and due > now then
        local member = string.format('%020d/', call('INCR', app .. '//counter')) .. queue
        call('ZADD', heads, 'NX', 0, queue)
        call('HSET', delayed, member, row)
        call('ZADD', all_due, text(due), member)
        call('ZADD', key .. '/due', text(due), member)
    else
        local position = append(queue, row)
        if id == '' then id = position end
    end
    if once ~= '' then call('SET', once, id, 'PX', milliseconds) end
    return id
end
local ids = {}
for i = 2, #ARGV, 6 do ids[#ids + 1] = send(unpack(ARGV, i, i + 5)) end
call('PUBLISH', app, '')
return ids
""",
    # Moves due messages; returns the queues with messages after a time.
    "look": """
for _, member in ipairs(call('ZRANGE', all_due, 0, text(now), 'BYSCORE', 'LIMIT', 0, 100)) do
    append(string.sub(member, 22), call('HGET', delayed, member))
    undelay(string.sub(member, 22), member)
end
local next = call('ZRANGE', all_due, 0, 0, 'WITHSCORES')[2]
local names = call('ZRANGE', heads, '(' .. ARGV[1], '+inf', 'BYSCORE')
return {names, text(newest), next and text(next - now) or ''}
""",
    "read": """
local key = app .. '/' .. ARGV[1]
local most = math.floor(ARGV[4] / (call('HGET', key, 'largest') or 1))
local count = math.max(1, math.min(ARGV[3], most))
return call('XRANGE', key .. '/messages', ARGV[2], '+', 'COUNT', count)
""",
    "backlog": """
local key = app .. '/' .. ARGV[1]
local count, first = waiting(key, ARGV[2])
return {count, first, call('ZSCORE', heads, ARGV[1]) or '0', call('ZCARD', key .. '/due')}
""",
    "delete": """
local key = app .. '/' .. ARGV[1]
local count = waiting(key, ARGV[2])
local left = {count, call('ZCARD', key .. '/due'), call('HLEN', key .. '/letters')}
if left[1] + left[2] + left[3] == 0 then
    call('DEL', key, key .. '/messages')
    call('ZREM', heads, ARGV[1])
end
return left
""",
    "discard_delayed": """
local found = {}
for i = 2, #ARGV do
    local member = string.format('%020d/', ARGV[i]) .. ARGV[1]
    if undelay(ARGV[1], member) == 1 then found[#found + 1] = tonumber(ARGV[i]) end
end
return found
""",
    "retry": """
local found = {}
for i = 1, #ARGV, 3 do
    local existed = call('HDEL', app .. '/' .. ARGV[i] .. '/letters', ARGV[i + 1]) == 1
    found[#found + 1] = existed and append(ARGV[i], ARGV[i + 2]) or ''
end
call('PUBLISH', app, '')
return found
""",
}


def after(position: int) -> int:
    """Return the first microsecond after a position."""
    return max(0, (position - EPOCH) // 10 + 1)


def position_of(microsecond: bytes) -> int:
    return int(microsecond.partition(b"-")[0]) * 10 + EPOCH


class RedisServer:
    """The keys of one app at a server."""

    def __init__(self, url: str, app: str) -> None:
        self.key = f"qdo/{app}"
        # Without retries, which would store a message again if only the answer was lost.
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        self.client = redis.Redis.from_url(url, retry=retry, socket_timeout=ANSWER_SECONDS)
        made = self.client.register_script
        self._scripts = {name: made(COMMON + script) for name, script in SCRIPTS.items()}

    @contextlib.contextmanager
    def translated(self) -> Iterator[redis.Redis]:
        try:
            yield self.client
        except redis.RedisError as error:
            raise UnreachableError(what="Redis", reason=str(error)) from error

    def run(self, script: str, *arguments: Any) -> Any:
        with self.translated():
            return self._scripts[script](keys=[self.key], args=arguments)


class RedisReader:
    def __init__(self, server: RedisServer, queue: str, position: int) -> None:
        self._server = server
        self._queue = queue
        self._position = position

    def fetch(self, limit: int) -> list[tuple[int, bytes, str | None, str | None]]:
        start = after(self._position)
        found = self._server.run("read", self._queue, start, limit, FETCH_BYTES)
        rows = [(position_of(id), *unpack_row(row)) for id, (_, row) in found]
        if rows:
            self._position = rows[-1][0]
        return rows


class RedisListener:
    """Calls `wake` in a thread, which is a greenlet in a worker."""

    def __init__(self, server: RedisServer, wake: Callable[[Iterable[str]], None]) -> None:
        self._server = server
        self._wake = wake
        self._stopped = threading.Event()
        self._seen = "+inf"
        while self._look() == 0.0:
            pass  # move all due messages before returning
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _look(self) -> float:
        """Wake the owners of new messages; return the seconds until the next look."""
        names, newest, due = self._server.run("look", self._seen)
        if names and not self._stopped.is_set():
            self._wake([name.decode() for name in names])
        self._seen = newest.decode()
        return min(max(0.0, int(due) / 1e6), LOOK_SECONDS) if due else LOOK_SECONDS

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                with self._server.translated() as client, client.pubsub() as notices:
                    notices.subscribe(self._server.key)
                    while not self._stopped.is_set():
                        notices.get_message(timeout=self._look())
                        while notices.get_message(timeout=0.0):
                            pass  # one look is enough for many notices
            except UnreachableError as error:
                if not self._stopped.wait(LOOK_SECONDS):
                    log.warning("a listener retries after %g s: %s", LOOK_SECONDS, error)

    def stop(self) -> None:
        self._stopped.set()
        with contextlib.suppress(UnreachableError), self._server.translated() as client:
            client.publish(self._server.key, "")  # ends the wait of the thread
        self._thread.join(LOOK_SECONDS)


class RedisCatalog(brokers.QueueCatalog):
    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def names(self) -> list[str]:
        with self._server.translated() as client:
            found = client.zrange(f"{self._server.key}//heads", 0, -1)
        return sorted(name.decode() for name in found)

    def backlog(self, queue: str, position: int) -> brokers.Backlog:
        count, first, head, delayed = self._server.run("backlog", queue, after(position))
        oldest = position_of(first) if first else None
        return brokers.Backlog(count, oldest, position_of(head) if int(head) else 0, delayed)


class RedisDelayedMessages(brokers.DelayedMessages):
    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def find(
        self, queue: str, limit: int, ids: Collection[str] | None = None
    ) -> list[DelayedMessage]:
        key = self._server.key
        with self._server.translated() as client:
            due = client.zrange(f"{key}/{queue}/due", 0, -1, withscores=True)
            rows = client.hmget(f"{key}//delayed", [member for member, _ in due]) if due else []
        found = []
        for (member, microsecond), row in zip(due, rows, strict=True):
            if row is not None:  # None: it was moved or deleted meanwhile
                body, message_key, headers = unpack_row(row)
                id = json.loads(headers or "{}").get("qdo-id", "")
                at = int(microsecond) * 10 + EPOCH
                number = int(member[:20])
                found.append(DelayedMessage(number, id, at, message_key, headers, body))
        return [each for each in found if ids is None or each.id in ids][:limit]

    def numbers(self, queue: str) -> list[int]:
        return [each.number for each in self.find(queue, 10**9)]

    def discard(self, queue: str, numbers: Collection[int]) -> set[int]:
        return set(self._server.run("discard_delayed", queue, *numbers))


class RedisDeadLetters(brokers.DeadLetterStore):
    def __init__(self, broker: RedisBroker) -> None:
        self._broker = broker
        self._server = broker.server

    def _key(self, queue: str) -> str:
        return f"{self._server.key}/{queue}/letters"

    def store(self, record: DeadLetterRecord) -> None:
        error, trace = map(brokers.utf8_text, (record.error, record.traceback))
        at = record.dead_at or time.time()
        record = replace(record, error=error, traceback=trace, dead_at=at)
        with self._server.translated() as client, client.pipeline() as both:
            both.zadd(f"{self._server.key}//heads", {record.queue: 0}, nx=True)
            both.hsetnx(self._key(record.queue), str(record.position), pack(record))
            both.execute()

    def records(self, queue: str | None = None) -> list[DeadLetterRecord]:
        queues = self._broker.catalog.names() if queue is None else [queue]
        with self._server.translated() as client, client.pipeline(transaction=False) as reads:
            for each in queues:
                reads.hvals(self._key(each))
            found = [unpack_letter(letter) for part in reads.execute() for letter in part]
        return sorted(found, key=lambda each: (each.dead_at, each.position))

    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        queues = {queue for queue, _ in keys}
        letters = {(each.queue, each.position): each for q in queues for each in self.records(q)}
        moves: list[Any] = []
        for queue, position in keys:
            row = b""
            letter = letters.get((queue, position))
            if letter is not None:
                own_id = self._broker.positions.message_id(position, self._broker.id_node)
                row = pack((letter.body, letter.key, self.headers_again(letter, own_id)))
            moves += [queue, position, row]
        found = self._server.run("retry", *moves)
        return [position_of(moved) if moved else None for moved in found]

    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        with self._server.translated() as client, client.pipeline() as all_of_them:
            for queue, position in keys:
                all_of_them.hdel(self._key(queue), str(position))
            return [count == 1 for count in all_of_them.execute()]


class RedisBroker(brokers.Broker):
    # Ordered, seekable and countable; it can delay, show and deduplicate messages.
    capabilities = brokers.Capabilities(
        True, True, True, True, True, brokers.MAX_STORED_BODY_BYTES, dedup=True
    )

    def __init__(self, url: str, app: str) -> None:
        self.server = RedisServer(url, app)
        self.id_node = int.from_bytes(hashlib.sha256(app.encode()).digest()[:6]) or 1
        self.catalog = RedisCatalog(self.server)
        self.delayed = RedisDelayedMessages(self.server)
        self.dead_letters = RedisDeadLetters(self)
        self._checked: set[str] = set()
        self._listeners: list[RedisListener] = []
        self._closed = False

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        if self._closed:
            raise UsageError(reason="this broker is closed; open a new one to send")
        sent = [each for message in messages for each in self._packed(message)]
        # A job in a thread must not use the connections of the worker's event loop.
        ids = brokers.at_home(self.server.run, "send", self.max_queues or "", *sent)
        if ids[:1] == [b"limit"]:
            raise QueueLimitError(queue=ids[1].decode(), limit=self.max_queues)
        made = self.positions.message_id
        node = self.id_node
        return [each.decode() if b"-" in each else made(position_of(each), node) for each in ids]

    def _packed(self, message: Outgoing) -> tuple[Any, ...]:
        """Return what the script takes of a message."""
        brokers.checked_size(self._checked, message)
        terms = message.terms or brokers.SendOptions()
        headers = message.headers
        due = id = ""
        if terms.due is not None:
            due = str(round(terms.due * 1e6))
            id = str(uuid.uuid4())
            headers = brokers.with_header(headers, qdo_id=id)
        row = pack((message.body, message.key, headers))
        once = "" if terms.dedup_key is None else f"key {terms.dedup_key}"
        milliseconds = max(1, round(terms.dedup_seconds * 1000))
        return message.queue, row, due, id, once, milliseconds

    def reader(self, queue: str, after: int) -> RedisReader:
        return RedisReader(self.server, queue, after)

    def listen(self, wake: Callable[[Iterable[str]], None]) -> Callable[[], None]:
        self._listeners.append(RedisListener(self.server, wake))
        return self._listeners[-1].stop

    def trim(self, queue: str, last: int, older_than: float) -> int:
        upto = min(last, position_of_time(time.time() - older_than))
        with self.server.translated() as client:
            key = f"{self.server.key}/{queue}/messages"
            return int(client.xtrim(key, minid=after(upto), approximate=False))

    def delete_queue(self, queue: str, last: int) -> None:
        counts = self.server.run("delete", queue, after(last))
        if any(counts):
            names = ("waiting", "delayed", "dead_letters")
            raise QueueNotEmptyError(queue=queue, **dict(zip(names, counts, strict=True)))

    def close(self) -> None:
        self._closed = True
        for listener in self._listeners:
            listener.stop()
        self.server.client.connection_pool.disconnect(inuse_connections=False)


def address_error(url: str) -> str | None:
    try:
        redis.connection.parse_url(url)
    except ValueError as error:
        return f"{error}; write {FORM}"
    return None


KIND = brokers.BrokerKind(
    RedisBroker, address_error, FORM, stores_requests=False, stores_streams=False
)
