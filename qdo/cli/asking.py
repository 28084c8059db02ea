"""Asks the workers whose names match for an action, on behalf of a command."""

from __future__ import annotations

from qdo.cli.connections import open_connections
from qdo.errors import NotFoundError, UsageError
from qdo.fleet import action_arguments as names
from qdo.fleet.actions import Asked, ask_workers, list_workers, matching, wait_for_results
from qdo.fleet.protocol.audit_entries import Values
from qdo.settings.settings import Settings

_STOPPING = (names.DRAIN, names.RESTART, names.RELOAD)


def ask(
    settings: Settings,
    glob: str,
    name: str,
    args: Values,
    seconds: float,
    reason: str,
    *,
    everything: bool = False,
) -> list[Asked]:
    """Ask the workers that match, and wait for their results.

    :param seconds: how long to wait; they do not begin it later.
    :param everything: the action may stop all workers at once.
    :raises NotFoundError: no registered worker matches.
    :raises UsageError: it would stop all workers.
    """
    with open_connections(settings, broker=False) as connections:
        client, layout = connections.client, connections.layout
        workers = list_workers(client, layout) if client is not None else []
        targets = matching(workers, glob)
        if client is None or not targets:
            raise NotFoundError(what="worker that matches", name=glob)
        if name in _STOPPING and targets == workers and glob not in workers and not everything:
            raise UsageError(reason=f"{name} of all workers needs --all, got {glob!r}")
        asked = ask_workers(
            client, layout, targets, name, args, within_seconds=seconds, reason=reason
        )
        profiled = names.seconds_of(name, args) if name == names.PROFILE else 0.0
        wait_for_results(client, layout, asked, seconds + profiled)
    return asked
