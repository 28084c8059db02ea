"""A client's access to the coordinator: TLS, the account, and the rights on each node.

`qdo.settings.coordinator_access` makes an `Access` from the settings.
`qdo.coordination.client.connect` passes the `Access` to the client.

Every node has an access control list. The list gives each account rights according to its role.

==========  ===================================================================================
role        rights
==========  ===================================================================================
workers     all, on every node
operators   read every node; write queues, workers, ``holds``, ``settings`` and documents; create
            documents, versions of settings, actions and entries of the action log; delete queues,
            documents and ``broker``
monitors    read every node
senders     create and write doorbells; read documents
==========  ===================================================================================

An account may have several roles. The nodes above the app's node (chroot and namespace) belong to
all apps. All accounts may read these nodes and create nodes below them.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kazoo.protocol.connection import PURESASL_AVAILABLE
from kazoo.security import ACL, OPEN_ACL_UNSAFE, Id, Permissions
from kazoo.security import Id as Identity

from qdo.coordination.znodes.layout import Layout
from qdo.errors import SettingsError

WORKERS = "workers"
OPERATORS = "operators"
MONITORS = "monitors"
SENDERS = "senders"
_READ = Permissions.READ
_WRITE = Permissions.WRITE
_CREATE = Permissions.CREATE
_DELETE = Permissions.DELETE
_CHANGE = _WRITE | _CREATE | _DELETE | Permissions.ADMIN
_WORLD = Id("world", "anyone")
_LETTERS = ((_CREATE, "c"), (_DELETE, "d"), (_READ, "r"), (_WRITE, "w"), (Permissions.ADMIN, "a"))
DIGEST = "digest"
SASL = "sasl"
# Matches the hash that follows the name of a digest account.
_HASH = re.compile(r"(?<=:)[A-Za-z0-9+/]{27}=")


@dataclass(frozen=True, slots=True)
class NodeRights:
    """The access control lists of the nodes of one app."""

    layout: Layout
    # The accounts of each role. If None, every node is open to everyone.
    accounts: Mapping[str, tuple[Id, ...]] | None = None
    # Whether workers refuse nodes that accounts without a role can change.
    required: bool = False
    _lists: dict[tuple[tuple[str, int], ...], list[ACL]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def of(self, path: str) -> list[ACL]:
        if self.accounts is None:
            return OPEN_ACL_UNSAFE
        rights = self._rights(path)
        key = tuple(rights.items())
        if key not in self._lists:
            self._lists[key] = self._list(rights)
        return self._lists[key]

    def stranger(self, acl: Iterable[ACL]) -> str | None:
        """Return an account without a role that may change a node with a given list, or None."""
        known = {each for accounts in (self.accounts or {}).values() for each in accounts}
        for each in acl:
            if each.perms & _CHANGE and each.id not in known:
                return "everybody" if each.id == _WORLD else acl_text([each])
        return None

    def _rights(self, path: str) -> dict[str, int]:
        """Return the rights of each role; the key "" means everyone."""
        layout = self.layout
        if not f"{path}/".startswith(f"{layout.root}/"):
            return {WORKERS: Permissions.ALL, "": _READ | _CREATE}
        rights = {WORKERS: Permissions.ALL, OPERATORS: _READ, MONITORS: _READ}
        folder = path.rpartition("/")[0]
        if folder in (layout.queues, layout.workers) or path in (
            layout.fleet.holds,
            layout.assignments,
        ):
            rights[OPERATORS] |= _WRITE
        elif path == layout.queues:
            rights[OPERATORS] |= _WRITE | _DELETE
        elif path == layout.fleet.settings:
            rights[OPERATORS] |= _WRITE | _CREATE
        elif path == layout.root:
            rights[OPERATORS] |= _DELETE
        elif f"{path}/".startswith(f"{layout.fleet.documents}/"):
            rights[OPERATORS] |= _WRITE | _CREATE | _DELETE
            rights[SENDERS] = _READ
        elif layout.fleet.actions in (path, folder) or path == layout.fleet.actionlog:
            rights[OPERATORS] |= _CREATE
        elif path == layout.fleet.limits:
            rights[OPERATORS] |= _CREATE | _DELETE
        elif folder == layout.fleet.limits:
            rights[OPERATORS] |= _WRITE
        elif path == layout.doorbells:
            rights[SENDERS] = _CREATE
        elif folder == layout.doorbells:
            rights[SENDERS] = _WRITE
        return rights

    def _list(self, rights: Mapping[str, int]) -> list[ACL]:
        merged: dict[Id, int] = {}
        for role, permissions in rights.items():
            for account in (self.accounts or {}).get(role, ()) if role else (_WORLD,):
                merged[account] = merged.get(account, 0) | permissions
        return [ACL(permissions, account) for account, permissions in merged.items()]


def same_list(one: Iterable[ACL], other: Iterable[ACL]) -> bool:
    """Return whether two lists give the same rights."""
    # ZooKeeper masks digests for accounts that may not change the list. Compare masked lists by
    # name.
    lists = [*one], [*other]
    masked = any(each.id.id.endswith(":x") for acl in lists for each in acl)
    first, second = (_merged(acl, masked) for acl in lists)
    return first == second


def _merged(acl: Iterable[ACL], masked: bool = False) -> dict[tuple[str, str], int]:
    """Return the rights of each account; if `masked`, omit digests from the names."""
    merged: dict[tuple[str, str], int] = {}
    for each in acl:
        scheme = each.id.scheme
        name = each.id.id
        key = scheme, name.partition(":")[0] if masked and scheme == "digest" else name
        merged[key] = merged.get(key, 0) | each.perms
    return merged


def acl_text(acl: Iterable[ACL]) -> str:
    """Format a list like zkCli.sh, without digests: ``sasl:app:cdrwa,world:anyone:r``."""
    return ",".join(
        f"{scheme}:{name}:" + "".join(letter for bit, letter in _LETTERS if permissions & bit)
        for (scheme, name), permissions in sorted(_merged(acl, masked=True).items())
    )


def identity_of(text: str) -> Identity:
    """Parse SCHEME:ID, an account in access control lists."""
    return Identity(*text.split(":", 1))


class Secret(str):
    """A string with a masked repr, because kazoo logs the arguments of requests."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def hide_digests(record: logging.LogRecord) -> bool:
    """Remove the hashes of digest accounts from a log record of kazoo; a log filter."""
    # At the level DEBUG, kazoo logs the access control list of each node that it creates or reads.
    text = record.getMessage()
    shown = _HASH.sub("***", text)
    if shown != text:
        record.msg = shown
        record.args = ()
    return True


