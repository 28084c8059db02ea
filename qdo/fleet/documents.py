"""Documents: named JSON values that every process of an app reads from its own memory.

A document is the node ``documents/<set>/<name>``. Each process keeps copies of the sets that it
uses (`folder_view`), and reads them over a separate connection (`coordination.side`). A write is a
transaction that takes effect only if the version is still the version read.

The first use of a set raises NodeRefusedError if the account at the coordinator may not read the
set, and CoordinatorUnreachableError if the copy is not complete before the timeout.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import ujson

from qdo.callables import check_done, check_hook
from qdo.coordination.client import Client
from qdo.coordination.protocol import machine as m
from qdo.coordination.side import SideConnection
from qdo.coordination.transactions import Node, change, make_folder, read
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import load, text_of, unix_time
from qdo.encoding import strict_json
from qdo.errors import (
    CoordinatorUnreachableError,
    DocumentConflictError,
    DocumentUnreadableError,
    DocumentValueError,
    NodeRefusedError,
    NotFoundError,
    SetFullError,
    StaleCopyError,
)
from qdo.fleet.folder_view import MAX_BYTES, MAX_NODES, CopiedNode, FolderView
from qdo.fleet.names import checked_name
from qdo.system.clock import checked_timeout
from qdo.system.home_loop import at_home
from qdo.system.twins import twin, warn_if_blocking

_log = logging.getLogger(__name__)

# Maximum size of a document's JSON. Every process of the app keeps a copy of the document.
MAX_DOCUMENT_BYTES = 128 * 1024
# The value of `if_version` that stands for any version.
ANY: Final = -1

Decide = Callable[[Node], "list[m.Op] | None"]
Parse = Callable[[bytes], Any]
OnChange = Callable[[FolderView, str], None]


class DocumentStore(Protocol):
    """The sets of documents of one app. `writer` is the name of this process."""

    writer: str

    def path(self, name: str, key: str) -> str:
        """Return the path of a document's node."""

    def view(self, name: str, parse: Parse, on_change: OnChange) -> FolderView:
        """Return the copy of a set. The first call waits until the copy is complete."""

    def fresh(self, view: FolderView, ltime: int | None, timeout_seconds: float) -> bool:
        """Wait until a copy has all writes up to `ltime` or now; return False on a timeout."""

    def perform(
        self,
        name: str,
        key: str,
        decide: Decide,
        is_mine: Callable[[m.NodeRead], bool],
        guess: m.NodeRead | None,
    ) -> int:
        """Change a document like `transactions.change`; return the time of the write."""


