"""What tests of commands share: a folder of their own, and `qdo` inside this process."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.support.cli import Ended, Run, run_here


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder of the test's own, name the app `a`, and leave standard input empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QDO_APP", "a")
    monkeypatch.setattr("sys.stdin", io.StringIO())


@pytest.fixture
def cli(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns a function that runs `qdo`, or the `COMMAND` of a module: exit code and output."""
    first = getattr(request.module, "COMMAND", ())

    def call(*arguments: str) -> Ended:
        return run_here(capsys, *first, *arguments)

    return call
