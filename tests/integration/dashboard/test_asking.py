"""Operators ask the owner of a queue for its messages in flight."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.dashboard import actions
from qdo.fleet.audit import read_entries
from tests.integration.dashboard.test_hostile_pages import ATTACK, NAME
from tests.support.cli import WORKER, clean_environment
from tests.support.dashboard.answering_worker import AnsweringWorker
from tests.support.dashboard.html_check import PageCheck
from tests.support.dashboard.shop import LAYOUT, OPERATOR, VIEWER, FilledShop
from tests.support.fakes.hostile_text import TEXT, unsafe
from tests.support.processes import Proc, children, wait_until

APP = """
import gevent
import qdo

app = qdo.App("shop")


@app.job()
def deliver(message, context):
    app.peek(message.queue)
    open("began", "a").close()
    gevent.sleep(3600)
"""


@contextlib.contextmanager
def silent_worker(shop: FilledShop, *queues: str) -> Iterator[str]:
    """A worker node that never answers, and owns queues."""
    path = shop.client.create(
        f"{LAYOUT.workers}/worker-", WorkerNode().encode(), ephemeral=True, sequence=True
    )
    name = path.rpartition("/")[2]
    for queue in queues:
        shop.client.create(LAYOUT.queue(queue), QueueNode(owner=name).encode())
    yield name


def test_a_worker_lists_its_messages(shop: FilledShop, tmp_path: Path) -> None:
    """With id, attempt, time and stack; the action log names the operator."""
    (tmp_path / "shop.py").write_text(APP)
    places = {f"QDO_{name.upper()}": value for name, value in shop.places.items()}
    env = clean_environment({"QDO_APP": "shop:app", **places})
    operator = shop.operator()
    with Proc.python(*WORKER, "--drain-seconds", "1", env=env, cwd=tmp_path) as worker:
        wait_until(lambda: (tmp_path / "began").exists(), "a message runs")
        wait_until(lambda: "Ask its worker" in operator.page("/queue?name=fine"), "it has an owner")

        def answer() -> str:
            return str(operator.post("/ask/runs", queue="fine").text)

        wait_until(lambda: "1 message in flight" in answer(), "the message is listed")
        # Its job made it a client as well.
        assert "No other process is registered" in operator.page("/workers")
        text = answer()
        assert "shop.py:12 deliver" in text
        assert "Running since" in text
        assert "<dt>Attempt</dt><dd>1</dd>" in text
        assert PageCheck(text).faults == []
        assert read_entries(shop.client, LAYOUT, limit=1) == []
        os.kill(children(worker.pid)[0], signal.SIGKILL)
        worker.kill()


def test_only_operators_may_ask(local_shop: FilledShop) -> None:
    """Neither viewers, nor operators of a dashboard without actions."""
    with silent_worker(local_shop, "owned"):
        viewer = local_shop.visitor(
            viewer_token=VIEWER, operator_token=OPERATOR, allow_actions=True
        )
        viewer.log_in(VIEWER)
        reader = local_shop.operator(allow_actions=False)
        for each in (viewer, reader, local_shop.visitor()):
            assert each.post("/ask/runs", queue="owned").status_code == 403
            wait_until(lambda each=each: "owned" in each.page("/queues"), "it is read")  # type: ignore[misc]
            assert "Ask its worker" not in each.page("/queue?name=owned")
    assert read_entries(local_shop.client, LAYOUT, limit=1) == []


def test_a_queue_without_an_owner_is_not_asked(local_shop: FilledShop) -> None:
    operator = local_shop.operator()
    for name in ("blocked", "no-such-queue", NAME):
        text = operator.post("/ask/runs", queue=name).text
        assert "No worker owns this queue" in text
        assert unsafe(text) - unsafe(NAME) == set()
    assert "Ask its worker" not in operator.page("/queue?name=blocked")


def test_a_silent_worker_delays_no_other_page(
    local_shop: FilledShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question ends after some seconds; more than four at once are refused."""
    monkeypatch.setattr(actions, "ANSWER_SECONDS", 3.0)
    operator = local_shop.operator()
    csrf = operator.csrf()
    with silent_worker(local_shop, "owned") as name:
        wait_until(lambda: "owned" in operator.page("/queues"), "the queue is read")
        answers: list[Any] = []

        def ask() -> None:
            client = type(operator)(operator.flask)
            client.http._cookies = operator.http._cookies
            answers.append(client.post("/ask/runs", csrf, queue="owned"))

        threads = [threading.Thread(target=ask) for _ in range(actions.MOST_AT_ONCE)]
        for each in threads:
            each.start()
        wait_until(lambda: actions._waiting._value == 0, "all wait")
        for path in ("/", "/holds", "/audit", "/queue?name=owned"):
            assert operator.page(path)
        assert operator.post("/ask/runs", csrf, queue="blocked").status_code == 503
        assert all(each.is_alive() for each in threads)
        for each in threads:
            each.join()
    assert [each.status_code for each in answers] == [200] * actions.MOST_AT_ONCE
    assert all(f"{name} did not answer in time" in each.text for each in answers)


OUTPUTS = (
    "",
    "no json",
    "[]",
    '{"runs": 7, "total": "x", "blocked": 3}',
    '{"runs": [1, {}, {"seconds": "x", "stack": []}, {"seconds": 1e400, "stack": []}]}',
    '{"runs": [{"seconds": NaN, "stack": [1]}, {"seconds": -1, "stack": []}], "total": 1e99}',
    json.dumps({"blocked": ATTACK + TEXT, "total": 10**9}),
    json.dumps(
        {
            "total": 10**9,
            "runs": [{"seconds": 1, "stack": [ATTACK + TEXT] * 3, "id": ATTACK, "attempt": TEXT}]
            * 30,
        }
    ),
)


def test_hostile_answers_are_shown_as_text(local_shop: FilledShop) -> None:
    operator = local_shop.operator()
    with contextlib.closing(
        AnsweringWorker(local_shop.places["coordinator"], "", "owned")
    ) as worker:
        for worker.output in OUTPUTS:
            answer = operator.post("/ask/runs", queue="owned")
            assert answer.status_code == 200
            assert "answered" in answer.text
            assert PageCheck(answer.text).faults == []
            assert "<script>" not in answer.text
            assert unsafe(answer.text) == set()
            assert len(answer.text) < 400_000
