"""kazoo's own tests of its recipes and its client pass on the embedded coordinator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.contract.kazoo_recipes.left_out import LEFT_OUT, LEFT_OUT_UNDER, MODULES

HERE = Path(__file__).parents[2]
HANDLERS = ("threading", "gevent")
AT_ONCE = 3
"""Modules run side by side: kazoo's tests mostly wait."""
LONGEST_FIRST = ("test_partitioner", "test_watchers", "test_lock")

Runs = dict[tuple[str, str], "Future[subprocess.CompletedProcess[str]]"]


def start(handler: str, module: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one of kazoo's test modules in a process of its own."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")
    }
    runner = "tests.contract.kazoo_recipes.runner"
    return subprocess.run(
        [sys.executable, "-m", runner, handler, str(folder / "report.json"), str(folder), module],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """A folder for every run."""
    return {
        (handler, module): tmp_path_factory.mktemp(f"{handler}-{module}")
        for handler in HANDLERS
        for module in MODULES
    }


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, folders: dict[tuple[str, str], Path]) -> Iterator[Runs]:
    """The runs that the selected tests ask for, all on their way."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {
        (call.params["handler"], call.params["module"])
        for call in calls
        if call is not None and {"handler", "module"} <= set(call.params)
    }
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            (handler, module): pool.submit(start, handler, module, folders[handler, module])
            for handler, module in sorted(wanted, key=lambda each: each[1] not in LONGEST_FIRST)
        }


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("module", MODULES)
def test_recipes(
    handler: str, module: str, runs: Runs, folders: dict[tuple[str, str], Path]
) -> None:
    """Each test of the module passes, and what is left out exists."""
    done = runs[handler, module].result(timeout=110)
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr[-4000:]}")
    report = json.loads((folders[handler, module] / "report.json").read_text())
    assert report["ends"]
    assert set(report["ends"].values()) == {"passed"}
    entries = [name for name in {**LEFT_OUT, **LEFT_OUT_UNDER[handler]} if _of(name, module)]
    assert [name for name in entries if not _in(name, set(report["left_out"]))] == []


def _of(entry: str, module: str) -> bool:
    return entry.startswith(f"{module}::")


def _in(entry: str, tests: set[str]) -> bool:
    return any(test == entry or test.startswith(f"{entry}::") for test in tests)


def test_every_module_that_is_left_out_of_is_run() -> None:
    """A misspelt module in the list would otherwise go unseen."""
    names = [*LEFT_OUT, *(name for names in LEFT_OUT_UNDER.values() for name in names)]
    assert {name.split("::")[0] for name in names} <= set(MODULES)
