"""Where documents are: nodes of the coordinator, over a connection of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp, NodeRead, Op
from qdo.coordination.side.connection import SideConnection
from qdo.coordination.transactions import Node, change, make_folder, read
from qdo.coordination.znodes.layout import Layout
from qdo.errors import CoordinatorUnreachableError, NodeRefusedError
from qdo.fleet.protocol.folder_view import FolderView
from qdo.system.home_loop import at_home

Decide = Callable[[Node], "list[Op] | None"]
Parse = Callable[[bytes], Any]
OnChange = Callable[[FolderView, str], None]


class DocumentStore(Protocol):
    """The sets of documents of one app, as this process sees them.

    :ivar writer: who this process is, for others.
    """

    writer: str

    def path(self, name: str, key: str) -> str:
        """Return the path of a document's node."""

    def view(self, name: str, parse: Parse, on_change: OnChange) -> FolderView:
        """Return the copy of a set; the first call waits until it is complete."""

    def fresh(self, view: FolderView, ltime: int | None, timeout_seconds: float) -> bool:
        """Wait until a copy is as new as `ltime`, or as this call; return False if it is not."""

    def perform(
        self,
        name: str,
        key: str,
        decide: Decide,
        is_mine: Callable[[NodeRead], bool],
        guess: NodeRead | None,
    ) -> int:
        """Change a document, see `coordination.transactions.change`; return its new time."""


class CoordinatorDocuments:
    """Documents in the coordinator.

    :ivar pid: the process that opened the connection.
    :param client: a connected client, for this only.
    :param timeout_seconds: how long the first read of a set waits for its copy.
    :param record: makes the entry of a change in the action log, from the document before it.
    :param dry_run: `perform` only checks a change.
    """

    def __init__(
        self,
        client: Client,
        layout: Layout,
        timeout_seconds: float,
        writer: str,
        record: Callable[[Node], CreateOp] | None = None,
        dry_run: bool = False,
    ) -> None:
        self._record = record
        self._dry_run = dry_run
        self.pid = os.getpid()
        self.writer = writer
        self._client = client
        self._side: SideConnection | None = None
        self._layout = layout
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._views: dict[str, FolderView] = {}

    @property
    def over(self) -> bool:
        """False: without nodes of its own it survives the end of its session."""
        return False

    def path(self, name: str, key: str) -> str:
        return f"{self._layout.fleet.document_set(name)}/{key}"

    def view(self, name: str, parse: Parse, on_change: OnChange) -> FolderView:
        """Return the copy of a set.

        :raises NodeRefusedError: the account at the coordinator may not read it.
        :raises CoordinatorUnreachableError: it is not complete in time.
        """
        view = self._views.get(name)
        return at_home(self._view, name, parse, on_change) if view is None else view

    def _view(self, name: str, parse: Parse, on_change: OnChange) -> FolderView:
        with self._lock:
            view = self._views.get(name)
            if view is None:
                view = self._open(self._layout.fleet.document_set(name), parse, on_change)
                self._views[name] = view
            return view

    def _open(self, folder: str, parse: Parse, on_change: OnChange) -> FolderView:
        if self._side is None:
            self._side = SideConnection(self._client)
        view = FolderView(folder, parse, lambda key: on_change(view, key))
        self._side.add(view)
        if not self._fresh(view, None, self._timeout_seconds):
            self._side.remove(view)
            if view.fault is not None:
                account = self._client.access.account_name()
                raise NodeRefusedError(path=folder, account=account)
            reason = f"no answer within {self._timeout_seconds:g} s"
            raise CoordinatorUnreachableError(url=self._client.address.url, reason=reason)
        return view

    def fresh(self, view: FolderView, ltime: int | None, timeout_seconds: float) -> bool:
        return at_home(self._fresh, view, ltime, timeout_seconds)

    def _fresh(self, view: FolderView, ltime: int | None, timeout_seconds: float) -> bool:
        side = self._side
        return side is not None and side.wait(partial(view.when_fresh, ltime), timeout_seconds)

    def perform(
        self,
        name: str,
        key: str,
        decide: Decide,
        is_mine: Callable[[NodeRead], bool],
        guess: NodeRead | None,
    ) -> int:
        folder = self._layout.fleet.document_set(name)
        client = self._client
        made = False

        def decided(node: Node) -> list[Op] | None:
            nonlocal made
            ops = decide(node)
            if ops and isinstance(ops[0], CreateOp) and not made:
                made = True
                make_folder(client, folder)
            return [*ops, self._record(node)] if ops and self._record is not None else ops

        path = f"{folder}/{key}"
        root = self._layout.root
        if self._record is not None:
            guess = None  # an entry in the action log names the version that was replaced

        def perform() -> int:
            if self._dry_run:
                decide(read(client, path))
                return 0
            answer = change(client, path, decided, root=root, is_mine=is_mine, guess=guess)
            return answer.zxid if answer is not None else 0

        return at_home(perform)

    def close(self) -> None:
        """Close the connection, unless a parent process opened it."""
        if self.pid != os.getpid():
            return
        if self._side is not None:
            self._side.close()
        else:
            self._client.stop()
            self._client.close()
