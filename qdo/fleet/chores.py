"""The leader's chores, which copy the action log, end lost actions, and delete unused nodes.

Each chore has a `ChoreRecord` with the time and the result of its last run.

Chores and functions raise NodeRefusedError if the account may not list a folder or read or write a
node. They raise CoordinatorUnreachableError if the connection is lost.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qdo.coordination.bulk_reads import NodeValue, names_below, pipelined, read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol import machine as m
from qdo.coordination.transactions import commit, read
from qdo.coordination.znodes.layout import FleetLayout, Layout
from qdo.coordination.znodes.values import encode, load, typed, unix_time
from qdo.fleet.action_machine import LOST, RUNNING, Action, ended_entry
from qdo.fleet.audit import entry_names, read_named
from qdo.fleet.audit_entries import AuditEntry, entry_name, entry_time
from qdo.system.clock import clock

_log = logging.getLogger(__name__)

# Maximum number of entries of the action log that one round reads, the oldest first.
MOST_COPIED_AT_ONCE = 500
# Time for which the folder of a lock must be empty before the leader deletes the folder.
IDLE_SECONDS = 3600.0
# Maximum number of lock folders, or of lost actions, in one round.
MOST_AT_ONCE = 1000
# Maximum number of surplus nodes that one transaction deletes.
AT_ONCE = 99
# Number of failed deletions after which a round ends. The next round skips these nodes.
MOST_REFUSED = 10


class CopiedActionsChore:
    """Passes each entry of the action log to `keep`.

    The function `keep` returns False if it has no room.
    """

    def __init__(self, keep: Callable[[AuditEntry], bool]) -> None:
        self._keep = keep
        self._copied: set[str] = set()  # a new leader passes on all entries again

    def __call__(self, client: Client, layout: Layout, fence: m.CheckOp) -> int:
        names = entry_names(client, layout)
        self._copied.intersection_update(names)
        new = sorted(name for name in names if name not in self._copied)[:MOST_COPIED_AT_ONCE]
        for entry in read_named(client, layout, new):
            if entry.fault is None and not self._keep(entry):
                break
            self._copied.add(entry.id)
        return 0  # this chore deletes nothing


class EmptyLocksChore:
    """Deletes lock folders that this leader has seen unchanged and empty for an hour."""

    # The coordinator rejects the deletion of a folder with a contender. The process of a later
    # contender creates the folder again.

    def __init__(self, now: Callable[[], float] = clock) -> None:
        self._now = now
        self._empty: dict[str, tuple[int, float]] = {}

    def __call__(self, client: Client, layout: Layout, fence: m.CheckOp) -> int:
        folders = [layout.fleet.lock(name) for name in names_below(client, layout.fleet.locks)]
        now = self._now()
        before = self._empty
        self._empty = {}
        for folder, stat in pipelined(client, client.exists_async, folders):
            if stat is not None and not isinstance(stat, Exception) and not stat.numChildren:
                # `pzxid` is the zxid of the last creation or deletion of a child.
                change, since = before.get(folder, (0, now))
                self._empty[folder] = stat.pzxid, since if change == stat.pzxid else now
        idle = [each for each, (_, since) in self._empty.items() if now - since >= IDLE_SECONDS]
        deleted = 0
        for folder in idle[:MOST_AT_ONCE]:
            answer = commit(client, [fence, m.DeleteOp(folder)])
            if isinstance(answer, m.Committed):
                deleted += 1
            elif isinstance(answer, m.NoResponse) or answer.index == 0:
                break  # it is deposed, or got no answer: a later period continues
        return deleted


class LostActionsChore:
    """Ends the actions of departed workers as "lost", and deletes the folders of these workers.

    No two workers ever have the same name. The chore lists the folders first and the workers
    second. A worker with a folder that is missing from the second list has departed. The folder of
    a departed worker receives no further actions, because commands check the worker's node in their
    transactions.
    """

    def __init__(self) -> None:
        self._refused: set[str] = set()

    def __call__(self, client: Client, layout: Layout, fence: m.CheckOp) -> int:
        fleet = layout.fleet
        folders = names_below(client, fleet.actions)
        workers = names_below(client, layout.workers)
        gone = [fleet.actions_of(name) for name in sorted(set(folders).difference(workers))]
        found = read_children(client, gone)
        paths = [f"{folder}/{name}" for folder in gone for name in found.get(folder, [])]
        self._refused.intersection_update(paths)
        wanted = [path for path in paths if path not in self._refused][:MOST_AT_ONCE]
        deleted = 0
        for node in read_nodes(client, wanted):
            answer = _end(client, fleet, fence, node)
            if isinstance(answer, m.Committed):
                deleted += 1
            elif isinstance(answer, m.NoResponse) or answer.index == 0:
                return deleted  # it is deposed, or got no answer: a later period continues
            elif answer.fault is not m.CommitError.NO_NODE:
                self._refused.add(node.path)
                reason = answer.reason or answer.fault.value
                _log.warning("cannot delete %s: %s; delete it by hand", node.path, reason)
        # The coordinator rejects the deletion of a folder that still has nodes.
        return deleted + sum(
            isinstance(commit(client, [fence, m.DeleteOp(folder)]), m.Committed) for folder in gone
        )


def _end(
    client: Client, fleet: FleetLayout, fence: m.CheckOp, node: NodeValue
) -> m.Committed | m.Rejected | m.NoResponse:
    folder, _, name = node.path.rpartition("/")
    action = Action(fault=node.refused) if node.refused else Action.parse(node.data)
    begun = "it had begun" if action.state == RUNNING else "it had not begun"
    other = entry_name(time.time(), f"{zlib.crc32(node.path.encode()):08x}")
    worker = folder.rpartition("/")[2]
    text = action.fault or f"the worker is gone; {begun}"
    for id in (name, other) if entry_time(name) else (other,):
        entry = ended_entry(id, worker, action, LOST, text)
        write = m.CreateOp(fleet.log_entry(id), entry.encode())
        answer = commit(client, [fence, m.DeleteOp(node.path, node.version), write])
        # If the entry exists, another program has used its name for the action.
        if not isinstance(answer, m.Rejected) or answer.fault is not m.CommitError.NODE_EXISTS:
            break
    return answer


@dataclass(frozen=True, slots=True)
class ChoreRecord:
    """The last run of a chore. `at` is the Unix time of its end, by the leader's clock."""

    chore: str
    at: float | None = None
    seconds: float | None = None
    deleted: int | None = None
    leader: str | None = None
    fault: str | None = None

    @classmethod
    def parse(cls, chore: str, value: Any, leader: str | None) -> ChoreRecord:
        """Return a record from its JSON. Values of wrong types count as missing."""
        found = value if isinstance(value, dict) else {}
        return cls(
            chore,
            unix_time(found.get("at")),
            unix_time(found.get("seconds")),  # the limits of a Unix time also apply to a duration
            typed(found.get("deleted"), int),
            leader,
            typed(found.get("fault"), str),
        )


