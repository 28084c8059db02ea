"""Sphinx directives that write the reference pages from the code, so that they cannot differ.

`qdo-commands`, `qdo-common-options` and `qdo-exit-codes` read click's objects and the tree of
errors, `qdo-settings` the declarations of settings, and `qdo-log-lines` every logging call. The
directives `qdo-settings` and `qdo-log-advice` take notes, each with the name or the words that it
is about; a note about something that does not exist is an error.
"""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import qdo
from qdo.cli.framework import EXIT_CODES
from qdo.cli.main import qdo as qdo_command
from qdo.cli.worker import worker as worker_command
from qdo.errors import QdoError
from qdo.settings.settings import declarations

PACKAGE = Path(qdo.__file__).parent
COMMON = 5
"""An option that so many commands take, most of them in the same words, is described once."""
LEVELS = ("critical", "error", "warning", "info")
_PLACEHOLDER = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")
_UNITS = {"str": "text", "bool": "true or false", "globs": "list"}

# --- reStructuredText ---


def inline(text: str) -> str:
    """Return text of a help or a log line as reStructuredText: `code` and --options are literal."""
    parts = re.split(r"(`[^`]+`|(?<![\w`-])--[a-z][a-z-]+)", " ".join(text.split()))
    for at, part in enumerate(parts):
        escaped = re.sub(r"([\\*|`_])", r"\\\1", part)
        parts[at] = f"\\ {_linked(part.strip('`'))}\\ " if at % 2 else escaped
    return "".join(parts).replace("\\  ", " ").replace(" \\ ", " ").removeprefix("\\ ").strip()


def _linked(code: str) -> str:
    return f":ref:`{code} <{label(code)}>`" if code in command_paths() else f"``{code}``"


def label(path: str) -> str:
    """Return the label of a command's section: "qdo-keys-new"; "program-qdo-worker"."""
    return path.replace(" ", "-") if " " in path else f"program-{path}"


def prose(text: str) -> Iterator[str]:
    """Yield the lines of a help text; click writes a paragraph after a backspace as it stands."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ("::", "", *(f"   {line}" for line in paragraph.splitlines()[1:]), "")
        else:
            yield from (inline(paragraph), "")


def table(widths: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, none without rows; a cell is one line of reStructuredText."""
    found = ["   * - " + "\n     - ".join(row) for row in (headings, *rows)]
    if len(found) > 1:
        yield from (".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", "")
        yield from (*found, "")


# --- commands ---


@cache
def contexts() -> tuple[click.Context, ...]:
    """Return a context for each program, command and subcommand, in the order of their helps."""

    def walk(context: click.Context) -> Iterator[click.Context]:
        yield context
        group = context.command
        for name in group.list_commands(context) if isinstance(group, click.Group) else ():
            command = group.get_command(context, name)
            if command is not None and not command.hidden:
                yield from walk(click.Context(command, parent=context, info_name=name))

    programs = {"qdo-worker": worker_command, "qdo": qdo_command}
    return tuple(
        each
        for name, command in programs.items()
        for each in walk(click.Context(command, info_name=name, **command.context_settings))
    )


@cache
def command_paths() -> frozenset[str]:
    """Return the names of all commands, such as "qdo admin keys new"."""
    return frozenset(each.command_path for each in contexts())


def options(context: click.Context) -> list[tuple[str, str]]:
    """Return the options of a command with their explanations, in click's words."""
    params = context.command.get_params(context)
    found = (each.get_help_record(context) for each in params if isinstance(each, click.Option))
    return [each for each in found if each is not None]


def flag(option: tuple[str, str]) -> str:
    """Return the long name of an option."""
    return option[0].split(", ")[-1].split()[0]


@cache
def common_options() -> frozenset[tuple[str, str]]:
    """Return the options that many commands, of several groups, have in common."""
    takers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for context in contexts():
        for option in options(context):
            takers[option].append(context.command_path)
    counts = Counter(flag(option) for option, paths in takers.items() for _ in paths)
    return frozenset(
        option
        for option, paths in takers.items()
        if len(paths) >= max(COMMON, 0.75 * counts[flag(option)])
        and len({each.split()[:2][-1] for each in paths}) > 1
    )


