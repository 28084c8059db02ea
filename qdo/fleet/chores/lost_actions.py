"""Ends the actions of workers that are gone: a chore of the leader."""

from __future__ import annotations

import logging
import time
import zlib

from qdo.coordination.bulk_reads import NodeValue, read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import (
    CheckOp,
    CommitError,
    Committed,
    CreateOp,
    DeleteOp,
    NoResponse,
    Rejected,
)
from qdo.coordination.transactions import commit
from qdo.coordination.znodes.layout import FleetLayout, Layout
from qdo.fleet.action_machine import LOST, RUNNING, Action, ended_entry
from qdo.fleet.audit_entries import entry_name, entry_time

_log = logging.getLogger(__name__)

MOST_AT_ONCE = 1000
"""Actions of gone workers that are ended in a round."""


class LostActionsChore:
    """Ends what workers that are gone were asked for as lost, and deletes their folders.

    Names of workers are never used again. So the order of the reads matters: a folder that is
    listed before the workers, and whose worker is then not among them, belongs to one that is gone.
    Nothing is asked of it any more, because commands check its node in their transaction.
    """

    def __init__(self) -> None:
        self._refused: set[str] = set()

    def __call__(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        """End the actions and delete the folders; return the number of deleted nodes.

        :raises NodeRefusedError: this account may not list one of the folders.
        :raises CoordinatorUnreachableError: the connection is lost.
        """
        fleet = layout.fleet
        folders = read_children(client, [fleet.actions]).get(fleet.actions, [])
        workers = read_children(client, [layout.workers]).get(layout.workers, [])
        gone = [fleet.actions_of(name) for name in sorted(set(folders).difference(workers))]
        found = read_children(client, gone)
        paths = [f"{folder}/{name}" for folder in gone for name in found.get(folder, [])]
        self._refused.intersection_update(paths)
        wanted = [path for path in paths if path not in self._refused][:MOST_AT_ONCE]
        deleted = 0
        for node in read_nodes(client, wanted):
            answer = _end(client, fleet, fence, node)
            if isinstance(answer, Committed):
                deleted += 1
            elif isinstance(answer, NoResponse) or answer.index == 0:
                return deleted  # deposed, or without an answer: a later period continues
            elif answer.fault is not CommitError.NO_NODE:
                self._refused.add(node.path)
                reason = answer.reason or answer.fault.value
                _log.warning("cannot delete %s: %s; delete it by hand", node.path, reason)
        # One that still has nodes is rejected.
        return deleted + sum(
            isinstance(commit(client, [fence, DeleteOp(folder)]), Committed) for folder in gone
        )


def _end(
    client: Client, fleet: FleetLayout, fence: CheckOp, node: NodeValue
) -> Committed | Rejected | NoResponse:
    """Delete an action, and write its entry."""
    folder, _, name = node.path.rpartition("/")
    action = Action(fault=node.refused) if node.refused else Action.parse(node.data)
    begun = "it had begun" if action.state == RUNNING else "it had not begun"
    other = entry_name(time.time(), f"{zlib.crc32(node.path.encode()):08x}")
    worker, text = folder.rpartition("/")[2], action.fault or f"the worker is gone; {begun}"
    for id in (name, other) if entry_time(name) else (other,):
        entry = ended_entry(id, worker, action, LOST, text)
        write = CreateOp(fleet.log_entry(id), entry.encode())
        answer = commit(client, [fence, DeleteOp(node.path, node.version), write])
        taken = isinstance(answer, Rejected) and answer.fault is CommitError.NODE_EXISTS
        if not taken:  # else another program has used the name of an entry for the action
            break
    return answer
