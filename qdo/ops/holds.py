"""Pauses and resumes queues, with an entry in the action log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.errors import NotFoundError
from qdo.fleet.audit import AuditTrail
from qdo.fleet.hold_node import Hold
from qdo.fleet.holds import Record, add_hold, end_holds
from qdo.fleet.protocol.audit_entries import Values


def pause(client: Client, layout: Layout, hold: Hold, by: str = "") -> int:
    """Let the queues of a hold stand still; return its place, see `add_hold`.

    :param by: who does it, if that is not the user of this process.
    """
    with recorded(client, layout, "pause", hold.queues, hold.why, by) as record:
        return add_hold(client, layout, hold, record=record)


def resume_hold(client: Client, layout: Layout, id: str, reason: str, by: str = "") -> list[Hold]:
    """End a hold; return it.

    :raises NotFoundError: there is no such hold.
    """
    with recorded(client, layout, "resume", (id,), reason, by) as record:
        ended = end_holds(client, layout, [id], record=record)
    if not ended:
        raise NotFoundError(what="hold", name=id)
    return ended


@contextmanager
def recorded(
    client: Client,
    layout: Layout,
    command: str,
    globs: Sequence[str],
    reason: str,
    by: str = "",
) -> Iterator[Record]:
    """Return what makes the entry of a change in the action log."""
    with AuditTrail(client, layout, command, reason, by).change(" ".join(globs)) as entry:
        yield lambda before, after: entry(_logged(before), _logged(after))


def _logged(holds: Sequence[Hold]) -> Values:
    return {hold.id[:8]: " ".join(hold.queues) for hold in holds}
