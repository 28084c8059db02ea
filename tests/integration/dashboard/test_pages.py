"""The pages and the JSON of the dashboard, over both coordinators."""

from __future__ import annotations

import json
import re
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from qdo import App
from qdo.brokers.streams import key_hash, split
from qdo.cli.framework import run
from qdo.cli.main import qdo
from qdo.coordination.znodes.queue_node import FailureRecord, QueueNode
from qdo.coordination.znodes.worker_report import LastHour, WorkerReport
from qdo.dashboard import close_app, create_app
from qdo.fleet.pauses import add_pause, new_pause, pause_queues
from tests.support.cli import WORKER, clean_environment
from tests.support.dashboard.shop import BASE, BLOCKED_ERROR, LAYOUT, FilledShop, Visitor
from tests.support.processes import Proc, wait_until

PAGES = (
    *("/", "/queues", "/queue?name=blocked", "/queue?name=dead", "/workers", "/dead-letters"),
    *("/dead-letters?list=1", "/holds", "/audit", "/settings", "/messages?queue=fine"),
    *("/timers", "/streams", "/limits"),
)
SAME = {
    "/api/status": ("status",),
    "/api/queues": ("queues",),
    "/api/queues?glob=f*&state=ok&state=no-worker": (
        *("queues", "f*", "--state", "ok", "--state", "no-worker"),
    ),
    "/api/queues?sort=state": ("queues", "--sort", "state"),
    "/api/workers": ("workers",),
    "/api/components": ("workers", "--all"),
    "/api/holds": ("pause", "--list"),
    "/api/limits": ("limits", "list"),
    "/api/timers": ("timers", "list"),
    "/api/streams": ("streams", "list"),
    "/api/audit": ("audit",),
    "/api/settings": ("settings", "show"),
}
"""Addresses of JSON, and the commands that write the same."""
MOVING = (
    *("behind_seconds", "sent_per_second", "per_second", "eta_seconds"),
    *("reported", "reason", "origin"),
)
"""Keys whose values change from moment to moment."""


def test_every_page_has_its_parts(shop: FilledShop) -> None:
    """A heading, landmarks, a title, and tables with scopes."""
    visitor = shop.visitor()
    for path in PAGES:
        text = visitor.page(path)
        assert text.count("<h1") == 1, path
        assert text.count("<main") == text.count('<nav aria-label="Pages">') == 1, path
        assert text.count("<th>") == 0, path
        assert "- shop - qdo</title>" in text, path
        for style in ("<style", " style=", "<script>"):
            assert style not in text, path


def test_the_overview_names_the_worst_queues(shop: FilledShop) -> None:
    """The reason, and the command to run next."""
    text = shop.visitor().page("/")
    assert BLOCKED_ERROR in text
    for command in ("retry-now blocked", "dead-letters add blocked ", "skip blocked "):
        assert f"<code>qdo {command}" in text, "each by itself, to copy"
    assert text.index(">blocked</a>") < text.index(">fine</a>")


def test_dead_letters_alone_are_not_called_well(tmp_path: Path, embedded_url: str) -> None:
    """Neither on the overview, below the warning about them, nor on the page of their queue."""
    with closing(FilledShop(tmp_path, embedded_url)) as shop:
        shop.app.send("dead", 1)
        shop.bury("dead", 0, "LookupError: no vase")
        position = shop.app.broker.reader("dead", 0).fetch(1)[0][0]
        shop.client.create(LAYOUT.queue("dead"), QueueNode(last=position).encode())
        visitor = shop.visitor()
        assert "but see the warnings above" in visitor.page("/")
        text = visitor.page("/queue?name=dead")
        assert "but its dead letters." in text
        assert "Nothing waits." not in text


def test_the_overview_shows_throughput_and_failures(shop: FilledShop) -> None:
    """Of all queues together, from the history."""
    for queue in ("fine", "dead"):
        shop.record(queue, "OSError: the disk")
    text = shop.visitor().page("/")
    assert '<b class="done">2</b> done, <b class="failed">2</b> failed in the last hour' in text
    assert '<rect class="failed"' in text


