"""Jobs on each executor with a span of their own."""

from __future__ import annotations

import os

from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

import qdo
from qdo import Message
from qdo.tracing import trace

provider = TracerProvider()
file = open("spans", "a", buffering=1)  # noqa: SIM115


def line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}{os.linesep}"


provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=file, formatter=line)))
otel.set_tracer_provider(provider)
app = qdo.App("desk")
trace(app)


def inside(message: Message) -> None:
    with otel.get_tracer("jobs").start_as_current_span("inner " + message.queue):
        pass


@app.job("greenlet")
def in_greenlet(message: Message, context: object) -> None:
    inside(message)


@app.job("thread", executor="thread")
def in_thread(message: Message, context: object) -> None:
    inside(message)


@app.job("process", executor="process")
def in_process(message: Message, context: object) -> None:
    inside(message)


@app.job("async")
async def in_asyncio(message: Message, context: object) -> None:
    inside(message)
