"""The files and functions that docs/developing.rst names exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.doc_pages import read
from tests.support.paths import ROOT, tree_of

QDO = ROOT / "qdo"
STEP = re.compile(r"^\d+\. ``([\w/]+\.py)`` `([\w.]+)`:", re.MULTILINE)
PATH = re.compile(r"``((?:[\w.]+/)+(?:\w+\.\w+)?|\w+\.py)``")
PLACES = (QDO, ROOT, *(QDO / part for part in ("brokers", "coordination", "worker")))
"""Bases of relative paths on the page; short names of a file are next to its folder."""


def steps() -> list[tuple[str, str]]:
    """Return file and function of each step of the walks."""
    found = STEP.findall(read("developing"))
    return list(dict.fromkeys(found))


def names_in(path: str) -> set[str]:
    """Return classes, functions and methods of a file of qdo/, as ``Class.method``."""
    found = set()
    for node in tree_of(QDO / path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{each.name}" for each in methods}
    return found


@pytest.mark.parametrize(("path", "name"), steps())
def test_step_of_a_walk_exists(path: str, name: str) -> None:
    """Its file has the function or class."""
    assert name in names_in(path)


def test_walks_have_all_their_steps() -> None:
    """No step is written in a form that the test above overlooks."""
    numbered = re.findall(r"^\d+\. ``", read("developing"), re.MULTILINE)
    assert len(numbered) == len(STEP.findall(read("developing"))) > 30


@pytest.mark.parametrize("path", sorted(set(PATH.findall(read("developing")))))
def test_path_on_the_page_exists(path: str) -> None:
    """In qdo/, or in the repository."""
    built = ("docs/_build/html", ".smoke/")
    assert path in built or any((place / path).exists() for place in PLACES)
