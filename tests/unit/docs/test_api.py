"""The page of the Python API, its docstrings, and what is public."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from pkgutil import iter_modules

import pytest

import qdo
from qdo.testing import TestKit, contracts
from tests.support.doc_pages import Block, blocks_in, check_session, read

PUBLIC = re.findall(r"`(qdo[\w.]*)`", (qdo.__doc__ or "").partition("Public")[2])
INTERNAL = {"operations": "its script moves positions to another coordinator of the same version"}
"""Pages whose examples may import more, with the reason."""


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_on_the_page(module: str) -> None:
    """Each name of `__all__`; a module without one is on the page as a whole."""
    text = read("api").replace(".. qdo-errors::", "qdo.errors")
    shown = set(re.findall(r"qdo[\w.]*\w", text))
    names = getattr(importlib.import_module(module), "__all__", None)
    if names is None:
        assert any(each.startswith(module) for each in shown)
    else:
        public = [each for each in names if each[0] != "_"]
        assert public
        assert [each for each in public if not {f"{module}.{each}", f"qdo.{each}"} & shown] == []


def test_options_of_the_page_belong_to_their_directive() -> None:
    """Behind an empty line they are text."""
    assert re.findall(r"\.\. auto\w+:: .*\n\n +:.*", read("api")) == []


def test_every_public_name_of_an_app_is_on_the_page() -> None:
    (members,) = re.findall(r"autoclass:: qdo.App\n   :members: (.*)", read("api"))
    public = {name for name in dir(qdo.App) if name[0] != "_"}
    internal = {"anchor", "broker", "origin", "override_broker", "override_coordinator", "ready"}
    twins = {f"a{name}" for name in public}  # `tests/unit/system/test_twins.py` checks them
    assert public - twins - {*members.split(", ")} == internal


def test_everything_else_is_private() -> None:
    """The docstring of `qdo` says so, and names what is public."""
    assert len(PUBLIC) > 8
    assert "Everything else is private" in " ".join((qdo.__doc__ or "").split())


def imported(code: str) -> set[str]:
    """Return the modules of qdo that a program imports from."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {each for each in found if each.partition(".")[0] == "qdo"}


@pytest.mark.parametrize(
    "block",
    [block for name, block in blocks_in("python") if name.rpartition("-")[0] not in INTERNAL],
)
def test_examples_import_public_modules_only(block: Block) -> None:
    """Other modules may change in any version."""
    parts = [each.name for each in iter_modules(contracts.__path__, "qdo.testing.contracts.")]
    assert imported(block.text) - {*PUBLIC} - {*parts} == set()


def deliver(message: qdo.Message, context: object) -> None:
    """Print the receiver."""
    print("mail to", message.body["to"])


@pytest.mark.parametrize(
    "documented", [qdo.App, qdo.Policy, TestKit], ids=lambda each: each.__name__
)
def test_docstrings_of_classes_show_a_call(documented: type) -> None:
    """It gives what is shown."""
    app = qdo.App("mail")
    app.job()(deliver)
    check_session(documented.__doc__ or "", {"qdo": qdo, "app": app, "TestKit": TestKit})


@pytest.mark.parametrize(
    "documented",
    [
        qdo.App.job,
        qdo.App.send,
        qdo.App.limit,
        qdo.App.lock,
        qdo.App.exclusive,
        qdo.App.documents,
        qdo.App.cancel,
        qdo.App.peek,
    ],
    ids=lambda each: each.__name__,
)
def test_docstrings_of_apps_show_a_call(documented: Callable[..., object]) -> None:
    """It gives what is shown, with an app in memory."""
    app = qdo.App("mail")
    with TestKit(app, without_job="*"):
        check_session(documented.__doc__ or "", {"qdo": qdo, "app": app})
