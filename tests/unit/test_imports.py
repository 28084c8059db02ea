"""Imports within functions name things that exist when the code runs."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

from tests import shape


def late_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield module and name of qdo's own imports that run, those for type checkers left out."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qdo"):
            yield from ((str(node.module), each.name) for each in node.names)
        waiting += ast.iter_child_nodes(node)


def exists(module: str, name: str) -> bool:
    """Return whether a module has a name, or a package a module of that name."""
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def test_imported_names_exist() -> None:
    """A name that a module imports for type checkers only passes mypy, and fails when used."""
    missing = {
        f"{source.path}: {module}.{name}"
        for folder in ("qdo", "workers")
        for source in shape.sources(folder)
        for module, name in late_imports(shape.tree_of(source))
        if not exists(module, name)
    }
    assert missing == set()


def test_imports_for_type_checkers_do_not_count() -> None:
    """Those in functions do."""
    text = """
if TYPE_CHECKING:
    from qdo.a import b
def f():
    from qdo.c import d
"""
    assert [*late_imports(ast.parse(text))] == [("qdo.c", "d")]
