"""The rules of ZooKeeper's operations on a tree of znodes and their rights, without I/O.

A `Tree` represents one transaction on the database. A tree reads nodes through a `NodeSource`,
keeps the changes of operations, and answers like a ZooKeeper server. The errors and their order of
precedence are also the same. Each operation is atomic and gets a separate zxid.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Protocol

from kazoo.exceptions import (
    AuthFailedError,
    BadArgumentsError,
    BadVersionError,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
    UnimplementedError,
)
from kazoo.protocol.connection import CHANGED_EVENT, CHILD_EVENT, CREATED_EVENT, DELETED_EVENT
from kazoo.protocol.serialization import (
    CheckVersion,
    Create,
    Create2,
    Delete,
    Exists,
    GetACL,
    GetChildren,
    GetChildren2,
    GetData,
    SetACL,
    SetData,
    Sync,
    Transaction,
)
from kazoo.protocol.states import ZnodeStat
from kazoo.security import ACL as Entry
from kazoo.security import OPEN_ACL_UNSAFE, Permissions
from kazoo.security import Id as Identity

from qdo.coordination.extra_operations import MultiRead
from qdo.errors import QdoError

# The identity of a connection without authentication.
LOCAL = Identity("ip", "127.0.0.1")
ROOT = "/"
# The maximum size of an operation. Like ZooKeeper, drop the connection after a larger one.
MAX_OPERATION_BYTES = 0xFFFFF
EPHEMERAL = 1
SEQUENTIAL = 2
# An event's type (as in kazoo.protocol.connection) and path.
Event = tuple[int, str]
# The characters that ZooKeeper rejects. Java writes characters of more than 16 bits as surrogate
# pairs, which ZooKeeper also rejects.
_BAD = "\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\U0010ffff"
_VALID = re.compile(rf"/|(?:/(?!\.\.?(?:/|\Z))[^/{_BAD}]+)+")


def authenticate(scheme: str, credential: str) -> Identity:
    """Return the identity that a credential proves; raise AuthFailedError for an unknown scheme."""
    # As in ZooKeeper, a client that knows "user:password" is the user, without other proof.
    if scheme != "digest" or ":" not in credential:
        raise AuthFailedError
    user = credential.split(":", 1)[0]
    # ZooKeeper's format requires SHA-1.
    digest = hashlib.sha1(credential.encode(), usedforsecurity=False).digest()
    return Identity("digest", f"{user}:{base64.b64encode(digest).decode()}")


def normalize_acl(acl: Iterable[Entry] | None, identities: tuple[Identity, ...]) -> str | None:
    """Return the stored form of an access control list, without duplicates; None if it is open."""
    if acl is OPEN_ACL_UNSAFE:
        return None
    entries: list[list[int | str]] = []
    for perms, identity in acl or ():
        for scheme, name in _expand(identity, identities):
            if [perms, scheme, name] not in entries:
                entries.append([perms, scheme, name])
    if not entries:
        raise InvalidACLError
    if entries == [[Permissions.ALL, "world", "anyone"]]:
        return None
    return json.dumps(entries)


def _expand(identity: Identity, identities: tuple[Identity, ...]) -> list[Identity]:
    if identity.scheme == "auth":
        known = [each for each in identities if each.scheme == "digest"]
        if not known:
            raise InvalidACLError
        return known
    valid = {
        "world": identity.id == "anyone",
        "digest": identity.id.count(":") == 1,
        "ip": bool(identity.id),
    }
    if not valid.get(identity.scheme, False):
        raise InvalidACLError
    return [identity]


@functools.lru_cache(maxsize=1024)
def _parse(stored: str) -> tuple[Entry, ...]:
    return tuple(Entry(perms, Identity(scheme, name)) for perms, scheme, name in json.loads(stored))


def allows(stored: str | None, permission: int, identities: tuple[Identity, ...]) -> bool:
    if stored is None:
        return True
    return any(
        entry.perms & permission
        and (entry.id == Identity("world", "anyone") or entry.id in identities)
        for entry in _parse(stored)
    )


def shown_acl(stored: str | None, identities: tuple[Identity, ...]) -> list[Entry]:
    """Return an access control list; mask digests unless the client may change the list."""
    if stored is None:
        return list(OPEN_ACL_UNSAFE)
    entries = list(_parse(stored))
    if allows(stored, Permissions.ADMIN, identities):
        return entries
    return [
        Entry(entry.perms, Identity(entry.id.scheme, entry.id.id.split(":")[0] + ":x"))
        if entry.id.scheme == "digest"
        else entry
        for entry in entries
    ]


@dataclass(slots=True, eq=False)
class TreeNode:
    """A znode; it never changes after it has become part of a tree."""

    data: bytes | None
    acl: str | None
    czxid: int
    mzxid: int
    pzxid: int
    ctime: int
    mtime: int
    version: int
    creates: int
    aversion: int
    owner: int
    children: int

    def row(self) -> tuple[Any, ...]:
        return _FIELDS(self)

    def copy(self) -> TreeNode:
        return TreeNode(*self.row())

    def stat(self) -> ZnodeStat:
        # Sequence numbers count only creations. The version that clients see also counts deletions.
        return ZnodeStat(
            self.czxid,
            self.mzxid,
            self.ctime,
            self.mtime,
            self.version,
            2 * self.creates - self.children,
            self.aversion,
            self.owner,
            len(self.data) if self.data else 0,
            self.children,
            self.pzxid,
        )


_FIELDS: Callable[[TreeNode], tuple[Any, ...]] = attrgetter(
    *(each.name for each in fields(TreeNode))
)


class NodeSource(Protocol):
    """The source of a tree's unchanged nodes."""

    def node(self, path: str) -> TreeNode | None: ...

    def names(self, path: str) -> Iterable[str]: ...


