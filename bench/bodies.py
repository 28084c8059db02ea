"""The cost of typed bodies: sent and processed by no-op jobs, beside dicts.

    python -m bench.bodies [--messages N] [--rounds N] [--json]

Runs in one process with the embedded broker and the engine of a worker, as
`bench.throughput_profile` does. All bodies have the same JSON of about 100 bytes: a number, a text,
a date and a decimal. Each round measures all types in turn; the best counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pydantic

from bench.throughput_profile import engine, noop  # patches for gevent, so it comes first
from qdo.app import App
from qdo.settings.settings import Settings

QUEUES = [f"queue-{number:03d}" for number in range(16)]
BATCH = 10_000
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
PRICE = Decimal("9.90")
NAME = "a" * 30


@dataclasses.dataclass
class Plain:
    order: int
    customer: str
    at: datetime.datetime
    price: Decimal


class Struct(msgspec.Struct):
    order: int
    customer: str
    at: datetime.datetime
    price: Decimal


class Model(pydantic.BaseModel):
    order: int
    customer: str
    at: datetime.datetime
    price: Decimal


class Typed(TypedDict):
    order: int
    customer: str
    at: datetime.datetime
    price: Decimal


def as_dict(number: int) -> dict[str, Any]:
    return {"order": number, "customer": NAME, "at": NOW.isoformat(), "price": str(PRICE)}


def as_typed_dict(number: int) -> Typed:
    return {"order": number, "customer": NAME, "at": NOW, "price": PRICE}


def fields(number: int) -> dict[str, Any]:
    return {"order": number, "customer": NAME, "at": NOW, "price": PRICE}


# Name, type of the job, kind of the messages, and the function that makes a body.
KINDS: tuple[tuple[str, Any, str | None, Callable[[int], Any]], ...] = (
    ("dict", None, None, as_dict),
    ("dict with a kind", None, "Plain", as_dict),
    ("dataclass", Plain, None, lambda number: Plain(**fields(number))),
    ("msgspec", Struct, None, lambda number: Struct(**fields(number))),
    ("TypedDict", Typed, "Typed", as_typed_dict),
    ("pydantic", Model, None, lambda number: Model(**fields(number))),
)


def measured(
    folder: Path, messages: int, type: Any, kind: str | None, make: Callable[[int], Any]
) -> tuple[float, float]:
    """Return the messages that are sent, and that are processed, in a second."""
    path = folder / f"{time.monotonic_ns()}.db"
    settings = Settings(app="bench", broker=f"sqlite:{path}")
    with App("bench") as app:
        app.use(settings)
        app.job(body=type)(noop)
        taken = 0.0
        for first in range(0, messages, BATCH):
            numbers = range(first, min(first + BATCH, messages))
            bodies = [make(number) for number in numbers]
            start = time.perf_counter()
            app.send_many(
                {"queue": QUEUES[number % len(QUEUES)], "body": body, "kind": kind}
                for number, body in zip(numbers, bodies, strict=True)
            )
            taken += time.perf_counter() - start
        processed = engine(app.broker, QUEUES, messages, settings, type=type)
    return messages / taken, processed


def main() -> int:
    """Measure all, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    best: dict[str, tuple[float, float]] = {}
    for _ in range(options.rounds):
        for name, *how in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                found = measured(Path(folder), options.messages, *how)
            before = best.get(name, (0.0, 0.0))
            best[name] = max(before[0], found[0]), max(before[1], found[1])
    if options.json:
        found = {name: {"sent": sent, "processed": done} for name, (sent, done) in best.items()}
        print(json.dumps(found))
        return 0
    for name, (sent, processed) in best.items():
        micros = 1e6 / processed
        print(f"{name:18} sent {sent:>9,.0f}/s   processed {processed:>9,.0f}/s  {micros:5.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
