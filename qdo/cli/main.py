"""The command `qdo`: everything but running workers, which `qdo-worker` does."""

from __future__ import annotations

import sys

import click

from qdo.cli.shell import EXIT_CODES, LazyGroup, run, version_option

COMMANDS = {
    "send": ("qdo.cli.send", "send", "Send messages: one, or JSON lines from a file."),
    "queues": ("qdo.cli.status", "queues", "List queues: owner, progress, backlog."),
    "workers": ("qdo.cli.status", "workers", "List the registered workers."),
    "dead-letters": (
        "qdo.cli.dead_letters",
        "dead_letters",
        "List, show, retry, discard, export what was set aside.",
    ),
    "seek": ("qdo.cli.seek", "seek", "Let a queue go on after another position."),
    "unblock": ("qdo.cli.unblock", "unblock_queue", "Let a blocked queue go on."),
    "tree": ("qdo.cli.tree", "tree", "Show the znodes of the coordinator with their values."),
    "config": ("qdo.cli.config", "config", "List every setting with its value and origin."),
    "demo": ("qdo.cli.demo", "demo", "Watch queues being shared out among three workers."),
}


@click.command(
    cls=LazyGroup,
    table=COMMANDS,
    epilog=EXIT_CODES,
    help="Look after queues and the workers that share them. Data goes to stdout, words to stderr.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@version_option
def qdo() -> None:
    """Do nothing by itself: click shows the help."""


def main() -> None:
    """Run the command line of this process."""
    sys.exit(run(qdo, "qdo"))
