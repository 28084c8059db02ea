"""Running the command line in tests."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from unittest import mock

from qdo.cli.framework import run as run_command
from qdo.cli.main import qdo
from tests.support.forks.processes import run
from tests.support.paths import ROOT

if TYPE_CHECKING:
    import pytest

QDO = ("-m", "qdo")
WORKER = ("-m", "qdo.cli.worker")


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a command."""

    code: int
    out: str
    err: str

    def items(self, code: int = 0) -> list[dict[str, Any]]:
        """Return what the command printed as JSON, if it ended with this code."""
        assert self.code == code, self.err
        found: list[dict[str, Any]] = json.loads(self.out)["items"]
        return found

    def refusal(self, code: int) -> str:
        """Return the only line of a command that failed with this code."""
        assert self.code == code, self.err
        assert (self.out, self.err.count("\n")) == ("", 1), self.err
        return self.err


Run = Callable[..., Ended]
"""Runs a command with these arguments."""


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


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    """Run ``qdo *arguments`` inside this process."""
    code = run_command(qdo, "qdo", arguments)
    output = capsys.readouterr()
    return Ended(code, output.out, output.err)


def run_in(folder: Path, *arguments: str, env: Mapping[str, str], stdin: bytes = b"") -> Ended:
    """Run ``qdo *arguments`` inside this process, as if it had a process of its own.

    It has a folder, settings and streams of its own. A fork of it takes ten times as long.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, clean_environment(env), clear=True),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8")),
        mock.patch.object(sys, "excepthook"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run_command(qdo, "qdo", arguments)
    out_text, err_text = (each.buffer.getvalue().decode() for each in (out, err))
    return Ended(code, out_text, err_text)
