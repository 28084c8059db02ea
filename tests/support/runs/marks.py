"""Marks that tests get by their servers, so ``make check`` can leave the slow ones out.

========== =====================================================================
zookeeper  uses a ZooKeeper server
postgresql uses a PostgreSQL server
aws        uses a server that speaks AWS's protocols
redis      uses a Redis server
processes  starts processes
slow       takes more than two seconds; set by hand
========== =====================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.support.paths import ROOT

MARKS = {
    "zookeeper": "uses a ZooKeeper server",
    "postgresql": "uses a PostgreSQL server",
    "aws": "uses a server that speaks AWS's protocols",
    "redis": "uses a Redis server",
    "processes": "starts processes",
    "slow": "takes more than two seconds",
    "long(reason)": "only `make test-rest` runs it",
    "exec": "starts its processes by exec, because a fork would hide what it tests",
}
SERVERS = {
    "zookeeper_server": "zookeeper",
    "shared_zookeeper": "zookeeper",
    "zookeeper_ensemble": "zookeeper",
    "secure_zookeeper": "zookeeper",
    "shared_postgresql": "postgresql",
    "postgresql_server": "postgresql",
    "moto_server": "aws",
    "sqs_stub": "aws",
    "kinesis_process": "aws",
    "redis_server": "redis",
}
"""Fixtures that start a server."""
ONE_PROCESS = (
    *("zookeeper_server", "zookeeper_ensemble", "secure_zookeeper", "postgresql_server"),
    "redis_server",
)
"""Fixtures whose tests run in one process, so that these servers start once a run."""
TOGETHER = {
    "tests/unit/docs/test_reference.py": "reference",
    **dict.fromkeys(
        (
            *(f"tests/unit/test_{name}.py" for name in ("layers", "refusals", "shape")),
            "tests/golden/test_wording.py",
            "tests/unit/docs/test_docs.py",
        ),
        "sources",
    ),
    **dict.fromkeys(
        (
            f"tests/acceptance/test_{name}.py"
            for name in ("attacks", "encryption", "holds", "strange_rows", "stream_fleet")
        ),
        "fleets",
    ),
}
"""Files of a group run in one process: they prepare for seconds what all of their tests read, or
each of their tests needs both cores, and six at once would exceed their time limits."""
REQUESTED = ("{}", "{}_url", "{}_server", "sqs_{}")
"""Names of the fixtures that a fixture or test requests by `getfixturevalue`, for a parameter."""
STARTERS = {
    *("subprocess", "multiprocessing", "Popen", "fork", "Proc", "ServerProcess", "serving"),
    *("Supervisor", "ProcessExecutor", "pytester", "system"),
}
"""Names by which tests start processes, in their own code or in that of `tests.support`."""
PROCESS_FOLDERS = ("tests/acceptance/", "tests/live_aws/")
EXECUTED = (
    *(f"tests/acceptance/test_{name}" for name in ("demo.", "rolling_restart.")),
    "tests/contract/broker/test_under_gevent.py",
    "tests/contract/coordinator/test_kazoo_recipes.py",
    "tests/integration/cli/test_completion.py",
    "tests/integration/cli/test_every_command.py",
    "tests/integration/cli/test_installation.py",
    "tests/integration/cli/test_processes.py",
    "tests/integration/sqs/test_live_suite_runs.py",
    "tests/integration/supervisor/",
    "tests/integration/testing/",
    "tests/integration/worker/executors/test_forks.py",
    "tests/integration/worker/executors/test_process",
    "tests/integration/worker/test_shadowed_modules.py",
    "tests/integration/worker/test_worker_process.py",
    "tests/unit/bench/",
)
"""Beginnings of the files that test starts, imports, signals, streams or ``/proc``. A fork by a
warm interpreter would hide faults of qdo there, so their processes start by exec."""
SIMULATION = "tests/simulation/"
"""Its only processes are interpreters with a fixed order of sets, so it is never marked."""
TESTS = f"{ROOT / 'tests'}/"


COMPUTES = 4
"""The kind of the shortest tests, which neither start processes nor ask servers."""


def add_marks(items: list[pytest.Item]) -> None:
    """Mark each test by its fixtures, its parameters and the functions that it reaches."""
    for item in items:
        for mark in marks_of(item):
            item.add_marker(mark)
        if item.nodeid.startswith(EXECUTED):
            item.add_marker("exec")
        groups = [name for name in ONE_PROCESS if name in getattr(item, "fixturenames", ())]
        if item.location[0] in TOGETHER:
            groups.append(TOGETHER[item.location[0]])
        for name in groups:
            item.add_marker(pytest.mark.together(name))


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return tests in the order to start them.

    The longest come first, so that none begins when the others are done. They mostly wait, so
    the shortest, which compute, are spread between them: both cores have work at all times.
    """
    ordered = sorted(items, key=_kind)
    waiting = [item for item in ordered if _kind(item) < COMPUTES]
    computing = ordered[len(waiting) :]
    mixed = []
    share = len(computing) / (len(waiting) + 1)
    for number, item in enumerate(waiting):
        mixed += [*computing[round(number * share) : round((number + 1) * share)], item]
    return mixed + computing[round(len(waiting) * share) :]


