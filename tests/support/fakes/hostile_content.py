"""Nodes that are valid in form, and hostile in content: texts, globs, names, numbers, TOML."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.values import load
from qdo.fleet.action_machine import Action
from qdo.fleet.audit_entries import entry_name
from qdo.fleet.limit_node import LimitNode
from qdo.fleet.pause_machine import PauseNode
from qdo.fleet.settings_machine import SettingsNode
from tests.support.fakes.hostile_text import HOSTILE_NAME, TEXT

MOST_BYTES = 200_000
_RULE = '[[policies]]\nqueues = "*"\n[[policies.rules]]\nattempts = 1\nexception = '


def _deep(levels: int) -> Any:
    value: Any = 0
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


VALUES: dict[str, Any] = {
    "empty": "",
    "long": "x" * 60_000,
    "long line break": "\n" * 60_000,
    "long and wide": "\U0001f600" * 15_000,
    "controls": TEXT,
    "invisible": HOSTILE_NAME,
    "private": "\ue000\U0010ffff",
    "surrogate": "\ud800",
    "parts": "attempts" + ".a" * 1500 + " = 1",
    "parts of a table": "[" + ".".join(["a"] * 30_000) + "]",
    "parts beside line ends": '."\x85".'.join([".".join(["a"] * 99)] * 300) + " = 1",
    "deep arrays": "attempts = " + "[" * 30_000 + "]" * 30_000,
    "numbers": "attempts = " + "9" * 4301 + "\nfetch = nan\nbackoff_seconds = inf",
    "a million": "attempts = 1000000\nfetch = 1_000_000_000",
    "tables": '[[policies]]\nqueues = "a"\n' * 2000,
    "stars": "*a" * 7000,
    "marks": "*?[!]]" * 2000,
    "ranges": "[z-a][!z-a][a-",
    "nested quantifiers": "(a+)+$" * 100 + "(?:(?:(?:x*)*)*)*",
    "module": _RULE + '"lib2to3.__main__:x"',
    "exit": _RULE + '"os:_exit"',
    "path": "../../queues/plain-1",
    "root": "/",
    "option": "--yes",
    "format": "%s%n{0.__class__}%(x)s",
    "infinity": "Infinity",
    "digits": "9" * 5000,
    "float": "1e400",
    "null": None,
    "true": True,
    "minus one": -1,
    "minus zero": -0.0,
    "fraction": 5e-324,
    "exact": 2**53 + 1,
    "past 64 bits": 2**64,
    "past floats": 10**400,
    "large": 1.7e308,
    "small": -1.7e308,
    "year 10000": 253402300800.0,
    "deep": _deep(90),
    "objects": [{}] * 5000,
}
_ID = "0123456789abcdef"
_VERSION = {"id": _ID, "number": 3, "text": "", "who": "ann", "at": 1.5e9, "why": "busy"}
_FAILURE = {
    "position": "135471512647131000",
    "attempts": 3,
    "error": "ValueError: x",
    "crashed": False,
    "retry_at": 1.5e9,
    "retry_delay": 5.0,
    "decision": "",
}
_ARGS = {"queue": "q", "queues": "*", "positions": "7", "seconds": 1, "level": "info", "most": 1}
_TIMES = ["q", "id", 1, 5.0, 1.0]
_COUNTS = (
    *("pid", "parent", "level", "concurrency", "queues", "busy", "processed", "failed", "retried"),
    *("dead_lettered", "skipped", "blocked", "stopped", "expired", "claimed", "released", "lost"),
)
_NAMES = ("worker", "host", "version", "python", "zone", "settings", "state", "blocked_by")
TEMPLATES: dict[str, tuple[Any, Callable[[bytes], object]]] = {
    "settings": (
        {"current": _VERSION, "proposal": {**_VERSION, "id": _ID[::-1]}},
        lambda data: SettingsNode.parse(data).fault,
    ),
    "holds": (
        {
            "holds": [
                {"id": _ID, "queues": ["none-*"], "why": "x", "who": "ann", "at": 1.5e9},
                {"id": _ID[::-1], "queues": ["none"], "until": 9e9, "by": "/a"},
            ]
        },
        lambda data: PauseNode.parse(data).fault,
    ),
    "limit": (
        {
            "max": 3,
            "rate": 50.0,
            "burst": 50,
            "reason": "x",
            "permits": [["gone", 0, 0]],
            "starts": [["gone", 0, 0]],
            "other": 1,
        },
        lambda data: LimitNode.parse(data).fault,
    ),
    "document": ({"value": {"a": 1}, "id": _ID, "by": "ann", "at": 1.5e9}, lambda data: None),
    **{
        f"action {name}".rstrip(): (
            {
                "action": name,
                "args": _ARGS,
                "expires": 9e9,
                "by": "ann",
                "why": "x",
                "state": "",
                "actor": "",
            },
            lambda data: Action.parse(data).fault,
        )
        for name in ("", "ping", "runs", "cancel", "log-level", "stacks")
    },
    "entry": (
        {
            "by": "ann",
            "account": "digest:ann",
            "command": "pause",
            "target": "q",
            "reason": "x",
            "from": {"a": 1},
            "to": {"outcome": "done", "result": "x"},
        },
        lambda data: None,
    ),
    "component": (
        {
            **dict.fromkeys(_NAMES, "x"),
            **dict.fromkeys(_COUNTS, 1),
            "started": 1.5e9,
            "blocked_since": 1.5e9,
            "behind": {"q": 1.0, "r": 1.0},
            "faults": {"q": "x"},
            "waits": {"q": ["crm"]},
            "long_runs": [_TIMES, _TIMES],
            "live": {"uses": 1, "accepts": _ID, "refuses": _ID, "why": "x", "pins": {"fetch": "x"}},
            "lost_workers": [{"name": "worker-1", "process": "x", "queues": 1, "at": 1.5e9}],
        },
        lambda data: None,
    ),
    "worker": (
        {
            "queues": ["q"],
            "reread": ["q"],
            "draining": False,
            "filter": {"queues": ["*"], "exclude": ["none"], "jobs": ["*"]},
            "holds": 1,
            "process": "x",
        },
        lambda data: None,
    ),
    "assignment": ({"queues": ["q"], "moves": {"q": "worker-0000000000"}}, lambda data: None),
    "queue": (
        {
            "last": "135471512647131000",
            "owner": "worker-1",
            "seek": 1,
            "onward": 1,
            "position": "x",
            "failing": _FAILURE,
            "other_failures": [_FAILURE],
            "done_ranges": [[5, 1]],
            "cancelled": [1, 2],
            "unconfirmed": ["x"],
            "other": 1,
        },
        lambda data: QueueNode.parse(data).fault,
    ),
    "leader": ({"worker": "worker-1", "process": "x", "level": 1, "next_level": 0}, lambda _: None),
    "contender": ({"who": "ann", "why": "x", "at": 1.5e9}, lambda data: None),
    "broker": ({"kind": "file", "id": "x", "address": "x", "host": "x"}, lambda data: None),
}
"""A good value of each kind of node, and a function that returns its fault."""


@functools.cache
def hostile_values(kind: str) -> dict[str, bytes]:
    """Return nodes by the name of a hostile value, each with it in every place that takes it."""
    template, fault = TEMPLATES[kind]
    return {name: _filled(template, value, fault) for name, value in VALUES.items()}


def _filled(template: Any, value: Any, fault: Callable[[bytes], object]) -> bytes:
    found = copy.deepcopy(template)
    for place in list(_places(found)):
        container, key = place
        before, container[key] = container[key], value
        data = json.dumps(found).encode()
        if len(data) > MOST_BYTES or fault(data) is not None or load(data)[1] is not None:
            container[key] = before
    return json.dumps(found).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return each place that has no other ones in it: its container and its key."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        if isinstance(each, (dict, list)):
            yield from _places(each)
        else:
            yield value, key


def many_hostile(layout: Layout, worker: str) -> dict[str, bytes]:
    """Return by path the nodes of which there are many, one for each hostile value."""
    fleet = layout.fleet
    folders = {
        "queue": layout.queues,
        "limit": fleet.limits,
        "document": fleet.document_set("plans"),
        "contender": fleet.lock("export"),
        "entry": fleet.actionlog,
        "action ping": fleet.actions_of(worker),
    }
    return {
        f"{folder}/{entry_name(1.5e9, f'{number:08x}')}": value
        for kind, folder in folders.items()
        for number, value in enumerate(hostile_values(kind).values())
    }


def one_hostile(layout: Layout, worker: str, name: str) -> dict[str, bytes]:
    """Return by path the nodes of which there is one, with a hostile value."""
    fleet = layout.fleet
    version = json.loads(hostile_values("settings")[name])["current"]
    found = {
        "settings": fleet.settings,
        "holds": fleet.holds,
        "leader": layout.rebalancer,
        "broker": layout.broker,
        "worker": layout.worker(worker),
        "assignment": layout.assignment(worker),
    }
    nodes = {path: hostile_values(kind)[name] for kind, path in found.items()}
    root, moves = hostile_values("leader")[name], hostile_values("assignment")[name]
    text = json.dumps(version).encode()
    kept = {f"{fleet.settings}/{number:010}": text for number in (2, 3)}
    return {**nodes, layout.root: root, layout.assignments: moves, **kept}


_HEADER_VALUES = (
    *('"1e308"', '"-1e308"', '"nan"', '"1e999"', '"253402300800"', '"-1"', '""', '"\\ue000"'),
    *('"\\ud800"', "null", "true", "5", "1e308", "-1", "[1]", "{}", '"' + "9" * 5000 + '"'),
    *("[" * 500 + "]" * 500, "[" * 1000 + "]" * 1000, '"' + "x" * 60_000 + '"'),
)
HEADERS = [
    *("null", "5", "[]", "{", "NaN", '"text"', "[" * 5000, '{"\\ud800": "\\udc00"}'),
    *(
        f'{{"{name}": {value}}}'
        for name in ("qdo-id", "qdo-sent", "qdo-due", "qdo-retried", "content-type", "qdo-mark")
        for value in _HEADER_VALUES
    ),
]
"""Stored headers of other programs."""
BODIES = [
    *(b"", b"\xff\xfe", b"NaN", b"1e999", b"9" * 5000, b'{"a":1,"a":2}', b"[1,", b"\x00"),
    *(b"[" * depth + b"]" * depth for depth in (99, 300, 500, 1000, 5000)),
    *(
        b'{"a":' * 400 + b"1" + b"}" * 400,
        b'"\\ud800"',
        b'"\xee\x80\x80"',
        b"q1.",
        b"q1.k." + b"x" * 40,
    ),
]
"""Bodies of other programs."""
