"""The commands of `qdo`, by the words that they are called with."""

from __future__ import annotations

from collections.abc import Iterator

import click

from qdo.cli.main import SECTIONS
from qdo.cli.main import qdo as qdo_command

COMMANDS = [name for table in SECTIONS.values() for name in table]
"""The names at the top."""


def every_command(
    group: click.Command = qdo_command, path: str = ""
) -> Iterator[tuple[str, click.Command]]:
    """Yield each command and each group."""
    if not isinstance(group, click.Group):
        return
    with click.Context(group) as context:
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            assert found is not None
            yield f"{path}{name}", found
            yield from every_command(found, f"{path}{name} ")
