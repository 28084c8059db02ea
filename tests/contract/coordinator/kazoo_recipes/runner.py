"""Runs modules of kazoo's own tests against a coordinator, in a process of its own.

    python -m tests.contract.coordinator.kazoo_recipes.runner HANDLER REPORT URL MODULE...

Under the gevent handler the process is monkey-patched first, as kazoo's tests use threads. What
became of each test is written to REPORT as JSON.
"""

from __future__ import annotations

import sys

if sys.argv[1] == "gevent":
    from gevent import monkey

    monkey.patch_all()

import importlib
import json
import types
from pathlib import Path
from typing import Any

# kazoo.testing wants them for the TLS of servers that it would start itself; they need a C
# compiler to install.
for _unused in ("OpenSSL", "jks"):
    sys.modules.setdefault(_unused, types.ModuleType(_unused))

import kazoo.client
import kazoo.testing.harness
import kazoo.tests
import pytest

from qdo.coordination.client import connect
from tests.contract.coordinator.kazoo_recipes.exclusions import reason

_HOST = "embedded:1"


class _Server:
    """The server for kazoo's harness: always there."""

    address = _HOST
    running = True


class _Cluster(list[_Server]):
    """The ensemble for kazoo's harness."""

    def terminate(self) -> None:
        """Do nothing: files go with the test's folder."""

    def get_logs(self) -> list[str]:
        return []


def use_coordinator(handler: str, url: str) -> None:
    """Have kazoo's harness, and tests that make their own client, use the coordinator."""
    network_client = kazoo.client.KazooClient

    def client(hosts: str = "127.0.0.1:2181", timeout: float = 10.0, **options: Any) -> Any:
        if not hosts.startswith(_HOST):
            return network_client(hosts, timeout=timeout, **options)
        options.setdefault("handler", handler)
        if "max_retries" in options:  # the older spelling of the retry options
            options["command_retry"] = options["connection_retry"] = None
        chroot = hosts.removeprefix(_HOST)
        return connect(f"{url}?chroot={chroot}", session_timeout_seconds=timeout, **options)

    cluster = _Cluster([_Server()])
    harness: Any = kazoo.testing.harness
    harness.get_global_cluster = lambda: cluster
    harness.KazooClient = client
    vars(kazoo.client)["KazooClient"] = client
    chosen = {
        "gevent": ("kazoo.handlers.gevent", "SequentialGeventHandler"),
        "threading": ("kazoo.handlers.threading", "SequentialThreadingHandler"),
    }[handler]
    cache: Any = importlib.import_module("kazoo.tests.test_cache")
    cache.KazooAdaptiveHandlerTestCase.HANDLERS = (chosen,)


class _Reporter:
    """A pytest plugin: drops the tests that are left out, and notes how the others ended."""

    def __init__(self, handler: str) -> None:
        self._handler = handler
        self.left_out: list[str] = []
        self.ends: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = {_name(item): reason(_name(item), self._handler) for item in items}
        self.left_out = [name for name, why in names.items() if why]
        items[:] = [item for item in items if not names[_name(item)]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = _short(report.nodeid)
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            self.ends.setdefault(name, report.outcome)
            if report.outcome == "failed":
                self.ends[name] = "failed"


def _name(item: pytest.Item) -> str:
    return _short(item.nodeid)


def _short(nodeid: str) -> str:
    path, _, rest = nodeid.partition("::")
    return f"{Path(path).stem}::{rest}"


def main() -> int:
    """Run the tests named on the command line; return pytest's exit code."""
    handler, report, url, *modules = sys.argv[1:]
    use_coordinator(handler, url)
    reporter = _Reporter(handler)
    code = pytest.main(
        [
            # qdo's own conftest imports hypothesis, which has a class TreeNode; a test of kazoo
            # counts the objects of a class with that name.
            "--noconftest",
            "-c", "/dev/null", "--rootdir", str(Path(kazoo.tests.__file__).parent),
            "-p", "no:cacheprovider", "-q", "--tb=short", "--timeout=60", "--durations=5",
            "-W", "ignore:No chroot path exists", "--pyargs",
            *(f"kazoo.tests.{module}" for module in modules),
        ],
        plugins=[reporter],
    )  # fmt: skip
    Path(report).write_text(json.dumps(vars(reporter)))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
