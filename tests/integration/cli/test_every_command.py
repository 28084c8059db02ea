"""Each command starts by itself: no module relies on another one having imported what it needs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from qdo.cli.main import qdo
from tests.support.cli import QDO, WORKER, command
from tests.support.commands import COMMANDS

EACH_BY_ITSELF = """
import contextlib, io, json, os, sys
from qdo.cli.framework import run
from qdo.cli.main import qdo

for name in json.loads(sys.argv[1]):
    loaded = set(sys.modules)
    child = os.fork()
    if not child:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = run(qdo, "qdo", [name, "--help"])
        begins = out.getvalue().startswith(f"Usage: qdo {name} ")
        os._exit(0 if (code, begins) == (0, True) else 1)
    assert loaded == set(sys.modules)
    if os.waitpid(child, 0)[1]:
        print(name)
"""
"""Prints the names of commands whose help is wrong; each runs in a copy that loads no other."""


def test_each_command_shows_its_help(tmp_path: Path) -> None:
    """By its own file, which loads nothing else of the command line."""
    ended = command("-c", EACH_BY_ITSELF, json.dumps(COMMANDS), cwd=tmp_path)
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_programs_show_their_help(tmp_path: Path) -> None:
    """The list of commands needs none of their files."""
    for program in (QDO, WORKER):
        ended = command(*program, "--help", cwd=tmp_path)
        assert (ended.code, ended.err) == (0, "")


def test_the_help_is_short() -> None:
    """Each name once, at most 34 of them, in 80 columns."""
    assert len(COMMANDS) == len({*COMMANDS}) <= 34
    with click.Context(qdo, info_name="qdo", terminal_width=80) as context:
        lines = qdo.get_help(context).splitlines()
    assert max(map(len, lines)) <= 80
    shown = [line.split()[0] for line in lines if re.match(r"  [a-z-]+ ", line)]
    assert [name for name in shown if name in COMMANDS] == COMMANDS
