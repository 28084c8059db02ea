"""`qdo completion`: a script with which a shell completes commands and options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from qdo.cli.framework import completion_variable

_KINDS: Mapping[str, type[ShellComplete]] = MappingProxyType(
    {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
)
PROGRAMS = ("qdo", "qdo-worker")


@click.command()
@click.argument("shell", type=click.Choice(list(_KINDS)))
def completion(shell: str) -> None:
    """Print the script that lets a shell complete commands and options of qdo and qdo-worker.

    \b
    bash:  eval "$(qdo completion bash)"                                  in ~/.bashrc
    zsh:   eval "$(qdo completion zsh)"                                   in ~/.zshrc
    fish:  qdo completion fish > ~/.config/fish/completions/qdo.fish
    """
    for program in PROGRAMS:
        # The script only names the program: which commands it has is asked while somebody types.
        kind = _KINDS[shell]
        script = kind(click.Command(program), {}, program, completion_variable(program))
        click.echo(script.source_template % script.source_vars())
