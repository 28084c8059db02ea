"""What a parent answers about its processes, and how their metrics add up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from qdo.system.clock import clock
from qdo.worker.metrics import catalog, monitor
from qdo.worker.metrics.catalog import FROM_PARENT, FROM_WORKERS, MetricKind, MetricTotals, parse
from qdo.worker.metrics.monitor import (
    ChildMetrics,
    HttpAnswer,
    MetricsPage,
    Monitor,
    PlaceView,
)
from qdo.worker.shared_memory import LoopReport

NESTED: list[Any] = []
for _ in range(100_000):
    NESTED = [NESTED]


class WatchedProcess:
    """A worker process, as its parent sees it."""

    def __init__(self, pid: int = 7) -> None:
        self.name = "process 1"
        self.pid = pid
        self.registered = True
        self.stopped = False
        self.silent = 0.0
        self.metrics = ChildMetrics()
        self.page = MetricsPage(self.metrics.fd)

    def is_stopped(self) -> bool:
        return self.stopped

    def loop(self) -> LoopReport | None:
        return LoopReport(clock() - self.silent, 0.0, 0.0)

    def publish(
        self, done: float = 0.0, state: str = "running", registered: float = 1.0
    ) -> WatchedProcess:
        metrics = {
            "qdo_attempts": [[["a-*", "done"], [done]]],
            "qdo_processes_registered": [[[], [registered]]],
            "qdo_oldest_message_age_seconds": [[[], [done]]],
            "qdo_lease_seconds": [[[], [done]]],
            "qdo_checkpoint_duration_seconds": [[[], [1, 2, 0, 0, 0, 0, 0, 1, 12.5]]],
        }
        self.page.write({"state": state, "metrics": metrics})
        return self


class WatchedMonitor(Monitor):
    """A monitor of two processes, which renders at each scrape."""

    def __init__(self) -> None:
        super().__init__(10.0)
        self.children = [WatchedProcess(7).publish(5.0), WatchedProcess(8).publish(2.0)]
        self.look(views(*self.children))


@pytest.fixture
def monitored(monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedMonitor]:
    monkeypatch.setattr(monitor, "RENDER_SECONDS", 0.0)
    made = WatchedMonitor()
    yield made
    for child in made.children:
        if child.metrics.fd >= 0:
            child.metrics.close()


def views(*children: WatchedProcess | None, state: str = "running", stopping: bool = False) -> Any:
    return [
        PlaceView(f"process {n}", state if child is None else "running", stopping, child)
        for n, child in enumerate(children, start=1)
    ]


def reasons(answer: HttpAnswer) -> list[str]:
    value = json.loads(answer.body)
    assert value["schema"] == "qdo.health/1"
    assert value["ok"] == (answer.status == 200) == (value["reasons"] == [])
    return list(value["reasons"])


def samples(made: Monitor) -> dict[tuple[str, ...], float]:
    """Return the samples of all metrics by their names and the values of their labels, in order."""
    families = text_string_to_metric_families(made.metrics().body.decode())
    return {
        (sample.name, *dict(sorted(sample.labels.items())).values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_running_processes_are_healthy_and_ready(monitored: WatchedMonitor) -> None:
    assert reasons(monitored.healthz()) == reasons(monitored.readyz()) == []


def test_a_parent_that_starts_is_not_ready() -> None:
    made = Monitor(10.0)
    assert made.healthz().status == 200
    assert len(reasons(made.readyz())) == 1


def test_a_process_whose_lease_is_over_is_not_ready(monitored: WatchedMonitor) -> None:
    """It is healthy: only the coordinator can help."""
    monitored.children[1].publish(0.0)
    assert reasons(monitored.healthz()) == []
    (reason,) = reasons(monitored.readyz())
    assert "process 2" in reason


@pytest.mark.parametrize("state", ["restarting", "ended"])
def test_a_process_that_is_missing(monitored: WatchedMonitor, state: str) -> None:
    """One that has ended for good, by itself or on request, is not ready, but not ill."""
    monitored.look(views(monitored.children[0], None, state=state))
    assert len(reasons(monitored.healthz())) == (state == "restarting")
    assert len(reasons(monitored.readyz())) == 1
    assert samples(monitored)["qdo_processes", state] == 1


def test_a_stopped_process_is_not_healthy(monitored: WatchedMonitor) -> None:
    monitored.children[1].stopped = True
    (reason,) = reasons(monitored.healthz())
    assert "process 2 (pid 8)" in reason
    assert samples(monitored)["qdo_healthy",] == 0


def test_a_blocked_loop_is_healthy_for_a_while(monitored: WatchedMonitor) -> None:
    """For the session timeout; the parent ends the process itself if it lasts too long."""
    monitored.children[0].silent = 9.0
    assert reasons(monitored.healthz()) == []
    assert samples(monitored)["qdo_event_loop_blocked_seconds",] == pytest.approx(9.0, abs=0.9)
    monitored.children[0].silent = 11.0
    assert len(reasons(monitored.healthz())) == 1


def test_a_parent_that_does_not_supervise(
    monitored: WatchedMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "SILENT_SECONDS", -1.0)
    assert len(reasons(monitored.healthz())) == 1


def test_only_registered_processes_are_ready(monitored: WatchedMonitor) -> None:
    """Both must say so: its last report to the parent, and what it has published."""
    for published, registered, ready in (
        (1.0, True, True),
        (0.0, True, False),
        (1.0, False, False),
    ):
        monitored.children[0].registered = registered
        monitored.children[0].publish(1.0, registered=published)
        assert (reasons(monitored.readyz()) == []) == ready
    assert reasons(monitored.healthz()) == []


def test_draining_processes_are_not_ready(monitored: WatchedMonitor) -> None:
    """Whether the parent asked for it, or the worker drains by itself."""
    monitored.look(views(*monitored.children, stopping=True))
    assert len(reasons(monitored.readyz())) == 2
    monitored.look(views(*monitored.children))
    monitored.children[0].publish(state="draining")
    assert len(reasons(monitored.readyz())) == 1
    assert reasons(monitored.healthz()) == []


def test_metrics_of_processes_add_up(monitored: WatchedMonitor) -> None:
    found = samples(monitored)
    assert found["qdo_attempts_total", "done", "a-*"] == 7
    assert found["qdo_oldest_message_age_seconds",] == 5
    assert found["qdo_lease_seconds",] == 2
    assert found["qdo_checkpoint_duration_seconds_bucket", "0.005"] == 6
    assert found["qdo_checkpoint_duration_seconds_count",] == 8
    assert found["qdo_checkpoint_duration_seconds_sum",] == 25


def test_counters_never_go_back(monitored: WatchedMonitor) -> None:
    """A process dies, is away for a while, and another one starts in its place."""
    monitored.children[0].metrics.close()
    monitored.look(views(None, monitored.children[1], state="restarting"))
    found = samples(monitored)
    assert found["qdo_attempts_total", "done", "a-*"] == 7
    assert found["qdo_processes_registered",] == 1
    monitored.children[0] = WatchedProcess(9)
    monitored.look(views(*monitored.children))
    assert samples(monitored)["qdo_attempts_total", "done", "a-*"] == 7
    monitored.children[0].publish(1.0)
    found = samples(monitored)
    assert found["qdo_attempts_total", "done", "a-*"] == 8
    assert found["qdo_process_restarts_total",] == 1


def test_a_restart_between_two_looks_counts(monitored: WatchedMonitor) -> None:
    monitored.children[0].metrics.close()
    monitored.children[0] = WatchedProcess(9).publish(1.0)
    monitored.look(views(*monitored.children))
    found = samples(monitored)
    assert found["qdo_attempts_total", "done", "a-*"] == 8
    assert found["qdo_process_restarts_total",] == 1


def test_many_scrapes_render_once(
    monitored: WatchedMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "RENDER_SECONDS", 3600.0)
    before = monitored.metrics().body
    monitored.children[0].publish(50.0)
    assert monitored.metrics().body == before


def test_every_metric_is_served(monitored: WatchedMonitor) -> None:
    """With its help, also those of which there is nothing yet."""
    text = monitored.metrics().body.decode()
    for metric in (*FROM_WORKERS, *FROM_PARENT):
        suffix = "_total" if metric.kind is MetricKind.COUNTER else ""
        assert f"# HELP {metric.name}{suffix} {metric.help}\n" in text


@pytest.mark.parametrize(
    "values",
    [
        None,
        7,
        {},
        {"metrics": 3},
        {"metrics": {"qdo_attempts": 3}},
        {"metrics": {"qdo_attempts": [[["a"], [1]]]}},
        {"metrics": {"qdo_attempts": [[["a", "b"], [1, 2]]]}},
        {"metrics": {"qdo_attempts": [[["a", "b"], [math.inf]]]}},
        {"metrics": {"qdo_attempts": [[["a", "b"], ["x"]]]}},
        {"metrics": {"qdo_dwell_seconds": [[["a"], [1, 2, 3]]]}},
        {"metrics": {"qdo_attempts": [[["a", "b"], [10**400]]]}},
        {"metrics": {"qdo_attempts": [[[NESTED, "b"], [1]]]}},
        [],
        "metrics",
    ],
)
def test_what_is_not_metrics_is_refused(values: Any, monitored: WatchedMonitor) -> None:
    """A job may write anything; the other processes are served."""
    with pytest.raises(ValueError, match=r"^(these are not metrics|qdo_|could not)"):
        parse(values)


def test_a_process_that_writes_rubbish_is_left_out(monitored: WatchedMonitor) -> None:
    for content in (7, [], "x", {"state": [1]}, {"metrics": {"qdo_attempts": "x"}}):
        monitored.children[0].page.write(content)
        assert samples(monitored)["qdo_attempts_total", "done", "a-*"] == 2
        assert len(reasons(monitored.readyz())) == 1


def test_hostile_labels_are_escaped(monitored: WatchedMonitor) -> None:
    hostile = 'a"} 1\n# HELP x\\\x1b[31m'
    metrics = {"qdo_attempts": [[[hostile, "done"], [3.0]]]}
    monitored.children[0].page.write({"state": "running", "metrics": metrics})
    assert samples(monitored)["qdo_attempts_total", "done", hostile] == 3


def test_gauges_of_ended_processes_are_gone() -> None:
    totals = MetricTotals()
    totals.end(parse({"metrics": {"qdo_queues": [[["idle"], [5.0]]]}}))
    assert totals.copy()[catalog.QUEUES] == {}


def ask(made: Monitor, path: str, method: str = "GET") -> tuple[str, dict[str, str], bytes]:
    """Return the status, headers and body of an answer of HTTP."""
    begun: list[Any] = []
    body = made({"REQUEST_METHOD": method, "PATH_INFO": path}, lambda *given: begun.extend(given))
    return begun[0], dict(begun[1]), b"".join(body)


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
def test_answers_get_and_head(monitored: WatchedMonitor, path: str) -> None:
    """The server leaves out the body of a HEAD."""
    for method in ("GET", "HEAD"):
        status, headers, body = ask(monitored, path, method)
        assert (status, headers["Content-Length"]) == ("200 OK", str(len(body)))
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/", "/healthz/", "/../healthz", "//healthz", "/healthz\0", "/etc/passwd", "*"]
)
def test_knows_only_its_paths(monitored: WatchedMonitor, path: str) -> None:
    status, _, body = ask(monitored, path)
    assert status == "404 Not Found"
    assert b"passwd" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "get"])
def test_refuses_other_methods(monitored: WatchedMonitor, method: str) -> None:
    status, headers, _ = ask(monitored, "/metrics", method)
    assert (status, headers["Allow"]) == ("405 Method Not Allowed", "GET, HEAD")


def test_an_ill_parent_answers_503(monitored: WatchedMonitor) -> None:
    monitored.children[0].stopped = True
    assert ask(monitored, "/healthz")[0] == "503 Service Unavailable"


def test_a_leader_whose_lease_is_over_leaves_no_facts(monitored: WatchedMonitor) -> None:
    """It may be frozen, and another worker may lead. Its own counts stay."""
    leader, other = monitored.children
    metrics = {"qdo_backlog_messages": [[[], [3]]], "qdo_jobs_running": [[[], [1]]]}
    shown = []
    for until in (clock() + 60, clock() - 1, "soon"):
        leader.page.write({"state": "running", "metrics": metrics, "leads_until": until})
        text = monitored.metrics().body.decode()
        shown.append(("qdo_backlog_messages 3.0" in text, "qdo_jobs_running 1.0" in text))
    assert shown == [(True, True), (False, True), (False, True)]
    other.page.write({"state": "running", "metrics": metrics})
    assert "qdo_backlog_messages 3.0" not in monitored.metrics().body.decode()
