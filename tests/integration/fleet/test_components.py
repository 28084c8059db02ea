"""`qdo workers --all`: real processes, several versions, nodes of other programs."""

from __future__ import annotations

import json
import os
import platform
import signal
from pathlib import Path
from typing import Any

import pytest
from kazoo.security import ACL, Id, Permissions

from qdo import App
from qdo._version import FORMAT_LEVEL, __version__
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QueueNameError
from qdo.fleet.components import read_components
from qdo.fleet.locks import CoordinatorLocks
from tests.support.cli import QDO, WORKER, Run, clean_environment, command
from tests.support.coordinator_process import connected
from tests.support.processes import Proc, wait_until
from tests.support.zookeeper import Ensemble

LAYOUT = Layout.of("shop")
WORKERS = f"{LAYOUT.components}/worker"
JOB = """
import gevent

def job(message, context):
    gevent.sleep(3600)
"""


@pytest.fixture
def settings(
    coordinator_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    found = {
        "QDO_APP": "shop",
        "QDO_BROKER": f"sqlite:{tmp_path}/messages.db",
        "QDO_COORDINATOR": coordinator_url,
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return {**found, "QDO_ZONE": "ams"}


ADDRESS = "10.0.0.7:8001"


def listed(cli: Run) -> tuple[list[dict[str, Any]], str]:
    """Return the listed processes, and what was printed on stderr."""
    ended = cli("workers", "--all", "-o", "json")
    return ended.items(), ended.err


def test_processes_describe_themselves(
    settings: dict[str, str], outsider: Client, tmp_path: Path, cli: Run
) -> None:
    """With the parent that started them; a job that runs counts as busy."""
    items, hint = listed(cli)
    assert items == []
    assert hint.startswith("hint: no process")
    (tmp_path / "work.py").write_text(JOB)
    environment = clean_environment(
        {
            **settings,
            "QDO_SESSION_TIMEOUT_SECONDS": "2.5",
            "QDO_DRAIN_SECONDS": "0",
            "QDO_ADDRESS": ADDRESS,
            "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        }
    )
    arguments = (*WORKER, "--job", "work:job", "--processes", "2")
    with Proc.python(*arguments, env=environment, cwd=tmp_path) as parent:
        assert command(*QDO, "send", "q", "1", cwd=tmp_path, env=environment).code == 0
        wait_until(
            lambda: sorted(each.busy or 0 for each in read_components(outsider, LAYOUT)) == [0, 1],
            "one of two processes is busy",
        )
        items, hint = listed(cli)
        assert hint == ""
        for item in items:
            assert item["kind"] == "worker"
            assert item["parent"] == parent.pid
            assert (item["version"], item["level"]) == (__version__, FORMAT_LEVEL)
            assert (item["python"], item["zone"]) == (platform.python_version(), "ams")
            assert (item["state"], item["fault"]) == ("running", None)
        assert len({item["pid"] for item in items}) == 2
        assert len({item["settings"] for item in items}) == 1
        with App("shop", coordinator=settings["QDO_COORDINATOR"]) as app:
            owner = app.owner("q")
        assert owner is not None
        assert (owner.queue, owner.zone, owner.address) == ("q", "ams", ADDRESS)
        place = f"of parent process {parent.pid}"
        assert owner.process in [f"host {items[0]['host']}, process {n} {place}" for n in (1, 2)]
        parent.send(signal.SIGTERM)
        parent.wait()


@pytest.mark.parametrize("node", [b"", b'{"owner": "worker-1"}', b"garbage"])
def test_no_queue_has_an_owner_that_is_gone(
    settings: dict[str, str], outsider: Client, node: bytes
) -> None:
    outsider.create(LAYOUT.queue("q"), node, makepath=True)
    with App("shop", coordinator=settings["QDO_COORDINATOR"]) as app:
        assert app.owner("q") is app.owner("unknown") is None
        with pytest.raises(QueueNameError):
            app.owner("")


def test_versions_that_differ_are_named(
    settings: dict[str, str], outsider: Client, cli: Run
) -> None:
    for version, level in (("0.1.0", 1), ("0.2.0", 2), ("0.2.0", 2), ("0.2.0", "x")):
        value = json.dumps({"host": "a", "version": version, "level": level}).encode()
        outsider.create(f"{WORKERS}/a-", value, ephemeral=True, sequence=True, makepath=True)
    outsider.create(f"{LAYOUT.components}/client/b-1", b"{}", ephemeral=True, makepath=True)
    items, hint = listed(cli)
    assert [item["kind"] for item in items] == ["client", *["worker"] * 4]
    assert "0.1.0 (level 1) in 1 of 4 processes, 0.2.0 (level 2) in 2 of 4 processes" in hint
    assert "0.2.0 (level unknown) in 1 of 4 processes" in hint


def clients(outsider: Client) -> list[int | None]:
    """Return the process ids of the registered processes that are not workers."""
    return [each.pid for each in read_components(outsider, LAYOUT) if each.kind == "client"]


def test_a_sender_registers_itself(settings: dict[str, str], outsider: Client) -> None:
    """Once, however often it asks, and with its locks; until it closes the app."""
    app = App("shop")
    for _ in range(2):
        app.register()
        with app.lock("export"):
            assert clients(outsider) == [os.getpid()]
    (found,) = read_components(outsider, LAYOUT)
    assert (found.version, found.level) == (__version__, FORMAT_LEVEL)
    app.close()
    assert clients(outsider) == []
    app.register()
    assert clients(outsider) == [os.getpid()]
    app.close()


def test_a_registered_sender_outlives_its_session(
    settings: dict[str, str], outsider: Client
) -> None:
    with App("shop") as app:
        app.register()
        (before,) = read_components(outsider, LAYOUT)
        locks = app._locks.get()
        assert isinstance(locks, CoordinatorLocks)
        locks.close()
        wait_until(
            lambda: {each.name for each in read_components(outsider, LAYOUT)} - {before.name},
            "it registers again",
        )
    assert clients(outsider) == []


def test_a_registered_sender_outlives_the_coordinator(
    zookeeper_server: Ensemble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says once that it is not registered, and tries again."""
    own = Ensemble(tmp_path, 1)
    own.start()
    app = App("shop", coordinator=own.url(), session_timeout_seconds=1, connect_seconds=1)
    try:
        app.register()
        own.servers[0].kill()
        locks = app._locks.get()
        assert isinstance(locks, CoordinatorLocks)
        locks.close()  # as after the end of the session, of which it cannot hear now
        wait_until(lambda: "no longer registered" in caplog.text, "it says so", 30.0)
        own.servers[0].restart()
        with connected(own.url()) as client:
            wait_until(lambda: clients(client) == [os.getpid()], "it registers again", 30.0)
        assert caplog.text.count("no longer registered") == 1
    finally:
        app.close()
        own.close()


def test_a_forked_sender_registers_itself(settings: dict[str, str], outsider: Client) -> None:
    """The node of its parent stays."""
    code = """
import os, signal
from qdo import App

app = App("shop")
app.register()
child = os.fork()
if not child:
    app.register()
    signal.pause()
print(child, flush=True)
os.waitpid(child, 0)
"""
    with Proc.python("-c", code, env=clean_environment(settings)) as sender:
        child = int(sender.wait_for_line(r"^(\d+)$")[0][1])
        wait_until(lambda: {*clients(outsider)} == {sender.pid, child}, "both are registered")
        os.kill(child, signal.SIGTERM)


HOSTILE = (
    b"",
    b"null",
    b"[]",
    b"\xff",
    b"[" * 5000,
    b'{"pid": 1e400, "level": NaN}',
    b'{"pid": true, "level": "1", "busy": [], "started": 1e308, "zone": {"a": 1}}',
    b'{"pid": 9223372036854775808, "host": "\\ud800", "started": -9223372036854775808}',
    b'{"host": "%s"}' % (b"x" * 500_000),
)


def test_a_hostile_node_costs_only_its_row(
    settings: dict[str, str], outsider: Client, cli: Run
) -> None:
    for number, data in enumerate(HOSTILE):
        outsider.create(f"{WORKERS}/bad-{number}", data, makepath=True)
    outsider.create(f"{WORKERS}/good", b'{"host": "h", "pid": 7}', ephemeral=True)
    (*bad, good), _ = listed(cli)
    assert len(bad) == len(HOSTILE)
    assert all(each["fault"] for each in bad)
    assert (good["host"], good["pid"], good["fault"]) == ("h", 7, None)
    assert cli("workers", "--all").code == 0


def test_a_protected_node_is_listed_with_its_fault(
    settings: dict[str, str], outsider: Client, cli: Run
) -> None:
    acl = [ACL(Permissions.ALL, Id("digest", "a:b"))]
    outsider.ensure_path(WORKERS)
    outsider.create(f"{WORKERS}/bad", b"{}", acl=acl, ephemeral=True)
    outsider.create(f"{LAYOUT.components}/lonely", b"not a folder")
    [item], _ = listed(cli)
    assert "ACL" in item["fault"]


def test_a_process_that_holds_a_lock_is_listed(
    settings: dict[str, str], coordinator_url: str, cli: Run
) -> None:
    """A script or a web server: no worker, but a process with nodes."""
    with App("shop", coordinator=coordinator_url) as app, app.lock("export"):
        [item], _ = listed(cli)
        assert (item["kind"], item["pid"], item["level"]) == ("client", os.getpid(), FORMAT_LEVEL)
        assert item["fault"] is None
