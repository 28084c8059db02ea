"""How queues are interrupted when workers join, leave and crash: ``python -m bench.handover``.

Ten members share 1,000 and 10,000 queues on one ZooKeeper server. An eleventh joins, one leaves
cleanly, and one is killed with SIGKILL while its parent process lives. First for qdo's coordination
and for kazoo's SetPartitioner: each member is a separate process that only claims and releases
queues. Then for a fleet of real workers that process messages all the time
(`bench.support.fleet`). Last, what 20 idle workers cost a coordinator (`bench.support.idle`).

``--coordinator`` names others: ``postgresql``, ``embedded``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from bench.peers import common as tally
from bench.support import fleet, report, services
from bench.support import members as crews
from bench.support.fleet import Upheaval
from bench.support.handover_analysis import Handover, handover
from bench.support.idle import IDLE_HEADER, IdleCost, measure_idle
from bench.support.processes import ProgramError
from bench.support.services import CoordinatorService
from bench.support.statistics import Goal, Spread
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.worker.supervisor.sessions import Session, close_session

APP = "bench"
SESSION_TIMEOUT_SECONDS = 10.0
CREATE_BATCH = 500
KILL_LEADER = "kill -9 of the rebalancer"


@dataclass(frozen=True, slots=True)
class MemberChange:
    """One change of the members, its effect, and its cost at ZooKeeper."""

    system: str
    queues: int
    cause: str
    effect: Handover
    transactions: int
    packets: int


def create_queues(client: Client, layout: Layout, names: Sequence[str]) -> None:
    """Create queue nodes without progress."""
    for path in layout.persistent:
        client.ensure_path(path)
    value = QueueNode().encode()
    for start in range(0, len(names), CREATE_BATCH):
        transaction = client.transaction()
        for name in names[start : start + CREATE_BATCH]:
            transaction.create(layout.queue(name), value)
        for answer in transaction.commit():
            if isinstance(answer, Exception):
                raise answer


def changes(
    system: str,
    crew: crews.Crew,
    service: CoordinatorService,
    scale: Scale,
    reap: Callable[[crews.MemberProcess], None],
) -> Iterator[MemberChange]:
    """Wait until all members have settled, then yield the effects of a join, a leave and a crash.

    :param reap: called after a member was killed, as its parent process would do.
    """
    crew.join(crew.hire(scale.members))
    settled = crew.wait_settled(scale.patience_seconds)
    crews.require(settled, f"not settled {scale.patience_seconds:g} s after the start")
    (newcomer,) = crew.hire(1)
    idle = service.traffic()
    # Lease renewals and pings happen all the time: count them separately.
    crews.wait_for(lambda: False, scale.idle_seconds)
    idle = service.traffic().since(idle)

    def kill(member: crews.MemberProcess) -> int:
        began = crew.kill(member)
        reap(member)
        return began

    leader = crew.leader()
    followers = [member for member in crew.members if member not in (leader, newcomer)]
    causes: list[tuple[str, Callable[[], int]]] = [
        ("join", lambda: crew.join([newcomer])),
        ("leave", lambda: crew.leave(followers[0])),
        ("kill -9", lambda: kill(followers[1])),
    ]
    if leader is not None:
        causes.append((KILL_LEADER, lambda: kill(leader)))
    for cause, act in causes:
        before, started = service.traffic(), time.monotonic()
        began = act()
        complete = crew.wait_settled(scale.patience_seconds)
        seen, window = service.traffic().since(before), time.monotonic() - started
        effect = handover(crew.collect(), began, crew.names())
        part = window / scale.idle_seconds
        yield MemberChange(
            system,
            scale.queues,
            cause if complete else f"{cause} (cut off after {scale.patience_seconds:g} s)",
            effect,
            max(0, round(seen.transactions - part * idle.transactions)),
            max(0, round(seen.packets - part * idle.packets)),
        )
        if not complete:
            return


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of queues and members, and how long to wait."""

    queues: int
    members: int
    patience_seconds: float
    idle_seconds: float = 2.0


def measure_qdo(service: CoordinatorService, scale: Scale, run: int) -> list[MemberChange]:
    """Measure qdo's coordination."""
    url = service.fresh(f"qdo-{scale.queues}-{run}")
    client = connect(url)
    client.open(15.0)
    try:
        create_queues(client, Layout.of(APP), queue_names(scale))
    finally:
        client.stop()
        client.close()

    def reap(member: crews.MemberProcess) -> None:
        # `qdo-worker` does the same when it reaps a dead child process.
        close_session(Session(url, *member.session), SESSION_TIMEOUT_SECONDS, 10.0)

    command = [sys.executable, "-m", "bench.support.member_process", url, APP]
    with crews.Crew(command, scale.queues) as crew:
        return list(changes(service.name, crew, service, scale, reap))


def queue_names(scale: Scale) -> list[str]:
    """Return the names of the shared queues, as long as a uuid4 in hex."""
    return [tally.set_member(number) for number in range(scale.queues)]


