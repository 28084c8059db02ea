"""All benchmarks, one after another: ``python -m bench [--quick]``."""

from __future__ import annotations

import argparse
import subprocess
import sys

from bench.processes import ROOT
from bench.report import say

ALL = ("throughput", "latency", "handover", "checkpoints", "jobs", "many", "sqs")


def main() -> int:
    """Return 0 when every benchmark reached its goals."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke runs")
    options = ["--quick"] if parser.parse_args().quick else []
    worst = 0
    for name in ALL:
        say(f"== {name}")
        # Each in a process of its own, so that none leaves anything behind for the next.
        done = subprocess.run([sys.executable, "-m", f"bench.{name}", *options], cwd=ROOT)
        worst = max(worst, abs(done.returncode))
    return worst


if __name__ == "__main__":
    sys.exit(main())
