"""The dashboard in Chromium: every page at three widths, light and dark, with nothing to complain.

Pictures of all pages are in tests/screenshots, which git ignores.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.brokers.requests import PAUSED, RUNNING
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.fleet.pauses import new_pause, pause_queues
from qdo.history.recorder import OwnerRow, Recorder
from qdo.history.writer import HistoryWriter
from tests.integration.dashboard.test_server import Served
from tests.support.dashboard.answering_worker import AnsweringWorker
from tests.support.dashboard.browser import SCHEMES, WIDTHS, Browser, require_chromium
from tests.support.dashboard.shop import LAYOUT, OPERATOR, POSITION, VIEWER, FilledShop
from tests.support.paths import ROOT
from tests.support.processes import wait_until

PICTURES = ROOT / "tests" / "screenshots"
PAGES = {
    "overview": "/",
    "queues": "/queues",
    "queue": "/queue?name=blocked",
    "queue-owned": "/queue?name=owned",
    "messages": "/messages?queue=fine",
    "workers": "/workers",
    "dead-letters": "/dead-letters",
    "dead-letters-list": "/dead-letters?list=1",
    "dead-letter": f"/dead-letter?queue=dead&id={POSITION}",
    "requests": "/requests",
    "requests-pool": "/requests?pool=invoice",
    "timers": "/timers",
    "streams": "/streams",
    "limits": "/limits",
    "holds": "/holds",
    "events": "/events",
    "events-none": "/events?glob=nothing&kind=worker",
    "audit": "/audit",
    "settings": "/settings",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    require_chromium()
    with tempfile.TemporaryDirectory(prefix="qdo-chromium-") as folder:
        made = Browser(Path(folder))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def served(local_shop: FilledShop) -> Iterator[str]:
    """A dashboard process, with names that are hard to lay out."""
    local_shop.app.send_many([(f"tenant-{'x' * 150}", 1), ("<img src=x onerror=alert(1)>", 2)])
    local_shop.record("blocked", "OSError")
    owned(local_shop)
    ask(local_shop)
    server = Served(
        local_shop,
        "--allow-actions",
        "--show-bodies",
        QDO_DASHBOARD_TOKEN=VIEWER,
        QDO_DASHBOARD_OPERATOR_TOKEN=OPERATOR,
    )
    with server.proc:
        yield f"http://127.0.0.1:{server.port}"


def owned(shop: FilledShop) -> None:
    """Let a worker that answers nothing own a queue, which others owned before."""
    node = WorkerNode(("owned",)).encode()
    path = shop.client.create(f"{LAYOUT.workers}/worker-", node, ephemeral=True, sequence=True)
    name = path.rpartition("/")[2]
    shop.client.create(LAYOUT.queue("owned"), QueueNode(last=7, owner=name).encode())
    now = time.time()
    recorder = Recorder()
    for row in (
        OwnerRow("owned", 5, "worker-0000000003", now - 90_000, now - 80_000, "rebalanced"),
        OwnerRow("owned", 6, "worker-0000000004", now - 80_000, now - 900, "drained"),
        OwnerRow("owned", 7, "worker-0000000005", now - 800),
        OwnerRow("owned", 8, name, now - 60),
    ):
        recorder.owners.pending.append(row)
    writer = HistoryWriter(shop.places["history"], "shop", recorder)
    writer.start()
    writer.close()


def ask(shop: FilledShop) -> None:
    """Let requests wait, run and be paused."""
    names = (f"order-{number}/invoice" for number in range(5))
    shop.app.request_many([{"pool": "invoice", "body": 1, "id": each} for each in names])
    shop.app.request(f"build-{'x' * 150}", 1, id="y" * 200)
    store = shop.app.broker.requests
    (runs, waits) = store.take("worker-0000000004", "invoice", 2, []).requests
    store.note(runs.take, RUNNING, "the PDF of page 12 of 40 is rendered with its 3 pictures")
    store.note(waits.take, PAUSED, "approval?")


def change(shop: FilledShop) -> None:
    """Let the dashboard see changes of every kind."""
    shop.app.send_many([(f"new-{number}", 1) for number in range(30)])
    shop.app.send("new-tenant-with-a-long-name-in-eu-central-1", 1)
    shop.client.create(LAYOUT.queue("fine"), QueueNode(owner="worker-0000000000").encode())
    pause = new_pause(["orders-*"], "the warehouse moves to another building this weekend")
    pause_queues(shop.client, LAYOUT, pause)


def log_in(browser: Browser, address: str) -> None:
    """Log in as an operator, by hand."""
    browser.forget()
    browser.complaints()  # of a page whose dashboard was killed at the end of another test
    browser.driver.get(f"{address}/queues")
    browser.type("token", OPERATOR)
    browser.type("name", "Grace")
    browser.press("Log in")
    wait_until(lambda: browser.heading() == "Queues", "the page that was asked for is shown")


def test_every_page_is_shown_without_complaint(
    browser: Browser, served: str, local_shop: FilledShop
) -> None:
    """No error on the console, nothing refused by the policy, nothing wider than the window."""
    browser.look(WIDTHS[-1])
    log_in(browser, served)
    browser.driver.get(f"{served}/events")
    change(local_shop)
    wait_until(lambda: "the warehouse moves" in browser.text(), "the changes are shown", 30)
    for width, scheme in itertools.product(WIDTHS, SCHEMES):
        browser.look(width, scheme)
        for name, path in PAGES.items():
            browser.driver.get(served + path)
            browser.picture(PICTURES / f"{name}-{width}-{scheme}.png")
            assert browser.complaints() == [], path
            assert browser.overflow() == 0, path
            assert browser.heading(), path
            assert browser.unnamed() == [], path


def test_an_operator_asks_a_worker(browser: Browser, served: str, local_shop: FilledShop) -> None:
    """By keyboard, at each width."""
    stack = ["/srv/shop/jobs.py:12 deliver", "/srv/shop/carriers/parcels.py:345 wait_for_carrier"]
    run = {"id": "8b907075-e805-11f1-8000-632a399f95cb", "attempt": 2, "seconds": 754.2}
    output = json.dumps({"total": 45, "runs": [{**run, "stack": stack}, {**run, "stack": []}]})
    with contextlib.closing(AnsweringWorker(local_shop.places["coordinator"], output, "asked")):
        for width, scheme in itertools.product(WIDTHS, SCHEMES):
            browser.look(width, scheme)
            log_in(browser, served)
            browser.driver.get(f"{served}/queue?name=asked")
            while browser.tab() != "Ask its worker":
                pass
            browser.enter()
            wait_until(lambda: "wait_for_carrier" in browser.text(), "the answer is shown")
            browser.picture(PICTURES / f"runs-{width}-{scheme}.png")
            assert browser.complaints() == []
            assert browser.overflow() == 0, width
            assert browser.unnamed() == []


def test_an_open_page_follows_the_app(
    browser: Browser, served: str, local_shop: FilledShop
) -> None:
    """Without a reload, and without a complaint."""
    browser.look(1400)
    log_in(browser, served)
    browser.driver.execute_script("window.stayed = true")
    local_shop.app.send("came-later", 1)
    wait_until(lambda: "came-later" in browser.text(), "the new queue is shown", 30)
    assert browser.driver.execute_script("return window.stayed") is True
    assert browser.complaints() == []


def test_an_operator_acts_with_the_keyboard(browser: Browser, served: str) -> None:
    """From the list of queues to the action log; the first tab stop skips the navigation."""
    browser.look(800)
    log_in(browser, served)
    browser.driver.get(f"{served}/queue?name=blocked")
    wait_until(lambda: browser.text().count("Copy") == 3, "one for each command is shown")
    assert browser.tab() == "Skip to content"
    while browser.tab() != "Make it a dead letter":
        pass
    browser.enter()
    wait_until(lambda: browser.heading().startswith("Make a dead letter of"), "it asks")
    browser.type("reason", "the customer agreed\n")
    wait_until(lambda: "Done: Make a dead letter of" in browser.text(), "it is done")
    browser.driver.get(f"{served}/audit")
    wait_until(lambda: "the customer agreed" in browser.text(), "the log has it")
    assert "Grace (dashboard" in browser.text()
    assert browser.complaints() == []
