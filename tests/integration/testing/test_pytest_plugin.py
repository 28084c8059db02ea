"""The pytest plugin, found by its entry point in a pytest of its own; the documented example."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import clean_environment
from tests.support.doc_pages import DOCS
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with qdo's metadata as an installation makes it, entry points included."""
    folder = tmp_path_factory.mktemp("metadata")
    _run("setup.py", "-q", "egg_info", "--egg-base", str(folder), cwd=ROOT)
    return folder


def _run(
    *argv: str, cwd: Path, path: tuple[Path, ...] = (), code: int = 0
) -> subprocess.CompletedProcess[str]:
    environment = {**clean_environment(), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = ":".join(map(str, (*path, ROOT)))
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def pytests(metadata: Path, folder: Path, *argv: str, code: int = 0) -> str:
    """Run the tests of a folder as an app developer does; return pytest's output."""
    options = ("-W", "error", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder))
    whole = ("-m", "pytest", "-c", "/dev/null", *options, *argv, str(folder))
    return _run(*whole, cwd=folder, path=(metadata, folder), code=code).stdout


def test_the_documented_example_passes(metadata: Path) -> None:
    """The tests on the page are those that are run here."""
    assert "5 passed" in pytests(metadata, DOCS / "examples")


def test_the_fixture_is_listed(metadata: Path, tmp_path: Path) -> None:
    """It is listed with its purpose."""
    said = pytests(metadata, tmp_path, "--fixtures", "-v")
    assert "qdo_kit" in said
    assert "Return a function that makes kits." in said


PLAIN = """
import sys


def test_nothing_of_qdo_is_loaded():
    heavy = {"gevent", "kazoo", "ujson", "sqlite3"} & set(sys.modules)
    assert heavy == set()
    assert [name for name in sys.modules if name.startswith("qdo.")] == [
        "qdo._version", "qdo.testing", "qdo.testing.plugin"
    ]
"""


def test_tests_that_do_not_use_it_do_not_pay_for_it(metadata: Path, tmp_path: Path) -> None:
    """Neither gevent nor the engine is loaded when pytest starts."""
    (tmp_path / "test_plain.py").write_text(PLAIN)
    assert "1 passed" in pytests(metadata, tmp_path)


SLEEPER = """
import qdo

app = qdo.App("sleeper")


@app.job()
def job(message, context):
    pass


def test_crash(qdo_kit):
    kit = qdo_kit(app)
    kit.send("q", 1)
    kit.crash_at("before-dead-letter")
    kit.run_until_idle()


def test_other(qdo_kit):
    kit = qdo_kit(app)
    assert kit.done() == []
    kit.send("q", 2)
    kit.run_until_idle()
    assert kit.done() == [2]
"""


UNKNOWN = """
import qdo

app = qdo.App("unknown")


@app.job("mail-*")
def job(message, context):
    pass


def test_misspelled(qdo_kit):
    qdo_kit(app).send("mial-1", 1)


def test_expected(qdo_kit):
    qdo_kit(app, without_job="mial-*").send("mial-1", 1)
"""


def test_an_invalid_test_fails(metadata: Path, tmp_path: Path) -> None:
    """A crash that never came, and messages without a job; the next test starts with a new kit."""
    (tmp_path / "test_sleeper.py").write_text(SLEEPER)
    (tmp_path / "test_unknown.py").write_text(UNKNOWN)
    said = pytests(metadata, tmp_path, code=1)
    for words in ("qdo_kit", "NoJobError", "mial-1", "4 passed, 2 errors"):
        assert words in said
