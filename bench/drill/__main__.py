"""Prepared faults: ``python -m bench.drill FAULT``, or ``--random``.

Three workers run an app with healthy queues, and one fault happens. A person exports the settings
that are printed, finds out what it is with `qdo` or the dashboard alone, and presses Enter to read
the answer.

``--measure`` goes through all of them. It measures the seconds from the fault until `qdo status`,
the command that docs/on-call.rst names, and the dashboard say the right thing by name. Then it
repairs the cause, types the next step as printed, and waits until every message is done.

``--busy`` runs fleets without a fault, in which much waits, and measures the worst verdict.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import select
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

from bench.drill.busy import measure_busy
from bench.drill.faults import FAULTS, Fault
from bench.drill.measure import Drill, attempt
from bench.drill.stage import DrillStage, staged
from bench.support import report
from bench.support.statistics import Goal

GOAL_SECONDS = 60.0
_BY_NAME = {each.name: each for each in FAULTS}


def main() -> int:
    """Practise with one fault, or measure all of them."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.drill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(_BY_NAME))
    parser.add_argument("--random", action="store_true", help="one of them, without its name")
    parser.add_argument("--measure", action="store_true", help="measure; no FAULT means all")
    parser.add_argument("--busy", action="store_true", help="judge healthy fleets instead")
    given = parser.parse_args()
    if not set(given.faults) <= _BY_NAME.keys():
        parser.error(f"FAULT must be one of {', '.join(_BY_NAME)}, got {' '.join(given.faults)}")
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)
    if given.busy:
        return measure_busy()
    if given.measure:
        return measure_all([_BY_NAME[name] for name in given.faults or _BY_NAME])
    if given.random == (len(given.faults) == 1) or len(given.faults) > 1:
        parser.error(f"name one fault, or give --random: {', '.join(_BY_NAME)}")
    practise(random.choice(FAULTS) if given.random else _BY_NAME[given.faults[0]])
    return 0


def practise(fault: Fault) -> None:
    """Let one fault happen, and wait for Enter or SIGTERM."""
    report.say("starting servers and workers, for up to a minute ...")
    with staged(fault.place) as stage:
        stage.start(fault.flags)
        incident = fault.strike(stage)
        print("Something is wrong with the app shop. Type this in another terminal:\n")
        print(f"  cd {shlex.quote(str(stage.folder))}")
        print(f"  export {' '.join(_exports(stage))}")
        print("\nThe logs of the workers are in this folder. Press Enter to read the answer.")
        sys.stdout.flush()
        _wait()
        print(f"{fault.name}: {fault.title}. See {fault.section!r} in docs/on-call.rst:")
        print(f"qdo status, {incident.named.title}, and {incident.page.title} of the dashboard.")


def _exports(stage: DrillStage) -> list[str]:
    return [f"{name}={shlex.quote(value)}" for name, value in stage.environment.items()]


def _wait() -> None:
    """Wait for a line, or for SIGTERM where nobody types."""
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    select.select([sys.stdin, ended], [], [])


def measure_all(faults: Sequence[Fault]) -> int:
    """Measure faults, print a table and write the JSON."""
    described = report.machine()
    found = []
    for fault in faults:
        report.say(f"-- {fault.name}")
        drill = attempt(fault)
        for problem in drill.problems:
            report.say(f"   {problem}")
        found.append(drill)
    print(report.table(_HEADER, [_row(each) for each in found], left=("next step", "result")))
    result = {"machine": described, "drills": [asdict(each) for each in found]}
    return report.finish("drill", result, _goals(found), failed=any(map(_failed, found)))


_HEADER = ("fault", "status", "command", "dashboard", "recovered", "lost", "result", "next step")


def _row(each: Drill) -> list[str]:
    times = [_seconds(value) for value in (each.first, each.named, each.page, each.recovered)]
    result = "FAIL" if _failed(each) else "ok"
    return [each.fault, *times, str(each.lost), result, each.step or "-"]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


def _failed(each: Drill) -> bool:
    late = any(
        value is None or value > GOAL_SECONDS for value in (each.first, each.named, each.page)
    )
    return late or bool(each.problems) or bool(each.lost)


def _goals(found: Sequence[Drill]) -> list[Goal]:
    times = [
        float("inf") if value is None else value
        for each in found
        for value in (each.first, each.named, each.page)
    ]
    return [
        Goal.at_most("s until any diagnosis is right", GOAL_SECONDS, max(times), ".1f"),
        Goal.at_most("messages lost", 0, sum(each.lost for each in found), ".0f"),
        Goal.at_most("faults with a problem", 0, sum(map(_failed, found)), ".0f"),
    ]


if __name__ == "__main__":
    sys.exit(main())
