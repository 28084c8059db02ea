"""The content of the dashboard's pages and JSON.

The dashboard reads each part once for all clients.
"""

from __future__ import annotations

import fnmatch
import logging
import re
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from qdo.connections.opened import Connections
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_report import MINUTES
from qdo.dashboard.board import Board
from qdo.dashboard.reading import Reading
from qdo.errors import NotFoundError, PausesUnreadableError, QdoError
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import is_selected, is_target
from qdo.fleet.limits import list_limits
from qdo.fleet.live_settings import read_answers, read_settings
from qdo.fleet.names import exactly
from qdo.fleet.pauses import PausesRead, read_pauses
from qdo.fleet.settings_machine import SettingsNode
from qdo.fleet.timer_node import read_timers
from qdo.history.recorder import RecordedRun
from qdo.history.reports import MinuteReport, RecordedOwner, failures, minute_reports, owners
from qdo.ops import dead_letters as ops
from qdo.ops.dead_letters import Filter, Letter
from qdo.ops.fleet import Fleet
from qdo.ops.items import Judged, audit_item, limit_item, pause_item
from qdo.ops.peek import KINDS, RECORDED, Kind, PeekedMessage, peek, peek_item, peek_named
from qdo.ops.requests import pool_items, records, request_item
from qdo.ops.streams import shard_items
from qdo.ops.timers import failed_elsewhere as read_failed_elsewhere
from qdo.ops.timers import timer_items
from qdo.ops.worker_status import WorkerStatus
from qdo.queues import command_text, is_glob
from qdo.settings.listing import live_items
from qdo.settings.vaults import vault_of
from qdo.text import describe

_log = logging.getLogger(__name__)

# Maximum number of entries of the action log to show. The log keeps at most 5,000 entries.
MOST_ENTRIES = 1000
FAILURES = 10
OWNERS = 10
# Maximum number of messages of each kind on the page of a queue.
MESSAGES = 50
# Lists of messages omit longer bodies, because many lists may be in memory at the same time.
LONG_BYTES = 100_000
REQUESTS = 100
DAY_SECONDS = 86400.0

Item = dict[str, Any]
_Item = TypeVar("_Item")

# Maximum count in a minute. qdo never writes a larger number.
MOST_A_MINUTE = 10**9
_BODY_KEYS = ("body", "body_base64", "body_error", "headers", "key")


def select(
    reading: Reading, glob: str = "*", states: Collection[str] = (), sort: str = "name"
) -> Judged:
    """Return the queues that match a glob and have one of the states, like `qdo queues`."""
    key = ("selected", glob, tuple(states), sort)
    return reading.once(key, lambda: _selected(reading, glob, states, sort))


def _selected(reading: Reading, glob: str, states: Collection[str], sort: str) -> Judged:
    chosen = reading.in_order(sort)
    if glob != "*":
        matches = re.compile(fnmatch.translate(glob)).match
        chosen = [each for each in chosen if matches(each[0].queue)]
    if states:
        chosen = [each for each in chosen if each[1].state.value in states]
    return chosen


def _in_coordinator(
    board: Board, key: Hashable, read: Callable[[Client, Layout], list[_Item]]
) -> list[_Item]:
    """Return a list from the coordinator, or an empty list if the coordinator's file is missing."""

    def opened(connections: Connections) -> list[_Item]:
        client = connections.client
        return [] if client is None else read(client, connections.layout)

    return board.direct.get(key, opened)


def _in_broker(
    board: Board,
    key: Hashable,
    read: Callable[[Fleet], list[_Item]],
    body_bytes: Callable[[list[_Item]], int] = lambda result: 0,
) -> list[_Item]:
    """Return a list from the broker; return an empty list before the first message."""

    def opened(connections: Connections) -> list[_Item]:
        fleet = connections.known_fleet()
        return [] if fleet is None else read(fleet)

    return board.direct.get(key, opened, body_bytes)


def pauses(board: Board) -> tuple[list[Item], PausesRead | None]:
    reads = _in_coordinator(board, "holds", lambda client, layout: [read_pauses(client, layout)])
    if not reads:
        return [], None
    node = reads[0].node
    if node.fault is not None:
        raise PausesUnreadableError(reason=node.fault)
    return [pause_item(each) for each in node.pauses], reads[0]


def timers(board: Board) -> list[Item]:
    def read(client: Client, layout: Layout) -> list[Item]:
        return timer_items(read_timers(client, layout), time.time())

    return _in_coordinator(board, "timers", read)


def limits(board: Board) -> list[Item]:
    def read(client: Client, layout: Layout) -> list[Item]:
        nodes = list_limits(client, layout)
        return [limit_item(name, node) for name, node in nodes.items()]

    return _in_coordinator(board, "limits", read)


