"""`qdo retry-now`: run failing or blocking messages again, now."""

from __future__ import annotations

import click

from qdo.cli.changing import Consent, all_option, changing, decide_about
from qdo.cli.framework import output_option, with_settings
from qdo.settings.settings import Settings


@click.command("retry-now")
@click.argument("queue")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@all_option
@changing
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def retry_now(
    queue: str,
    ids: tuple[str, ...],
    every: bool,
    consent: Consent,
    form: str,
    settings: Settings,
) -> None:
    """Run messages that fail or block a queue again now, with attempts counted from 1.

    ID is the id of a message or its position. Without one: the first message that blocks the
    queue, or else the first that waits for its next attempt. Workers may be running.
    """
    decide_about(
        settings,
        "retry",
        queue,
        ids,
        schema="qdo.retry-now/1",
        form=form,
        consent=consent,
        every=every,
    )
