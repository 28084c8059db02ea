"""Makes the `Access` of coordinator clients from the settings, and checks these settings.

The password is not a setting, but comes from a file or an environment variable. Therefore lists of
settings, command lines and errors cannot show the password.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from qdo.coordination.access import (
    DIGEST,
    MONITORS,
    OPERATORS,
    SASL,
    SENDERS,
    WORKERS,
    Access,
    Account,
    NodeRights,
    Secret,
    Tls,
    has_sasl,
    identity_of,
)
from qdo.coordination.znodes.layout import Layout
from qdo.errors import SettingsError
from qdo.settings.settings import Settings
from qdo.settings.values import PASSWORD_VARIABLE, from_origin
from qdo.text import how_to_install

_ROLES = {
    WORKERS: "acl_workers",
    OPERATORS: "acl_operators",
    MONITORS: "acl_monitors",
    SENDERS: "acl_senders",
}
_MOST_PASSWORD_BYTES = 1000


def coordinator_access(settings: Settings, layout: Layout) -> Access:
    """Return the access for this app's clients; raise SettingsError for contradictory settings."""
    # Read the files each time, because a new session must use their current content.
    tls = _tls(settings)
    account = _account(settings)
    if tls is not None:
        try:
            tls.context()
        except OSError as error:
            raise _fault(
                settings,
                "coordinator_ca",
                f"a TLS file cannot be used: {error.strerror or error}; coordinator_ca, "
                "coordinator_cert and coordinator_key must be PEM files, and the key must fit the "
                "certificate and have no password",
            ) from error
    app = layout.root.rpartition("/")[2]
    return Access(tls, account, _rights(settings, layout, account), app)


def _fault(settings: Settings, name: str, reason: str) -> SettingsError:
    return SettingsError(name=name, reason=f"{reason}{from_origin(settings.origin(name))}")


def _has_servers(settings: Settings) -> bool:
    return settings.coordinator.startswith("zookeeper://")


def _tls(settings: Settings) -> Tls | None:
    cert = settings.coordinator_cert
    key = settings.coordinator_key
    verify = settings.coordinator_verify
    if cert and not key:
        raise _fault(settings, "coordinator_cert", "it needs coordinator_key; set both, or none")
    if key and not cert:
        raise _fault(settings, "coordinator_key", "it needs coordinator_cert; set both, or none")
    if not settings.coordinator_ca:
        unused = {"coordinator_cert": bool(cert), "coordinator_verify": verify != "host"}
        for name in unused:
            if unused[name]:
                raise _fault(settings, name, "it needs coordinator_ca, which turns TLS on")
        return None
    if not _has_servers(settings):
        raise _fault(
            settings,
            "coordinator_ca",
            "only ZooKeeper has this setting; remove it: the address of a PostgreSQL database takes"
            " sslmode and sslrootcert, and a file needs no TLS",
        )
    for name in ("coordinator_ca", "coordinator_cert", "coordinator_key"):
        if path := getattr(settings, name):
            _check_file(settings, name, path, secret=name == "coordinator_key")
    return Tls(settings.coordinator_ca, cert, key, verify == "host")


def _account(settings: Settings) -> Account | None:
    if not settings.coordinator_auth:
        if settings.coordinator_password_file:
            raise _fault(
                settings,
                "coordinator_password_file",
                "a password needs an account; set coordinator_auth",
            )
        return None
    scheme, _, name = settings.coordinator_auth.partition(":")
    if scheme == SASL and not _has_servers(settings):
        raise _fault(settings, "coordinator_auth", "only ZooKeeper has SASL; use digest:NAME")
    if scheme == SASL and not has_sasl():
        raise _fault(
            settings, "coordinator_auth", f"SASL needs a library; {how_to_install('sasl')}"
        )
    return Account(scheme, name, _password(settings))


def _password(settings: Settings) -> Secret:
    password = os.environ.get(PASSWORD_VARIABLE, "")
    if password:
        return Secret(password)
    path = settings.coordinator_password_file
    if not path:
        raise _fault(
            settings,
            "coordinator_auth",
            f"an account needs a password; set coordinator_password_file, or the environment "
            f"variable {PASSWORD_VARIABLE}",
        )
    _check_file(settings, "coordinator_password_file", path, secret=True)
    with open(path, "rb") as file:
        data = file.read(_MOST_PASSWORD_BYTES + 1)
    try:
        password = data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        password = ""
    if not password or not password.isprintable() or len(data) > _MOST_PASSWORD_BYTES:
        raise _fault(
            settings, "coordinator_password_file", f"{path} must contain one line with the password"
        )
    return Secret(password)


def _check_file(settings: Settings, name: str, path: str, *, secret: bool) -> None:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise _fault(
            settings, name, f"cannot read {path}: {error.strerror}; correct the path or its rights"
        ) from error
    if secret and mode & stat.S_IRWXO:
        raise _fault(
            settings, name, f"every user of this machine can use {path}; run `chmod o= {path}`"
        )


def _rights(settings: Settings, layout: Layout, account: Account | None) -> NodeRights:
    accounts = {role: _accounts(settings, name) for role, name in _ROLES.items()}
    if settings.acl == "open":
        for name in _ROLES.values():
            if getattr(settings, name):
                raise _fault(settings, name, 'it needs acl = "account" or "required"')
        return NodeRights(layout)
    if not accounts[WORKERS]:
        if account is None:
            raise _fault(
                settings,
                "acl",
                "the nodes need accounts; set coordinator_auth and its password, or acl_workers",
            )
        accounts[WORKERS] = (account.identity,)
    return NodeRights(layout, accounts, settings.acl == "required")


def _accounts(settings: Settings, name: str) -> tuple[Any, ...]:
    found = tuple(map(identity_of, getattr(settings, name)))
    if not _has_servers(settings) and any(each.scheme != DIGEST for each in found):
        raise _fault(settings, name, "only ZooKeeper has other accounts than digest")
    return found