COUNTED_APP = """
import qdo

app = qdo.App("shop")


@app.job("fine", policy=qdo.Policy(attempts=1))
def job(message, context):
    if message.body == 2:
        raise ValueError


@app.job("invoice", pool=True)
def invoice(message, context):
    pass
"""


def test_the_overview_counts_without_a_history(tmp_path: Path, embedded_url: str) -> None:
    """Messages and requests of a real worker, whatever others report; and what waits."""
    with closing(FilledShop(tmp_path, embedded_url, history="")) as shop:
        shop.app.send_many([("fine", 1), ("fine", 2), ("other", 3)])
        shop.app.request("invoice", 1)
        shop.report(WorkerReport(last_hour=LastHour(10**18, (-5, 10**18), (), (1,))))
        visitor = shop.visitor()
        assert "in the last hour" in visitor.page("/")
        (tmp_path / "counted.py").write_text(COUNTED_APP)
        places = {f"QDO_{name.upper()}": value for name, value in shop.places.items()}
        environment = {**clean_environment(), **places, "QDO_SESSION_TIMEOUT_SECONDS": "3"}
        with Proc.python(*WORKER, "counted:app", env=environment, cwd=tmp_path):
            said = '2</b> done, <b class="failed">1</b> failed (1 for good) in the last hour'
            wait_until(lambda: said in visitor.page("/"), "the worker has reported")
        wait_until(lambda: '<path class="line"' in visitor.page("/"), "it has read twice")
        assert "takes its counts with it" in visitor.page("/")


def test_queues_are_filtered_sorted_and_cut(shop: FilledShop) -> None:
    """On the server: a browser gets one page of the list."""
    shop.app.send_many([(f"many-{number:03}", number) for number in range(120)])
    visitor = shop.visitor()
    first = visitor.page("/queues?glob=many&sort=name")
    assert "many-000" in first
    assert "many-049" in first
    assert "many-050" not in first
    assert "120 queues" in first
    assert "many-119" in visitor.page("/queues?glob=many-*&sort=name&page=3")
    assert "many-119" in visitor.page("/queues?glob=many-*&sort=name&page=999")
    only = visitor.page("/queues?state=blocked")
    assert "name=blocked" in only
    assert "name=fine" not in only


def test_timers_have_a_page_with_their_faults_first(local_shop: FilledShop) -> None:
    """Each leads to its queue."""
    assert "app.timer</code>" in local_shop.visitor().page("/timers")
    times = {"last": "2026-01-01T01:30:00Z", "next": "2026-01-02T01:30:00Z"}
    for name, node in {
        "late": {**times, "when": "every 1 s", "queue": "fine"},
        "before": {**times, "when": ""},
    }.items():
        path = f"{LAYOUT.fleet.timers}/{name}"
        local_shop.client.create(path, json.dumps(node).encode(), makepath=True)
    text = local_shop.visitor().page("/timers")
    assert text.index(">late<") < text.index("overdue by") < text.index(">before<")
    assert 'datetime="2026-01-02T01:30:00Z"' in text
    assert 'href="/queue?name=fine"' in text


def test_streams_have_a_page_without_what_is_done(local_shop: FilledShop) -> None:
    """Each shard leads to its queue and its parents."""
    assert "app.stream</code>" in local_shop.visitor().page("/streams")
    local_shop.app.stream("user", shards=2).send("ada", 1)
    store = local_shop.app.broker.streams
    (used,) = (each.queue for each in store.shards("user") if each.has(key_hash("ada")))
    store.add(split(store.shards("user"), used, None))
    visitor = local_shop.visitor()
    names = {each["shard"] for each in visitor.items("/api/streams")}
    assert names == {each.queue for each in store.shards("user")}
    text = visitor.page("/streams")
    assert all(f'href="/queue?name={each}"' in text for each in names)
    assert [text.count(f">{each}</td>") for each in ("open", "sealed", "hidden")] == [1, 1, 2]


