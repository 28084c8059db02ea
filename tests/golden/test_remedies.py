"""Each command that a text of qdo names exists, with its options and arguments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from qdo.cli.commands import dead_letters
from qdo.cli.main import qdo
from qdo.cli.worker import worker
from tests.golden.wording import PACKAGES
from tests.support.cli import run_in
from tests.support.paths import ROOT
from tests.support.postgresql.server import PostgresqlDatabase

_COMMAND = re.compile(r"`(qdo(?:-worker)?(?: [^`]*)?)`")
_JOINT = re.compile(r"""["']\s*\n\s*f?["']""")
"""Between two literals of one text. Syntax trees of all files took 100 times as long."""


def _commands() -> list[str]:
    """Return the commands of messages, remedies, helps and docstrings."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found.update(_COMMAND.findall(_JOINT.sub("", path.read_text(encoding="utf-8"))))
    return sorted({re.sub(r"\{[^}]*\}|%[sdr]", "x", each) for each in found})


def test_the_commands_of_all_texts_parse() -> None:
    """Their options and arguments exist; a text may leave out those that a command requires."""
    commands = _commands()
    assert len(commands) > 80
    unknown = {each: fault for each in commands if (fault := _fault(each))}
    assert unknown == {}


def test_a_command_that_does_not_exist_is_found() -> None:
    wrong = ("qdo sned", "qdo delete --nothing", "qdo admin broker init now", "qdo-worker a b")
    assert all(map(_fault, wrong))


def _fault(line: str) -> str:
    """Return what the command line would say of a command, "" if it would begin."""
    program, *words = shlex.split(line)
    command: click.Command = qdo if program == "qdo" else worker
    settings = command.context_settings  # a command keeps its first --help, with these names
    try:
        while isinstance(command, click.Group) and words:
            if isinstance(command, dead_letters.ListByDefault) and words[0] not in command.commands:
                words.insert(0, "list")
            if words[0].startswith("-"):
                break
            name = words.pop(0)
            found = command.get_command(click.Context(command, **settings), name)
            if found is None:
                return f"no command {name}"
            command = found
        parser = command.make_parser(click.Context(command, **settings))
        _, rest, _ = parser.parse_args(words)
    except click.ClickException as error:
        return error.format_message()
    return f"too many arguments: {rest}" if rest else ""


@pytest.mark.parametrize("options", [(), ("--app", "in_code:app")])
def test_the_remedy_of_a_missing_schema_creates_it(
    bare_database: PostgresqlDatabase, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Also if only the code of the app has the address."""
    url = bare_database.url()
    given = f"broker={url!r}" if options else ""
    name = "in_code" if options else "in_settings"
    (tmp_path / f"{name}.py").write_text(f"import qdo\napp = qdo.App('shop', {given})\n")
    env = {} if options else {"QDO_BROKER": url}
    send = ("send", "--app", f"{name}:app", "q", "1")
    refused = run_in(tmp_path, *send, env=env)
    assert refused.code == 2
    assert "`qdo admin broker init`" in refused.err
    assert run_in(tmp_path, "admin", "broker", "init", *options, env=env).code == 0
    assert run_in(tmp_path, *send, env=env).code == 0
