"""The decisions of `qdo doctor`, on made-up facts, and that it ends in time."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from qdo.brokers.base import Broker
from qdo.brokers.requests import NewRequest
from qdo.coordination.client import Client
from qdo.coordination.session_setup import ServerReport, read_server
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_report import WorkerReport
from qdo.errors import NodeRefusedError, UnreachableError
from qdo.jobs.job import Job
from qdo.ops import doctor
from qdo.ops.doctor import CHECKS, Check, diagnose, judge_servers, judge_versions, notices
from qdo.ops.doctor_case import Case, Diagnosis, ok
from qdo.ops.requests import MANY_DEAD, check_requests
from qdo.ops.status import Statuses
from qdo.ops.worker_status import WorkerStatus
from qdo.queues import EVERYTHING, QueueFilter
from qdo.testing.memory_broker import MemoryBroker, MemoryStore
from tests.support.fakes.statuses import queue_status

V = (3, 9, 4)


def case_of(broker: Broker | None = None, **values: Any) -> Case:
    return Case(None, broker, Layout.of("a"), {}, "sqlite:c.db", "sqlite:m.db", **values)


@pytest.mark.parametrize(
    ("reports", "status"),
    [
        ([ServerReport("a", V, "standalone")], "ok"),
        ([ServerReport("a", V, "leader"), ServerReport("b", V, "follower")], "ok"),
        ([ServerReport("a", V, "leader"), ServerReport("b", fault="refused")], "warning"),
        ([ServerReport("a", V, "follower"), ServerReport("b", V, "follower")], "warning"),
        ([ServerReport("a", V, "standalone"), ServerReport("b", V, "standalone")], "failed"),
        ([ServerReport("a", V, "leader"), ServerReport("b", V, "leader")], "failed"),
        ([ServerReport("a"), ServerReport("b")], "unknown"),
    ],
)
def test_servers_are_one_ensemble(reports: list[ServerReport], status: str) -> None:
    assert judge_servers(reports).status == status


@pytest.mark.parametrize(
    ("reports", "status"),
    [
        ([ServerReport("a", V, "leader"), ServerReport("b", fault="refused")], "ok"),
        ([ServerReport("a", (3, 9, 3), "leader"), ServerReport("b", V, "follower")], "warning"),
        ([ServerReport("a", (3, 9, 3), "standalone")], "ok"),
        ([ServerReport("a", (3, 5, 9), "standalone")], "failed"),
        ([ServerReport("a"), ServerReport("b")], "unknown"),
    ],
)
def test_versions_of_servers_are_safe(reports: list[ServerReport], status: str) -> None:
    """One server alone needs no election."""
    assert judge_versions(reports).status == status


def test_a_server_that_refuses_has_a_fault() -> None:
    assert read_server("127.0.0.1:1", 1.0).fault is not None


@pytest.mark.parametrize(
    ("free", "status"), [(50 << 20, "failed"), (500 << 20, "warning"), (50 << 30, "ok")]
)
def test_the_first_look_names_a_full_disk(
    free: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing about checks that are made by `qdo doctor` alone, or that cannot be made."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    assert doctor.disk(case_of()).status == status
    shown = [] if status == "ok" else [("disk", status)]
    assert [(each["check"], each["status"]) for each in notices(case_of())] == shown


def test_a_check_that_hangs_hides_no_other() -> None:
    """It is unknown, and so are those that no time is left for."""
    forever = threading.Event()

    def hang(case: Case) -> Diagnosis:
        forever.wait()
        return ok("never")

    checks = (Check("quick", lambda case: ok("fine")), Check("hangs", hang), Check("late", hang))
    found = dict(diagnose(case_of(), 0.3, checks))
    assert {name: found[name].status for name in ("quick", "hangs", "late")} == {
        "quick": "ok",
        "hangs": "unknown",
        "late": "unknown",
    }
    forever.set()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnreachableError(what="it", reason="gone"), "failed"),
        (NodeRefusedError(path="/x", account="nobody"), "unknown"),
        (ZeroDivisionError(), "unknown"),
    ],
)
def test_an_error_is_the_answer_of_its_check(error: Exception, status: str) -> None:
    def broken(case: Case) -> Diagnosis:
        raise error

    assert dict(diagnose(case_of(), 5.0, (Check("broken", broken),)))["broken"].status == status


@pytest.mark.parametrize(
    ("warnings", "text"), [(["mind q"], "mind q"), (["mind q", "mind r"], "mind q and 1 more")]
)
def test_warnings_of_the_broker_are_counted(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str], text: str
) -> None:
    broker = MemoryBroker(MemoryStore(), "a")
    monkeypatch.setattr(
        broker, "capabilities", replace(broker.capabilities, checks_config=True), raising=False
    )
    monkeypatch.setattr(broker.catalog, "config_warnings", lambda policies: warnings, raising=False)
    found = doctor.configuration(case_of(broker))
    assert found.text == text
    assert "more" not in (found.remedy or "")


def test_doctor_sums_the_jobs_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = MemoryBroker(MemoryStore(), "a")
    able = replace(broker.capabilities, checks_config=True)
    monkeypatch.setattr(broker, "capabilities", able, raising=False)
    catalog: Any = broker.catalog
    monkeypatch.setattr(catalog, "connection_warnings", lambda places: [f"{sum(places)} jobs"])
    reports = [SimpleNamespace(report=SimpleNamespace(concurrency=each)) for each in (4, None, 3)]
    case = case_of(broker)
    case.client = cast(Client, object())
    monkeypatch.setattr(Case, "workers", lambda case: reports)
    assert doctor.configuration(case).text == "7 jobs"


def test_checks_without_their_service_are_unknown() -> None:
    found = dict(diagnose(case_of()))
    assert found["coordinator"].status == found["broker"].status == "failed"
    assert {found[each.name].status for each in CHECKS if each.needs} == {"unknown"}
    assert {each.remedy is not None for each in found.values() if each.status == "failed"} == {True}


def job(timeout_seconds: float | None) -> Job:
    return Job(lambda message, context: None, timeout_seconds=timeout_seconds)


@pytest.mark.parametrize(
    ("hold", "timeout", "status"),
    [(None, 1e6, "ok"), (60.0, 30.0, "ok"), (60.0, None, "ok"), (60.0, 61.0, "failed")],
)
def test_a_job_ends_before_its_message_returns(
    hold: float | None, timeout: float | None, status: str
) -> None:
    broker = MemoryBroker(MemoryStore(), "a")
    broker.capabilities = replace(broker.capabilities, hold_seconds=hold)
    assert doctor.deadlines(case_of(broker, jobs=[job(timeout)])).status == status
    assert doctor.deadlines(case_of(broker)).status == ("unknown" if hold else "ok")


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"behind_seconds": 1e9}, "ok"),
        ({"behind_seconds": 40.0, "retention_seconds": 100.0}, "ok"),
        ({"behind_seconds": 60.0, "retention_seconds": 100.0}, "warning"),
        ({"lost": True, "fault": "they have expired"}, "failed"),
    ],
)
def test_old_messages_are_compared_with_retention(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], status: str
) -> None:
    case = case_of(MemoryBroker(MemoryStore(), "a"))
    monkeypatch.setattr(Case, "statuses", lambda self: Statuses([queue_status(**facts)]))
    assert doctor.retention(case).status == status


@pytest.mark.parametrize(
    ("filters", "rows", "status", "text"),
    [
        ([], (1, 0), "warning", "1 request of build-eu cannot run"),
        ([EVERYTHING], (1, 0), "warning", "no live worker takes the pool"),
        ([QueueFilter(("x",), pools=("build-*",))], (1, 0), "warning", "of build-eu"),
        ([EVERYTHING, QueueFilter(pools=("build-*",))], (1, 0), "ok", "1 request wait"),
        ([QueueFilter(pools=("*",))], (MANY_DEAD // 10, MANY_DEAD), "ok", "1 request"),
        ([QueueFilter(pools=("*",))], (9, MANY_DEAD + 1), "warning", "a transaction stays open"),
        ([QueueFilter(pools=("*",))], (MANY_DEAD, 2 * MANY_DEAD), "ok", "1 request"),
    ],
)
def test_waiting_requests_have_a_worker(
    monkeypatch: pytest.MonkeyPatch,
    filters: list[QueueFilter],
    rows: tuple[int, int],
    status: str,
    text: str,
) -> None:
    """And their table can be cleaned up."""
    broker = MemoryBroker(MemoryStore(), "a")
    broker.requests.ask([NewRequest("build-eu", "1", (b"1", None), b"")])
    monkeypatch.setattr(broker.catalog, "request_rows", lambda: rows, raising=False)
    workers = [WorkerStatus("w", 0, 0, 0.0, WorkerReport(), each) for each in filters]
    monkeypatch.setattr(Case, "workers", lambda self: workers)
    found = check_requests(case_of(broker))
    assert (found.status, text in found.text) == (status, True)
    assert (found.remedy is None) == (status == "ok")


@pytest.mark.parametrize(
    ("queue", "status", "remedy"),
    [
        ("mail-1", "ok", None),
        ("pdf", "failed", "app.request"),
        ("mail-old", "failed", "--exclude"),
        ("fax", "failed", "--exclude"),
    ],
)
def test_a_queue_that_no_worker_takes_has_its_remedy(
    queue: str, status: str, remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = QueueFilter(exclude=("mail-old",), jobs=("mail-*",), pools=("pdf",))
    worker = WorkerStatus("w", 0, 0, 0.0, WorkerReport(), takes)
    monkeypatch.setattr(Case, "workers", lambda self: [worker])
    monkeypatch.setattr(Case, "names", lambda self: [queue])
    found = doctor.queues_without_jobs(case_of())
    assert found.status == status
    assert remedy is None or (found.remedy and remedy in found.remedy)


@pytest.mark.parametrize(("starved", "status"), [(None, "ok"), (0.97, "warning")])
def test_a_starved_worker_is_named(
    starved: float | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `status`, too."""
    report = WorkerReport(host="h1", pid=7, starved=starved)
    monkeypatch.setattr(Case, "workers", lambda self: [WorkerStatus("w", 0, 0, 0.0, report)])
    found = doctor.starved(case_of())
    assert found.status == status
    assert ("w (h1, process 7: 97%)" in found.text) == (starved is not None)
    assert next(each for each in CHECKS if each.find is doctor.starved).first
