"""`qdo skip`: skip failing or blocking messages."""

from __future__ import annotations

import click

from qdo.cli.changing import Consent, changing, decide_about
from qdo.cli.framework import output_option, with_settings
from qdo.settings.settings import Settings


@click.command("skip")
@click.argument("queue")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@changing
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def skip_messages(
    queue: str,
    ids: tuple[str, ...],
    consent: Consent,
    form: str,
    settings: Settings,
) -> None:
    """Skip messages that fail or block a queue: they never run again, and are not kept.

    ID is the id of a message or its position; `qdo peek` shows both. If a message is not failing
    any more, the command changes nothing: typed twice, it skips no other message. An attempt that
    runs now ends first, and if it succeeds the message is done. Workers may be running.
    """
    decide_about(
        settings,
        "skip",
        queue,
        ids,
        schema="qdo.skip/1",
        form=form,
        consent=consent,
    )
