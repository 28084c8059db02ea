"""The settings of the app: its jobs and queues, and where its messages and its state are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qdo.settings import checks
from qdo.settings.checks import Check


def setting(
    default: Any, help: str, check: Check | None = None, unit: str = "", *, live: bool = False
) -> Any:
    """Declare a setting.

    :param live: whether it may be changed while processes run, see `qdo.settings.live_toml`.
    """
    about = {"help": help, "check": check, "unit": unit, "live": live}
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class AppSettings:
    """The first part of `Settings`: what commands and senders need, too."""

    app: str = setting(
        "",
        "the app: MODULE:APP, whose settings in code then apply, or only the name of its znode",
        checks.app,
    )
    job: str = setting(
        "",
        "the function to call for each message, MODULE:FUNCTION; needs `app`",
        checks.import_reference,
    )
    job_context: str = setting(
        "",
        "context manager whose value is passed to jobs as context, MODULE:FUNCTION",
        checks.import_reference,
    )
    job_failure: str = setting(
        "", "function called after every failed attempt, MODULE:FUNCTION", checks.import_reference
    )
    queues: tuple[str, ...] = setting(
        ("*",),
        "take only queues that match one of these globs: * any text, ? one character, [ab] either",
        checks.non_empty_globs,
    )
    exclude: tuple[str, ...] = setting(
        (), "leave queues that match one of these globs to other workers", checks.globs
    )
    broker: str = setting(
        "sqlite:qdo-data/messages.db",
        "where messages are stored: sqlite:PATH, postgresql://USER@HOST/DATABASE, "
        "sqs://REGION/PREFIX?OPTION=VALUE&... or kinesis://REGION/STREAM?OPTION=VALUE&...",
        checks.broker_url,
    )
    coordinator: str = setting(
        "sqlite:qdo-data/coordination.db",
        "where shared state is stored: sqlite:PATH for one machine, or "
        "zookeeper://HOST:PORT,HOST:PORT/CHROOT",
        checks.coordinator_url,
    )
    coordinator_ca: str = setting(
        "",
        "PEM file with the certificate authorities of ZooKeeper's servers; turns TLS on",
    )
    coordinator_cert: str = setting("", "PEM file with this client's certificate for TLS")
    coordinator_key: str = setting("", "PEM file with the private key of `coordinator_cert`")
    coordinator_verify: str = setting(
        "host",
        "what a server's certificate must fit: host, the host in the address, or ca, only "
        "`coordinator_ca`",
        checks.one_of("host", "ca"),
    )
    coordinator_auth: str = setting(
        "", "account at the coordinator: digest:NAME or sasl:NAME", checks.account
    )
    coordinator_password_file: str = setting(
        "",
        "file with the password of this account; the variable QDO_COORDINATOR_PASSWORD overrides "
        "it",
    )
    acl: str = setting(
        "open",
        "rights on new nodes: open, all for everybody; account, by role; required, by role, and "
        "workers refuse nodes that others can change",
        checks.one_of("open", "account", "required"),
    )
    acl_workers: tuple[str, ...] = setting(
        (), "accounts with all rights; without, this client's own account", checks.accounts
    )
    acl_operators: tuple[str, ...] = setting(
        (),
        "accounts that may read all nodes, seek, pause and delete queues",
        checks.accounts,
    )
    acl_monitors: tuple[str, ...] = setting((), "accounts that may read all nodes", checks.accounts)
    acl_senders: tuple[str, ...] = setting(
        (), "accounts that may notify the owners of queues (`doorbell`)", checks.accounts
    )
    group: str = setting(
        "", "group of users that share new files of broker and coordinator; without, only this user"
    )
    namespace: str = setting(
        "/mozilla/services/qdo", "znode below which every app has its own znode", checks.namespace
    )
    keys: str = setting(
        "", "file with keys, made with `qdo keys`; processes read it again when it changes"
    )
    encrypt: tuple[str, ...] = setting(
        (),
        "what senders encrypt with the first key of `keys`: bodies",
        checks.some_of("bodies"),
    )
    require_encryption: bool = setting(
        False, "workers treat a body in clear as one that cannot be decoded; needs `keys`"
    )
    hide: tuple[str, ...] = setting(
        (),
        "what workers keep out of znodes: errors (the text after the kind of an error), hosts",
        checks.some_of("errors", "hosts"),
    )