def parent_of(path: str) -> str:
    """Return the path of a node's parent; the node must not be the root."""
    return path[: path.rindex("/")] or ROOT


@dataclass(slots=True)
class TreeResult:
    """The outcome of an operation: its result or error, and its events for watches in order."""

    result: Any = None
    error: KazooException | QdoError | None = None
    events: list[Event] = field(default_factory=list)


class Tree:
    """A transaction's view of all znodes; `zxid` is the number of the newest change."""

    def __init__(self, source: NodeSource, zxid: int, now_milliseconds: int) -> None:
        self.zxid = zxid
        self._source = source
        self._now = now_milliseconds
        self._nodes: dict[str, TreeNode | None] = {}
        self._journal: list[tuple[str, TreeNode | None]] = []
        self._events: list[Event] = []
        self._session = 0
        self._identities: tuple[Identity, ...] = ()

    def changes(self) -> dict[str, TreeNode | None]:
        return {path: self._nodes[path] for path, _ in self._journal}

    def perform(self, operation: Any, session: int, identities: tuple[Identity, ...]) -> TreeResult:
        self._session = session
        self._identities = identities
        mark = len(self._journal)
        self._events = []
        try:
            result = _RULES.get(type(operation), _unimplemented)(self, operation)
        except KazooException as error:
            self._undo(mark)
            return TreeResult(error=error)
        if len(self._journal) > mark:
            self.zxid += 1
        return TreeResult(result, events=self._events)

    def end_session(self, paths: Iterable[str]) -> list[Event]:
        """Delete the ephemeral nodes of a session that has ended."""
        self._events = []
        mark = len(self._journal)
        for path in paths:
            if self._find(path) is not None:
                self._remove(path)
        if len(self._journal) > mark:
            self.zxid += 1
        return self._events

    # --- the state of the transaction -------------------------------------------------

    def _find(self, path: str) -> TreeNode | None:
        try:
            return self._nodes[path]
        except KeyError:
            node = self._nodes[path] = self._source.node(path)
            return node

    def _get(self, path: str) -> TreeNode:
        node = self._find(path)
        if node is None:
            raise NoNodeError
        return node

    def _put(self, path: str, node: TreeNode | None) -> None:
        self._journal.append((path, self._find(path)))
        self._nodes[path] = node

    def _undo(self, mark: int) -> None:
        while len(self._journal) > mark:
            path, node = self._journal.pop()
            self._nodes[path] = node

    def _check(self, node: TreeNode, permission: int) -> None:
        if node.acl is not None and not allows(node.acl, permission, self._identities):
            raise NoAuthError

    # --- changes ----------------------------------------------------------------------

    def _create(self, operation: Create | Create2) -> str:
        path = str(operation.path)
        if "/" not in path or "\0" in path:
            raise BadArgumentsError
        parent_path = parent_of(path)
        rights = normalize_acl(operation.acl, self._identities)
        parent = self._get(parent_path)
        self._check(parent, Permissions.CREATE)
        if operation.flags & SEQUENTIAL:
            path = f"{path}{parent.creates:010d}"
        _require_valid(path)
        if operation.flags & ~(SEQUENTIAL | EPHEMERAL):
            raise UnimplementedError
        if self._find(path) is not None:
            raise NodeExistsError
        if parent.owner:
            raise NoChildrenForEphemeralsError
        self._add(path, operation, rights)
        return path

    def _add(self, path: str, operation: Create | Create2, rights: str | None) -> None:
        zxid = self.zxid + 1
        owner = self._session if operation.flags & EPHEMERAL else 0
        now = self._now
        self._put(
            path, TreeNode(operation.data, rights, zxid, zxid, zxid, now, now, 0, 0, 0, owner, 0)
        )
        parent_path = parent_of(path)
        parent = self._get(parent_path).copy()
        parent.creates = _counted(parent.creates)
        parent.children = _counted(parent.children)
        parent.pzxid = zxid
        self._put(parent_path, parent)
        self._events += ((CREATED_EVENT, path), (CHILD_EVENT, parent_path))

    def _create2(self, operation: Create2) -> tuple[str, ZnodeStat]:
        path = self._create(operation)
        return path, self._get(path).stat()

    def _delete(self, operation: Delete) -> bool:
        path = str(operation.path)
        if "/" not in path or "\0" in path or path == ROOT:
            raise BadArgumentsError
        parent = self._get(parent_of(path))
        self._check(parent, Permissions.DELETE)
        node = self._get(path)
        _require_version(node.version, operation.version)
        if node.children:
            raise NotEmptyError
        self._remove(path)
        return True

    def _remove(self, path: str) -> None:
        parent_path = parent_of(path)
        parent = self._get(parent_path).copy()
        parent.children = _counted(parent.children, -1)
        parent.pzxid = self.zxid + 1
        self._put(path, None)
        self._put(parent_path, parent)
        self._events += ((DELETED_EVENT, path), (CHILD_EVENT, parent_path))

    def _set_data(self, operation: SetData) -> ZnodeStat:
        path = operation.path
        _require_valid(path)
        node = self._get(path)
        self._check(node, Permissions.WRITE)
        _require_version(node.version, operation.version)
        node = node.copy()
        node.data = operation.data
        node.mzxid = self.zxid + 1
        node.mtime = self._now
        node.version = _counted(node.version)
        self._put(path, node)
        self._events.append((CHANGED_EVENT, path))
        return node.stat()

    def _set_acl(self, operation: SetACL) -> ZnodeStat:
        _require_valid(operation.path)
        rights = normalize_acl(operation.acls, self._identities)
        node = self._get(operation.path)
        self._check(node, Permissions.ADMIN)
        _require_version(node.aversion, operation.version)
        node = node.copy()
        node.acl = rights
        node.aversion = _counted(node.aversion)
        self._put(operation.path, node)
        return node.stat()

    def _check_version(self, operation: CheckVersion) -> bool:
        _require_valid(operation.path)
        node = self._get(operation.path)
        self._check(node, Permissions.READ)
        _require_version(node.version, operation.version)
        return True

    def _transaction(self, transaction: Transaction) -> list[Any]:
        mark = len(self._journal)
        results: list[Any] = []
        for operation in transaction.operations:
            try:
                results.append(_OPERATIONS[type(operation)](self, operation))
            except KazooException as error:
                self._undo(mark)
                self._events.clear()
                after = len(transaction.operations) - len(results) - 1
                return [
                    *(RolledBackError() for _ in results),
                    error,
                    *(RuntimeInconsistency() for _ in range(after)),
                ]
        return results

    # --- reads ------------------------------------------------------------------------

    def _exists(self, operation: Exists) -> ZnodeStat | None:
        node = self._find(operation.path)
        return None if node is None else node.stat()

    def _get_data(self, operation: GetData) -> tuple[bytes | None, ZnodeStat]:
        node = self._get(operation.path)
        self._check(node, Permissions.READ)
        return node.data, node.stat()

    def _get_many(self, operation: MultiRead) -> list[Any]:
        found: list[Any] = []
        for each in operation.reads:
            try:
                found.append(self._get_data(each))
            except KazooException as error:
                found.append(error)
        return found

    def _get_acl(self, operation: GetACL) -> tuple[list[Any], ZnodeStat]:
        node = self._get(operation.path)
        self._check(node, Permissions.READ | Permissions.ADMIN)
        return shown_acl(node.acl, self._identities), node.stat()

    def _get_children(self, operation: GetChildren) -> list[str]:
        return self._get_children2(operation)[0]

    def _get_children2(self, operation: GetChildren | GetChildren2) -> tuple[list[str], ZnodeStat]:
        path = operation.path
        node = self._get(path)
        self._check(node, Permissions.READ)
        names = dict.fromkeys(self._source.names(path))
        for changed, _ in self._journal:
            if changed != ROOT and parent_of(changed) == path:
                name = changed[changed.rindex("/") + 1 :]
                if self._nodes[changed] is None:
                    names.pop(name, None)
                else:
                    names[name] = None
        return list(names), node.stat()

    def _sync(self, operation: Sync) -> str:
        return str(operation.path)


