"""Documents of an app under test, in memory: every write is seen at once."""

from __future__ import annotations

from collections.abc import Callable

from qdo.coordination.protocol.machine import (
    CheckOp,
    DeleteOp,
    NodeMissing,
    NodeRead,
    SetOp,
)
from qdo.fleet.document_store import Decide, OnChange, Parse
from qdo.fleet.protocol.folder_view import FolderView


class MemoryDocuments:
    """The store of documents of a TestKit."""

    writer = "TestKit"

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, NodeRead]] = {}
        self._views: dict[str, FolderView] = {}
        self._zxid = 0

    def path(self, name: str, key: str) -> str:
        return f"{name}/{key}"

    def view(self, name: str, parse: Parse, on_change: OnChange) -> FolderView:
        view = self._views.get(name)
        if view is None:
            view = FolderView(name, parse, lambda key: on_change(self._views[name], key))
            self._views[name] = view
            for key, node in self._nodes.get(name, {}).items():
                view.take(key, node)
            view.ltime = self._zxid = self._zxid + 1
        return view

    def fresh(self, view: FolderView, ltime: int | None, timeout_seconds: float) -> bool:
        return True

    def perform(
        self,
        name: str,
        key: str,
        decide: Decide,
        is_mine: Callable[[NodeRead], bool],
        guess: NodeRead | None,
    ) -> int:
        nodes = self._nodes.setdefault(name, {})
        ops = decide(nodes.get(key, NodeMissing()))
        self._zxid += 1
        for op in ops or ():
            if isinstance(op, DeleteOp):
                del nodes[key]
            elif not isinstance(op, CheckOp):
                version = op.version + 1 if isinstance(op, SetOp) else 0
                nodes[key] = NodeRead(op.data, version, self._zxid)
        if (view := self._views.get(name)) is not None:
            view.take(key, nodes.get(key, NodeMissing()))
            view.ltime = self._zxid
        return self._zxid
