"""Second runs of failed items, in small suites with several processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.runs.small_suites import closing, ended, start

pytestmark = pytest.mark.slow

START = """
import os
from pathlib import Path

import pytest

FIRST = os.getpid()


def is_first(name):
    path = Path(__file__).with_name(name)
    is_first = not path.exists()
    path.touch()
    return is_first


@pytest.fixture
def setup_once():
    assert not is_first("setup"), "setup failed"


@pytest.fixture
def teardown_once():
    yield
    assert not is_first("teardown"), "teardown failed"


@pytest.mark.parametrize("number", range(4))
def test_passes(number):
    assert os.getppid() == FIRST
"""
ITEMS = {
    "test_once[a@b]": """
@pytest.mark.together("together")
@pytest.mark.parametrize("name", ["a@b"])
def test_once(name, teardown_once):
    print("printed by the test")
    assert not is_first("once"), "failed at first"
""",
    "test_setup": """
def test_setup(setup_once):
    pass
""",
    "test_crash": """
def test_crash():
    if is_first("crash"):
        os._exit(3)
""",
    "test_fourth": """
def test_fourth():
    assert not is_first("fourth")
""",
    "test_twice": """
def test_twice():
    assert False, "first time" if is_first("twice") else "second time"
""",
    "test_skipped": """
def test_skipped():
    if not is_first("skipped"):
        pytest.skip()
    assert False
""",
    "broken": """
raise ValueError("cannot be imported")
""",
}
UNSTABLE = ["test_once[a@b]", "test_setup", "test_crash"]


def run(folder: Path, names: list[str]) -> tuple[int, str, str]:
    """Run a suite; return its exit code, its output, and the outputs that it kept."""
    outputs = folder / "unstable.log"
    outputs.write_text("of the run before")
    files = {"test_small.py": START + "".join(ITEMS[each] for each in names)}
    options = ("-ra", "--unstable", outputs, "--processes", 2, "test_small.py")
    code, out = ended(start(folder, files, ("second_runs", "processes"), *options))
    return code, out, outputs.read_text() if outputs.exists() else ""


def listed(out: str) -> list[str]:
    """Return the names of unstable items in the last lines."""
    return sorted(re.findall(r"^unstable: test_small\.py::(.*)$", out, re.MULTILINE))


def test_second_runs_save_a_run(tmp_path: Path) -> None:
    """An assertion with an error of its teardown, an error of a setup, and a lost process."""
    code, out, outputs = run(tmp_path, UNSTABLE)
    assert (code, closing(out)) == (0, "4 passed, 3 unstable"), out
    assert listed(out) == sorted(UNSTABLE)
    assert out.splitlines()[-2].endswith("/unstable.log")
    for text in ("failed at first", "teardown failed", "setup failed", "ended with code 3"):
        assert text in outputs
    assert outputs.count("second run: test_small.py::") == outputs.count(" 1 passed in ") == 3
    assert outputs.count("\nprinted by the test") == 3  # by its call and teardown, and again
    assert "of the run before" not in outputs


@pytest.mark.parametrize(
    ("names", "unstable", "counts"),
    [
        (
            ["test_once[a@b]", "test_twice", "test_skipped"],
            ["test_once[a@b]"],
            "2 failed, 4 passed, 1 unstable",
        ),
        ([*UNSTABLE, "test_fourth"], [], "3 failed, 4 passed, 2 errors"),
    ],
    ids=["not green the second time", "more than three"],
)
def test_second_runs_hide_no_failure(
    names: list[str], unstable: list[str], counts: str, tmp_path: Path
) -> None:
    """A test that fails twice, one that does not run again, and more than bad luck explains."""
    code, out, _ = run(tmp_path, names)
    assert (code, closing(out)) == (1, counts), out
    assert listed(out) == unstable
    for text in ("first time", "second time") if "test_twice" in names else ():
        assert f"\nE       AssertionError: {text}\n" in out


def test_a_broken_file_has_no_second_run(tmp_path: Path) -> None:
    """It is not an item, and its tests are not known."""
    code, out, _ = run(tmp_path, ["broken"])
    assert code != 0
    assert "second run" not in out
