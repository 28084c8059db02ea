"""What `make check`, `make test` and `make test-rest` run.

Each item has one level. `make test` includes those of `make check`; the two others together are
all items. Items that run once on each coordinator, or on each server that speaks SQS, are divided:
`make test` plays one of them, chosen by the name, and `make test-rest` the others. So are the many
combinations of a few files.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

CHECK, TEST, REST = "check", "test", "rest"
SELECTED = {CHECK: {CHECK}, TEST: {CHECK, TEST}, REST: {REST}}
COSTLY = {"zookeeper", "postgresql", "aws", "redis", "processes", "slow"}
"""Marks of items that `make check` leaves out."""
SEVERAL_PARTS = "tests/integration/"
"""Tests of several parts: `make check` leaves them out, too."""
LONG: dict[str, str | None] = {
    "tests/acceptance/test_strange_rows.py": None,
    "tests/acceptance/": "whole fleets",
    "tests/contract/coordinator/test_kazoo_recipes.py": "kazoo's own tests",
    "tests/integration/deployment/": "containers and units of systemd",
    "tests/integration/dashboard/test_browser.py": "pictures of all pages in Chromium",
    "tests/live_aws/": "AWS itself, on request",
    "tests/contract/support/test_sqs_servers.py": None,
    "tests/contract/support/": "servers of the tests",
    "tests/unit/support/test_forks.py": None,
    "tests/unit/support/test_levels.py": None,
    "tests/unit/support/": "tools of the tests",
    "tests/unit/bench/": "benchmarks",
}
"""Files whose items only `make test-rest` runs, with the reason, and exceptions from that. The mark
`long` names others."""
SHARES = {
    "tests/contract/coordinator/test_differential.py": 5,
    "tests/faults/test_decisions.py": 3,
    "tests/faults/test_fault_points.py": 4,
    "tests/faults/test_killed_processes.py": 3,
    "tests/faults/test_s3.py": 2,
    "tests/faults/test_sqs.py": 3,
    "tests/integration/cli/messages/test_decisions.py": 3,
}
"""Files of which `make test` plays every n-th combination of parameters."""
TWINS = (
    ("embedded", "zookeeper", "database"),
    ("embedded_url", "zookeeper_url", "database_url"),
    ("files", "servers"),
)
"""Parameters with which a test runs on each coordinator."""
CONTRACTS = "tests/contract/"
"""Tests that compare coordinators: `make test` plays all."""
AWS_TWINS = (("stub", "moto"), ("standard", "fifo"))
"""Parameters with which a contract runs on each server of SQS, and on each kind of queue."""
_PARTS = re.compile(r"[\[\]-]")


def long_reason(item: pytest.Item) -> str | None:
    """Return why only `make test-rest` runs an item; None if `make test` may run it."""
    mark = item.get_closest_marker("long")
    if mark is not None:
        return str(mark.args[0])
    return next((why for start, why in LONG.items() if item.nodeid.startswith(start)), None)


def twin(nodeid: str) -> tuple[str, str] | None:
    """Return an item's name without what its twins differ in, and their kind; None without any."""
    name, bracket, parameters = nodeid.partition("[")
    groups = AWS_TWINS if nodeid.startswith(CONTRACTS) else TWINS
    for each in _PARTS.split(parameters) if bracket else ():
        for kinds in groups:
            if each in kinds:
                return f"{name}[{parameters.replace(each, '*', 1)}", kinds[1]
    return None


def reasons(items: Sequence[pytest.Item]) -> dict[pytest.Item, str]:
    """Return why only `make test-rest` runs an item, for each such item."""
    found = {item: reason for item in items if (reason := long_reason(item)) is not None}
    others = other_twins([item.nodeid for item in items])
    found |= dict.fromkeys((each for each in items if each.nodeid in others), "another twin")
    others = other_combinations(each.nodeid for each in items if each not in found)
    found |= dict.fromkeys((each for each in items if each.nodeid in others), "other combinations")
    return found


def levels(items: Sequence[pytest.Item]) -> dict[pytest.Item, str]:
    """Return the level of each item of a whole run, or of a part of it."""
    rest = reasons(items)
    found = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        is_costly = not COSTLY.isdisjoint(marks) or item.nodeid.startswith(SEVERAL_PARTS)
        found[item] = REST if item in rest else TEST if is_costly else CHECK
    return found


def other_twins(nodeids: Iterable[str]) -> set[str]:
    """Return the items whose twin on another coordinator or server `make test` plays instead."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for nodeid in nodeids:
        if (found := twin(nodeid)) is not None:
            pairs.setdefault(found, []).append(nodeid)
    return {
        each
        for (name, _), twins in pairs.items()
        for each in twins
        if each != sorted(twins)[zlib.crc32(name.encode()) % len(twins)]
    }


def other_combinations(nodeids: Iterable[str]) -> set[str]:
    """Return the items of `SHARES` that `make test` leaves out.

    Each function keeps a diagonal of its combinations: of a parameter with n values, all of them.
    """
    found = set()
    positions: Counter[str] = Counter()
    for nodeid in nodeids:
        share = SHARES.get(nodeid.partition("::")[0], 1)
        name, bracket, _ = nodeid.partition("[")
        if bracket:
            line, column = divmod(positions[name], share)
            positions[name] += 1
            if (line + column) % share:
                found.add(nodeid)
    return found
