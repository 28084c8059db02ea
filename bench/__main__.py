"""All benchmarks, one after another: ``python -m bench [--quick]``."""

from __future__ import annotations

import argparse
import subprocess
import sys

from bench.support.report import say
from tests.support.paths import ROOT

ALL = (
    "throughput",
    "latency",
    "handover",
    "checkpoints",
    "jobs",
    "priorities",
    "queue_lifecycle",
    "documents",
    "permits",
    "ingest",
    "actions",
    "ops",
    "sqs",
)


def main() -> int:
    """Return 0 if every benchmark reached its goals."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke runs")
    options = ["--quick"] if parser.parse_args().quick else []
    worst = 0
    for name in ALL:
        say(f"== {name}")
        # Each in a separate process, so that none affects the next.
        done = subprocess.run([sys.executable, "-m", f"bench.{name}", *options], cwd=ROOT)
        worst = max(worst, abs(done.returncode))
    return worst


if __name__ == "__main__":
    sys.exit(main())
