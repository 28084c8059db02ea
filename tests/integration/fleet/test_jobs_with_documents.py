"""Jobs that read documents, in a real worker: each executor sees what its messages ask for."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qdo
from qdo.errors import DocumentConflictError, UsageError
from qdo.testing import TestKit
from tests.support.paths import ROOT
from tests.support.processes import Proc, paused, wait_until, whole_lines
from tests.support.zookeeper import Ensemble

JOBS = "from tests.apps.documents import app, plans\n"
QUEUES = ["greenlet", "thread", "process", "asyncio", "batch"]


class DocumentShop:
    """The app, its folder, and its worker program."""

    def __init__(self, folder: Path, coordinator: str) -> None:
        self.folder = folder
        self.coordinator = coordinator
        self.broker = f"sqlite:{folder / 'messages.db'}"
        (folder / "shop.py").write_text(JOBS)
        self.app = qdo.App("shop", broker=self.broker, coordinator=coordinator)

    def start(self, *options: str) -> Proc:
        return Proc.python(
            *("-m", "qdo.cli.worker", "shop:app", *(options or ("--burst",))),
            *("--broker", self.broker, "--coordinator", self.coordinator),
            cwd=self.folder,
            env={"PYTHONPATH": str(ROOT)},
        )

    def said(self) -> list[str]:
        return whole_lines(self.folder / "said")


@pytest.fixture
def shop(tmp_path: Path, coordinator_url: str) -> Iterator[DocumentShop]:
    made = DocumentShop(tmp_path, coordinator_url)
    yield made
    made.app.close()


def test_each_executor_sees_what_its_message_asks_for(shop: DocumentShop) -> None:
    """Every message is sent right after its write: without the wait, copies would be behind."""
    plans = shop.app.documents("plans")
    for number in range(20):
        stamp = plans.put("acme", number)
        for queue in QUEUES:
            shop.app.send(queue, number, after=stamp)
    with shop.start() as worker:
        assert worker.wait() == 0
    found = [line.split() for line in shop.said()]
    assert len(found) == 20 * len(QUEUES)
    assert all(int(value) >= int(body) for _, body, value in found)


def test_no_job_starts_once_the_lease_is_over(tmp_path: Path, zookeeper_server: Ensemble) -> None:
    """Its message waits for documents while the coordinator, and so the lease, is away."""
    shop = DocumentShop(tmp_path, zookeeper_server.url(f"/{tmp_path.name}"))
    stamp = shop.app.documents("plans").put("acme", 0)
    for queue in QUEUES:
        shop.app.send(queue, "first", after=stamp)
    (server,) = zookeeper_server.servers
    with shop.start("--session-timeout-seconds", "2") as worker:
        wait_until(lambda: len(shop.said()) == len(QUEUES), "all have run")
        with paused(server.pid):
            for queue in QUEUES:
                shop.app.send(queue, "second", after=stamp + 10**9)
            late = "gets older documents"
            wait_until(lambda: worker.output.count(late) == len(QUEUES), "all have waited")
            worker.wait_for_line("the lease expired")
            assert len(shop.said()) == len(QUEUES)
        again = {f"{queue} second 0" for queue in QUEUES}
        wait_until(lambda: again <= {*shop.said()}, "all have run again")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    shop.app.close()


def test_jobs_see_changes_while_the_worker_runs(shop: DocumentShop) -> None:
    plans = shop.app.documents("plans")
    shop.app.send("greenlet", 0, after=plans.put("acme", 0))
    worker = Proc.python(
        *("-m", "qdo.cli.worker", "shop:app"),
        *("--broker", shop.broker, "--coordinator", shop.coordinator),
        cwd=shop.folder,
        env={"PYTHONPATH": str(ROOT)},
    )
    with worker:
        wait_until(lambda: len(shop.said()) == 1, "the first job")
        for number in range(1, 50):
            stamp = plans.put("acme", number)
            shop.app.send_many(
                [qdo.NewMessage(queue, number, after=stamp) for queue in ("greenlet", "thread")]
            )
        wait_until(lambda: len(shop.said()) == 99, "all jobs")
        for line in shop.said():
            _, body, value = line.split()
            assert int(value) >= int(body)


@pytest.mark.parametrize("first", ["thread", "asyncio", "greenlet"])
def test_the_first_use_may_be_in_any_thread(shop: DocumentShop, first: str) -> None:
    """The connection belongs to the worker's event loop, not to the thread that needs it first."""
    plans = shop.app.documents("plans")
    shop.app.send(first, 0, after=plans.put("acme", 0))
    worker = Proc.python(
        *("-m", "qdo.cli.worker", "shop:app", "--broker", shop.broker),
        *("--coordinator", shop.coordinator),
        cwd=shop.folder,
        env={"PYTHONPATH": str(ROOT)},
    )
    with worker:
        wait_until(lambda: len(shop.said()) == 1, "the first job")
        for number, queue in enumerate(["greenlet", "locked", "asyncio", "batch", first], 1):
            shop.app.send(queue, number, after=plans.put("acme", number))
            wait_until(lambda number=number: len(shop.said()) == number + 1, queue)  # type: ignore[misc]
    assert all(line.split()[1] == line.split()[2] for line in shop.said())


@pytest.mark.parametrize("after", [-1, 1.5, "1", True, 1 << 63])
def test_a_time_that_no_document_has(after: Any) -> None:
    with pytest.raises(UsageError):
        qdo.App("shop").send("q", 1, after=after)


# --- the testing kit ---


def test_the_kit_keeps_documents_in_memory() -> None:
    """It needs no coordinator; the app's own documents are back when it is closed."""
    app = qdo.App("shop", coordinator="zookeeper://127.0.0.1:1")
    plans = app.documents("plans")
    seen: list[Any] = []
    changed: list[tuple[str, Any]] = []
    plans.on_change(lambda name, value: changed.append((name, value)))

    @app.job()
    def job(message: qdo.Message, context: Any) -> None:
        seen.append((message.body, plans["acme"]["quota"]))

    with TestKit(app) as kit:
        assert dict(plans) == {}
        stamp = plans.put("acme", {"quota": 1})
        kit.send("q", "first", after=stamp)
        kit.run_until_idle()
        plans.change("acme", lambda plan: {**plan, "quota": plan["quota"] + 1})
        kit.send("q", "second")
        kit.run_until_idle()
        with pytest.raises(DocumentConflictError):
            plans.put("acme", 0, if_version=None)
        plans.delete("acme")
        assert dict(plans) == {}
    assert seen == [("first", 1), ("second", 2)]
    assert changed == [("acme", {"quota": 1}), ("acme", {"quota": 2}), ("acme", None)]
    with TestKit(app):
        assert dict(plans) == {}