@dataclass(frozen=True, slots=True)
class Account:
    """The account of a client; `scheme` is DIGEST or SASL."""

    scheme: str
    name: str
    password: Secret

    @property
    def identity(self) -> Identity:
        if self.scheme == SASL:
            return Identity(SASL, self.name)
        # ZooKeeper's format requires SHA-1.
        credential = f"{self.name}:{self.password}".encode()
        digest = base64.b64encode(hashlib.sha1(credential, usedforsecurity=False).digest())
        return Identity(DIGEST, f"{self.name}:{digest.decode()}")

    def __str__(self) -> str:
        return f"{self.scheme}:{self.name}"

    def options(self) -> dict[str, Any]:
        if self.scheme == DIGEST:
            return {"auth_data": [(DIGEST, Secret(f"{self.name}:{self.password}"))]}
        login = {"username": self.name, "password": self.password}
        return {"sasl_options": {"mechanism": "DIGEST-MD5", **login}}


@dataclass(frozen=True, slots=True)
class Tls:
    """The settings of TLS connections. The client checks the certificates of servers."""

    # The file with the only certificate authorities that the client trusts.
    ca: str
    # The file with the client's certificate; "" for none. `key` is the file with its private key.
    cert: str = ""
    key: str = ""
    # Whether the server's certificate must name the host in the coordinator's address.
    check_host: bool = True

    def context(self) -> ssl.SSLContext:
        """Read the files; raise OSError, or its subclass ssl.SSLError, if one is invalid."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.check_host
        context.load_verify_locations(self.ca)
        if self.cert:
            # Pass an empty password, because otherwise OpenSSL asks for a password at the terminal.
            context.load_cert_chain(self.cert, self.key, password="")
        return context


@dataclass(frozen=True, slots=True)
class Access:
    """A client's TLS, account and rights; without `rights`, nodes are open to everyone.

    :ivar app: the name of the app in lists of connections; "-" if unknown.
    """

    tls: Tls | None = None
    account: Account | None = None
    rights: NodeRights | None = None
    app: str = "-"

    def options(self) -> dict[str, Any]:
        return self.account.options() if self.account is not None else {}

    def acl_of(self, path: str) -> list[ACL]:
        """Return the access control list of a new node at a path below the chroot."""
        return OPEN_ACL_UNSAFE if self.rights is None else self.rights.of(path)

    def account_name(self) -> str:
        return "no account" if self.account is None else f"account {self.account}"


ANYBODY = Access()


def acl_rejected() -> SettingsError:
    """Return the error for an access control list that the coordinator rejects."""
    return SettingsError(
        name="acl",
        reason="the coordinator rejects the accounts in acl_workers, acl_operators, acl_monitors "
        "and acl_senders; its servers need the authentication provider of each (SASL, X.509)",
    )


def has_sasl() -> bool:
    return bool(PURESASL_AVAILABLE)