class CoordinatorDocuments:
    """Documents in the coordinator.

    :param client: a connected client that serves only these documents.
    :param timeout_seconds: maximum time for which the first read of a set waits for its copy.
    :param record: makes the action log entry of a change, from the document before the change.
    :param dry_run: whether `perform` only checks a change.
    """

    def __init__(
        self,
        client: Client,
        layout: Layout,
        timeout_seconds: float,
        writer: str,
        record: Callable[[Node], m.CreateOp] | None = None,
        dry_run: bool = False,
    ) -> None:
        self._record = record
        self._dry_run = dry_run
        self.writer = writer
        self._client = client
        self._side: SideConnection | None = None
        self._layout = layout
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._views: dict[str, FolderView] = {}

    def path(self, name: str, key: str) -> str:
        return f"{self._layout.fleet.document_set(name)}/{key}"

    def view(self, name: str, parse: Parse, on_change: OnChange) -> FolderView:
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
        is_mine: Callable[[m.NodeRead], bool],
        guess: m.NodeRead | None,
    ) -> int:
        folder = self._layout.fleet.document_set(name)
        path = f"{folder}/{key}"
        client = self._client
        root = self._layout.root
        made = False
        if self._record is not None:
            guess = None  # the entry in the action log must name the replaced version

        def decided(node: Node) -> list[m.Op] | None:
            nonlocal made
            ops = decide(node)
            if ops and isinstance(ops[0], m.CreateOp) and not made:
                made = True
                make_folder(client, folder)
            return [*ops, self._record(node)] if ops and self._record is not None else ops

        def perform() -> int:
            if self._dry_run:
                decide(read(client, path))
                return 0
            answer = change(client, path, decided, root=root, is_mine=is_mine, guess=guess)
            return answer.zxid if answer is not None else 0

        return at_home(perform)

    def close(self) -> None:
        if self._side is not None:
            self._side.close()
        else:
            self._client.stop()
            self._client.close()


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A stored document."""

    value: Any
    # User and host of the writer; "" if unknown.
    by: str
    # Unix time of the write, by the writer's clock; 0 if unknown.
    at: float


class Documents(Mapping[str, Any]):
    """A set of documents: a mapping from names to JSON values that all processes share.

    Reads return a value from memory. Treat the value as read-only, because other readers get the
    same object. The first use waits for a complete copy. While the coordinator is unreachable, the
    copy stays readable, and `ltime` does not change.

    Any number of threads and greenlets may use a set. A forked child opens its own connection.
    """

    def __init__(self, name: str, store: Callable[[], DocumentStore]) -> None:
        self.name = checked_name("set of documents", name)
        self._store = store
        self._listeners: list[Callable[[str, Any], object]] = []

    # --- reading --------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """Return the value of a document.

        :raises KeyError: the document does not exist.
        :raises DocumentUnreadableError: the node does not hold a document.
        """
        entry = self._current().entries[name]
        if entry.fault is not None:
            raise DocumentUnreadableError(name=name, reason=entry.fault)
        return entry.value.value

    def __iter__(self) -> Iterator[str]:
        """Return the names of the documents in arbitrary order."""
        return iter(list(self._current().entries))

    def __len__(self) -> int:
        return len(self._current().entries)

    def version(self, name: str) -> int | None:
        """Return the version of a document for `if_version`; None for a missing document."""
        entry = self._current().entries.get(name)
        return None if entry is None else entry.version

    def entries(self) -> dict[str, CopiedNode]:
        """Return the copied nodes by name; `CopiedNode.value` is a `StoredDocument`."""
        return dict(self._current().entries)

    @property
    def ltime(self) -> int:
        """The logical time up to which the copy has every write."""
        return self._current().ltime

    def fresh(self, ltime: int | None = None, timeout_seconds: float = 15.0) -> int:
        """Wait until the copy has all writes up to a time; return the time of the copy.

        :param ltime: the time that `put` returned in any process; None to wait for all writes
            before this call.
        :raises StaleCopyError: the copy lacks writes after the timeout.
        """
        warn_if_blocking()
        limit = checked_timeout(timeout_seconds)
        view = self._current()
        is_new = ltime is not None and view.ltime >= ltime
        if not is_new and not self._store().fresh(view, ltime, limit):
            raise StaleCopyError(what=f"documents {self.name!r}", seconds=limit)
        return view.ltime

    afresh = twin(fresh)

    def on_change(self, function: Callable[[str, Any], object]) -> Callable[[str, Any], object]:
        """Call a function with the name and the value of each changed document.

        The value of a deleted document is None.

        The calls begin with the first change after the first read of the set. The function runs on
        the thread of the connection and should be fast. qdo logs its exceptions.

        :raises UsageError: the argument is not a function, or is an ``async def`` function, which
            would never run.
        """
        check_hook(function, ("name", "value"), f"on_change of documents {self.name!r}")
        self._listeners.append(function)
        return function

    # --- writing --------------------------------------------------------------------------

    def put(self, name: str, value: Any, *, if_version: int | None = ANY) -> int:
        """Write a document; return the time of the write, for `fresh` in other processes.

        :param value: a JSON value.
        :param if_version: write only if the document has this version. With None, write only if the
            document is missing.
        :raises DocumentConflictError: the document has another version.
        :raises DocumentValueError: JSON cannot hold the value, or the value is too large.
        :raises SetFullError: the set already has the maximum number of documents.
        :raises NodeRefusedError: the account at the coordinator may not write the document.
        :raises CoordinatorUnreachableError: the coordinator does not respond. The write may still
            take effect later.
        """
        warn_if_blocking()
        # Without a condition, the write needs neither a version nor an earlier read.
        blind = m.NodeRead(b"", m.ANY_VERSION) if if_version == ANY else None
        return self._write(name, lambda node: value, if_version, blind)

    aput = twin(put)

    def change(self, name: str, function: Callable[[Any], Any]) -> int:
        """Replace a document's value by the result of a function; return the time of the write.

        The function gets the present value, or None for a missing document, and may modify the
        value. If another process writes at the same time, qdo calls the function again with the
        newer value.

        :raises: as `put`, and the errors of the function.
        """

        warn_if_blocking()

        def changed(node: Node) -> Any:
            return function(_value_of(name, node) if isinstance(node, m.NodeRead) else None)

        return self._write(name, changed, ANY)

    achange = twin(change)

    def delete(self, name: str, *, if_version: int = ANY) -> None:
        """Delete a document.

        :raises NotFoundError: the document does not exist.
        :raises: as `put`.
        """
        warn_if_blocking()
        path = self._path(name)
        tried = False

        def decide(node: Node) -> list[m.Op] | None:
            nonlocal tried
            if isinstance(node, m.NodeMissing):
                if tried:
                    return None  # the answer was lost, or another process has deleted it
                raise NotFoundError(what="document", name=name)
            tried = True
            _check_version(name, node, if_version)
            return [m.DeleteOp(path, node.version)]

        self._store().perform(self.name, name, decide, lambda node: False, None)

    adelete = twin(delete)

    def _write(
        self,
        name: str,
        make: Callable[[Node], Any],
        if_version: int | None,
        guess: m.NodeRead | None = None,
    ) -> int:
        path = self._path(name)
        id = uuid.uuid4().hex
        mine = id.encode()

        def decide(node: Node) -> list[m.Op]:
            _check_version(name, node, if_version)
            data = _encoded(name, make(node), id, self._store().writer)
            if isinstance(node, m.NodeRead):
                return [m.SetOp(path, data, node.version)]
            if not self._current().has_room(len(data)):
                raise SetFullError(name=self.name, documents=MAX_NODES, mebibytes=MAX_BYTES >> 20)
            # A write returns its place in the coordinator's order, but a creation does not.
            return [m.CreateOp(path, b""), m.SetOp(path, data, 0)]

        return self._store().perform(self.name, name, decide, lambda node: mine in node.data, guess)

    def _path(self, name: str) -> str:
        return self._store().path(self.name, checked_name("document", name))

    def _current(self) -> FolderView:
        return self._store().view(self.name, _parsed, self._notify)

    def _notify(self, view: FolderView, name: str) -> None:
        if not view.ltime:
            return  # the first copy is not a change
        entry = view.entries.get(name)
        for listener in self._listeners:
            try:
                value = None if entry is None or entry.fault else entry.value.value
                check_done(listener(name, value), listener, "listener")
            except Exception:  # noqa: BLE001 - the code of an app must not stop the copy
                _log.exception(
                    "a listener of documents %s failed for %s; the others are called",
                    self.name,
                    name,
                )


def _encoded(name: str, value: Any, id: str, writer: str) -> bytes:
    try:
        body = strict_json(value)
    except ValueError as error:
        found = f"a value that JSON cannot hold: {error}"
        raise DocumentValueError(name=name, limit=MAX_DOCUMENT_BYTES, found=found) from error
    about = {"id": id, "by": writer, "at": round(time.time(), 3)}
    data = b'{"value":%b,%b' % (body, ujson.dumps(about).encode()[1:])
    found = f"{len(body)} bytes" if len(body) > MAX_DOCUMENT_BYTES else ""
    if not found and load(data)[1] is not None:
        found = "more levels"
    if found:
        raise DocumentValueError(name=name, limit=MAX_DOCUMENT_BYTES, found=found)
    return data


def _parsed(data: bytes) -> StoredDocument:
    if len(data) > 2 * MAX_DOCUMENT_BYTES:
        raise ValueError(f"it has {len(data)} bytes")
    value, fault = load(data)
    if fault is not None:
        raise ValueError(fault)
    if "value" not in value:
        raise ValueError("the value must be a JSON object with the key 'value'")
    return StoredDocument(
        value["value"], text_of(value.get("by")), unix_time(value.get("at")) or 0.0
    )


def _value_of(name: str, node: m.NodeRead) -> Any:
    try:
        return _parsed(node.data).value
    except ValueError as error:
        raise DocumentUnreadableError(name=name, reason=str(error)) from error


def _check_version(name: str, node: Node, if_version: int | None) -> None:
    version = node.version if isinstance(node, m.NodeRead) else None
    if if_version in (ANY, version):
        return
    by = text_of(load(node.data)[0].get("by")) if isinstance(node, m.NodeRead) else ""
    raise DocumentConflictError(
        name=name,
        expected="not exist" if if_version is None else f"have version {if_version}",
        found="no such document" if version is None else f"version {version}",
        writer=f", written by {by}" if by else "",
    )
