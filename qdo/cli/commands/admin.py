"""The commands of `qdo admin`, which set up an app and are rarely used."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from qdo.cli.connections import open_connections
from qdo.cli.framework import LazyGroup, completion_variable
from qdo.cli.options import COORDINATOR, with_output
from qdo.cli.output import emit, print_message, width_of
from qdo.coordination.bulk_reads import read_nodes, read_permitted_children
from qdo.coordination.client import Client
from qdo.coordination.znodes.values import inflated
from qdo.settings.settings import Settings
from qdo.text import printable

_SHELLS: Mapping[str, type[ShellComplete]] = MappingProxyType(
    {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
)
PROGRAMS = ("qdo", "qdo-worker")


@click.command(
    cls=LazyGroup,
    sections={
        "Commands": {
            "broker": ("setup", "broker", "Show the shared broker file; prepare a database."),
            "keys": ("setup", "keys", "Make, list and retire keys for encrypted bodies."),
            "outbox": ("fleet", "outbox", "List, retry and drop refused messages of outboxes."),
            "acl": ("setup", "acl", "Check and correct the rights on znodes."),
            "tree": ("admin", "tree", "Show the znodes of the coordinator with their values."),
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


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def completion(shell: str) -> None:
    """Print the script that lets a shell complete commands and options of qdo and qdo-worker.

    \b
    bash:  eval "$(qdo admin completion bash)"                                  in ~/.bashrc
    zsh:   eval "$(qdo admin completion zsh)"                                   in ~/.zshrc
    fish:  qdo admin completion fish > ~/.config/fish/completions/qdo.fish
    """
    for program in PROGRAMS:
        # The script only contains the program's name. The shell runs the program to complete
        # commands.
        kind = _SHELLS[shell]
        script = kind(click.Command(program), {}, program, completion_variable(program))
        click.echo(script.source_template % script.source_vars())


@dataclass(frozen=True, slots=True)
class Znode:
    """A node of the coordinator. The value of an unreadable node is the reason."""

    path: str
    value: str
    version: int
    ephemeral: bool

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def subtree(client: Client, root: str) -> list[Znode]:
    """Return the node at `root`, if any, and all nodes below `root`, parents first, by name."""
    paths = [root]
    level = paths
    while level:  # nodes that another process creates or deletes now may be missing
        below = read_permitted_children(client, level)
        level = [
            f"{path.rstrip('/')}/{name}" for path, names in below.items() for name in names or ()
        ]
        paths += level
    nodes = [
        Znode(
            read.path,
            read.refused or inflated(read.data).decode(errors="backslashreplace"),
            read.version,
            read.session != 0,
        )
        for read in read_nodes(client, paths)
    ]
    return sorted(nodes, key=lambda node: node.path.split("/"))


@click.command()
@with_output(*COORDINATOR)
def tree(form: str, settings: Settings) -> None:
    """Show the znodes of an app with their values; without --app, those of every app.

    Ephemeral nodes, which are deleted with their session, are marked with a *.
    """
    with open_connections(settings, broker=False) as connections:
        root = connections.layout.root if settings.app else settings.namespace
        nodes = subtree(connections.client, root) if connections.client else []
    if not nodes:
        print_message(f"hint: znode {root} does not exist yet: no worker has registered there")
    if form == "table":
        width = width_of(sys.stdout)
        sys.stdout.writelines(f"{line[:width]}\n" for line in drawn(nodes))
        return
    emit("qdo.tree/1", map(dataclasses.asdict, nodes), form)


def drawn(nodes: Sequence[Znode]) -> Iterable[str]:
    """Yield one line, with branches, for each node of a subtree, parents before children."""
    children_of = _children(nodes)
    stack = [(node, "", "") for node in nodes[:1]]
    while stack:
        node, branch, indent = stack.pop()
        name = node.name if branch else node.path
        mark = "*" if node.ephemeral else ""
        yield printable(f"{branch}{name}{mark}  {' '.join(node.value.split())}".rstrip())
        children = children_of.get(node.path, [])
        for child in reversed(children):
            is_last = child is children[-1]
            corner = indent + ("└─ " if is_last else "├─ ")
            stack.append((child, corner, indent + ("   " if is_last else "│  ")))


def _children(nodes: Iterable[Znode]) -> dict[str, list[Znode]]:
    children_of: dict[str, list[Znode]] = {}
    for node in nodes:
        children_of.setdefault(node.path.rpartition("/")[0] or "/", []).append(node)
    return children_of
