"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.support.statistics import Goal
from tests.support.paths import ROOT

RESULTS = ROOT / "bench" / "results"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Container[str] = ()) -> str:
    """Return a reStructuredText simple table.

    :param left: headers of the columns with text, in addition to the first one; all others are
        aligned to the right.
    """
    lines = [tuple(header), *map(tuple, rows)]
    if any(len(line) != len(header) for line in lines):
        raise ValueError("every row must have as many cells as the header")
    widths = [max(1, *(len(line[column]) for line in lines)) for column in range(len(header))]
    rule = "  ".join("=" * width for width in widths)

    def cell(column: int, text: str) -> str:
        plain = column == 0 or header[column] in left
        return text.ljust(widths[column]) if plain else text.rjust(widths[column])

    shown = ["  ".join(map(cell, range(len(line)), line)).rstrip() for line in lines]
    return "\n".join([rule, shown[0], rule, *shown[1:], rule])


def goals_table(goals: Sequence[Goal]) -> str:
    """Return the table of goals."""
    rows = [(goal.what, goal.wanted, goal.found, "yes" if goal.reached else "NO") for goal in goals]
    return table(("goal", "wanted", "found", "reached"), rows)


def machine() -> dict[str, Any]:
    """Describe the machine."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def versions(names: Sequence[str], python: Path | None = None) -> dict[str, str]:
    """Return the versions of installed packages, here or in another environment."""
    if python is None:
        return {name: metadata.version(name) for name in names if _installed(name)}
    done = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        capture_output=True,
        check=True,
        text=True,
    )
    found = {entry["name"].lower(): entry["version"] for entry in json.loads(done.stdout)}
    return {name: found[name] for name in names if name in found}


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def say(text: str) -> None:
    """Print progress to standard error; results go to standard output."""
    print(text, file=sys.stderr, flush=True)


def publish(name: str, result: Mapping[str, Any], goals: Sequence[Goal]) -> Path:
    """Write `bench/results/<name>.json` and return its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    whole = {
        "benchmark": name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        **result,
        "goals": goals,
    }
    path.write_text(json.dumps(whole, indent=1, default=_plain) + "\n")
    return path


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} cannot be encoded as JSON")


def finish(
    name: str, result: Mapping[str, Any], goals: Sequence[Goal], failed: bool = False
) -> int:
    """Print the goals and write the JSON; return 0 if every goal was reached, else 1.

    :param goals: empty for a smoke run, whose figures mean nothing.
    :param failed: something could not be measured.
    """
    if goals:
        print(goals_table(goals))
    say(f"written: {publish(name, result, goals)}")
    return 0 if not failed and all(goal.reached for goal in goals) else 1