def paths_of(operations: Iterable[Any]) -> tuple[set[str], set[str]]:
    """Return the paths of nodes that operations read or change, and of nodes to list.

    The paths are a hint for a source that reads many nodes at once. The result excludes new
    sequential nodes, because their names are not known yet.
    """
    nodes: set[str] = set()
    listed: set[str] = set()
    for operation in operations:
        if isinstance(operation, Transaction):
            parts = paths_of(operation.operations)
        elif isinstance(operation, MultiRead):
            parts = paths_of(operation.reads)
        else:
            path = str(getattr(operation, "path", ROOT))
            parts = {path}, {path} if isinstance(operation, (GetChildren, GetChildren2)) else set()
            if isinstance(operation, (Create, Create2, Delete)) and "/" in path:
                parts[0].add(parent_of(path))
        nodes |= parts[0]
        listed |= parts[1]
    return {*filter(is_valid, nodes)}, {*filter(is_valid, listed)}


def is_valid(path: str) -> bool:
    """Return whether a node can have a path."""
    return _VALID.fullmatch(path) is not None


def _require_valid(path: str) -> None:
    if not is_valid(path):
        raise BadArgumentsError


def _counted(number: int, step: int = 1) -> int:
    """Count in 32 bits like ZooKeeper; after the end of the range, wrap around."""
    return (number + step + 2**31) % 2**32 - 2**31


def _require_version(found: int, expected: int) -> None:
    if expected not in (-1, found):
        raise BadVersionError


_OPERATIONS: dict[type, Callable[[Tree, Any], Any]] = {
    Create: Tree._create,
    Delete: Tree._delete,
    SetData: Tree._set_data,
    CheckVersion: Tree._check_version,
}
# The operations that need the write lock. Even transactions of only checks need it; see `session`.
CHANGING: dict[type, Callable[[Tree, Any], Any]] = {
    Create: Tree._create,
    Create2: Tree._create2,
    Delete: Tree._delete,
    SetData: Tree._set_data,
    SetACL: Tree._set_acl,
    Transaction: Tree._transaction,
}


def _unimplemented(tree: Tree, operation: Any) -> Any:
    raise UnimplementedError


_RULES: dict[type, Callable[[Tree, Any], Any]] = {
    **CHANGING,
    Exists: Tree._exists,
    GetData: Tree._get_data,
    MultiRead: Tree._get_many,
    GetACL: Tree._get_acl,
    GetChildren: Tree._get_children,
    GetChildren2: Tree._get_children2,
    Sync: Tree._sync,
}
