"""Messages of timers, as the leader, the testing kit and `qdo timers run` send them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qdo.brokers.base import Capabilities
from qdo.encoding import with_header
from qdo.errors import UnsupportedError
from qdo.jobs.timers import Occurrence, Timer
from qdo.sending.messages import NewMessage, build_outgoing, encrypted, with_defaults
from qdo.sending.sender import Sender
from qdo.text import iso_time

WINDOW_SECONDS = 604_800.0
"""How long the broker recognizes an occurrence: the longest pause of a leader between sending and
recording it."""

DueTimer = tuple[Timer, Occurrence]


def recognizes(can: Capabilities) -> bool:
    """Return whether a broker stores an occurrence once, however often a leader sends it."""
    return can.dedup and (can.dedup_seconds or WINDOW_SECONDS) >= WINDOW_SECONDS


def send_occurrences(app: Sender, due: Sequence[DueTimer], *, runs: bool = False) -> list[str]:
    """Send the messages of occurrences, all or none; return their ids.

    :param runs: an operator asked for them: these are not those of the schedule.
    """
    messages, can, dedup = [], app.broker.capabilities, dict[str, Any]()
    for timer, occurrence in due:
        at = iso_time(occurrence.at)
        name = f"{timer.name}@{at}"
        body = {"timer": timer.name, "at": at, "missed": occurrence.missed}
        if can.dedup and not runs:
            window = can.dedup_seconds or WINDOW_SECONDS
            dedup = {"dedup_key": f"timer/{name}", "dedup_seconds": window}
        message = build_outgoing(NewMessage(timer.queue, body, **dedup))
        headers = with_header(message.headers, qdo_timer=f"{name}/run" if runs else name)
        messages.append(replace(message, headers=headers))
    messages = with_defaults(messages, app.default_headers)
    messages = encrypted(messages, app.settings, app.name, app._stream_of)
    try:
        return app.broker.send_many(messages)
    except UnsupportedError:  # a standard queue of SQS
        return app.broker.send_many([replace(message, terms=None) for message in messages])
