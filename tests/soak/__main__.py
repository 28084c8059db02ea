"""Play rounds: ``python -m tests.soak --coordinator both --seed 1 --rounds 4 --seconds 60``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.soak.checks import check_journal, check_log, check_owners, read_journal, unfinished
from tests.soak.fleet import SoakFleet
from tests.soak.growth import Growth
from tests.soak.log_rules import FlipRules, LimitRules
from tests.soak.shared import SOAK_ROOT

PARENTS = 2
SEND_EVERY = 0.25
"""Seconds between two messages to each queue."""
HEAL_SECONDS = 120.0
"""Once the faults are over, no such time may pass without a run before all messages are processed.
Processes that died several times in a row are restarted after a pause of up to 30 s."""
AWHILE = 0.05


def play(
    coordinator: str, seed: int, seconds: float, folder: Path, older: Path | None = None
) -> list[str]:
    """Play one round; return the violations."""
    url = f"sqlite:{folder / 'coordination.db'}" if coordinator == "embedded" else coordinator
    fleet = SoakFleet(folder, url, seed, older)
    try:
        for _ in range(PARENTS):
            fleet.start_parent()
        if older is None:  # an older version may not obey them
            fleet.shared.begin()
        growth = Growth()
        _befall(fleet, growth, seconds)
        fleet.shared.end()
        text, limit = "", time.monotonic() + HEAL_SECONDS
        while unfinished(fleet.text(), fleet.facts()) and time.monotonic() < limit:
            if text != fleet.text():  # a backlog may take longer, but must become smaller
                text, limit = fleet.text(), time.monotonic() + HEAL_SECONDS
            time.sleep(10 * AWHILE)
        found = check_journal(fleet.text(), fleet.facts()) + check_owners(fleet.transactions())
        flips = FlipRules(SOAK_ROOT)
        flips.replay(fleet.transactions())
        limits = LimitRules(SOAK_ROOT)
        limits.replay(fleet.transactions())
        found += flips.violations + limits.violations
        if older is None:
            found += fleet.shared.settings_not_in_use()
        found += growth.violations()
        for _, output in fleet.outputs():
            found += check_log(output)
        fleet.end_workers()
        found += fleet.shared.left_behind()
        _report(fleet, growth, coordinator, seed, found)
        if found:
            for pid, text in fleet.outputs():
                (folder / f"parent-{pid}.log").write_text(text)
        return found
    finally:
        fleet.close()


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
        if growth.due():
            growth.sample(fleet.pids(), fleet.watches())
        time.sleep(AWHILE)


def _report(
    fleet: SoakFleet, growth: Growth, coordinator: str, seed: int, found: list[str]
) -> None:
    entries = read_journal(fleet.text())
    runs = Counter(each.kind for each in entries)
    faults = Counter(fleet.faults)
    print(
        f"{coordinator} seed {seed}: {sum(fleet.sent.values())} messages, {runs['S']} runs,"
        f" {len(fleet.endless)} endless, {len(fleet.facts().letters)} dead letters,"
        f" {runs['L']} locks, {len(fleet.shared.sections)} sections of"
        f" {len(fleet.shared.sections) + fleet.shared.not_held},"
        f" {fleet.shared.flips} changes of settings of"
        f" {fleet.shared.flips + fleet.shared.not_flipped}, {growth.summary()},"
        f" {sum(faults.values())} faults {dict(faults)}: {len(found)} violations",
        flush=True,
    )
    for each in found[:20]:
        print(f"  {each}", flush=True)


def main() -> int:
    """Play the rounds that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--coordinator", choices=("embedded", "zookeeper", "both"), default="both")
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults in each round")
    parser.add_argument("--keep", help="folder for the files of rounds with violations")
    parser.add_argument("--older", type=Path, help="checkout of a version to run beside this one")
    arguments = parser.parse_args()
    kinds = ("embedded", "zookeeper")
    violations = 0
    for number in range(arguments.rounds):
        kind = kinds[number % 2] if arguments.coordinator == "both" else arguments.coordinator
        seed = arguments.seed + number
        with tempfile.TemporaryDirectory(prefix="soak-") as name:
            folder = Path(name)
            if arguments.keep:
                folder = Path(arguments.keep).absolute() / f"{kind}-{seed}"
                folder.mkdir(parents=True)
            violations += len(play(kind, seed, arguments.seconds, folder, arguments.older))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