def write_records(
    client: Client, layout: Layout, fence: m.CheckOp, leader: str, records: Sequence[ChoreRecord]
) -> int:
    """Write the records of one round. Return 0, the number of deleted nodes."""
    kept = ("at", "seconds", "deleted", "fault")
    chores = {
        each.chore: {key: value for key, value in asdict(each).items() if key in kept}
        for each in records
    }
    data = encode({"leader": leader, "chores": chores})
    path = layout.fleet.chores
    # Ignore a lost answer, because the next round writes the node again.
    answer = commit(client, [fence, m.SetOp(path, data, m.ANY_VERSION)])
    if isinstance(answer, m.Rejected) and answer.fault is m.CommitError.NO_NODE:
        commit(client, [fence, m.CreateOp(path, data)])
    return 0


def read_records(client: Client, layout: Layout) -> tuple[list[ChoreRecord], str | None]:
    node = read(client, layout.fleet.chores)
    value, fault = load(node.data if isinstance(node, m.NodeRead) else b"")
    chores = value.get("chores", {})
    leader = typed(value.get("leader"), str)
    if not isinstance(chores, dict):
        return [], "`chores` must be an object"
    return [ChoreRecord.parse(name, each, leader) for name, each in chores.items()], fault


class SurplusChore:
    """Deletes surplus nodes of a folder.

    A function selects the names of these nodes from all names.
    """

    # The leader cannot delete a node if another program has created nodes below it. Continue with
    # the other deletions.

    def __init__(
        self,
        folder: Callable[[Layout], str],
        surplus: Callable[[Collection[str], float], list[str]],
    ) -> None:
        self._folder = folder
        self._surplus = surplus
        self._refused: set[str] = set()

    def __call__(self, client: Client, layout: Layout, fence: m.CheckOp) -> int:
        folder = self._folder(layout)
        names = names_below(client, folder)
        wanted = self._surplus(names, time.time())
        self._refused.intersection_update(wanted)
        wanted = [name for name in wanted if name not in self._refused]
        deleted = refused = 0
        while wanted and refused < MOST_REFUSED:
            batch = wanted[:AT_ONCE]
            paths = [f"{folder}/{name}" for name in batch]
            answer = commit(client, [fence, *map(m.DeleteOp, paths)])
            if isinstance(answer, m.Committed):
                deleted += len(batch)
                del wanted[:AT_ONCE]
            elif isinstance(answer, m.Rejected) and answer.index > 0:
                name = wanted.pop(answer.index - 1)
                if answer.fault is not m.CommitError.NO_NODE:
                    refused += 1
                    self._refused.add(name)
                    _log.warning(
                        "cannot delete %s/%s: %s; delete it by hand", folder, name, answer.reason
                    )
            else:  # it is deposed, or got no answer: the leader of the next period continues
                break
        return deleted
