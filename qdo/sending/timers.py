"""Sends the messages of timers, for the leader, the testing kit and `qdo timers run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qdo.encoding import with_header
from qdo.jobs.timers import Occurrence, Timer
from qdo.sending.messages import NewMessage, build_outgoing
from qdo.sending.sender import Sender
from qdo.text import iso_time

DueTimer = tuple[Timer, Occurrence]


def send_occurrences(app: Sender, due: Sequence[DueTimer], *, runs: bool = False) -> list[str]:
    """Send the messages of all occurrences, or of none; return the ids of the messages.

    :param runs: whether an operator requested these occurrences outside the schedule.
    """
    messages = []
    keys = []
    for timer, occurrence in due:
        at = iso_time(occurrence.at)
        name = f"{timer.name}@{at}"
        body = {"timer": timer.name, "at": at, "missed": occurrence.missed}
        message = build_outgoing(NewMessage(timer.queue, body))
        headers = with_header(message.headers, qdo_timer=f"{name}/run" if runs else name)
        messages.append(replace(message, headers=headers))
        keys.append(f"timer/{name}")
    return app._store(messages) if runs else app._store_once(messages, keys)
