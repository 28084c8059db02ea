"""kazoo's own tests of its recipes and its client pass on the coordinators in databases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.coordinator.kazoo_recipes.exclusions import LEFT_OUT, LEFT_OUT_UNDER, MODULES
from tests.support.paths import ROOT

HANDLERS = ("threading", "gevent")


def start(handler: str, module: str, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one of kazoo's test modules in a process of its own."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")
    }
    runner = "tests.contract.coordinator.kazoo_recipes.runner"
    return subprocess.run(
        [sys.executable, "-m", runner, handler, str(folder / "report.json"), url, module],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("kind", ["embedded_url", "database_url"])
def test_recipes(
    kind: str, handler: str, module: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each test of the module passes, and every exclusion names a test that exists."""
    done = start(handler, module, request.getfixturevalue(kind), tmp_path)
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr[-4000:]}")
    report = json.loads((tmp_path / "report.json").read_text())
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
