"""The source keeps to the limits of `tests.shape`."""

from __future__ import annotations

import pytest

from tests import shape


@pytest.mark.parametrize("title", shape.CHECKS)
def test_source_is_within_the_limits(title: str) -> None:
    """``python -m tests.shape`` prints all findings."""
    assert [str(each) for each in shape.CHECKS[title]()] == []


def test_exceptions_are_few_and_exist() -> None:
    """At most two long files, each exception with a reason, and none for a name that is gone."""
    assert len(shape.LONG_FILES) <= 2
    assert all([*shape.LONG_FILES.values(), *shape.MEASURED_LOOPS.values()])
    assert shape.LONG_FILES.keys() <= {each.path for each in shape.sources("qdo")}
    assert shape.MEASURED_LOOPS.keys() <= {where for where, _ in shape.functions("qdo")}


def test_definitions_are_found_at_any_depth() -> None:
    """Functions within functions, classes within blocks."""
    text = "if 1:\n class A:\n  def b(self):\n   def c(): ...\nasync def d(): ..."
    names = [name for name, _ in shape.definitions(_file("x.py", 5, text))]
    assert names == ["A", "A.b", "A.b.c", "d"]


def _file(path: str, lines: int, text: str = "") -> shape.SourceText:
    return shape.SourceText(path, text + "\n" * (lines - text.count("\n")))


def test_a_short_file_of_its_own_folder_is_a_fragment() -> None:
    """Its importers are next to it; a docstring that names it is not an importer."""
    short = _file("qdo/a/short.py", shape.FLOOR_LINES - 1)
    importer = _file("qdo/a/b.py", 100, "from qdo.a import short")
    elsewhere = _file("qdo/c/d.py", 100, '"""See `qdo.a.short`."""')
    assert [each.where for each in shape.fragments([short, importer, elsewhere])] == [short.path]


@pytest.mark.parametrize(
    "text",
    ["from qdo.a import short", "from qdo.a.short import name", 'TABLE = {"a": "qdo.a.short"}'],
)
def test_a_short_file_may_serve_other_folders(text: str) -> None:
    """They import it, or load it by its name."""
    short = _file("qdo/a/short.py", 1)
    assert shape.fragments([short, _file("qdo/c/d.py", 100, text)]) == []


def test_a_file_with_enough_lines_is_no_fragment() -> None:
    """Packages and programs may be short, too."""
    names = [("qdo/a/b.py", shape.FLOOR_LINES), ("qdo/a/__init__.py", 1), ("qdo/__main__.py", 5)]
    assert shape.fragments([_file(*each) for each in names]) == []


def test_a_file_over_the_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As is a folder with too many files."""
    files = [_file(f"qdo/a/f{number}.py", 50) for number in range(shape.FOLDER_FILES + 1)]
    files.append(_file("qdo/long.py", shape.FILE_LINES + 1))
    monkeypatch.setattr(shape, "sources", lambda folder: files if folder == "qdo" else ())
    assert [each.where for each in shape.long_files()] == ["qdo/long.py"]
    assert [each.where for each in shape.full_folders()] == ["qdo/a"]
