"""`qdo admin`: the commands that set up an app, and that are rarely typed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from qdo.cli.framework import LazyGroup, completion_variable


@click.command(
    cls=LazyGroup,
    sections={
        "Commands": {
            "broker": ("setup", "broker", "Show the shared broker file; prepare a database."),
            "keys": ("setup", "keys", "Make, list and retire keys for encrypted bodies."),
            "acl": ("setup", "acl", "Check and correct the rights on znodes."),
            "tree": ("tree", "tree", "Show the znodes of the coordinator with their values."),
            "checkpoints": (
                "checkpoints",
                "checkpoints",
                "Save the positions of queues in a file, or import them.",
            ),
            "completion": (
                "admin",
                "completion",
                "Print a script for the completion of commands in a shell.",
            ),
        }
    },
)
def admin() -> None:
    """Set up brokers, keys and rights; look at znodes; save and import positions."""


_KINDS: Mapping[str, type[ShellComplete]] = MappingProxyType(
    {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
)
PROGRAMS = ("qdo", "qdo-worker")


@click.command()
@click.argument("shell", type=click.Choice(list(_KINDS)))
def completion(shell: str) -> None:
    """Print the script that lets a shell complete commands and options of qdo and qdo-worker.

    \b
    bash:  eval "$(qdo admin completion bash)"                                  in ~/.bashrc
    zsh:   eval "$(qdo admin completion zsh)"                                   in ~/.zshrc
    fish:  qdo admin completion fish > ~/.config/fish/completions/qdo.fish
    """
    for program in PROGRAMS:
        # The script only names the program: the shell asks for its commands while the user types.
        kind = _KINDS[shell]
        script = kind(click.Command(program), {}, program, completion_variable(program))
        click.echo(script.source_template % script.source_vars())
