"""Rights of the files of broker and coordinator while a worker runs."""

from __future__ import annotations

import grp
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo import App
from qdo.brokers.registry import open_broker
from qdo.coordination.client import connect
from qdo.errors import CoordinatorUnreachableError, DatabaseError
from tests.support.paths import ROOT
from tests.support.processes import Proc, wait_until

JOBS = """
import qdo

app = qdo.App("a")

@app.job()
def run(message, context):
    open("out", "a").write("ran\\n")
"""


@pytest.fixture
def workshop() -> Iterator[Path]:
    """A folder with an app, which other users may enter; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory(prefix="qdo-test-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        (folder / "jobs.py").write_text(JOBS)
        yield folder


def settings(folder: Path, **more: str) -> dict[str, str]:
    places = {name: f"sqlite:{folder}/new/{name}.db" for name in ("broker", "coordinator")}
    return {f"QDO_{name.upper()}": value for name, value in {**places, **more}.items()}


def start(folder: Path, umask: int = 0o022, **more: str) -> Proc:
    old = os.umask(umask)
    try:
        argv = ("-m", "qdo.cli.worker", "jobs:app")
        return Proc.python(*argv, env=settings(folder, **more), cwd=folder)
    finally:
        os.umask(old)


def rights(folder: Path) -> dict[str, int]:
    """Return the modes of everything in a folder; pipes as "pipe"."""
    found = {}
    for each in [folder, *folder.rglob("*")]:
        status = each.lstat()
        name = "pipe" if stat.S_ISFIFO(status.st_mode) else str(each.relative_to(folder))
        found[name] = stat.S_IMODE(status.st_mode)
    return found


def names(mode: int, folder_mode: int) -> dict[str, int]:
    databases = ("broker.db", "coordinator.db")
    files = [f"{name}{end}" for name in databases for end in ("", "-wal", "-shm")]
    files += ["coordinator.db.beats", "broker.db.wakeups/.gate", "pipe"]
    folders = [".", "broker.db.wakeups", "coordinator.db.wakeups"]
    return {**dict.fromkeys(files, mode), **dict.fromkeys(folders, folder_mode)}


@pytest.mark.parametrize("umask", [0, 0o022])
def test_files_of_a_worker_are_private(workshop: Path, umask: int) -> None:
    """Whatever its umask: logs, heartbeats and pipes, too."""
    with App("a", broker=f"sqlite:{workshop}/new/broker.db") as app:
        app.send("q", 1)
    with start(workshop, umask) as worker:
        wait_until(lambda: (workshop / "out").exists(), 30)
        assert rights(workshop / "new") == names(0o600, 0o700), worker.output


_MEMBER = """
import os, sys
from qdo import App
from qdo.brokers.embedded import broker, reader
import qdo.connections.broker
app = App("a")
group = int(sys.argv[1])
os.setgroups([group])
os.setgid(65534)
os.setuid(65534)
os.umask(0o077)
app.send("q", 2)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_members_of_a_group_share_the_files(workshop: Path) -> None:
    """The second user sends, and notifies the worker of the first."""
    group = grp.getgrnam("daemon")
    with start(workshop, group="daemon") as worker:
        wait_until(lambda: "registered" in worker.output, 30)
        subprocess.run(
            [sys.executable, "-c", _MEMBER, str(group.gr_gid)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **settings(workshop, group="daemon")},
            timeout=60,
            check=True,
        )
        wait_until(lambda: (workshop / "out").exists(), 30)
        assert rights(workshop / "new") == names(0o660, 0o2770), worker.output
        owners = {each.lstat().st_gid for each in (workshop / "new").rglob("*")}
        assert owners == {group.gr_gid}
        assert "not shared" not in worker.output


def test_rights_of_others_are_warned_of(workshop: Path) -> None:
    """Once, when the worker starts, with the command that takes them away."""
    (workshop / "new").mkdir(mode=0o755)
    (workshop / "new" / "broker.db").touch(mode=0o644)
    with start(workshop, burst="true") as worker:
        assert worker.wait(60) == 0
        assert worker.output.count(f"`chmod -R o= {workshop}/new/broker.db*`") == 1


@pytest.mark.parametrize("name", ["broker.db", "broker.db.wakeups/.gate", "broker.db.wakeups"])
def test_a_broker_follows_no_link(tmp_path: Path, name: str) -> None:
    """Root's file stays as it is, and none is created where the link points to."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(secret if name.endswith("wakeups") else secret / "file")
    with pytest.raises(DatabaseError):
        open_broker(f"sqlite:{tmp_path}/broker.db", "a")
    assert list(secret.iterdir()) == []


@pytest.mark.parametrize("name", ["c.db", "c.db.beats", "c.db.wakeups"])
def test_a_coordinator_follows_no_link(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (tmp_path / name).symlink_to(secret if name.endswith("wakeups") else secret / "file")
    client = connect(f"sqlite:{tmp_path}/c.db", handler="threading")
    with pytest.raises((DatabaseError, CoordinatorUnreachableError)):
        client.open(0.5)
    assert list(secret.iterdir()) == []