def _kind(item: pytest.Item) -> int:
    if any(item.get_closest_marker(name) for name in ("slow", "timeout")):
        return 0
    if item.nodeid.startswith(PROCESS_FOLDERS):
        return 1
    if item.get_closest_marker("processes"):
        return 2
    return (
        3
        if any(map(item.get_closest_marker, ("aws", "zookeeper", "postgresql", "redis")))
        else COMPUTES
    )


def marks_of(item: pytest.Item) -> set[str]:
    """Return the names of the marks that a test gets."""
    fixtures = set(getattr(item, "fixturenames", ()))
    found = {mark for name, mark in SERVERS.items() if name in fixtures}
    reached = frozenset[str]().union(*map(names_reached, _functions(item)))
    if "getfixturevalue" in reached:
        found |= {SERVERS[name] for name in _requested(item) & SERVERS.keys()}
    if item.nodeid.startswith(SIMULATION):
        return found
    if reached & STARTERS or item.nodeid.startswith(PROCESS_FOLDERS):
        found.add("processes")
    return found


def unmarked(item: pytest.Item) -> set[str]:
    """Return the fixtures of servers that a test has used, and for which it has no mark."""
    used = getattr(getattr(item, "_request", None), "_fixture_defs", {})
    return {name for name in SERVERS.keys() & used if not item.get_closest_marker(SERVERS[name])}


def _requested(item: pytest.Item) -> set[str]:
    """Return the fixtures that a test may request for its parameters, and all that these use."""
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec else ()
    kinds = [each for value in values if isinstance(value, str) for each in value.split("-")]
    waiting = [name.format(each) for each in kinds for name in REQUESTED]
    found = set[str]()
    while waiting:
        name = waiting.pop()
        definitions = item.session._fixturemanager.getfixturedefs(name, item) or ()
        if definitions and name not in found:
            found.add(name)
            waiting += definitions[-1].argnames
    return found


def _functions(item: pytest.Item) -> Iterator[FunctionType]:
    """Yield the test's function, and those of the fixtures it uses, however far away."""
    info: Any = getattr(item, "_fixtureinfo", None)
    if info is None:  # such as a doctest
        return
    functions = [getattr(item, "function", None)]
    for name, definitions in info.name2fixturedefs.items():
        if name not in SERVERS:
            functions += [each.func for each in definitions[-1:]]
    for each in functions:
        plain = getattr(each, "__func__", each)
        if isinstance(plain, FunctionType):
            yield plain


@cache
def names_reached(function: FunctionType) -> frozenset[str]:
    """Return the names that a function uses, and all functions and classes of tests/ it reaches."""
    found: set[str] = set()
    seen: set[object] = set()
    waiting: list[Any] = [function]
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if isinstance(each, type):
            members = [getattr(value, "__func__", value) for value in vars(each).values()]
            properties = [value.fget for value in members if isinstance(value, property)]
            waiting += [
                value
                for value in (*members, *properties, *each.__bases__)
                if isinstance(value, FunctionType | type) and _is_of_tests(value)
            ]
        elif isinstance(each, FunctionType):
            names = set(_names(each.__code__))
            found |= names
            for name in names:
                value = each.__globals__.get(name)
                for one in value.values() if isinstance(value, dict) else (value,):
                    inner = getattr(one, "func", getattr(one, "__wrapped__", one))
                    if isinstance(inner, FunctionType | type) and _is_of_tests(inner):
                        waiting.append(inner)
    return frozenset(found)


def _is_of_tests(value: FunctionType | type) -> bool:
    """Return whether a function or class is defined in tests/, conftest.py included."""
    file = getattr(sys.modules.get(value.__module__), "__file__", None)
    return file is not None and file.startswith(TESTS)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
