"""Each command starts by itself: no module relies on another one having imported what it needs."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from qdo.cli.main import qdo
from tests.support.cli import QDO, WORKER, command
from tests.support.commands import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_command_shows_its_help(tmp_path: Path, name: str) -> None:
    """By its own file, which loads nothing else of the command line."""
    ended = command(*QDO, name, "--help", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"Usage: qdo {name} ")


def test_programs_show_their_help(tmp_path: Path) -> None:
    """The list of commands needs none of their files."""
    for program in (QDO, WORKER):
        ended = command(*program, "--help", cwd=tmp_path)
        assert (ended.code, ended.err) == (0, "")


def test_commands_are_found_by_click() -> None:
    """The table of lazily imported commands names each of them."""
    context = click.Context(qdo)
    assert [qdo.get_command(context, name).name for name in COMMANDS] == COMMANDS


def test_the_help_is_short() -> None:
    """Each name once, at most 34 of them, in 80 columns."""
    assert len(COMMANDS) == len({*COMMANDS}) <= 34
    with click.Context(qdo, info_name="qdo", terminal_width=80) as context:
        lines = qdo.get_help(context).splitlines()
    assert max(map(len, lines)) <= 80
    shown = [line.split()[0] for line in lines if re.match(r"  [a-z-]+ ", line)]
    assert [name for name in shown if name in COMMANDS] == COMMANDS
