"""qdo on PostgreSQL, beside job queues there: ``python -m bench.postgresql``.

Everything in one run on one server, which the benchmark starts. Commits wait for the disk.

- ``load``: one worker process, and two, on full queues: jobs per second, compared with a bare loop
  that reads the same rows, and with other programs;
- ``keys``: the same with the order of each key kept, compared with Procrastinate's `lock`;
- ``send``: messages per second from 1, 4 and 16 senders, single and in batches;
- ``latency``: from `send()` to the start of the job;
- ``tables``: size of qdo's tables after many messages, and the time to list many queues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import latency
from bench.support import postgresql_loads as loads
from bench.support import postgresql_sends as sends
from bench.support import postgresql_tables as tables
from bench.support import report, services
from bench.support.postgresql_runs import QDO, Bench, postgresql
from bench.support.statistics import Goal

PARTS = ("load", "keys", "send", "latency", "tables")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.postgresql", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run with few messages")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part")
    parser.add_argument("--only", action="append", metavar="NAME", help="measure only this program")
    parser.add_argument("--waiting", type=int, default=1_000_000, help="messages before the start")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="for which senders send")
    parser.add_argument("--samples", type=int, default=1000, help="of the latency")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--messages", type=int, default=5_000_000, help="with retention")
    parser.add_argument("--pace", type=float, default=25_000, help="of these, per second")
    parser.add_argument("--queues", type=int, default=1_000_000, help="to list")
    parser.add_argument("--no-peers", action="store_true", help="only qdo and the bare loop")
    parser.add_argument("--peers-venv", type=Path, default=services.POSTGRESQL_PEERS)
    given = parser.parse_args()
    if given.quick:
        given.waiting, given.runs, given.seconds = 20_000, 1, 0.5
        given.samples, given.idle_seconds = 50, 2.0
        given.messages, given.queues = 20_000, 1_000
    return given


def main() -> int:
    """Measure, print and write the JSON."""
    given = arguments()
    described = report.machine()
    wanted = services.POSTGRESQL_REQUIREMENTS
    alone = given.no_peers
    python = Path(sys.executable) if alone else services.peers_python(given.peers_venv, wanted)
    with postgresql() as server:
        bench = Bench(server, python, given)
        result, judged = measured(bench, given.part or PARTS)
    for failure in bench.failures:
        print(failure)
    whole = {
        "machine": described,
        "versions": report.versions(("psycopg", "ujson", "gevent")),
        "peers": {} if alone else report.versions(services.peer_names(wanted), python),
        "options": {name: str(value) for name, value in vars(given).items()},
        **result,
    }
    return report.finish("postgresql", whole, [] if given.quick else judged, bool(bench.failures))


def measured(bench: Bench, parts: Sequence[str]) -> tuple[dict[str, Any], list[Goal]]:
    """Measure parts and print their tables; return all figures and the goals."""
    result: dict[str, Any] = {}
    judged: list[Goal] = []
    if "load" in parts:
        result["load"], entries = _loads(bench, loads.load_entries(bench), QDO)
        judged += loads.load_goals(entries)
    if "keys" in parts:
        result["keys"], entries = _loads(bench, loads.key_entries(bench), loads.KEYED)
        judged += loads.key_goals(entries)
    if "send" in parts:
        sent = sends.run_senders(bench)
        show(sends.SEND_HEADER, [sends.send_row(*each) for each in sent])
        result["send"] = [{"name": rival.name, **asdict(load)} for rival, load in sent]
    if "latency" in parts:
        waits = sends.run_latency(bench)
        show(latency.HEADER, [latency.row(each) for each in waits])
        result["latency"] = [asdict(each) for each in waits]
        judged += sends.latency_goals(waits)
    if "tables" in parts and bench.wanted(QDO):
        sizes = bench.noted("retention", lambda: tables.run_retention(bench))
        if sizes is not None:
            show(tables.SIZE_HEADER, [each.row() for each in sizes])
            result["retention"] = [asdict(each) for each in sizes]
            judged += tables.goals(sizes)
        listed = bench.noted("list of queues", lambda: tables.run_lists(bench))
        if listed is not None:
            show(tables.LIST_HEADER, [tables.list_row(listed)])
            result["list"] = listed
    return result, judged


def _loads(
    bench: Bench, entries: Sequence[loads.LoadResult], own: str
) -> tuple[list[dict[str, Any]], Sequence[loads.LoadResult]]:
    loads.run_loads(bench, entries)
    show(loads.LOAD_HEADER, loads.load_rows(entries, own))
    return [{**asdict(each), "name": each.name} for each in entries], entries


def show(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as soon as it is measured."""
    print(report.table(header, rows, left=("set-up",)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
