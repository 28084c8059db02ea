"""The source keeps to the limits of `tests.shape`."""

from __future__ import annotations

import ast

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
    tree = ast.parse("if 1:\n class A:\n  def b(self):\n   def c(): ...\nasync def d(): ...")
    names = [name for name, _ in shape.definitions(shape.ParsedFile("x.py", 5, tree))]
    assert names == ["A", "A.b", "A.b.c", "d"]
