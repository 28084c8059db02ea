"""Workers and commands in the process of the tests, and operators of an app."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.app_runs import OperatorDesk
from tests.support.cli import Ended, Run, run_here
from tests.support.engine import EngineSetup


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., EngineSetup]]:
    """Make engines that end with the test."""
    made: list[EngineSetup] = []

    def make_one(**settings: Any) -> EngineSetup:
        made.append(EngineSetup(tmp_path, **settings))
        return made[-1]

    yield make_one
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make: Callable[..., EngineSetup]) -> EngineSetup:
    """An engine with the settings of most tests."""
    return make()


@pytest.fixture
def local(tmp_path: Path, embedded_url: str) -> Iterator[OperatorDesk]:
    """An operator of an app on the embedded broker and coordinator."""
    with contextlib.closing(OperatorDesk("desk", tmp_path, embedded_url)) as desk:
        yield desk


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
