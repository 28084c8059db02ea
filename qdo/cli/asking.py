"""Asks the workers whose names match for an action, on behalf of a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qdo.cli.connections import open_connections
from qdo.errors import NotFoundError
from qdo.fleet import actions as names
from qdo.fleet.actions import Asked, ask_workers, list_workers, matching, wait_for_results
from qdo.fleet.audit_entries import Values
from qdo.settings.settings import Settings


def ask(
    settings: Settings,
    glob: str,
    name: str,
    args: Values,
    seconds: float,
    reason: str,
    *,
    agreed: Callable[[Sequence[str]], bool] = lambda workers: True,
) -> list[Asked]:
    """Ask the workers that match, and wait for their results.

    :param seconds: how long to wait; they do not begin it later.
    :param agreed: tells whether these workers may be asked.
    :raises NotFoundError: no registered worker matches.
    """
    with open_connections(settings, broker=False) as connections:
        client, layout = connections.client, connections.layout
        workers = list_workers(client, layout) if client is not None else []
        targets = matching(workers, glob)
        if client is None or not targets:
            raise NotFoundError(what="worker that matches", name=glob)
        if not agreed(targets):
            return []
        asked = ask_workers(
            client, layout, targets, name, args, within_seconds=seconds, reason=reason
        )
        profiled = names.seconds_of(name, args) if name == names.PROFILE else 0.0
        wait_for_results(client, layout, asked, seconds + profiled)
    return asked
