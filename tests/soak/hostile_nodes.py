"""Hostile values of nodes, and the attacks that write them beside a running fleet.

An attack is a generator. It writes, yields until it gets True, and then undoes what stays.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Generator, Iterable
from typing import Any

from kazoo.exceptions import KazooException
from kazoo.protocol.serialization import Create, SetData
from kazoo.security import OPEN_ACL_UNSAFE, make_acl

from qdo.coordination.client import Client
from qdo.coordination.queue_admin import seek
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import encode_queues
from qdo.fleet.audit_entries import entry_name
from tests.soak.app import LIMIT, LOCK
from tests.support.fakes.hostile_content import TEMPLATES, hostile_values

TOUCHED = "plain-0"
"""The only queue whose node is attacked."""
GHOST = 9_000_000_000
"""First number of nodes that no worker gets."""
PROTECTED = {
    "protected": [make_acl("world", "anyone", admin=True)],
    "read-only": [make_acl("world", "anyone", read=True, admin=True)],
}
EPHEMERAL = 1
STEPS_OF_A_VALUE = 4
"""While these last, workers read a value that others follow."""


def _bomb(item: bytes) -> bytes:
    """Return almost 8 MiB of JSON, which zlib makes 8 KB."""
    items = item * ((8_388_608 - 100) // len(item))
    return zlib.compress(b'{"queues": [], "x": [' + items + b"0]}", 9)


VALUES: dict[str, bytes | None] = {
    "null": None,
    "empty": b"",
    "number": b"5",
    "deep": b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "giant": b'{"last": "", "x": "' + b"x" * 900_000 + b'"}',
    "many objects": b'{"last": "", "queues": [], "x": [' + b"{}," * 300_000 + b"0]}",
    "most objects": b'{"last": "", "queues": [], "x": [' + b"{}," * 170_000 + b"0]}",
    "nan": b'{"last": "", "x": NaN}',
    "too large": b'{"last": "9223372036854775807"}',
    "surrogate": b'{"last": "\\ud800", "owner": "\\udc00", "queues": ["\\ud800"]}',
    "wrong types": b'{"last": [], "owner": {}, "queues": {"a": 1}, "filter": 5, "reread": "x"}',
}
LISTS: dict[str, bytes | None] = {
    "bomb of objects": _bomb(b"{},"),
    "bomb of numbers": _bomb(b"1.5,"),
    "bomb of names": _bomb(b'"a",'),
    "globs": zlib.compress(
        b'{"queues": [], "filter": {"queues": ["'
        + b'","'.join(b"*q-%x*" % each for each in range(60_000))
        + b'"]}}'
    ),
    "cut off": zlib.compress(encode_queues(["a"]))[:-3],
}


class Outsider:
    """A program with a session at the coordinator of the fleet, and no other right."""

    def __init__(self, client: Client, layout: Layout) -> None:
        self.client = client
        self.layout = layout

    def create(self, path: str, data: bytes | None, flags: int = 0) -> None:
        """Create a node, also one without data as `zkCli.sh` does: kazoo would send b""."""
        answer = self.client.handler.async_result()
        request = Create(self.client.chroot + path, data, OPEN_ACL_UNSAFE, flags)
        self.client._call(request, answer)
        answer.get(timeout=20)

    def put(self, path: str, data: bytes | None) -> None:
        answer = self.client.handler.async_result()
        self.client._call(SetData(self.client.chroot + path, data, -1), answer)
        answer.get(timeout=20)

    def drop(self, path: str) -> None:
        """Delete a node, unless it is gone or has nodes below it."""
        with contextlib.suppress(KazooException):
            self.client.delete(path)

    def first(self, folder: str) -> str:
        """Return the path of the first node in a folder."""
        return f"{folder}/{min(self.client.get_children(folder))}"

    def workers(self) -> list[str]:
        return sorted(self.client.get_children(self.layout.workers))


Steps = Generator[None, bool, None]
Attack = Callable[[Outsider], Steps]
Place = Callable[[Outsider], str]
PLACES: dict[str, Place] = {
    "queue": lambda outsider: outsider.layout.queue(TOUCHED),
    "assignment": lambda outsider: outsider.first(outsider.layout.assignments),
    "worker": lambda outsider: outsider.first(outsider.layout.workers),
    "rebalancer": lambda outsider: outsider.layout.rebalancer,
    "candidate": lambda outsider: outsider.first(outsider.layout.election),
    "component": lambda outsider: outsider.first(f"{outsider.layout.components}/worker"),
    "broker": lambda outsider: outsider.layout.broker,
    "settings": lambda outsider: outsider.layout.fleet.settings,
    "holds": lambda outsider: outsider.layout.fleet.holds,
    "workers": lambda outsider: outsider.layout.workers,
    "queues": lambda outsider: outsider.layout.queues,
    "assignments": lambda outsider: outsider.layout.assignments,
    "election": lambda outsider: outsider.layout.election,
    "components": lambda outsider: f"{outsider.layout.components}/worker",
}


def _once() -> Steps:
    while not (yield):
        pass


def _overwritten(place: Place, value: bytes | None) -> Attack:
    def attack(outsider: Outsider) -> Steps:
        with contextlib.suppress(KazooException):  # it may be deleted meanwhile
            outsider.put(place(outsider), value)
        yield from _once()

    return attack


def _spoilt_queue(*values: bytes | None) -> Attack:
    def attack(outsider: Outsider) -> Steps:
        path = outsider.layout.queue(TOUCHED)
        last = QueueNode.parse(outsider.client.get(path)[0]).last
        yield from _in_turn(outsider, path, values)
        if QueueNode.parse(outsider.client.get(path)[0]).last < last:
            seek(outsider.client, outsider.layout, TOUCHED, last)

    return attack


def _in_turn(outsider: Outsider, path: str, values: Iterable[bytes | None]) -> Steps:
    for value in values:
        with contextlib.suppress(KazooException):  # it may be deleted meanwhile
            outsider.put(path, value)
        for _ in range(STEPS_OF_A_VALUE):
            if (yield):
                return
    yield from _once()


def _new(stem: Place, value: bytes | None, count: int = 1, flags: int = 0) -> Attack:
    def attack(outsider: Outsider) -> Steps:
        paths = [f"{stem(outsider)}{GHOST + number}" for number in range(count)]
        for path in paths:
            outsider.create(path, value, flags)
        yield from _once()
        for path in paths:
            outsider.drop(path)

    return attack


def _protected(place: Place, acl: Any) -> Attack:
    def attack(outsider: Outsider) -> Steps:
        path = place(outsider)
        outsider.client.set_acls(path, acl)
        yield from _once()
        with contextlib.suppress(KazooException):  # it may be replaced meanwhile
            outsider.client.set_acls(path, OPEN_ACL_UNSAFE)

    return attack


def _again_and_again(act: Callable[[Outsider, int], None]) -> Attack:
    def attack(outsider: Outsider) -> Steps:
        number = 0
        while not (yield):
            with contextlib.suppress(KazooException, ValueError):  # nothing to spoil just now
                act(outsider, number)
            number += 1

    return attack


def _deleted(place: Place) -> Attack:
    def attack(outsider: Outsider) -> Steps:
        outsider.drop(place(outsider))
        yield from _once()

    return attack


def _swap_shares(outsider: Outsider, number: int) -> None:
    workers = outsider.workers()
    paths = [outsider.layout.assignment(worker) for worker in workers]
    values = [outsider.client.get(path)[0] for path in paths]
    for path, value in zip(paths, values[1:] + values[:1], strict=True):
        outsider.put(path, value)


def _assign_everything(outsider: Outsider, number: int) -> None:
    value = encode_queues(outsider.client.get_children(outsider.layout.queues))
    for worker in outsider.workers():
        outsider.put(outsider.layout.assignment(worker), value)


def _forge_owner(outsider: Outsider, number: int) -> None:
    workers = outsider.workers()
    node = QueueNode(owner=workers[number % len(workers)])
    outsider.put(outsider.layout.queue(TOUCHED), node.encode())


def _come_and_go(outsider: Outsider, number: int) -> None:
    path = outsider.layout.worker(f"worker-{GHOST + number}")
    outsider.create(path, b'{"queues": []}', EPHEMERAL)
    outsider.drop(path)


CONTENT_NODES: dict[str, Place] = {
    "settings": PLACES["settings"],
    "holds": PLACES["holds"],
    "limit": lambda outsider: outsider.layout.fleet.limit(LIMIT),
    "assignment": PLACES["assignment"],
    "worker": PLACES["worker"],
    "component": PLACES["component"],
    "leader": PLACES["rebalancer"],
    "broker": PLACES["broker"],
}
"""The nodes that get hostile content, one value after the other."""
CONTENT_FOLDERS: dict[str, Place] = {
    "entry": lambda outsider: outsider.layout.fleet.actionlog,
    "contender": lambda outsider: outsider.layout.fleet.lock(LOCK),
    "document": lambda outsider: outsider.layout.fleet.document_set("plans"),
    **dict.fromkeys(
        (each for each in TEMPLATES if each.startswith("action")),
        lambda outsider: outsider.layout.fleet.actions_of(outsider.workers()[0]),
    ),
}
"""The folders in which nodes with hostile content are created."""


def _contents(kind: str, place: Place) -> Attack:
    def attack(outsider: Outsider) -> Steps:
        path = place(outsider)
        before = outsider.client.get(path)[0]
        yield from _in_turn(outsider, path, hostile_values(kind).values())
        with contextlib.suppress(KazooException):
            outsider.put(path, before)

    return attack


def _new_contents(kind: str, find: Place) -> Attack:
    def attack(outsider: Outsider) -> Steps:
        folder, now = find(outsider), time.time()
        outsider.client.ensure_path(folder)
        values = hostile_values(kind).values()
        paths = [f"{folder}/{entry_name(now, f'{each:08x}')}" for each in range(len(values))]
        for path, value in zip(paths, values, strict=True):
            outsider.create(path, value)
        yield from _once()
        for path in paths:
            outsider.drop(path)

    return attack


def _together(parts: Iterable[Attack]) -> Attack:
    def attack(outsider: Outsider) -> Steps:
        steps = [each(outsider) for each in parts]
        for each in steps:
            next(each)
        over = False
        while not over:
            over = yield
            for each in steps:
                with contextlib.suppress(StopIteration):
                    each.send(over)

    return attack


def attacks() -> dict[str, Attack]:
    """Return all attacks by name."""
    found: dict[str, Attack] = {"nothing": lambda outsider: _once()}
    queue_stem: Place = lambda outsider: outsider.layout.queue("bad-")  # noqa: E731
    worker_stem: Place = lambda outsider: outsider.layout.worker("worker-")  # noqa: E731
    nodes = (
        *("assignment", "worker", "rebalancer", "candidate", "component", "broker"),
        *("settings", "holds"),
    )
    for name, value in VALUES.items():
        found[f"queue: {name}"] = _spoilt_queue(value)
        found[f"new queues: {name}"] = _new(queue_stem, value, 10)
        found |= {f"{place}: {name}": _overwritten(PLACES[place], value) for place in nodes}
    for name, value in LISTS.items():
        found |= {f"{place}: {name}": _overwritten(PLACES[place], value) for place in nodes[:2]}
        found[f"ghost: {name}"] = _new(worker_stem, value)
    for place, find in PLACES.items():
        found |= {f"{place}: {name}": _protected(find, acl) for name, acl in PROTECTED.items()}
    for place in ("queue", *nodes[:5]):
        found[f"{place}: deleted"] = _deleted(PLACES[place])
    contents = {kind: _contents(kind, place) for kind, place in CONTENT_NODES.items()}
    contents |= {kind: _new_contents(kind, place) for kind, place in CONTENT_FOLDERS.items()}
    contents["queue"] = _spoilt_queue(*hostile_values("queue").values())
    found |= {f"content: {kind}": attack for kind, attack in contents.items()}
    found["content: every kind"] = _together(contents.values())
    found["100 ghosts"] = _new(worker_stem, b"{}", 100)
    found["100 ghosts with a session"] = _new(worker_stem, b"{}", 100, EPHEMERAL)
    found["ghost candidate"] = _new(lambda outsider: f"{outsider.layout.election}/candidate-", b"")
    for act in (_swap_shares, _assign_everything, _forge_owner, _come_and_go):
        found[f"loop: {act.__name__.strip('_')}"] = _again_and_again(act)
    for place in ("assignment", "rebalancer", "candidate"):
        found[f"loop: {place} deleted"] = _again_and_again(
            lambda outsider, _, place=place: outsider.drop(PLACES[place](outsider))
        )
    return found
