"""The cost of encrypted and of typed bodies, beside dicts in clear.

    python -m bench.encryption [--messages N] [--rounds N] [--json]

Measures sealing, opening, sending and processing. Runs in one process with the embedded broker and
the engine of a worker, as `bench.throughput_profile` does. All typed bodies have the same JSON of
100 bytes, with a date and a decimal. Each round measures all types in turn; the best counts. Takes
a minute.
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
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pydantic

from bench.throughput_profile import (  # patches for gevent, so it comes first
    BODY_BYTES,
    engine,
    noop,
)
from qdo.app import App
from qdo.encryption.key_ring import change_keys, new_key
from qdo.sending.messages import NewMessage
from qdo.settings.settings import Settings
from qdo.settings.vaults import vault_of

SIZES = (100, 10_000, 1_000_000)
SECONDS = 0.4
"""How long each size is sealed, and opened."""
QUEUES = [f"queue-{number:03d}" for number in range(16)]
BATCH = 10_000


@dataclasses.dataclass
class PlainOrder:
    order: int
    customer: str
    at: datetime.datetime
    price: Decimal


class StructOrder(msgspec.Struct):
    order: int
    customer: str
    at: datetime.datetime
    price: Decimal


class ModelOrder(pydantic.BaseModel):
    order: int
    customer: str
    at: datetime.datetime
    price: Decimal


class TypedOrder(TypedDict):
    order: int
    customer: str
    at: datetime.datetime
    price: Decimal


ORDER = {
    "order": 1,
    "customer": "a" * 30,
    "at": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    "price": Decimal("9.90"),
}
JSON_ORDER = {**ORDER, "at": str(ORDER["at"]), "price": str(ORDER["price"])}
TYPES: dict[str, tuple[Any, Any, str | None]] = {
    "dict": (None, JSON_ORDER, None),
    "with a kind": (None, JSON_ORDER, "PlainOrder"),
    "dataclass": (PlainOrder, PlainOrder(**ORDER), None),
    "msgspec": (StructOrder, StructOrder(**ORDER), None),
    "TypedDict": (TypedOrder, ORDER, "TypedOrder"),
    "pydantic": (ModelOrder, ModelOrder(**ORDER), None),
}
"""The type of a job, its bodies, and their kind."""


def rate(call: Callable[[], Any]) -> float:
    """Return how often a function can be called in a second."""
    count, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < SECONDS:
        call()
        count += 1
    return count / taken


def sealing(settings: Settings) -> list[dict[str, float]]:
    """Return the rates of sealing and opening bodies of different sizes."""
    vault = vault_of(settings, "bench", str)
    if vault is None:
        raise SystemExit("no keys")
    found = []
    for size in SIZES:
        body = b"x" * size
        sealed, headers = vault.seal("q", body, None)
        seals = rate(partial(vault.seal, "q", body, None))
        opens = rate(partial(vault.open, "q", sealed, headers))
        found.append(
            {
                "bytes": size,
                "sealed_per_second": round(seals),
                "opened_per_second": round(opens),
                "sealed_mb_per_second": round(seals * size / 1e6, 1),
                "opened_mb_per_second": round(opens * size / 1e6, 1),
            }
        )
    return found


def whole(
    settings: Settings,
    messages: int,
    type: Any = None,
    body: Any = None,
    kind: str | None = None,
) -> dict[str, int]:
    """Return the messages per second that are sent, and processed by no-op jobs."""
    body = body or {"text": "x" * (BODY_BYTES - len('{"text":""}'))}
    with App("bench") as app:
        app.job(body=type)(noop)
        app.use(settings)
        start = time.perf_counter()
        for first in range(0, messages, BATCH):
            numbers = range(first, min(first + BATCH, messages))
            bodies = [NewMessage(QUEUES[each % len(QUEUES)], body, kind=kind) for each in numbers]
            app.send_many(bodies)
        sent = messages / (time.perf_counter() - start)
        rates = [engine(app.broker, QUEUES, messages, settings, type=type) for _ in range(2)]
    return {"sent_per_second": round(sent), "processed_per_second": round(max(rates))}


def main() -> int:
    """Measure all, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = str(Path(folder) / "keys")
        change_keys(keys, lambda before: [new_key("encrypt")])

        def settings(name: str, **chosen: Any) -> Settings:
            return Settings(app="bench", broker=f"sqlite:{Path(folder) / name}", **chosen)

        sealed = settings("sealed.db", keys=keys, encrypt=("bodies",))
        result: dict[str, Any] = {
            "sealing": sealing(sealed),
            "in_clear": whole(settings("clear.db"), options.messages),
            "accepting": whole(settings("accepting.db", keys=keys), options.messages),
            "encrypted": whole(sealed, options.messages),
        }
        for number in range(options.rounds):
            for name, how in TYPES.items():
                found = whole(settings(f"{name} {number}.db"), options.messages, *how)
                before = result.get(name, found)
                result[name] = {each: max(rate, before[each]) for each, rate in found.items()}
    if options.json:
        print(json.dumps(result))
        return 0
    for each in result["sealing"]:
        print(
            f"{each['bytes']:>9,} bytes   seal {each['sealed_per_second']:>9,.0f}/s"
            f" {each['sealed_mb_per_second']:>9,.1f} MB/s   open {each['opened_per_second']:>9,.0f}"
            f"/s {each['opened_mb_per_second']:>9,.1f} MB/s"
        )
    for name in ("in_clear", "accepting", "encrypted", *TYPES):
        sent, processed = result[name]["sent_per_second"], result[name]["processed_per_second"]
        print(f"{name:12}   sent {sent:>9,}/s   processed {processed:>9,}/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