def test_limits_have_a_page_with_waiting_queues(local_shop: FilledShop) -> None:
    """Also those that jobs name and that do not exist."""
    assert "app.limit</code>" in local_shop.visitor().page("/limits")
    report = WorkerReport(waits={"orders-*": ("crm",)}, unusable={"gone": "limit gone is missing"})
    worker = local_shop.report(report)
    limit = {"max": 1, "permits": [[worker, 1, 2]]}
    for name, node in {"crm": limit, "bad": {"max": "x"}}.items():
        path = LAYOUT.fleet.limit(name)
        local_shop.client.create(path, json.dumps(node).encode(), makepath=True)
    text = local_shop.visitor().page("/limits")
    assert text.index("limit gone is missing") < text.index(">bad<") < text.index(">crm<")
    assert 'href="/queues?glob=orders-*"' in text
    assert f"{worker} 1/2" in text


def test_a_queue_shows_error_traceback_and_history(shop: FilledShop) -> None:
    """What is at its head, and what failed before."""
    shop.record("dead", "OSError: the disk")
    visitor = shop.visitor()
    assert BLOCKED_ERROR in visitor.page("/queue?name=blocked")
    text = visitor.page("/queue?name=dead")
    assert "Traceback (most recent call last)" in text
    assert "OSError" in text
    assert '<rect class="failed"' in text
    first = visitor.reader.look()
    wait_until(lambda: visitor.reader.look() is not first, "read again")
    assert '<path class="line"' in visitor.page("/queue?name=dead")


def test_a_blocking_message_has_its_id_and_body(shop: FilledShop) -> None:
    """The body only if bodies are shown."""
    id = shop.app.send("stuck", {"vase": 7})
    position = shop.app.broker.reader("stuck", 0).fetch(1)[0][0]
    failure = FailureRecord(position, 2, "LookupError: no box", blocked_since=time.time())
    shop.client.create(LAYOUT.queue("stuck"), QueueNode(last=7, failure=failure).encode())
    for shown in (False, True):
        text = shop.visitor(show_bodies=shown).page("/queue?name=stuck")
        assert str(id) in text
        assert ("vase" in text) is shown


def test_messages_of_a_queue_are_listed_and_found(shop: FilledShop) -> None:
    """Those that wait, and the delayed ones; by id or position."""
    waiting = str(shop.app.send("fine", {"vase": 7}, key="secret"))
    delayed = str(shop.app.send("fine", 5, delay_seconds=3600))
    shop.app.send("fine", "long" * 40_000)
    for shown in (False, True):
        visitor = shop.visitor(show_bodies=shown)
        text = visitor.page("/messages?queue=fine")
        assert [text.count(each) for each in (waiting, delayed)] == [1, 1]
        assert ("vase" in text) is shown
        assert "secret" not in text
        assert "longlong" not in text
        assert ("Too long" in text) is shown
    for id, other in ((waiting, delayed), (delayed, waiting)):
        text = visitor.page(f"/messages?queue=fine&id={id}")
        assert other not in text
        assert text.count(id) == 2, "in the form, and in the table"
    for id in ("nonsense", "74952772-e562-11f1-8000-5950e7b46546"):
        assert '<p class="notice warning"' in visitor.page(f"/messages?queue=fine&id={id}")


def test_a_queue_shows_its_pauses_and_changes(shop: FilledShop) -> None:
    """Those whose glob matches its name, and no others."""
    pause_queues(shop.client, LAYOUT, new_pause(["ord*"], "the customer moves"))
    pause_queues(shop.client, LAYOUT, new_pause(["other*"], "another reason"))
    gone = f"{LAYOUT.components}/client/host-0000000001"
    add_pause(shop.client, LAYOUT, replace(new_pause(["ord*"], "its maker is gone"), by=gone))
    text = shop.visitor().page("/queue?name=orders-1")
    assert text.count("the customer moves") >= 2
    assert "another reason" not in text
    assert "its maker is gone" not in text


def test_dead_letters_are_grouped_by_error(shop: FilledShop) -> None:
    """Errors that differ only in numbers are one kind; each kind leads to its letters."""
    shop.bury("fine", 9, "TimeoutError: slow")
    visitor = shop.visitor()
    text = visitor.page("/dead-letters")
    assert "LookupError: customer # is gone" in text
    assert "TimeoutError: slow" in text
    listed = visitor.page("/dead-letters?error=LookupError: customer %23 is gone")
    assert "customer 2 is gone" in listed
    assert "TimeoutError" not in listed