def streams(board: Board) -> list[Item]:
    """Return the unfinished shards, like `qdo streams list`."""

    def read(fleet: Fleet) -> list[Item]:
        if not fleet.broker.capabilities.streams:
            return []
        items = shard_items(fleet, fleet.broker.streams.shards())
        return [each for each in items if each["state"] != "done"]

    return _in_broker(board, "streams", read)


def audit(board: Board, glob: str = "*") -> list[Item]:
    def read(client: Client, layout: Layout) -> list[Item]:
        return [audit_item(each) for each in read_entries(client, layout, limit=MOST_ENTRIES)]

    items = _in_coordinator(board, "audit", read)
    return [each for each in items if is_selected(each["command"], each["target"], glob)]


def audit_of(board: Board, queue: str) -> list[Item]:
    glob = exactly(queue)
    return [each for each in audit(board) if is_target(each["target"], glob)]


def pools(board: Board) -> list[Item]:
    return _in_broker(board, "pools", lambda fleet: pool_items(fleet.broker.requests, time.time()))


def requests(board: Board, pool: str | None = None, state: str = "") -> list[Item]:
    """Return the newest requests of a pool or of all pools.

    :param state: a state or an outcome; "" for all unfinished requests.
    """

    def read(fleet: Fleet) -> list[Item]:
        newest = records(fleet.broker.requests, pool, state, REQUESTS)
        return [request_item(each, time.time()) for each in newest]

    return _in_broker(board, ("requests", pool, state), read)


@dataclass(frozen=True, slots=True)
class ShownSettings:
    """The live settings in force."""

    number: int
    items: Sequence[Item]
    workers: int
    # Number of workers that do not use this version yet.
    late: int


def live_settings(board: Board) -> ShownSettings:
    def read(connections: Connections) -> ShownSettings:
        client = connections.client
        layout = connections.layout
        node = read_settings(client, layout) if client else SettingsNode()
        answers = read_answers(client, layout) if client else []
        uses = [0 if each.report is None else each.report.uses for each in answers]
        late = sum(each < node.number for each in uses)
        return ShownSettings(node.number, live_items(node, answers), len(answers), late)

    return board.direct.get("settings", read)


def last_hour(workers: Sequence[WorkerStatus], newest: int) -> list[list[int]]:
    """Return the sums of all workers' three counts for each minute of the hour before `newest`."""
    # Sum the counts of `LastHour`. Ignore minutes outside of this hour, for example from a wrong
    # clock.
    sums = {minute: [minute, 0, 0, 0] for minute in range(newest - MINUTES + 1, newest + 1)}
    for hour in filter(None, (each.report.last_hour for each in workers)):
        for place, counts in enumerate((hour.done, hour.failed, hour.dead_lettered), 1):
            for age, count in enumerate(counts[:MINUTES]):
                minute = hour.minute - age
                if minute in sums and 0 <= count <= MOST_A_MINUTE:
                    sums[minute][place] += count
    return list(sums.values())


@dataclass(frozen=True, slots=True)
class ShownHistory:
    """The records about a queue in the history database."""

    minutes: Sequence[MinuteReport] = ()
    failures: Sequence[RecordedRun] = ()
    owners: Sequence[RecordedOwner] = ()
    fault: str | None = None


def history(board: Board, queue: str | None = None) -> ShownHistory | None:
    """Return the records about a queue, or the minutes of all queues; None without a history."""
    url = board.settings.history
    if not url:
        return None

    def read(connections: Connections) -> ShownHistory:
        now = time.time()
        try:
            minutes = minute_reports(url, board.app, queue, now - 60 * MINUTES, limit=MINUTES)
            if queue is None:
                return ShownHistory(minutes)
            exact = exactly(queue)
            failed = failures(url, board.app, now - DAY_SECONDS, exact, limit=FAILURES)
            owned = owners(url, board.app, queue, 0.0, limit=OWNERS)
        except QdoError as error:
            return ShownHistory(fault=str(error))
        return ShownHistory(minutes, failed, owned)

    return board.direct.get(("history", queue), read)


