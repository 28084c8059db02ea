"""Proof that the checks can fail: the protocol with one thing left out at a time.

``python -m tests.simulation.mutants`` plays histories with each mutant until a check fails, and
prints the violated invariant; the exit code is 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.simulation.mutants.edits import MUTANTS, Mutant
from tests.support.paths import ROOT

HISTORIES = 20_000


def check_edits(mutant: Mutant) -> dict[str, str]:
    """Return the changed sources by file; raise ValueError for an edit that does not fit."""
    texts: dict[str, str] = {}
    for edit in mutant.edits:
        text = texts.get(edit.file)
        if text is None:
            text = (ROOT / edit.file).read_text()
        texts[edit.file] = edit.apply(text)
    for file, text in texts.items():
        compile(text, file, "exec")
    return texts


@contextmanager
def mutated(mutant: Mutant) -> Iterator[Path]:
    """Yield a folder with the mutated package and the tests."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        shutil.copytree(ROOT / "qdo", folder / "qdo", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tests").mkdir()
        (folder / "tests" / "simulation").symlink_to(ROOT / "tests" / "simulation")
        for file, text in check_edits(mutant).items():
            (folder / file).write_text(text)
        yield folder


def hunt(mutant: Mutant, histories: int, start_seed: int = 0) -> dict[str, object]:
    """Play histories with a mutant until one violates an invariant; return which, and where."""
    with mutated(mutant) as folder:
        command = [sys.executable, "-m", "tests.simulation", "--json"]
        command += ["--histories", str(histories), "--start-seed", str(start_seed)]
        command += ["--passing-over", mutant.passing]
        for switch in mutant.switches:
            command += ["--switch", switch]
        run = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
    if not run.stdout.strip():
        raise RuntimeError(f"{mutant.name}: {run.stderr}")
    found: dict[str, object] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Hunt every mutant, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants")
    parser.add_argument("--histories", type=int, default=HISTORIES, help="at most, for each")
    parser.add_argument("--redundant", type=int, default=1000, help="at most, where none fails")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    arguments = parser.parse_args()
    bad = 0
    print(f"{'left out':58} {'breaks':9} {'seed':>6} {'histories':>9}  verdict")
    for mutant in MUTANTS:
        if arguments.only not in mutant.name:
            continue
        found = hunt(mutant, arguments.histories if mutant.breaks else arguments.redundant)
        verdict = _verdict(mutant, found)
        bad += verdict.isupper()
        print(
            f"{mutant.name:58} {found['invariant'] or 'nothing':9} {found['seed']!s:>6} "
            f"{found['histories']!s:>9}  {verdict}",
            flush=True,
        )
    return 1 if bad else 0


def _verdict(mutant: Mutant, found: dict[str, object]) -> str:
    if not found["invariant"]:
        return "SURVIVES" if mutant.breaks else "redundant, as expected"
    if not mutant.breaks:
        return "UNEXPECTED"
    if found["invariant"] in mutant.breaks.split():
        return "found"
    if found["invariant"] == "crash":
        return "CRASHES"  # which says nothing about the rule
    return f"found, expected {mutant.breaks}"


if __name__ == "__main__":
    sys.exit(main())
