"""Spans of jobs, linked to those of the senders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import qdo
from qdo.testing import TestKit
from qdo.tracing import trace
from tests.support.app_runs import AppRuns
from tests.support.processes import wait_until, whole_lines

PROVIDER = TracerProvider()
TRACER = PROVIDER.get_tracer("tests")


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    exporter.provider = provider  # type: ignore[attr-defined]
    yield exporter
    provider.shutdown()


@pytest.fixture
def app(spans: InMemorySpanExporter) -> qdo.App:
    app = qdo.App("shop")
    trace(app, spans.provider)  # type: ignore[attr-defined]
    return app


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def test_a_job_is_linked_to_its_sender(app: qdo.App, spans: InMemorySpanExporter) -> None:
    seen: list[dict[str, str]] = []

    @app.job("orders-*")
    def run(message: qdo.Message, context: object) -> None:
        seen.append(dict(message.headers))
        app.send("mails", 1)

    @app.job("mails")
    async def mail(message: qdo.Message, context: object) -> None: ...

    with TestKit(app) as kit:
        with TRACER.start_as_current_span("request") as request:
            id = app.send("orders-7", 1, headers={"own": "x"})
        kit.run_until_settled()
    order, mailed = spans.get_finished_spans()
    sender = request.get_span_context()
    assert (order.name, order.kind) == ("process orders-*", SpanKind.CONSUMER)
    assert (order.parent, linked(order)) == (None, [sender.span_id])
    assert order.status.status_code is StatusCode.UNSET
    assert order.attributes is not None
    assert dict(order.attributes) == {
        "messaging.system": "qdo",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders-7",
        "messaging.destination.template": "orders-*",
        "messaging.message.id": id,
        "qdo.attempt": 1,
        "qdo.fence": order.attributes["qdo.fence"],
    }
    # What a job sends is linked to the job.
    assert order.context is not None
    assert linked(mailed) == [order.context.span_id]
    assert seen == [{"own": "x", "traceparent": seen[0]["traceparent"]}]


def test_headers_of_the_message_win(app: qdo.App) -> None:
    """Of a relay, for instance, which passes on the context that it was given."""
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    seen: list[str] = []

    @app.job()
    def run(message: qdo.Message, context: object) -> None:
        seen.append(message.headers["traceparent"])

    with TestKit(app) as kit, TRACER.start_as_current_span("request"):
        app.send_many([("q", 1, None, {"traceparent": given})])
        kit.run_until_settled()
    assert seen == [given]


def test_without_a_context_nothing_is_added(app: qdo.App, spans: InMemorySpanExporter) -> None:
    seen: list[dict[str, str]] = []

    @app.job()
    def run(message: qdo.Message, context: object) -> None:
        seen.append(dict(message.headers))

    with TestKit(app) as kit:
        app.send("q", 1)
        app.send("q", 2, headers={"traceparent": "\\x00 nonsense"})
        kit.run_until_settled()
    assert seen[0] == {}
    assert [linked(span) for span in spans.get_finished_spans()] == [[], []]


def test_errors_are_recorded_and_decisions_are_events(
    app: qdo.App, spans: InMemorySpanExporter
) -> None:
    @app.job(policy=qdo.Policy(attempts=2, backoff_seconds=1))
    def run(message: qdo.Message, context: object) -> None:
        if message.body == "fail":
            raise ValueError("no such shop")
        raise qdo.Skip("not for us")

    with TestKit(app) as kit:
        app.send_many([("a", "fail"), ("b", "skip")])
        kit.run_until_settled()
    found = {}
    for span in spans.get_finished_spans():
        assert span.attributes is not None
        key = span.attributes["messaging.destination.name"], span.attributes["qdo.attempt"]
        found[key] = span
    failed, again, skipped = found["a", 1], found["a", 2], found["b", 1]
    assert failed.status.status_code is again.status.status_code is StatusCode.ERROR
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "builtins.ValueError"
    assert [event.name for event in failed.events] == ["exception"]
    assert skipped.status.status_code is StatusCode.UNSET
    assert [event.name for event in skipped.events] == ["qdo.skip"]


def test_a_batch_is_linked_to_each_of_its_senders(
    app: qdo.App, spans: InMemorySpanExporter
) -> None:
    @app.job(batch=10)
    def run(batch: qdo.Batch, context: object) -> None: ...

    with TestKit(app) as kit:
        senders = []
        for number in range(3):
            with TRACER.start_as_current_span("request") as request:
                app.send_many([("q", number), ("q", number)])
            senders.append(request.get_span_context().span_id)
        kit.run_until_settled()
    (span,) = spans.get_finished_spans()
    assert linked(span) == senders
    assert span.attributes is not None
    assert span.attributes["messaging.batch.message_count"] == 6


SOURCE = "from tests.apps.traced import app\n"
QUEUES = ("greenlet", "thread", "process", "async")


def test_every_executor_keeps_the_context(tmp_path: Path, coordinator_url: str) -> None:
    """Spans within a job are children of its span, in threads and processes as well."""
    runs = AppRuns("desk", tmp_path, coordinator_url)
    try:
        for queue in QUEUES:
            runs.app.send(queue, 1)
        runs.start(SOURCE)
        wait_until(lambda: len(whole_lines(tmp_path / "spans")) == 8, "the spans")
    finally:
        runs.close()
    found = {span["name"]: span for span in map(json.loads, whole_lines(tmp_path / "spans"))}
    for queue in QUEUES:
        outer, inner = found[f"process {queue}"], found[f"inner {queue}"]
        assert inner["parent_id"] == outer["context"]["span_id"]
