"""Records spans of OpenTelemetry. Call ``trace(app)`` after ``pip install 'qdo-queues[tracing]'``.

Messages carry the context of their sender in the headers `traceparent` and `tracestate` (W3C Trace
Context). A job has a separate span with a link to the sender's span, because a message may wait for
hours, and a batch has many senders. Names and attributes follow OpenTelemetry's semantic
conventions for messaging (version 1.37).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import propagate
from opentelemetry import trace as otel
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

from qdo._version import __version__
from qdo.message import Batch, Message
from qdo.outcomes import Outcome

if TYPE_CHECKING:
    from qdo.app import App

__all__ = ["trace"]

# OpenTelemetry's maximum number of links of a span. A batch may have more messages.
MOST_LINKS = 128


def trace(app: App, provider: TracerProvider | None = None) -> None:
    """Add the sender's context to each message, and a span to each call of a job.

    Call this function once, after creating the app. Without a provider that exports spans,
    OpenTelemetry records nothing, but messages still carry the context.

    :param provider: the provider that makes the spans; None for OpenTelemetry's global provider.
    """
    tracer = otel.get_tracer("qdo", __version__, provider)

    @contextlib.contextmanager
    def span(message: Message | Batch) -> Iterator[None]:
        messages = message if isinstance(message, Batch) else [message]
        job = app.job_for(message.queue)
        name = f"process {job.queues}" if job is not None else "process"
        with tracer.start_as_current_span(
            name,
            kind=SpanKind.CONSUMER,
            links=_links(messages),
            attributes=_attributes(message, job.queues if job else None),
            record_exception=False,
            set_status_on_exception=False,
        ) as current:
            try:
                yield
            except Exception as error:
                _record(current, error)
                raise

    @app.middleware(jobs="sync")
    def around(call_next: Any, message: Any, context: Any) -> Any:
        with span(message):
            return call_next(message, context)

    @app.middleware(jobs="async")
    async def around_async(call_next: Any, message: Any, context: Any) -> Any:
        with span(message):
            return await call_next(message, context)

    app.default_headers = _context_headers


def _context_headers() -> Mapping[str, str]:
    """Return the headers with the context of the sender, if any."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


def _links(messages: Sequence[Message]) -> list[Link]:
    links: dict[tuple[int, int], Link] = {}
    for message in messages:
        context = propagate.extract(message.headers)
        sender = otel.get_current_span(context).get_span_context()
        if sender.is_valid and len(links) < MOST_LINKS:
            links[sender.trace_id, sender.span_id] = Link(sender)
    return list(links.values())


def _attributes(message: Message | Batch, template: str | None) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "messaging.system": "qdo",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": message.queue,
        "messaging.message.id": message.id,
        "qdo.attempt": message.attempt,
        "qdo.fence": message.fence,
    }
    if template is not None:
        attributes["messaging.destination.template"] = template
    if isinstance(message, Batch):
        attributes["messaging.batch.message_count"] = len(message)
    return attributes


def _record(span: Span, error: Exception) -> None:
    """Record the failure of an attempt. A decision of the job is an event, not an error."""
    if isinstance(error, Outcome):
        span.add_event(f"qdo.{type(error).__name__.lower()}", {"qdo.reason": str(error)[:1000]})
        return
    span.record_exception(error)
    span.set_attribute("error.type", f"{type(error).__module__}.{type(error).__qualname__}")
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"[:1000]))
