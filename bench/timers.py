"""A thousand timers due in one second, beside schedulers: ``python -m bench.timers``.

How late does the broker have each message, how many are stored twice, and how much processor time
does the leader take, also while no timer is due? Celery's beat and APScheduler, each with two
processes, get the same thousand schedules, one after the other. How late is an occurrence if the
leader is killed?
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from calendar import timegm
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ujson

from bench.support import report, services
from bench.support.processes import Program, ProgramError, cpu_seconds
from bench.support.statistics import percentile
from qdo.brokers.registry import open_broker
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_node import parse_leader
from qdo.fleet.components import read_components
from qdo.positions import time_of_position
from tests.support.paths import ROOT
from tests.support.processes import descendants, wait_until

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


def started(folder: Path, app: str, *options: str) -> Program:
    """Start one worker, whose broker and coordinator are files in the folder."""
    (folder / "timers_app.py").write_text(app)
    settings = {"PYTHONPATH": f"{folder}:{ROOT}", "QDO_LOG_LEVEL": "warning"}
    worker = "import sys; from qdo.__main__ import worker; sys.exit(worker())"
    argv = [sys.executable, "-c", worker, "timers_app:app", *options]
    return Program(argv, environment=settings, folder=folder)


def stored(folder: Path) -> list[tuple[dict[str, Any], float]]:
    """Return the body and the time of each message."""
    broker = open_broker(f"sqlite:{folder}/qdo-data/messages.db", "bench")
    rows = broker.reader("t", 0).fetch(10 * TIMERS) if broker.catalog.names() else ()
    found = [(ujson.loads(body), time_of_position(at)) for at, body, _, _ in rows]
    broker.close()
    return found


def qdo_figures(folder: Path, cron: str) -> dict[str, float]:
    """Measure two processes of one worker."""
    with started(folder, APP.replace("{cron}", cron), "--processes", "2") as program:
        wait_for_a_minute()
        before = cpu_seconds(program.pid)
        time.sleep(AFTER_SECONDS)
        used = cpu_seconds(program.pid) - before
    found = [(body["timer"], at) for body, at in stored(folder)]
    newest = max((at // 60 for _, at in found), default=0)
    figures = lateness([each for each in found if each[1] // 60 == newest]) if found else {}
    return {**figures, "processor_seconds": used}


def takeover_seconds(folder: Path, whole: bool) -> float:
    """Return how late the first occurrence after the death of a leader is.

    :param whole: kill its parent, too: its session ends by the timeout.
    """
    app = "import qdo\napp = qdo.App('bench')\napp.job()(print)\n"
    app += "app.timer('t', every_seconds=1, queue='t')"
    with ExitStack() as stack:
        tree = stack.enter_context(started(folder, app, "--processes", "2"))
        wait_until((folder / "qdo-data" / "messages.db").exists, "the worker starts", 120)
        wait_until(lambda: len(stored(folder)) > 2, "the leader sends", 120)
        stack.enter_context(started(folder, app))
        time.sleep(START_SECONDS)
        client = connect(f"sqlite:{folder}/qdo-data/coordination.db", handler="threading")
        client.open()
        layout = Layout.of("bench")
        leader = parse_leader(client.get(layout.rebalancer)[0])[1].rpartition("/")[2]
        pids = [each.pid for each in read_components(client, layout) if each.name == leader]
        client.stop()
        client.close()
        killed = time.time()
        for pid in [tree.pid, *descendants(tree.pid)] if whole else pids:
            os.kill(pid or 0, signal.SIGKILL)
        time.sleep(START_SECONDS)
    for body, at in stored(folder):
        due = timegm(time.strptime(body["at"], "%Y-%m-%dT%H:%M:%SZ")) - int(body["missed"])
        if at > killed:
            return at - due
    raise ProgramError("no worker took over")


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
    for name, whole in (("leader killed", False), ("leader and its parent killed", True)):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = {"late_seconds": takeover_seconds(Path(folder), whole)}
        print(f"{name}: {found[name]['late_seconds']:.2f} s late")
    return report.finish("timers", {"machine": described, "figures": found}, [])


if __name__ == "__main__":
    sys.exit(main())