def measure_fleet(service: CoordinatorService, scale: Scale, run: int) -> list[Upheaval]:
    """Measure real workers that process messages."""
    url = service.fresh(f"fleet-{scale.queues}-{run}")
    layout = Layout.of(APP)
    client = connect(url)
    client.open(15.0)
    try:
        create_queues(client, layout, queue_names(scale))
        return fleet.measure(
            client, url, layout, scale.queues, scale.members, scale.patience_seconds
        )
    finally:
        client.stop()
        client.close()


def measure_partitioner(
    service: CoordinatorService, scale: Scale, run: int, time_boundary: float
) -> list[MemberChange]:
    """Measure kazoo's SetPartitioner."""
    ensemble = service.ensemble
    if ensemble is None:
        raise ProgramError("SetPartitioner needs ZooKeeper")
    command = [
        *(sys.executable, "-m", "bench.peers.with_setpartitioner"),
        *(ensemble.hosts, f"/partitioner-{scale.queues}-{run}"),
        *(str(scale.queues), str(time_boundary)),
    ]
    name = f"SetPartitioner, time_boundary={time_boundary:g}"
    with crews.Crew(command, scale.queues) as crew:
        # The session of a dead member ends only by its timeout.
        return list(changes(name, crew, service, scale, lambda member: None))


# --- the command ----------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 100 queues, 3 members")
    parser.add_argument("--queues", type=int, action="append", help="default: 1000 and 10000")
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--time-boundary", type=float, default=1.0, help="time_boundary of SetPartitioner"
    )
    parser.add_argument(
        "--peer-queues",
        type=int,
        default=10_000,
        help="largest number of queues for SetPartitioner",
    )
    parser.add_argument(
        "--peer-seconds", type=float, default=120.0, help="seconds to wait for SetPartitioner"
    )
    parser.add_argument("--coordinator", choices=services.COORDINATORS, action="append")
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--no-peers", action="store_true", help="qdo alone")
    parser.add_argument("--no-fleet", action="store_true", help="skip the real workers")
    given = parser.parse_args()
    if given.quick:
        given.queues, given.members, given.runs, given.idle_seconds = [100], 3, 1, 5.0
    given.queues = given.queues or [1000, 10_000]
    return given


def main() -> int:
    """Measure, print and write the JSON."""
    given = arguments()
    described = report.machine()
    found: list[MemberChange] = []
    upheavals: list[tuple[int, Upheaval]] = []
    failures: list[str] = []

    @contextlib.contextmanager
    def noted(what: str, queues: int) -> Iterator[None]:
        """Report what cannot be measured, and continue with the rest."""
        report.say(f"{what}, {queues:,} queues")
        try:
            yield
        except ProgramError as error:
            failures.append(f"{what}, {queues:,} queues: {error}")
            report.say(failures[-1])

    idle: list[IdleCost] = []

    def measure(service: CoordinatorService, queues: int) -> None:
        scale = Scale(queues, given.members, 60.0)
        for run in range(given.runs):
            with noted(f"{service.name}, run {run + 1} of {given.runs}", queues):
                found.extend(measure_qdo(service, scale, run))
        for run in range(0 if given.no_fleet else given.runs):
            with noted(f"real workers, run {run + 1} of {given.runs}", queues):
                upheavals.extend((queues, each) for each in measure_fleet(service, scale, run))
        if not given.no_peers and queues <= given.peer_queues and service.ensemble is not None:
            scale = Scale(queues, given.members, given.peer_seconds)
            with noted("SetPartitioner", queues):
                found.extend(measure_partitioner(service, scale, 0, given.time_boundary))

    for kind in given.coordinator or services.COORDINATORS[:1]:
        with services.coordinator(kind) as service:
            for queues in given.queues:
                measure(service, queues)
            with noted(f"{service.name}, idle workers", 0):
                idle.append(measure_idle(service, given.idle_seconds))
    print(report.table(HEADER, [row(group) for group in grouped(found)]))
    print(report.table(IDLE_HEADER, [each.row() for each in idle]))
    if upheavals:
        print(report.table(FLEET_HEADER, fleet_rows(upheavals)))
    for failure in failures:
        print(failure)
    result = {
        "machine": described,
        "versions": report.versions(("kazoo", "gevent")),
        "idle": [asdict(each) for each in idle],
        "changes": [asdict(change) for change in found],
        "fleet": [{"queues": queues, **asdict(each)} for queues, each in upheavals],
        "failures": failures,
    }
    judged = [] if given.quick else [*goals(found), *fleet_goals(upheavals)]
    return report.finish("handover", result, judged, bool(failures))


HEADER = (
    *("system, queues, change", "runs", "moved", "fewest", "settled ms", "worst ms"),
    *("gap ms", "paused", "pause ms", "ZK writes", "ZK packets"),
)


def grouped(found: Sequence[MemberChange]) -> list[list[MemberChange]]:
    """Group the runs by change."""
    groups: dict[tuple[str, int, str], list[MemberChange]] = {}
    for change in found:
        groups.setdefault((change.system, change.queues, change.cause), []).append(change)
    return list(groups.values())


