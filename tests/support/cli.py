"""Running the command line in tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.support.forks.processes import run
from tests.support.paths import ROOT

QDO = ("-m", "qdo")
WORKER = ("-m", "qdo.cli.worker")


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a command."""

    code: int
    out: str
    err: str


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without settings of qdo."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QDO_")}
    return {**kept, "PYTHONPATH": str(ROOT), **(extra or {})}


def command(
    *argv: str,
    cwd: Path,
    stdin: bytes = b"",
    stdout: IO[bytes] | int = subprocess.PIPE,
    env: Mapping[str, str] | None = None,
    preexec: Callable[[], Any] | None = None,
    timeout_seconds: float = 60.0,
) -> Ended:
    """Run ``python *argv`` in a process of its own, to its end.

    :param stdout: where its output goes instead of into the result.
    """
    done = run(
        [sys.executable, *argv],
        cwd=cwd,
        input=stdin,
        env=clean_environment(env),
        stdout=stdout,
        stderr=subprocess.PIPE,
        preexec_fn=preexec,
        timeout=timeout_seconds,
    )
    return Ended(done.returncode, (done.stdout or b"").decode(), done.stderr.decode())