def test_bodies_are_hidden_unless_allowed(shop: FilledShop) -> None:
    """On the page of a dead letter, and in JSON."""
    path = "/dead-letter?queue=dead&id=135471512647131001"
    hidden = shop.visitor()
    assert "secret" not in hidden.page(path)
    assert not {"body", "key", "headers"} & hidden.items("/api/dead-letters")[0].keys()
    shown = shop.visitor(show_bodies=True)
    assert "secret" in shown.page(path)
    assert shown.items("/api/dead-letters")[0]["body"] == {"secret": 1}


def test_json_is_that_of_the_command(
    shop: FilledShop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same schema, items, keys and values."""
    monkeypatch.setenv("QDO_APP", "shop")
    for name in ("broker", "coordinator"):
        monkeypatch.setenv(f"QDO_{name.upper()}", shop.places[name])
    pause_queues(shop.client, LAYOUT, new_pause(["x*"], "why"))
    with shop.app.lock("anything"):
        pass
    visitor = shop.visitor()
    for path, words in SAME.items():
        answer = visitor.get(path).get_json()
        capsys.readouterr()
        assert run(qdo, "qdo", [*words, "-o", "json"]) == 0
        written = json.loads(capsys.readouterr().out)
        assert _still(answer) == _still(written), path
        assert answer["schema"] == written["schema"]


def test_json_of_settings_is_that_of_the_command(
    local_shop: FilledShop, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the origins: the dashboard of this test has its settings from code."""
    items = local_shop.visitor().items("/api/config")
    assert run(qdo, "qdo", ["config", "--app", "shop", "-o", "json"]) == 0
    written = json.loads(capsys.readouterr().out)["items"]
    assert [each["setting"] for each in items] == [each["setting"] for each in written]
    assert items[0].keys() == written[0].keys()


def _still(value: Any) -> Any:
    """Return a value without what changes from moment to moment."""
    if isinstance(value, dict):
        return {name: _still(each) for name, each in value.items() if name not in MOVING}
    return [_still(each) for each in value] if isinstance(value, list) else value


def test_wrong_parameters_are_refused_or_ignored(local_shop: FilledShop) -> None:
    """Pages take the nearest sense; JSON says what is wrong."""
    visitor = local_shop.visitor()
    for query in ("page=-1", "page=x", "page=" + "9" * 400, "sort=evil", "state=evil", "glob=["):
        visitor.page(f"/queues?{query}")
    for query in ("sort=evil", "state=evil", "page=0", "page=x"):
        assert visitor.get(f"/api/queues?{query}").status_code == 400
    assert visitor.get("/api/queue?name=none").status_code == 404
    assert visitor.get("/queue?name=none").status_code == 404
    assert visitor.get("/dead-letter?queue=none&id=1").status_code == 404


def test_an_app_that_nobody_used_yet_has_pages(tmp_path: Path) -> None:
    """Neither file exists; looking creates none."""
    with App(
        "empty",
        broker=f"sqlite:{tmp_path / 'none.db'}",
        coordinator=f"sqlite:{tmp_path / 'no.db'}",
    ) as app:
        visitor = Visitor(create_app(app.settings, anonymous=True, pause_seconds=0.05))
    for path in PAGES:
        if "name=" not in path:
            visitor.page(path)
    close_app(visitor.flask)
    assert list(tmp_path.iterdir()) == []


def test_the_dashboard_is_mounted_in_another_app(local_shop: FilledShop) -> None:
    """Its links and files are below the path at which it is mounted."""

    def own(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"own"]

    visitor = local_shop.visitor()
    visitor.page("/")
    client = Client(DispatcherMiddleware(own, {"/shown": visitor.flask}))
    assert client.get("/", base_url=BASE).text == "own"
    text = client.get("/shown/queues", base_url=BASE).text
    links = re.findall(r'(?:href|src|action|data-events)="(/[^"]*)"', text)
    assert len(links) > 10
    assert [each for each in links if not each.startswith("/shown/")] == []
    with client.get("/shown/static/dashboard.css", base_url=BASE) as answer:
        assert answer.status_code == 200
