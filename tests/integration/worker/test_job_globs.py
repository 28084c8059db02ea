"""Rolling deploys: a queue goes to a worker whose version of the app has a job for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from qdo.app import App
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from tests.support.cli import QDO, WORKER, Ended, command
from tests.support.processes import Proc, wait_until, whole_lines

VERSION = """
import qdo

app = qdo.App("a")

def write(message, context):
    with open("out", "a") as file:
        file.write(f"{{message.queue}} {{message.body}} {version}\\n")

for glob in {globs}:
    app.job(glob)(write)
"""


class RollingDeploy:
    """Real workers of an old and a new version of an app; only the new one has a job for SMS."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        (folder / "qdo-data").mkdir()
        for version, globs in (("old", ["mail-*"]), ("new", ["mail-*", "sms-*"])):
            text = VERSION.format(version=version, globs=globs)
            (folder / f"{version}.py").write_text(text)
        self.app = stack.enter_context(App("a", broker=f"sqlite:{folder}/qdo-data/messages.db"))

    def start(self, version: str, *options: str) -> Proc:
        argv = (*WORKER, f"{version}:app", "--session-timeout-seconds", "4", *options)
        return self._stack.enter_context(Proc.python(*argv, cwd=self.folder))

    def qdo(self, *argv: str) -> Ended:
        return command(*QDO, *argv, "--app", "a", cwd=self.folder)

    def queues(self) -> dict[str, dict[str, Any]]:
        found = self.qdo("queues", "-o", "json").items()
        return {each["queue"]: each for each in found}

    def done(self) -> list[str]:
        return sorted(whole_lines(self.folder / "out"))

    def claims(self) -> dict[str, int]:
        """Return how often the node of each queue was written."""
        client = connect(f"sqlite:{self.folder}/qdo-data/coordination.db")
        with closing(client):
            client.open(20)
            layout = Layout.of("a")
            found = {}
            for queue in client.get_children(layout.queues):
                data, stat = client.get(layout.queue(queue))
                found[queue] = stat.version if QueueNode.parse(data).owner else -1
            client.stop()
        return found


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[RollingDeploy]:
    with ExitStack() as stack:
        yield RollingDeploy(tmp_path, stack)


def test_a_queue_goes_to_the_version_that_has_its_job(deploy: RollingDeploy) -> None:
    """Until then it is without owner and says so; the other queues stay where they are."""
    deploy.app.send_many([("mail-1", 1), ("mail-2", 1), ("sms-1", 1), ("fax-1", 1)])
    old = deploy.start("old")
    old.wait_for_line(r"rebalancer: no worker takes 2 queues .*: fax-1, sms-1$")
    wait_until(lambda: deploy.done() == ["mail-1 1 old", "mail-2 1 old"], "what it has jobs for")
    queues = deploy.queues()
    assert {name: each["untaken"] for name, each in queues.items()} == {
        "mail-1": None,
        "mail-2": None,
        "sms-1": "no job",
        "fax-1": "no job",
    }
    assert (queues["sms-1"]["owner"], queues["sms-1"]["backlog"]) == (None, 1)
    table = deploy.qdo("queues").out.splitlines()
    assert [line.split()[:4] for line in table if "sms" in line] == [
        ["sms-1", "no-job", "no", "job"]
    ]
    owner = queues["mail-1"]["owner"]
    before = deploy.claims()
    deploy.start("new")
    wait_until(lambda: "sms-1 1 new" in deploy.done(), "the new version runs its job")
    queues = deploy.queues()
    assert queues["mail-1"]["owner"] == queues["mail-2"]["owner"] == owner
    assert queues["sms-1"]["owner"] not in (None, owner)
    assert queues["fax-1"]["untaken"] == "no job"
    after = deploy.claims()
    assert {name: after[name] for name in ("mail-1", "mail-2")} == {
        name: before[name] for name in ("mail-1", "mail-2")
    }
    workers = deploy.qdo("workers", "-o", "json").items()
    assert [each["filter"]["jobs"] for each in workers] == [["mail-*"], ["mail-*", "sms-*"]]
    assert "mail-*, sms-*" in deploy.qdo("workers").out
    old.send(signal.SIGTERM)
    assert old.wait() == 0, old.output
    deploy.app.send("mail-1", 2)
    wait_until(lambda: "mail-1 2 new" in deploy.done(), "the new version takes the rest")


def test_a_queue_whose_job_is_excluded_says_so(deploy: RollingDeploy) -> None:
    """The remedy is then another setting, not another job."""
    deploy.app.send_many([("mail-1", 1), ("sms-1", 1)])
    worker = deploy.start("new", "--exclude", "sms-*")
    worker.wait_for_line(r"rebalancer: no worker takes 1 queue .*: sms-1$")
    assert deploy.queues()["sms-1"]["untaken"] == "excluded by all workers"


def test_burst_leaves_queues_without_a_job(deploy: RollingDeploy) -> None:
    """They do not keep the worker from exiting."""
    deploy.app.send_many([("mail-1", 1), ("sms-1", 1)])
    burst = deploy.start("old", "--burst")
    assert burst.wait() == 0, burst.output
    assert deploy.done() == ["mail-1 1 old"]
