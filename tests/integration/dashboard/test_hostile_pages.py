"""Text of other parties on every page: it neither becomes HTML nor hides or reorders a part."""

from __future__ import annotations

import html
import json
import re
from urllib.parse import quote

import pytest

from qdo.brokers.requests import RUNNING
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.values import encode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.fleet.pause_machine import Pause, PauseNode
from qdo.queues import QueueFilter
from tests.support.dashboard.html_check import PageCheck
from tests.support.dashboard.shop import LAYOUT, POSITION, FilledShop, Visitor
from tests.support.fakes.hostile_content import BODIES, HEADERS
from tests.support.fakes.hostile_text import HOSTILE_NAME, TEXT, unsafe
from tests.support.processes import wait_until

ATTACK = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'><svg onload=alert(1)>{{7*7}}"
NAME = f"{HOSTILE_NAME}<img src=x onerror='x'>\"&{{{{7*7}}}}"
LONG = f"{ATTACK}{TEXT}" + "E" * 200_000
PAGES = (
    *("/", "/queues", f"/queues?glob={quote(NAME)}", f"/queue?name={quote(NAME)}", "/workers"),
    *("/dead-letters", "/dead-letters?list=1", f"/dead-letters?error={quote(ATTACK)}", "/holds"),
    *("/audit", f"/audit?glob={quote(ATTACK)}", "/settings", "/timers", "/streams", "/limits"),
    *("/requests", f"/requests?pool={quote(NAME)}", f"/requests?pool={quote(ATTACK)}"),
    *("/events", f"/events?glob={quote(ATTACK)}&kind={quote(ATTACK)}"),
    f"/dead-letter?queue={quote(NAME)}&id={POSITION}",
)


@pytest.fixture
def hostile(local_shop: FilledShop) -> FilledShop:
    """An app that other parties filled."""
    client = local_shop.client
    local_shop.app.send(NAME, {"n": ATTACK})
    local_shop.block(NAME, ATTACK + TEXT)
    local_shop.bury(NAME, 0, LONG, body=json.dumps({"n": LONG}).encode())
    local_shop.record(NAME, ATTACK)
    local_shop.app.request(NAME, 1, id="</form>" + ATTACK)
    local_shop.app.request(NAME, 1, id="noted")
    (_, taken) = local_shop.app.broker.requests.take(ATTACK + HOSTILE_NAME, NAME, 2, []).requests
    local_shop.app.broker.requests.note(taken.take, RUNNING, LONG)
    client.create(LAYOUT.queue("bytes"), b"\xff\xfe<script>")
    client.create(LAYOUT.queue("owned"), QueueNode(last=7, owner=ATTACK).encode())
    pause = PauseNode((Pause("a" * 8, (NAME,), ATTACK + TEXT, ATTACK),))
    client.set(LAYOUT.fleet.holds, pause.encode())
    takes = QueueFilter((ATTACK,), (ATTACK,), (ATTACK,))
    worker = WorkerNode((NAME,), (), False, takes)
    client.create(f"{LAYOUT.workers}/worker-", worker.encode(), ephemeral=True, sequence=True)
    texts = dict.fromkeys(("host", "pid", "state", "started", "version", "zone"), ATTACK + TEXT)
    texts |= {"unusable": {ATTACK: TEXT}, "waits": {ATTACK: [HOSTILE_NAME]}}
    for kind in ("worker", "web"):
        path = f"{LAYOUT.components}/{kind}/host-"
        client.create(path, encode(texts), ephemeral=True, sequence=True, makepath=True)
    names = ("by", "account", "command", "target", "reason")
    entry = {**dict.fromkeys(names, ATTACK + TEXT), "from": {ATTACK: TEXT}, "to": {"a": [ATTACK]}}
    client.create(LAYOUT.fleet.log_entry("1000-x"), encode(entry), makepath=True)
    limit = {"max": 1, "reason": ATTACK + TEXT, "permits": [[ATTACK, 1, 1]]}
    client.create(LAYOUT.fleet.limit(HOSTILE_NAME), encode(limit), makepath=True)
    timer = dict.fromkeys(("last", "next", "when", "queue", "by", "refused"), ATTACK + TEXT)
    client.create(f"{LAYOUT.fleet.timers}/{HOSTILE_NAME}", encode(timer), makepath=True)
    return local_shop


