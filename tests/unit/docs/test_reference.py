"""The pages that `docs.reference` writes have everything that the code has."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from qdo.cli.main import qdo as qdo_command
from qdo.cli.worker import worker as worker_command
from qdo.errors import QdoError
from qdo.settings.settings import declarations
from tests.golden.wording import collect
from tests.support.doc_pages import DOCS

pytestmark = pytest.mark.slow
KAZOO = ("AUTH_FAILED closing: %s", "Connection dropped: %s", "Session has expired")
"""They go to kazoo's logger, whose lines are shown at the level debug only."""
SETTINGS = {"extensions": ["docs.reference"], "default_role": "literal", "smartquotes": False}
Pages = dict[str, nodes.document]


def build(folder: Path, sources: dict[str, str]) -> tuple[Pages, str]:
    """Build pages; return their documents, and the warnings."""
    for name, source in sources.items():
        (folder / f"{name}.rst").write_text(source, encoding="utf-8")
    warnings = io.StringIO()
    confoverrides = {**SETTINGS, "root_doc": next(iter(sources))}
    with patch_docutils(), docutils_namespace():
        out = [str(folder / each) for each in ("out", "trees")]
        app = Sphinx(folder, None, *out, "dummy", confoverrides, None, warnings)
        app.build()
        return {name: app.env.get_doctree(name) for name in sources}, warnings.getvalue()


def text_of(node: nodes.Node) -> str:
    """Return the text of a node with single spaces."""
    return " ".join(node.astext().split())


def plain(text: str) -> str:
    """Return a text of the code as a page shows it."""
    return " ".join(text.replace("`", "").split())


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """The pages alone: references to others stay unresolved."""
    names = ("cli", "configuration", "log-messages")
    sources = {name: (DOCS / f"{name}.rst").read_text(encoding="utf-8") for name in names}
    return build(tmp_path_factory.mktemp("pages"), sources)[0]


def section(page: nodes.document, title: str) -> nodes.section:
    """Return the section with this title."""
    (found,) = (each for each in page.findall(nodes.section) if text_of(each[0]) == title)
    return found


def rows(node: nodes.Node) -> list[list[str]]:
    """Return the cells of all tables in a node."""
    return [[*map(text_of, row.findall(nodes.entry))] for row in node.findall(nodes.row)]


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and all of its subcommands with their names."""
    yield path, command
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from commands(found, f"{path} {name}")


COMMANDS = [*commands(worker_command, "qdo-worker"), *commands(qdo_command, "qdo")]


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_every_command_has_its_help_and_options(
    pages: Pages, path: str, command: click.Command
) -> None:
    """In the section with its name; options that many share are named there."""
    shown = text_of(section(pages["cli"], path))
    assert plain((command.help or "").split("\n\n")[0]) in shown
    flags = {each.opts[-1] for each in command.params if isinstance(each, click.Option)}
    if "Every setting is an option" in shown:
        flags -= {each.flag for each in declarations()}
        assert path == "qdo config"
    assert {each for each in flags if not re.search(rf"{each}\b(?!-)", shown)} == set()


def test_every_shared_option_has_its_meaning(pages: Pages) -> None:
    """Where the section of a command only names an option, the list of all has it."""
    listed = section(pages["cli"], "Common options").findall(nodes.definition_list_item)
    terms = [text_of(each[0]) for each in listed if text_of(each[1])]
    shown = {name for term in terms for name in term.replace(",", "").split()}
    named = re.findall(r"Common options: (.*?)\.(?: |$)", text_of(pages["cli"]))
    assert len(named) == len(COMMANDS)
    assert {name for names in named for name in names.split(", ")} <= shown


def test_every_error_is_beside_its_exit_code(pages: Pages) -> None:
    """No error ends a command with a code that the page does not know."""
    codes = {
        code: {*names.split(", ")} for code, _, names in rows(section(pages["cli"], "Exit codes"))
    }
    kinds: list[type[QdoError]] = [QdoError]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    public = [each for each in kinds if each.__module__.endswith("errors")]
    assert len(public) > 50
    assert [each for each in public if each.__name__ not in codes[str(each.exit_code)]] == []


def test_every_setting_has_its_default_unit_and_help(pages: Pages) -> None:
    """In the order of declaration, and no other."""
    shown = rows(section(pages["configuration"], "All settings"))[1:]
    assert [each.name for each in declarations()] == [row[0] for row in shown]
    for each, (_, _, unit, live, meaning) in zip(declarations(), shown, strict=True):
        assert each.unit in ("", unit)
        assert bool(live) == each.live
        assert plain(each.help[1:]) in meaning


def test_every_line_of_the_log_is_on_its_page(pages: Pages) -> None:
    """Each of the golden list, which other code collects, from the level info on."""
    own = collect().split("# workers/")[0]  # programs that come with qdo are apps
    lines = {*re.findall(r"^log (?!debug)\w+: (.*)$", own, re.MULTILINE)}.difference(KAZOO)
    assert len(lines) > 150
    shown = text_of(pages["log-messages"])
    for line in lines:
        parts = re.split(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]|\{.*?\}+| \| ", line)
        assert [each for each in parts if plain(each) not in shown] == [], line


@pytest.mark.parametrize("directive", ["qdo-settings", "qdo-log-advice"])
def test_a_note_about_nothing_is_an_error(tmp_path: Path, directive: str) -> None:
    """Advice about a line that is gone, or a link for a setting that is gone."""
    source = f"Page\n====\n\n.. {directive}::\n\n   no such thing\n      Do something.\n"
    _, warnings = build(tmp_path, {"index": source})
    assert "there is no 'no such thing' in qdo" in warnings
