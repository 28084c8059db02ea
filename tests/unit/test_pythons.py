"""The source runs on the oldest supported Python, as far as reading it can tell.

mypy finds modules and names that a later Python added; it cannot find these subscripts, because
its stubs declare the classes as generic for every Python. ``make smoke`` runs everything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests import shape, smoke

GENERIC_SINCE_3_11 = {
    *(
        "array.array",
        "csv.DictReader",
        "csv.DictWriter",
        "graphlib.TopologicalSorter",
        "memoryview",
    ),
    *("logging.FileHandler", "logging.LoggerAdapter", "logging.StreamHandler"),
    *("multiprocessing.managers.DictProxy", "multiprocessing.managers.ListProxy"),
    *("multiprocessing.queues.JoinableQueue", "multiprocessing.queues.Queue"),
}
"""Classes that a type checker takes in brackets and Python 3.10 does not."""
LATE_MODULE = "logging.handlers."
"""A module of which that is true for every class."""
MENTIONED = re.compile(
    rf"\b(handlers|{'|'.join(each.rpartition('.')[2] for each in GENERIC_SINCE_3_11)})\b"
)


def late_subscripts(tree: ast.Module) -> Iterator[str]:
    """Yield the classes with brackets that Python evaluates and 3.10 rejects."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({each.asname or each.name: each.name for each in node.names})
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                names[each.asname or each.name] = f"{node.module}.{each.name}"
    for node in _evaluated(tree):
        if isinstance(node, ast.Subscript):
            head, dot, rest = _dotted(node.value).rpartition(".")
            name = names.get(head, head) + dot + rest if dot else names.get(rest, rest)
            if name in GENERIC_SINCE_3_11 or name.startswith(LATE_MODULE):
                yield name


def _dotted(node: ast.AST) -> str:
    """Return a name such as ``csv.DictReader``, "" for any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _evaluated(root: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, except annotations and branches for type checkers."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        skipped = {"annotation", "returns"}
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.add("body")
        for name, value in reversed([*ast.iter_fields(node)]):
            if name not in skipped:
                children = reversed(value) if isinstance(value, list) else [value]
                waiting += [child for child in children if isinstance(child, ast.AST)]


@pytest.mark.slow
def test_no_class_is_subscripted_that_310_cannot_subscript() -> None:
    """Python 3.10 could not import the module: ``'type' object is not subscriptable``."""
    found = [
        f"{source.path}: {name}[...]"
        for folder in shape.TOP_FOLDERS
        for source in shape.sources(folder)
        if MENTIONED.search(source.text)  # parsing all files takes 10 s
        for name in late_subscripts(shape.tree_of(source))
    ]
    assert found == []


def test_late_subscripts_are_found_under_any_spelling() -> None:
    """Base classes and aliases count; annotations are not evaluated."""
    text = """
import logging, logging.handlers as handlers
from csv import DictReader as Reader
class A(logging.StreamHandler[str]): ...
Alias = dict[str, handlers.QueueHandler[int]]
def f(x: Reader[str]) -> Reader[str]: return Reader[str](x)
if TYPE_CHECKING:
    B = logging.LoggerAdapter[logging.Logger]
"""
    assert [*late_subscripts(ast.parse(text))] == [
        "logging.StreamHandler",
        "logging.handlers.QueueHandler",
        "csv.DictReader",
    ]


@pytest.mark.slow
def test_annotations_are_not_evaluated_anywhere() -> None:
    """Each file with annotations of its own has the import that makes them text."""
    missing = [
        source.path
        for folder in ("qdo", "workers")
        for source in shape.sources(folder)
        if any(
            isinstance(each, ast.AnnAssign | ast.FunctionDef)
            for each in ast.walk(shape.tree_of(source))
        )
        and "annotations"
        not in {
            each.name
            for node in shape.tree_of(source).body
            if isinstance(node, ast.ImportFrom) and node.module == "__future__"
            for each in node.names
        }
    ]
    assert missing == []


def test_smoke_covers_the_supported_pythons() -> None:
    """The versions that ``make smoke`` runs are those that the package declares."""
    assert smoke.VERSIONS[0] == smoke.OLDEST
    assert len(smoke.VERSIONS) == len({*smoke.VERSIONS})