def test_hostile_changes_are_shown_as_text(local_shop: FilledShop) -> None:
    """Names, owners, states, commands and errors of others, on the pages of events."""
    visitor = local_shop.visitor(pause_seconds=0.05)
    visitor.page("/")
    client = local_shop.client
    local_shop.app.send(NAME, 1)
    client.create(LAYOUT.queue("owned"), QueueNode(last=7, owner="x").encode())
    visitor.page("/")
    wait_until(lambda: "owned" in visitor.page("/events"), "it is seen")
    client.set(LAYOUT.queue("owned"), QueueNode(last=7, owner=ATTACK + TEXT).encode())
    names = ("by", "command", "target", "reason")
    client.create(
        LAYOUT.fleet.log_entry("1000-x"), encode(dict.fromkeys(names, LONG)), makepath=True
    )
    local_shop.block(NAME, ATTACK + TEXT)
    wait_until(lambda: len(visitor.items("/api/events?kind=command")) == 1, "the command is seen")
    wait_until(lambda: visitor.items("/api/events?kind=owner") != [], "the owner is seen")
    for path in ("/", "/events"):
        text = visitor.page(path)
        assert PageCheck(text).faults == []
        assert "<script>" not in text
        assert unsafe(re.sub(r'value="[^"]*"', "", text)) == set()
        assert len(text) < 100_000


def test_no_page_is_changed_by_hostile_text(hostile: FilledShop) -> None:
    """With bodies, and with the forms of operators."""
    for visitor in (hostile.operator(show_bodies=True), hostile.visitor(show_bodies=True)):
        for path in PAGES:
            text = visitor.page(path)
            assert PageCheck(text).faults == [], path
            assert "<script>" not in text, path
            # A value of a field is what was typed: a browser shows it, and sends it back as it is.
            assert unsafe(re.sub(r'value="[^"]*"', "", text)) == set(), path
            assert len(text) < 400_000, path


def test_messages_of_other_programs_end_no_page(local_shop: FilledShop) -> None:
    """Whatever their headers, bodies and times."""
    parts = [*((headers, b"1") for headers in HEADERS), *((None, body) for body in BODIES)]
    for number, (headers, body) in enumerate(parts):
        at = (float("inf"), -1e308, 1e18)[number % 3]
        local_shop.bury("q", number, "ValueError: x", body, headers, at)
    local_shop.app.send("q", 1)
    visitor = local_shop.visitor(show_bodies=True)
    for path in ("/", "/queue?name=q", "/dead-letters", "/dead-letters?list=1&page=2"):
        assert PageCheck(visitor.page(path)).faults == []
    assert len(visitor.items("/api/dead-letters?glob=q")) == 100
    assert len(visitor.items("/api/dead-letters?glob=q&page=2")) == len(parts) - 100
    for number in range(len(parts)):
        assert PageCheck(visitor.page(f"/dead-letter?queue=q&id={POSITION + number}")).faults == []


def test_names_lead_to_their_pages(hostile: FilledShop) -> None:
    """Every link of a hostile name is that of its queue."""
    visitor = hostile.visitor()
    links = re.findall(r'href="(/queue\?name=[^"]+)"', visitor.page("/queues"))
    pages = [visitor.page(html.unescape(each)) for each in links]
    assert len(pages) >= 6
    assert any("onerror" in each and "<img" not in each for each in pages)


def test_an_operator_acts_on_a_hostile_name(hostile: FilledShop) -> None:
    """The name comes back as it is, and nothing else does."""
    visitor: Visitor = hostile.operator()
    text = visitor.page(f"/queue?name={quote(NAME)}")
    found = re.search(r'name="queue" value="([^"]*)"', text)
    assert found is not None
    assert html.unescape(found[1]) == NAME
    fields = {"queue": NAME, "position": str(POSITION), "decision": "skip"}
    assert visitor.act("/actions/decide", ATTACK, 1, **fields).status_code == 302
    assert "<script>" not in visitor.page("/audit")


def test_an_operator_cancels_a_request_with_a_hostile_id(hostile: FilledShop) -> None:
    visitor, id = hostile.operator(), "</form>" + ATTACK
    text = visitor.page("/requests")
    found = [html.unescape(each) for each in re.findall(r'name="id" value="([^"]*)"', text)]
    assert sorted(found) == sorted([id, "noted"])
    assert "<script>" not in visitor.post("/actions/cancel-request", id=id).text
    assert visitor.act("/actions/cancel-request", ATTACK, 1, id=id).status_code == 302
    text = visitor.page("/requests")
    assert "being cancelled" in text
    assert "<script>" not in text
    assert PageCheck(text).faults == []
    record = hostile.app.broker.requests.find(id)
    assert record is not None
    assert record.is_cancelled


def test_json_has_each_text_exactly(hostile: FilledShop) -> None:
    """With escapes of its own."""
    answer = hostile.visitor().get(f"/api/queue?name={quote(NAME)}")
    assert answer.get_json()["items"][0]["queue"] == NAME
    assert answer.content_type == "application/json"
