"""The page of log messages has each warning and error that qdo logs, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.support.doc_pages import read
from tests.support.paths import ROOT

_PLACEHOLDER = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")
_LEVELS = ("warning", "error", "exception", "critical")
_QUIET = ("DEBUG", "INFO")


def _plain(text: str) -> str:
    """Return a template as the page shows it: variable parts are an ellipsis."""
    return " ".join(_PLACEHOLDER.sub("…", text).split())


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield the text of a literal with an ellipsis for each variable part."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield _plain(node.value)
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        yield _plain("".join(map(str, parts)))
    elif isinstance(node, ast.IfExp):
        yield from (*_texts(node.body), *_texts(node.orelse))


def _template(call: ast.Call) -> ast.expr | None:
    """Return the text of a call that logs a warning or worse, None for any other call."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not call.args:
        return None
    # `self.logger` is that of kazoo: its lines are shown at the level debug only.
    receiver = ast.unparse(function.value).lower()
    if "log" not in receiver or receiver == "self.logger":
        return None
    if function.attr in _LEVELS:
        return call.args[0]
    if function.attr == "log" and len(call.args) > 1:
        level = call.args[0]
        quiet = isinstance(level, ast.Attribute) and level.attr in _QUIET
        return None if quiet else call.args[1]
    return None


@cache
def _sources() -> tuple[frozenset[str], frozenset[str]]:
    """Return the texts that qdo logs as warnings or worse, and all of its texts."""
    logged: set[str] = set()
    every: set[str] = set()
    for path in sorted((ROOT / "qdo").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.expr):
                every.update(_texts(node))
            template = _template(node) if isinstance(node, ast.Call) else None
            if isinstance(template, ast.Name):
                template = named.get(template.id, template)
            if template is not None:
                logged.update(_texts(template))
    return frozenset(each for each in logged if re.search(r"\w", each)), frozenset(every)


def _listed() -> list[str]:
    """Return the messages of the page: terms of its definition lists."""
    return re.findall(r"^``(.+)``$", read("log-messages"), re.MULTILINE)


def test_every_warning_and_error_is_on_the_page() -> None:
    """Whoever finds a line in a log can look up what it means."""
    logged, _ = _sources()
    assert len(logged) > 100
    assert sorted(logged - {*_listed()}) == []


def test_the_page_has_no_message_that_nothing_logs() -> None:
    """A message that was reworded is on the page in its new words only."""
    _, every = _sources()
    assert [each for each in _listed() if each not in every] == []


def test_no_message_is_on_the_page_twice() -> None:
    """Two answers to one line would differ some day."""
    listed = _listed()
    assert len(listed) == len({*listed})


def test_every_message_on_the_page_has_a_meaning() -> None:
    """The line after each one is its definition."""
    lines = read("log-messages").splitlines()
    terms = [at for at, line in enumerate(lines) if re.fullmatch(r"``.+``", line)]
    assert [lines[at] for at in terms if not lines[at + 1].startswith("    ")] == []
