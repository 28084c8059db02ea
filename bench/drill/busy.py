"""Healthy fleets that are busy: no verdict may be worse than "lagging", and no check may warn."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support import report
from bench.support.processes import Program, ProgramError
from bench.support.statistics import Goal
from qdo import App
from qdo.ops.verdicts import QueueHealth
from tests.support.cli import QDO, command
from tests.support.paths import ROOT
from tests.support.processes import wait_until

SECONDS = 110.0
"""A queue is late after one minute, and may look stopped after half a minute without a record."""
PAUSE_SECONDS = 5.0
WORST = QueueHealth.LAGGING


@dataclass(frozen=True, slots=True)
class BusyFleet:
    """A fleet of one worker.

    :ivar name: of an app in `busy_shop`.
    :ivar commands: what an operator types first.
    """

    name: str
    queues: int
    messages: int
    commands: tuple[tuple[str, ...], ...] = ()


FLEETS = (
    BusyFleet("places", 300, 3),
    BusyFleet("rate", 300, 3, (("limits", "set", "crm", "--rate", "1/s"),)),
    BusyFleet("permits", 150, 2, (("limits", "set", "crm", "--max", "1"),)),
    BusyFleet("pace", 50, 5),
    BusyFleet("long", 300, 2),
    BusyFleet("turns", 100, 40),
    BusyFleet("lanes", 40, 50),
    BusyFleet("paused", 50, 2, (("pause", "*", "--no-wait", "--allow-none", "--yes"),)),
    BusyFleet("batches", 50, 3),
    BusyFleet("retries", 150, 2),
    BusyFleet("pool", 1, 600),
    BusyFleet("stream", 1, 1000),
    BusyFleet("timers", 0, 0),
    BusyFleet("relayed", 20, 100),
)


def measure_busy() -> int:
    """Run all fleets at once; print the worst verdict of each, and write the JSON."""
    described = report.machine()
    worst: dict[str, tuple[QueueHealth, str]] = {}
    warned: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qdo-busy-")))
        environment = {
            "QDO_BROKER": f"sqlite:{folder / 'messages.db'}",
            "QDO_COORDINATOR": f"sqlite:{folder / 'coordination.db'}",
            "PYTHONPATH": f"{ROOT / 'bench' / 'drill'}:{ROOT}",
        }
        os.environ["QDO_BROKER"] = environment["QDO_BROKER"]  # which `busy_shop` reads
        for each in FLEETS:
            _start(each, folder, environment, stack)
        wait_until(
            lambda: all(_items(each, folder, environment, "workers") for each in FLEETS),
            "each fleet has a worker",
            60.0,
            1.0,
        )
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            for each in FLEETS:
                found = _worst(each, folder, environment)
                if each.name not in worst or found[0].rank < worst[each.name][0].rank:
                    worst[each.name] = found
                (item,) = _items(each, folder, environment, "status")
                warned |= {f"{each.name}: {why['check']}": why["reason"] for why in item["notices"]}
            time.sleep(PAUSE_SECONDS)
    rows = [[name, state.value, reason] for name, (state, reason) in worst.items()]
    rows += [[name, "warning", reason] for name, reason in warned.items()]
    print(report.table(("fleet", "worst state", "reason"), rows, left=("worst state", "reason")))
    wrong = sum(state.rank < WORST.rank for state, _ in worst.values())
    goals = [
        Goal.at_most("healthy fleets that look worse than late", 0, wrong, ".0f"),
        Goal.at_most("checks that warn of a healthy fleet", 0, len(warned), ".0f"),
    ]
    return report.finish(
        "busy", {"machine": described, "fleets": rows}, goals, failed=len(worst) < len(FLEETS)
    )


def _start(fleet: BusyFleet, folder: Path, environment: dict[str, str], stack: ExitStack) -> None:
    with App(fleet.name, broker=environment["QDO_BROKER"]) as app:
        _send(fleet, app)
    for words in fleet.commands:
        _qdo(fleet, folder, environment, *words)
    argv = [sys.executable, "-m", "qdo.cli.worker", f"busy_shop:{fleet.name}"]
    argv += ["--drain-seconds", "0", "--log-level", "warning"]
    stack.callback(Program(argv, folder=folder, environment=environment).stop)


def _send(fleet: BusyFleet, app: App) -> None:
    shop = importlib.import_module("bench.drill.busy_shop")
    if fleet.name == "pool":
        app.request_many([{"pool": "thumb", "body": each} for each in range(fleet.messages)])
    elif fleet.name == "stream":
        visits = app.stream("visit", shards=8)
        visits.send_many([(f"k{each % 40}", each) for each in range(fleet.messages)])
    elif fleet.name == "relayed":
        with shop.engine.begin() as transaction:
            shop.outbox.create(transaction)
            for number in range(fleet.messages):
                for each in range(fleet.queues):
                    shop.outbox.send(transaction, f"q{each}", number)
    else:
        for number in range(fleet.messages):
            app.send_many([(f"q{each}", number, f"k{number % 8}") for each in range(fleet.queues)])


def _worst(fleet: BusyFleet, folder: Path, environment: dict[str, str]) -> tuple[QueueHealth, str]:
    items = _items(fleet, folder, environment, "queues")
    states = [(QueueHealth(each["state"]), each["reason"] or "") for each in items]
    return min(states, key=lambda each: each[0].rank, default=(QueueHealth.IDLE, "no queue yet"))


def _items(
    fleet: BusyFleet, folder: Path, environment: dict[str, str], what: str
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_qdo(fleet, folder, environment, what, "-o", "json"))[
        "items"
    ]
    return found


def _qdo(fleet: BusyFleet, folder: Path, environment: dict[str, str], *words: str) -> str:
    ended = command(*QDO, *words, "--app", fleet.name, cwd=folder, env=environment)
    if ended.code:
        raise ProgramError(f"qdo {' '.join(words)} ended with {ended.code}: {ended.err}")
    return ended.out
