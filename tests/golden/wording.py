"""Collects every sentence that qdo shows its users: error templates and log messages.

``python -m tests.golden.wording`` writes ``tests/golden/wording.txt`` from the source. A change of
wording is then one diff that a person can read, and no other test quotes a sentence.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT, tree_of

GOLDEN = ROOT / "tests" / "golden" / "wording.txt"
PACKAGES = ("qdo", "workers")
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
_ARGUMENTS = ("reason", "remedy", "what")
"""Keyword arguments of errors that hold part of a sentence."""


def literal_text(node: ast.expr) -> str | None:
    """Return the literal text of an expression with its parts in braces; None: it has none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value)
            if isinstance(part, ast.Constant)
            else "{"
            + ast.unparse(part.value if isinstance(part, ast.FormattedValue) else part)
            + "}"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [
            literal_text(each) or "{" + ast.unparse(each) + "}" for each in (node.left, node.right)
        ]
        return "".join(sides)
    if isinstance(node, ast.IfExp):
        found = [each for each in (literal_text(node.body), literal_text(node.orelse)) if each]
        return " | ".join(found) or None
    return None


def _is_log(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in _LEVELS
        and isinstance(function.value, ast.Name | ast.Attribute | ast.Call)
        and "log" in ast.unparse(function.value).lower()
    )


def _sentences(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
            template = ast.get_docstring(node)
            if template:
                yield f"error {node.name}: {' '.join(template.split())}"
        elif isinstance(node, ast.Call) and _is_log(node) and node.args:
            text = literal_text(node.args[0])
            if text and isinstance(node.func, ast.Attribute):
                yield f"log {node.func.attr}: {' '.join(text.split())}"
        elif isinstance(node, ast.Call):
            found = [(each.arg, each.value) for each in node.keywords if each.arg in _ARGUMENTS]
            if ast.unparse(node.func).endswith("_fault"):
                found += [("reason", each) for each in node.args[:1]]
            for name, value in found:
                text = literal_text(value)
                if text and " " in text:
                    yield f"{name}: {' '.join(text.split())}"


@cache
def collect(root: Path = ROOT) -> str:
    """Return all sentences, grouped by file and sorted within it."""
    groups = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            found = sorted(set(_sentences(tree_of(path))))
            if found:
                groups.append("\n".join([f"# {path.relative_to(root).as_posix()}", *found]))
    return "\n\n".join(groups) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(collect(), encoding="utf-8")
