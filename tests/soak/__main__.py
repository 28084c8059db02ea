"""Play rounds: ``python -m tests.soak --coordinator all --seed 1 --rounds 4 --seconds 60``.

``--app`` names what to play: `ci` is the fleet of `ci_fleet`, `requests` that of `request_fleet`,
and `streams` that of `stream_fleet`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.soak import ci_fleet, request_fleet, stream_fleet
from tests.soak.broker_server import BrokerServer, RedisBroker
from tests.soak.checks import check_journal, check_owners, unfinished
from tests.soak.crew import OperatorCrew
from tests.soak.fleet import AWHILE, SoakFleet
from tests.soak.growth import Growth
from tests.soak.log_rules import FlipRules, LimitRules, unlogged
from tests.soak.operator_rules import check_crew, summary
from tests.soak.shared import SOAK_ROOT
from tests.support.forks.processes import choice
from tests.support.postgresql.commands import missing
from tests.support.processes import descendants

PARENTS = 2
KINDS = ("embedded", "zookeeper", "postgresql")
SERVERS: dict[str, Callable[[], Any]] = {"postgresql": BrokerServer, "redis": RedisBroker}
"""Brokers with a server."""
SEND_EVERY = 0.25
"""Seconds between two messages to each queue."""


@dataclass(frozen=True, slots=True)
class Round:
    """What to play.

    :ivar older: checkout of a version to run beside this one.
    :ivar operators: how many operators there are at a time.
    :ivar database: the server of the broker, None for a file.
    """

    coordinator: str
    seed: int
    seconds: float
    folder: Path
    older: Path | None = None
    operators: int = 0
    database: BrokerServer | RedisBroker | None = None


Play = Callable[[Any, argparse.Namespace], list[str]]
"""Plays a round of a fleet, as the command line says; returns the violations."""
OTHERS: dict[str, tuple[Callable[..., SoakFleet], Play]] = {
    "ci": (ci_fleet.CiFleet, lambda fleet, given: ci_fleet.play(fleet, given.seconds)),
    "requests": (request_fleet.RequestFleet, request_fleet.play),
    "streams": (stream_fleet.StreamFleet, stream_fleet.play),
}
"""Apps with a fleet of their own, and what plays a round of it."""


def play_other(wanted: Round, arguments: argparse.Namespace) -> list[str]:
    """Play one round of another app than `soak`; return the violations."""
    broker = "postgresql" if wanted.database else "embedded"
    print(f"{wanted.coordinator} and broker {broker}, seed {wanted.seed}:", flush=True)
    make, play_round = OTHERS[arguments.app]
    given = wanted.folder, wanted.coordinator, wanted.seed
    with closing(make(*given, database=wanted.database)) as fleet:
        found = play_round(fleet, arguments)
        if found:
            _keep(fleet, found)
        return found


def _keep(fleet: SoakFleet, found: list[str]) -> None:
    (fleet.folder / "violations").write_text("\n".join(found))
    for pid, text in fleet.outputs():
        (fleet.folder / f"parent-{pid}.log").write_text(text)


def play(wanted: Round) -> list[str]:
    """Play one round of the app `soak`; return the violations."""
    coordinator, folder, older = wanted.coordinator, wanted.folder, wanted.older
    fleet = SoakFleet(folder, coordinator, wanted.seed, older, wanted.database)
    fleet.fails_over = not wanted.operators  # whose commands may be lost
    crew = OperatorCrew(folder, fleet.environment, wanted.seed, wanted.operators)
    try:
        for _ in range(PARENTS):
            fleet.start_parent()
        if older is None:  # an older version may not obey them
            fleet.shared.begin()
        if wanted.operators:
            crew.begin()
        growth = Growth()
        _befall(fleet, growth, wanted.seconds)
        crew.end()
        fleet.shared.end()
        fleet.heal(lambda: _is_over(fleet, crew))
        found = check_journal(fleet.entries(), fleet.facts()) + check_owners(fleet.transactions())
        found += check_crew(fleet.entries(), crew.facts(), fleet.facts())
        found += [*crew.errors(), *crew.left_behind(), *unlogged(fleet.transactions(), SOAK_ROOT)]
        flips = FlipRules(SOAK_ROOT)
        flips.replay(fleet.transactions())
        limits = LimitRules(SOAK_ROOT)
        limits.replay(fleet.transactions())
        found += flips.violations + limits.violations
        if older is None:
            found += fleet.shared.settings_not_in_use()
        found += growth.violations()
        found += fleet.logged()
        fleet.end_workers()
        found += fleet.shared.left_behind()
        _report(fleet, crew, growth, wanted, found)
        if found:
            _keep(fleet, found)
        return found
    finally:
        crew.close()
        fleet.close()


def _is_over(fleet: SoakFleet, crew: OperatorCrew) -> bool:
    return crew.heal() and not unfinished(fleet.entries(), fleet.facts())


def _befall(fleet: SoakFleet, growth: Growth, seconds: float) -> None:
    """Send messages and let things go wrong, for a while."""
    end = time.monotonic() + seconds
    fault_at = send_at = 0.0
    while (now := time.monotonic()) < end:
        if now >= send_at:
            fleet.send()
            send_at = now + SEND_EVERY
        if now >= fault_at:
            if fault_at:
                fleet.befall()
            fault_at = now + fleet.random.uniform(0.5, 4.0)
        fleet.restart_ended()
        if growth.due():
            growth.sample(fleet.pids())
        time.sleep(AWHILE)


def _report(
    fleet: SoakFleet, crew: OperatorCrew, growth: Growth, wanted: Round, found: list[str]
) -> None:
    entries = fleet.entries()
    runs = Counter(each.kind for each in entries)
    lines = [
        f"{wanted.coordinator} seed {wanted.seed}: {sum(fleet.sent.values())} messages,"
        f" {runs['S']} runs,"
        f" {len(fleet.endless)} endless, {len(fleet.facts().letters)} dead letters,"
        f" {runs['L']} locks, {len(fleet.shared.sections)} sections of"
        f" {len(fleet.shared.sections) + fleet.shared.not_held},"
        f" {fleet.shared.flips} changes of settings of"
        f" {fleet.shared.flips + fleet.shared.not_flipped}, {growth.summary()}",
    ]
    if wanted.operators:
        sent = sum(crew.sent.values())
        lines.append(f"operators: {sent} messages, {dict(crew.faults)}, {summary(crew.facts())}")
    fleet.report(found, *lines)


def _play_round(arguments: argparse.Namespace, number: int) -> list[str]:
    kind = KINDS[number % 3] if arguments.coordinator == "all" else arguments.coordinator
    stores = ("embedded", "postgresql") if missing() is None else ("embedded",)
    store = stores[number // 3 % len(stores)] if arguments.broker == "both" else arguments.broker
    seed = arguments.seed + number
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        if arguments.keep:
            folder = Path(arguments.keep).absolute() / f"{kind}-{store}-{seed}"
            folder.mkdir(parents=True)
        crew = arguments.operators if arguments.older is None else 0
        seconds, older = arguments.seconds, arguments.older
        make = SERVERS.get(store)
        with closing(make()) if make else nullcontext() as database:
            wanted = Round(kind, seed, seconds, folder, older, crew, database)
            return play_other(wanted, arguments) if arguments.app in OTHERS else play(wanted)


def main() -> int:
    """Play the rounds that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--app", choices=("soak", *OTHERS), default="soak")
    parser.add_argument("--coordinator", choices=(*KINDS, "all"), default="all")
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults in each round")
    parser.add_argument("--keep", help="folder for the files of rounds with violations")
    parser.add_argument("--older", type=Path, help="checkout of a version to run beside this one")
    parser.add_argument("--operators", type=int, default=3, help="at a time; 0 for none")
    parser.add_argument("--broker", choices=("embedded", *SERVERS, "both"), default="both")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between faults")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--messages", type=int, default=100_000, help="in streams")
    parser.add_argument("--reshards", type=int, default=100)
    arguments = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # kazoo logs each outage
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends all servers, too
    violations = 0
    for number in range(arguments.rounds):
        try:
            violations += len(_play_round(arguments, number))
        except Exception:  # noqa: BLE001 - the other rounds may still find something
            traceback.print_exc()
            violations += 1
        finally:
            choice.close()
            for pid in descendants(os.getpid()):  # servers of a fleet that could not start
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
