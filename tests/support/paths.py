"""Where the checkout is, at whatever depth a test lies, and its parsed files."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a parsed file. All of qdo take 1 s, so tests that read them run in one process."""
    return ast.parse(path.read_text(encoding="utf-8"))
