"""Play many histories: ``python -m tests.simulation --histories 100000 --start-seed 0``."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

from tests.simulation.world import describe, play


def main() -> int:
    """Play histories and report the first that violates something; 1 if one does."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--histories", type=int, default=2000, help="how many")
    parser.add_argument("--start-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play this one and print its trace")
    parser.add_argument("--keep-going", action="store_true", help="count failures, trace none")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if arguments.seed is not None:
        return report(arguments.seed)
    began = time.perf_counter()
    failed: dict[str, list[int]] = {}
    steps = messages = 0
    for seed in range(arguments.start_seed, arguments.start_seed + arguments.histories):
        violation, world = play(seed)
        steps += world.schedule.steps
        messages += world.checks.ledger
        if violation is not None:
            failed.setdefault(violation.invariant, []).append(seed)
            print(f"seed {seed}: {violation}", flush=True)
            if not arguments.keep_going:
                return report(seed)
    took = time.perf_counter() - began
    print(
        f"{arguments.histories} histories in {took:.1f} s, "
        f"{60 * arguments.histories / took:.0f} a minute, {steps} steps, {messages} messages"
    )
    for invariant, seeds in failed.items():
        print(f"invariant {invariant}: {len(seeds)} failed, such as {seeds[:8]}")
    return 1 if failed else 0


def report(seed: int) -> int:
    """Play one history again, with its trace."""
    violation, world = play(seed, tracing=True)
    print("\n".join(world.schedule.trace or []))
    print(describe(world))
    print(f"seed {seed}: {violation or 'nothing violated'}")
    if violation is not None and violation.__cause__ is not None:
        traceback.print_exception(violation.__cause__)
    return 1 if violation is not None else 0


if __name__ == "__main__":
    sys.exit(main())
