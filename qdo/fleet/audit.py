"""The action log: the operator, the command, the change and the reason.

Every command that changes a node of the coordinator writes one entry in the same transaction.
Therefore both take effect, or neither. Each entry is a separate node and never changes. The name of
an entry begins with its time. Therefore a reader can find the newest entries by their names.

Functions that read raise NodeRefusedError if the account may not list the log, and
CoordinatorUnreachableError if the connection is lost.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from qdo.coordination.bulk_reads import names_below, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import Committed, CreateOp, NodeRead, Op, Rejected
from qdo.coordination.transactions import Node, change, commit, make_folder
from qdo.coordination.znodes.layout import Layout
from qdo.errors import AuditRefusedError, NodeRefusedError, QdoError
from qdo.fleet.audit_entries import AuditEntry, Values, entry_name, entry_time
from qdo.fleet.names import writer

# Number of entries that a search reads at once.
READ_AT_ONCE = 200

Entry = Callable[[Values, Values], CreateOp]


class AuditTrail:
    """Writes the entries for one run of a command."""

    def __init__(
        self, client: Client, layout: Layout, command: str, reason: str = "", by: str = ""
    ) -> None:
        self._client = client
        self._layout = layout
        self._command = command
        self._reason = reason
        self._by = by

    @contextmanager
    def change(self, target: str) -> Iterator[Entry]:
        """Yield a function that returns an operation, which writes the entry for one change.

        The function takes the values before and after the change.

        :raises AuditRefusedError: this account may not write entries. Nothing has changed.
        """
        fleet = self._layout.fleet
        # A repeated transaction uses the same name, so the log has only one entry for the change.
        name = entry_name(time.time(), secrets.token_hex(4))

        def entry(before: Values, after: Values) -> CreateOp:
            # Workers create this node when they start. If no worker has started yet, create the
            # node here.
            make_folder(self._client, fleet.actionlog)
            account = self._client.access.account
            written = AuditEntry(
                name,
                0.0,
                by=self._by or writer(),
                account="" if account is None else str(account),
                command=self._command,
                target=target,
                before=before,
                after=after,
                reason=self._reason,
            )
            return CreateOp(fleet.log_entry(name), written.encode())

        try:
            yield entry
        except NodeRefusedError as error:
            if not f"{error.details['path']}/".startswith(f"{fleet.actionlog}/"):
                raise
            account = self._client.access.account_name()
            raise AuditRefusedError(path=fleet.actionlog, account=account) from error

    def announce(self, target: str, before: Values, after: Values) -> None:
        """Write one entry for several changes that follow. Raise the errors of `change`."""
        with self.change(target) as entry:
            written = entry(before, after)

            def decide(node: Node) -> list[Op] | None:
                return None if isinstance(node, NodeRead) else [written]

            change(self._client, written.path, decide, root=self._layout.root)

    def note(self, target: str, before: Values, after: Values) -> str | None:
        """Write the entry for a change outside the coordinator.

        Return the reason if the write fails.
        """
        try:
            with self.change(target) as entry:
                answer = commit(self._client, [entry(before, after)])
        except QdoError as error:
            return str(error)
        if isinstance(answer, Committed):
            return None
        return answer.reason if isinstance(answer, Rejected) else "the coordinator did not respond"


def read_entries(
    client: Client,
    layout: Layout,
    *,
    limit: int,
    selects: Callable[[AuditEntry], bool] = lambda entry: True,
    since: float = 0.0,
) -> list[AuditEntry]:
    """Return the newest entries since a Unix time, newest first."""
    names = entry_names(client, layout)
    newest = sorted((name for name in names if entry_time(name) >= since), reverse=True)
    entries: list[AuditEntry] = []
    for start in range(0, len(newest), READ_AT_ONCE):
        if len(entries) >= limit:
            break
        batch = newest[start : start + READ_AT_ONCE]
        entries += [entry for entry in read_named(client, layout, batch) if selects(entry)]
    return entries[:limit]


def entry_names(client: Client, layout: Layout) -> list[str]:
    return names_below(client, layout.fleet.actionlog)


def read_named(client: Client, layout: Layout, names: Sequence[str]) -> list[AuditEntry]:
    return [
        AuditEntry.parse(node.path.rpartition("/")[2], node.data, node.written, node.refused)
        for node in read_nodes(client, [layout.fleet.log_entry(name) for name in names])
    ]