def attempt(read: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return a part of a page, or the reason why this part cannot be read."""
    try:
        return read(), None
    except QdoError as error:
        return None, str(error)


def late_workers(pauses: PausesRead | None) -> list[str]:
    if pauses is None:
        return []
    return [name for name, upto in pauses.obeyed.items() if upto < pauses.zxid]


def letters(board: Board, queues: str = "*") -> list[Letter]:
    """Return the dead letters of queues that match a glob, newest first."""
    # All globs share one reading, because a visitor could invent any number of globs.
    shared = "*" if is_glob(queues) else queues

    def read(fleet: Fleet) -> list[Letter]:
        letters = ops.find(fleet.broker, Filter(shared), time.time())
        return sorted(letters, key=lambda each: -each.entry.dead_at)

    found = _in_broker(board, ("letters", shared), read)
    if queues == shared:
        return found
    matches = re.compile(fnmatch.translate(queues)).match
    return [each for each in found if matches(each.entry.queue)]


def failed_elsewhere(board: Board) -> list[ops.ErrorGroup]:
    """Return the failures of timers and outboxes, which are not dead letters."""

    def read(client: Client, layout: Layout) -> list[ops.ErrorGroup]:
        return read_failed_elsewhere(client, layout, time.time())

    return _in_coordinator(board, "failed-elsewhere", read)


def exported(board: Board, chosen: Sequence[Letter]) -> list[dict[str, Any]]:
    """Return items of qdo.dead-letters/2, with bodies only if the options allow bodies."""

    shown = board.options.show_bodies

    def read(fleet: Fleet) -> list[Item]:
        broker = fleet.broker
        vault = vault_of(board.settings, board.app, broker.stream_of) if shown else None

        def item(letter: Letter) -> Item:
            return ops.exported(letter, ops.read(broker, letter), broker.positions, vault)

        return list(_items(chosen, item, shown))

    def size(items: list[Item]) -> int:
        return sum(each["body_bytes"] for each in items) if shown else 0

    key = tuple((each.entry.queue, each.place) for each in chosen)
    return _in_broker(board, ("exported", key), read, size)


def _items(
    found: Iterable[_Item], make: Callable[[_Item], Item], with_bodies: bool
) -> Iterator[Item]:
    """Yield the items of messages. Omit messages that cannot be shown."""
    for each in found:
        try:
            item = make(each)
        except NotFoundError:
            continue  # the message has been retried, done or discarded
        except QdoError:
            raise
        except Exception as error:  # noqa: BLE001 - another program wrote the text
            _log.warning(
                "dashboard: cannot show message %s, so it is left out: %s; see `qdo peek` and"
                " `qdo dead-letters export`",
                getattr(each, "id", None),
                describe(error),
            )
            continue
        for key in () if with_bodies else _BODY_KEYS:
            item.pop(key, None)
        yield item


def messages(
    board: Board, queue: str, name: str = "", kinds: Collection[Kind] = KINDS
) -> list[Item]:
    """Return the next messages of a queue, delayed messages last, or the message with a name.

    For SQS, return only messages that the coordinator records.
    """

    shown = board.options.show_bodies

    def read(fleet: Fleet) -> list[Item]:
        able = [each for each in kinds if fleet.broker.capabilities.peek or each in RECORDED]
        present = [each for each in able if each != "delayed"]
        if name:
            found = [peek_named(fleet, queue, name)]
        else:
            found = list(peek(fleet, queue, present, MESSAGES))
            if "delayed" in able:
                found += peek(fleet, queue, ["delayed"], MESSAGES)
        vault = vault_of(board.settings, board.app, fleet.broker.stream_of) if shown else None

        def item(message: PeekedMessage) -> Item:
            is_long = (message.body_bytes or 0) > LONG_BYTES
            values = peek_item(queue, message, vault, shown and not is_long)
            if is_long:
                command = command_text("peek", queue, options="--body")
                values["body_error"] = f"Too long for a page: {command}"
            return values

        return list(_items(found, item, shown))

    def size(items: list[Item]) -> int:
        with_body = (each for each in items if "body" in each or "body_base64" in each)
        return sum(each["body_bytes"] for each in with_body)

    return _in_broker(board, ("messages", queue, name, tuple(kinds)), read, size)


def letter(board: Board, queue: str, id: str | None = None) -> tuple[Letter, Item] | None:
    """Return a dead letter of a queue (without `id`, the newest) and its item, or None."""
    own = [each for each in letters(board, queue) if each.entry.queue == queue]
    named = [each for each in own if id is None or id in (each.id, each.place)]
    items = exported(board, named[:1])
    return (named[0], items[0]) if items else None


@dataclass(frozen=True, slots=True)
class Part(Generic[_Item]):
    """One page of a list."""

    items: Sequence[_Item]
    number: int
    pages: int
    # Number of the first item on the page, counted from 1; 0 if there are no items.
    first: int
    last: int
    total: int


def paged(items: Sequence[_Item], number: str | None, size: int) -> Part[_Item]:
    """Return a page of a list, or the nearest page if this number does not exist.

    :param number: the number in the address of the page. Invalid numbers count as 1.
    """
    pages = max(1, -(-len(items) // size))
    page = int(number[:9]) if number and number.isascii() and number.isdecimal() else 1
    page = min(max(1, page), pages)
    begin = (page - 1) * size
    shown = items[begin : begin + size]
    first = begin + 1 if shown else 0
    return Part(shown, page, pages, first, begin + len(shown), len(items))


def glob_of(text: str) -> str:
    """Return the glob for a filter text. Plain text matches anywhere in a name."""
    return f"*{text}*" if text and not set(text) & set("*?[") else text or "*"