def option_list(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a list of options."""
    for names, text in found:
        yield from (f"``{names}``", f"   {inline(text)}", "")


def command_section(context: click.Context, pages: Iterable[str]) -> Iterator[str]:
    """Yield the section of a command: its usage, help, commands and options."""
    command, path = context.command, context.command_path
    yield from (f".. _{label(path)}:", "", path, "--~^"[path.count(" ")] * len(path), "")
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield from (".. code-block:: text", "", f"   {usage}", "")
    yield from prose(command.help or "")
    yield from prose((command.epilog or "").replace(EXIT_CODES, ""))
    parts = ((each.command_path, each.command) for each in contexts() if each.parent is context)
    rows = ((inline(f"`{name}`"), inline(each.get_short_help_str(200))) for name, each in parts)
    yield from table("30 70", ("Command", "What it does"), rows)
    own = [each for each in options(context) if each not in common_options()]
    flags = {each.flag for each in declarations() if each.kind != "tables"}
    if flags <= set(map(flag, options(context))):
        own = [each for each in own if flag(each) not in flags]
        yield from ("Every :ref:`setting <all-settings>` is an option, except tables.", "")
    yield from option_list(own)
    shared = (f"``{flag(each)}``" for each in options(context) if each in common_options())
    yield f":ref:`Common options <common-options>`: {', '.join(shared)}."
    words = {each + end for each in path.split()[1:] for end in ("", "s")}
    yield from ("", *(f"See also :doc:`{page}`." for page in sorted(words & {*pages})), "")


# --- errors and settings ---


def error_modules() -> list[str]:
    """Return the names of the modules of qdo that define errors: they end in "errors"."""
    names = (each.name for each in pkgutil.iter_modules(qdo.__path__))
    return [f"qdo.{name}" for name in names if name.endswith("errors")]


def exit_code_rows() -> Iterator[tuple[str, str, str]]:
    """Yield each exit code with its meaning and the errors that end a command with it."""
    found = [each for name in error_modules() for each in vars(import_module(name)).values()]
    errors = {each for each in found if isinstance(each, type) and issubclass(each, QdoError)}
    for code, meaning in re.findall(r"^ +(\d+)  (.*)$", EXIT_CODES, re.MULTILINE):
        names = [
            f"{each.__module__}.{each.__name__}" for each in errors if each.exit_code == int(code)
        ]
        links = ", ".join(f":exc:`~{name}`" for name in sorted(names))
        yield f"``{code}``", inline(meaning), links


def setting_rows(notes: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield each setting with its default, unit or type, whether it is live, and its meaning."""
    for each in declarations():
        name, default = f"``{each.name}``", f"``{json.dumps(each.default)}``"
        unit = each.unit or _UNITS.get(each.kind, each.kind)
        text = inline(f"{each.help[0].upper()}{each.help[1:]}.")
        yield name, default, unit, "live" * each.live, f"{text} {notes.get(each.name, '')}"


# --- log lines ---


class LogLine(NamedTuple):
    """A line that qdo logs, with an ellipsis for each part that varies."""

    part: str
    level: str
    text: str


@cache
def log_lines() -> tuple[LogLine, ...]:
    """Return every line that qdo logs at the level info and above."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "log" in source:
            part = ".".join(["qdo", *path.relative_to(PACKAGE).parts[:-1][:2]])
            found |= {LogLine(part, level, text) for level, text in _logged(ast.parse(source))}
    return tuple(sorted(found, key=lambda each: (each.part, LEVELS.index(each.level), each.text)))


def _logged(tree: ast.Module) -> Iterator[tuple[str, str]]:
    assignments = (each for each in tree.body if isinstance(each, ast.Assign))
    named = {ast.unparse(each.targets[0]): each.value for each in assignments}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        receiver, method, args = ast.unparse(node.func.value).lower(), node.func.attr, node.args
        if "log" not in receiver or receiver == "self.logger":  # kazoo's logger: only for debugging
            continue
        if method == "log" and len(args) > 1:
            levels, template = _levels(args[0]), args[1]
        elif method in (*LEVELS, "exception") and args:
            levels, template = [method.replace("exception", "error")], args[0]
        else:
            continue
        texts = [*_texts(named.get(ast.unparse(template), template))]
        yield from ((level, text) for level in levels for text in texts)


def _levels(node: ast.expr) -> list[str]:
    """Return the levels that an argument can be; "warning" if a variable has it."""
    named = {each.attr.lower() for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return sorted(named & {*LEVELS}) or ([] if "debug" in named else ["warning"])


def _texts(node: ast.expr) -> Iterator[str]:
    text = ""
    if isinstance(node, ast.IfExp):
        yield from (*_texts(node.body), *_texts(node.orelse))
    elif isinstance(node, ast.Constant):
        text = str(node.value)
    elif isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
        text = "".join(map(str, parts))
    if re.search(r"\w", _PLACEHOLDER.sub("", text)):
        yield " ".join(_PLACEHOLDER.sub("…", text).split())


# --- directives ---


class Reference(SphinxDirective):
    """A directive whose content is written from the code each time."""

    has_content = True
    write: Callable[[Reference], Iterable[str]]

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        text = "\n".join(self.write(self))
        return self.parse_text_to_nodes(text, allow_section_headings=True)

    def notes(self, exists: Callable[[str], bool]) -> dict[str, str]:
        """Return the notes of the content: a line "NAME" or "NAME | NAME", and indented text."""
        notes = {}
        for each in "\n".join(self.content).split("\n\n"):
            names, _, text = each.strip().partition("\n")
            notes[names] = " ".join(text.split())
            for name in filter(None, names.split(" | ")):
                if not exists(name):
                    raise self.error(f"there is no {name!r} in qdo for this note")
        return notes


def _commands(page: Reference) -> Iterator[str]:
    for each in contexts():
        yield from command_section(each, page.env.found_docs)


def _common_options(page: Reference) -> Iterator[str]:
    found = (each for context in contexts() for each in options(context))
    return option_list(each for each in dict.fromkeys(found) if each in common_options())


def _exit_codes(page: Reference) -> Iterator[str]:
    return table("8 26 66", ("Code", "Meaning", "Errors"), exit_code_rows())


def _errors(page: Reference) -> Iterator[str]:
    return (f".. automodule:: {name}\n   :members:\n" for name in error_modules())


def _settings(page: Reference) -> Iterator[str]:
    notes = page.notes({each.name for each in declarations()}.__contains__)
    headings = ("Setting", "Default", "Unit", "Live", "Meaning")
    return table("25 18 9 5 43", headings, setting_rows(notes))


def _log_lines(page: Reference) -> Iterator[str]:
    for part in dict.fromkeys(each.part for each in log_lines()):
        yield from (part, "-" * len(part), "")
        rows = ((each.level, inline(each.text)) for each in log_lines() if each.part == part)
        yield from table("12 88", ("Level", "Line"), rows)


def _log_advice(page: Reference) -> Iterator[str]:
    for words, text in page.notes(
        lambda words: any(words in each.text for each in log_lines())
    ).items():
        yield from (
            " or ".join(f"*{inline(each)}*" for each in words.split(" | ")),
            f"   {text}",
            "",
        )


def setup(app: Any) -> dict[str, bool]:
    """Register the directives, named after their functions: "qdo-log-lines"."""
    writers = (_commands, _common_options, _exit_codes, _errors, _settings, _log_lines, _log_advice)
    for write in writers:
        kind = type("Directive", (Reference,), {"write": staticmethod(write)})
        app.add_directive("qdo" + write.__name__.replace("_", "-"), kind)
    return {"parallel_read_safe": True}