def row(group: Sequence[MemberChange]) -> tuple[str, ...]:
    """Return one line of the table: medians, and the worst value of each violation."""
    first = group[0]
    settled = Spread.of_costs([change.effect.settled_seconds for change in group])

    def worst(pick: Callable[[MemberChange], float]) -> float:
        return max(map(pick, group))

    def median(pick: Callable[[MemberChange], float]) -> float:
        return Spread.of_costs(list(map(pick, group))).median

    return (
        f"{first.system}, {first.queues:,}, {first.cause}",
        str(len(group)),
        f"{worst(lambda c: c.effect.moved):,.0f}",
        f"{first.effect.fewest:,}",
        f"{1000 * settled.median:,.0f}",
        f"{1000 * settled.worst:,.0f}",
        f"{1000 * worst(lambda c: c.effect.gap_seconds):,.0f}",
        f"{worst(lambda c: c.effect.paused):,.0f}",
        f"{1000 * worst(lambda c: c.effect.pause_seconds):,.0f}",
        f"{median(lambda c: c.transactions):,.0f}",
        f"{median(lambda c: c.packets):,.0f}",
    )


def goals(found: Sequence[MemberChange]) -> list[Goal]:
    """Return the goals of qdo's coordination."""
    reached: list[Goal] = []
    for group in grouped([change for change in found if change.system.startswith("qdo")]):
        first = group[0]
        where = f"{first.system}, {first.queues:,} queues, {first.cause}"
        settled = Spread.of_costs([change.effect.settled_seconds for change in group])
        if first.cause in ("join", "kill -9", KILL_LEADER):
            reached.append(Goal.at_most(f"{where}: seconds until settled", 0.5, settled.median))
        moves = max(change.effect.moved - change.effect.fewest for change in group)
        reached.append(Goal.at_most(f"{where}: moves beyond the fewest", 0, moves, ".0f"))
        paused = max(change.effect.paused for change in group)
        reached.append(Goal.at_most(f"{where}: unmoved queues paused", 0, paused, ".0f"))
        lost = max(change.effect.unowned for change in group)
        reached.append(Goal.at_most(f"{where}: queues without owner", 0, lost, ".0f"))
    return reached


FLEET_HEADER = (
    *("real workers, queues, change", "runs", "moved", "fewest", "settled ms", "worst ms"),
    *("gap ms", "wait before ms", "unmoved ms", "moved ms", "repeated", "missing", "disordered"),
)


def _by_cause(upheavals: Sequence[tuple[int, Upheaval]]) -> dict[str, list[Upheaval]]:
    groups: dict[str, list[Upheaval]] = {}
    for queues, each in upheavals:
        groups.setdefault(f"{queues:,} queues, {each.cause}", []).append(each)
    return groups


def fleet_rows(upheavals: Sequence[tuple[int, Upheaval]]) -> list[tuple[str, ...]]:
    """Return the table lines of real workers: medians of times, the worst of all other values."""
    lines = []
    for where, group in _by_cause(upheavals).items():
        settled = Spread.of_costs([each.effect.settled_seconds for each in group])
        waits = zip(*((u.calm_wait, u.unmoved_wait, u.moved_wait) for u in group), strict=True)
        lines.append(
            (
                where,
                str(len(group)),
                f"{max(each.effect.moved for each in group):,}",
                f"{group[0].effect.fewest:,}",
                f"{1000 * settled.median:,.0f}",
                f"{1000 * settled.worst:,.0f}",
                f"{1000 * max(each.effect.gap_seconds for each in group):,.0f}",
                *(f"{1000 * max(wait):,.0f}" for wait in waits),
                f"{max(each.repeated for each in group):,}",
                f"{max(each.missing for each in group):,}",
                f"{max(each.disordered for each in group):,}",
            )
        )
    return lines


def fleet_goals(upheavals: Sequence[tuple[int, Upheaval]]) -> list[Goal]:
    """Return the goals of real workers."""
    found: list[Goal] = []
    for where, group in _by_cause(upheavals).items():
        what = f"real workers, {where}"
        if group[0].cause in ("join", "kill -9"):
            settled = Spread.of_costs([each.effect.settled_seconds for each in group])
            found.append(Goal.at_most(f"{what}: seconds until settled", 0.5, settled.median))
        moves = max(each.effect.moved - each.effect.fewest for each in group)
        found.append(Goal.at_most(f"{what}: moves beyond the fewest", 0, moves, ".0f"))
        paused = max(each.effect.paused for each in group)
        found.append(Goal.at_most(f"{what}: unmoved queues paused", 0, paused, ".0f"))
        wrong = max(each.missing + each.disordered for each in group)
        found.append(Goal.at_most(f"{what}: messages missing or too early", 0, wrong, ".0f"))
        if group[0].cause != "kill -9":
            repeated = max(each.repeated for each in group)
            found.append(Goal.at_most(f"{what}: messages repeated", 0, repeated, ".0f"))
    return found


if __name__ == "__main__":
    sys.exit(main())
