"""`qdo dead-letters add`: make dead letters of failing or blocking messages."""

from __future__ import annotations

import click

from qdo.cli.changing import Consent, changing
from qdo.cli.deciding import all_option, decide_about
from qdo.cli.framework import output_option, with_settings
from qdo.errors import UsageError
from qdo.settings.settings import Settings


@click.command("add")
@click.argument("queue")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@all_option
@changing
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def add(
    queue: str,
    ids: tuple[str, ...],
    every: bool,
    consent: Consent,
    form: str,
    settings: Settings,
) -> None:
    """Store messages that fail or block a queue as dead letters now, with their errors.

    ID is the id of a message or its position; `qdo peek` shows both. An attempt that runs now ends
    first, and if it succeeds the message is done. Workers may be running.
    """
    if not ids and not every:
        raise UsageError(reason="name messages as QUEUE ID..., or give --all")
    decide_about(
        settings,
        "dead-letter",
        queue,
        ids,
        schema="qdo.dead-letters-added/1",
        form=form,
        consent=consent,
        every=every,
    )
