"""`qdo admin`: the commands that set up an app, and that are rarely typed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from qdo.cli.connections import open_connections
from qdo.cli.framework import LazyGroup, completion_variable
from qdo.cli.options import COORDINATOR, output_option, with_settings
from qdo.cli.output import emit, print_message, width_of
from qdo.coordination.bulk_reads import read_nodes, read_permitted_children
from qdo.coordination.client import Client
from qdo.coordination.znodes.values import inflated
from qdo.settings.settings import Settings
from qdo.text import printable


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


@dataclass(frozen=True, slots=True)
class Znode:
    """A node of the coordinator.

    :ivar value: its data as text; bytes that are not UTF-8 appear as ``\\xNN``. Of a node that
        cannot be read, the reason.
    :ivar ephemeral: it is deleted with the session that created it.
    """

    path: str
    value: str
    version: int
    ephemeral: bool

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def subtree(client: Client, root: str) -> list[Znode]:
    """Return the node at `root` and all nodes below it, parents before children, by name.

    Empty if the node does not exist. Nodes that come or go during the read may be missing.
    """
    paths = [root]
    level = paths
    while level:
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
@with_settings(*COORDINATOR)
@output_option
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
    items = [
        {
            "path": node.path,
            "value": node.value,
            "version": node.version,
            "ephemeral": node.ephemeral,
        }
        for node in nodes
    ]
    emit("qdo.tree/1", items, form, {})


def drawn(nodes: Sequence[Znode]) -> Iterable[str]:
    """Yield one line per node of a subtree, parents before children, with branches."""
    below = _children(nodes)
    stack = [(node, "", "") for node in nodes[:1]]
    while stack:
        node, branch, indent = stack.pop()
        name = node.name if branch else node.path
        mark = "*" if node.ephemeral else ""
        yield printable(f"{branch}{name}{mark}  {' '.join(node.value.split())}".rstrip())
        children = below.get(node.path, [])
        for place, child in enumerate(reversed(children)):
            last = place == 0
            stack.append(
                (child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "))
            )


def _children(nodes: Iterable[Znode]) -> dict[str, list[Znode]]:
    below: dict[str, list[Znode]] = {}
    for node in nodes:
        below.setdefault(node.path.rpartition("/")[0] or "/", []).append(node)
    return below
