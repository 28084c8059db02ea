"""A thousand timers due in one second, beside schedulers: ``python -m bench.timers``.

How late does the broker have each message, how many are stored twice, and how much processor time
does the leader take, also while no timer is due? Celery's beat and APScheduler, each with two
processes, get the same thousand schedules, one after the other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ujson

from bench.support import report, services
from bench.support.processes import Program, cpu_seconds
from bench.support.statistics import percentile
from qdo.brokers.registry import open_broker
from qdo.positions import time_of_position
from tests.support.paths import ROOT

TIMERS = 1000
START_SECONDS = 25.0
"""Time for the processes to start before the minute begins."""
AFTER_SECONDS = 40.0
APP = f"""
import qdo

app = qdo.App("bench")
for number in range({TIMERS}):
    app.timer(f"t{{number}}", "{{cron}}", queue="t")

@app.job()
def job(message, context):
    pass
"""


def wait_for_a_minute() -> None:
    """Return at the first begin of a minute for which the processes have had time to start."""
    begun = time.time() + START_SECONDS
    time.sleep(begun - time.time() + 60 - begun % 60)


def lateness(found: list[tuple[str, float]]) -> dict[str, float]:
    """Return figures from the name and the time of each message of one minute."""
    late = [at % 60 for _, at in found]
    counts = Counter(name for name, _ in found)
    return {
        "sent": len(counts),
        "doubled": sum(count > 1 for count in counts.values()),
        "median_seconds": percentile(late, 50),
        "p99_seconds": percentile(late, 99),
    }


def qdo_figures(folder: Path, cron: str) -> dict[str, float]:
    """Measure two processes of one worker."""
    (folder / "timers_app.py").write_text(APP.replace("{cron}", cron))
    settings = {"PYTHONPATH": f"{folder}:{ROOT}", "QDO_LOG_LEVEL": "warning"}
    worker = "import sys; from qdo.__main__ import worker; sys.exit(worker())"
    argv = [sys.executable, "-c", worker, "timers_app:app", "--processes", "2"]
    with Program(argv, environment=settings, folder=folder) as program:
        wait_for_a_minute()
        before = cpu_seconds(program.pid)
        time.sleep(AFTER_SECONDS)
        used = cpu_seconds(program.pid) - before
    broker = open_broker(f"sqlite:{folder}/qdo-data/messages.db", "bench")
    rows = broker.reader("t", 0).fetch(10 * TIMERS) if broker.catalog.names() else ()
    found = [(ujson.loads(body)["timer"], time_of_position(at)) for at, body, _, _ in rows]
    broker.close()
    newest = max((at // 60 for _, at in found), default=0)
    figures = lateness([each for each in found if each[1] // 60 == newest]) if found else {}
    return {**figures, "processor_seconds": used}


def peer_figures(python: Path, name: str, folder: Path, environment: dict[str, str]) -> Any:
    """Measure two processes of a peer, which write the name and the time of what they send."""
    folder.mkdir()
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                Program(
                    [str(python), "-m", "bench.peers.with_schedulers", name, str(number)],
                    environment={**environment, "BENCH_FOLDER": str(folder)},
                )
            )
            for number in range(2)
        ]
        wait_for_a_minute()
        before = sum(cpu_seconds(each.pid) for each in programs)
        time.sleep(AFTER_SECONDS)
        used = sum(cpu_seconds(each.pid) for each in programs) - before
    lines = [
        line.split() for path in folder.glob("sent-*") for line in path.read_text().splitlines()
    ]
    times = [(name, float(at)) for name, at in lines]
    newest = max((at // 60 for _, at in times), default=0)
    figures = lateness([each for each in times if each[1] // 60 == newest]) if times else {}
    return {**figures, "processor_seconds": used}


def main() -> int:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.timers", description=__doc__)
    parser.add_argument("--no-peers", action="store_true", help="qdo alone")
    parser.add_argument("--peers-venv", type=Path, default=services.PEERS)
    given = parser.parse_args()
    python = None if given.no_peers else services.peers_python(given.peers_venv)
    described, found = report.machine(), {}
    with tempfile.TemporaryDirectory() as folder, services.redis() as redis:
        for name, cron in (("qdo", "* * * * *"), ("qdo, none due", "0 0 29 2 *")):
            made = Path(folder, name.replace(", ", "-").replace(" ", "-"))
            made.mkdir()
            found[name] = qdo_figures(made, cron)
        for name in ("celery", "apscheduler") if python else ():
            found[name] = peer_figures(python, name, Path(folder, name), {"BENCH_REDIS": redis})
    keys = ("sent", "doubled", "median_seconds", "p99_seconds", "processor_seconds")
    rows = [
        (name, *(f"{figures.get(key, 0):,.2f}" for key in keys)) for name, figures in found.items()
    ]
    print(report.table(("system", *keys), rows, left=(0,)))
    return report.finish("timers", {"machine": described, "figures": found}, [])


if __name__ == "__main__":
    sys.exit(main())
