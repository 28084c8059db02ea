"""How a client connects to the coordinator: TLS, its account, and the rights on nodes it creates.

`qdo.settings.coordinator_access` makes an `Access` from the settings. Every client gets one through
`qdo.coordination.client.connect`.
"""

from __future__ import annotations

import base64
import hashlib
import ssl
from dataclasses import dataclass
from typing import Any

from kazoo.protocol.connection import PURESASL_AVAILABLE
from kazoo.security import ACL, OPEN_ACL_UNSAFE
from kazoo.security import Id as Identity

from qdo.coordination.znodes.rights import NodeRights
from qdo.errors import SettingsError

DIGEST, SASL = "digest", "sasl"


def identity_of(text: str) -> Identity:
    """Return an account in access control lists from SCHEME:ID."""
    return Identity(*text.split(":", 1))


class Secret(str):
    """A text that logs and tracebacks do not show: kazoo logs requests with their arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


@dataclass(frozen=True, slots=True)
class Account:
    """The account of a client.

    :ivar scheme: DIGEST or SASL.
    """

    scheme: str
    name: str
    password: Secret

    @property
    def identity(self) -> Identity:
        """The account in access control lists."""
        if self.scheme == SASL:
            return Identity(SASL, self.name)
        # The format of ZooKeeper, which requires SHA-1.
        credential = f"{self.name}:{self.password}".encode()
        digest = base64.b64encode(hashlib.sha1(credential, usedforsecurity=False).digest())
        return Identity(DIGEST, f"{self.name}:{digest.decode()}")

    def __str__(self) -> str:
        return f"{self.scheme}:{self.name}"

    def options(self) -> dict[str, Any]:
        """Return the options of kazoo's client."""
        if self.scheme == DIGEST:
            return {"auth_data": [(DIGEST, Secret(f"{self.name}:{self.password}"))]}
        login = {"username": self.name, "password": self.password}
        return {"sasl_options": {"mechanism": "DIGEST-MD5", **login}}


@dataclass(frozen=True, slots=True)
class Tls:
    """Encrypted connections to servers whose certificates are checked.

    :ivar ca: file with the only certificate authorities that count.
    :ivar cert: file with the client's own certificate, "" for none; `key` is its private key.
    :ivar check_host: the certificate must be for the host in the coordinator's address.
    """

    ca: str
    cert: str = ""
    key: str = ""
    check_host: bool = True

    def context(self) -> ssl.SSLContext:
        """Read the files.

        :raises OSError: a file cannot be used; ssl.SSLError is a subclass.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.check_host
        context.load_verify_locations(self.ca)
        if self.cert:
            # The empty password, which is not a secret: OpenSSL would ask for one at the terminal.
            context.load_cert_chain(self.cert, self.key, password="")  # nosec B106
        return context


@dataclass(frozen=True, slots=True)
class Access:
    """How a client connects.

    :ivar tls: None for plain connections.
    :ivar account: None for no account.
    :ivar rights: None: nodes are open to all.
    """

    tls: Tls | None = None
    account: Account | None = None
    rights: NodeRights | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of kazoo's client."""
        return self.account.options() if self.account is not None else {}

    def acl_of(self, path: str) -> list[ACL]:
        """Return the access control list of a new node at a path below the chroot."""
        return OPEN_ACL_UNSAFE if self.rights is None else self.rights.of(path)

    def account_name(self) -> str:
        """Return the account for errors."""
        return "no account" if self.account is None else f"account {self.account}"


ANYBODY = Access()


def acl_rejected() -> SettingsError:
    """Return the error to raise for an access control list that the coordinator rejects."""
    return SettingsError(
        name="acl",
        reason="the coordinator rejects the accounts in acl_workers, acl_operators, acl_monitors "
        "and acl_senders; its servers need the authentication provider of each (SASL, X.509)",
    )


def has_sasl() -> bool:
    """Return whether the library for SASL is installed."""
    return bool(PURESASL_AVAILABLE)
