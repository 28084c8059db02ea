"""The kinds of brokers, and the properties of each kind that qdo knows before opening a broker.

An installed package offers a kind by an entry point in the group `GROUP`: the name is the scheme of
the addresses, the value is a `BrokerKind`. qdo offers its own kinds in the same way.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdo.errors import SettingsError, UnsupportedError
from qdo.positions import TIME_POSITIONS, Positions
from qdo.queues import name_error
from qdo.system.native import check_no_eventlet
from qdo.text import describe, hide_credentials, how_to_install, wrong_form

if TYPE_CHECKING:
    from qdo.brokers.base import Broker

GROUP = "qdo.brokers"
# The entry points of qdo, which setup.py publishes. qdo reads them here, because a checkout has no
# metadata of its own, and reading that of 150 packages takes 30 ms, a sixth of a command's start.
_OWN = Path(__file__).with_name("entry_points.txt")


@dataclass(frozen=True, slots=True)
class BrokerSchema:
    """The schema of a broker that is a database; each function takes the broker's address."""

    # Returns the SQL statements that create the schema, given the duration of a partition in
    # seconds.
    script: Callable[[str, int], str]
    # Returns the action of `create`: "create", "upgrade" or ""; raises the errors of `create`.
    change: Callable[[str], str]
    # Creates or upgrades the schema; returns whether the schema has changed.
    create: Callable[[str, int], bool]
    # Returns the SQL statements that give a role the rights of a sender, worker or onlooker.
    grants: Callable[[str, str, str], list[str]]


@dataclass(frozen=True, slots=True)
class BrokerKind:
    """One kind of broker."""

    # Opens a broker, given the address and the app's name; see `open_broker`.
    open: Callable[[str, str], Broker]
    # Returns the reason why an address is invalid; None if it is valid.
    address_error: Callable[[str], str | None]
    # The form of addresses, such as ``sqlite:PATH``, for errors.
    form: str = ""
    # The meaning of the broker's positions.
    positions: Positions = TIME_POSITIONS
    # Returns the maximum time in seconds that the broker at an address needs to close.
    closing_seconds: Callable[[str], float] = lambda url: 0.0
    # Returns the stream that the queues of an address form; None if each queue is separate. A
    # worker may receive a message from another queue of the stream than the named queue.
    stream: Callable[[str], str | None] = lambda url: None
    # Whether other programs may send to the broker; see `encryption.marks`.
    foreign_senders: bool = False
    # Whether keys may contain NUL characters.
    stores_nul: bool = True
    stores_requests: bool = True
    stores_streams: bool = True
    # Whether the broker at an address can store dead letters.
    keeps_dead_letters: Callable[[str], bool] = lambda url: True
    # The way for an operator to limit the dead letters, if qdo cannot limit them; else "".
    dead_letter_remedy: str = ""
    # The schema; None if opening a broker creates all that the broker needs.
    schema: BrokerSchema | None = None
    # Returns a function that opens a DB-API 2.0 connection to the database at an address, for
    # native threads. The value is None if the broker is not a database for other tables.
    connector: Callable[[str], Callable[[], Any]] | None = None


def parse_error(parse: Callable[[str], object], url: str) -> str | None:
    """Return the reason of the `SettingsError` that a parser raises for an address, or None."""
    try:
        parse(url)
    except SettingsError as error:
        return str(error.details["reason"])
    return None


def missing_library(error: ImportError, extra: str) -> SettingsError:
    reason = f"this broker needs a library ({error}); {how_to_install(extra)}"
    return SettingsError(name="broker", reason=reason)


@functools.cache
def _own() -> Mapping[str, str]:
    _, *lines = _OWN.read_text(encoding="utf-8").splitlines()
    return dict(line.split(" = ") for line in lines)


@functools.cache
def _installed() -> Mapping[str, str]:
    """Return the entry points of all packages by scheme; another package cannot replace qdo's."""
    from importlib.metadata import entry_points

    found = {each.name: each.value for each in entry_points(group=GROUP)}
    return {**_own(), **found, **_own()}


@functools.cache
def _load(scheme: str) -> BrokerKind:
    """Return the kind with a scheme that exists; raise SettingsError if its package is broken."""
    entry = _own().get(scheme) or _installed()[scheme]
    remedy = f"repair or uninstall the package that offers {scheme}"
    try:
        kind = pkgutil.resolve_name(entry)
    except Exception as error:
        reason = f"cannot load {entry} ({describe(error)}); {remedy}"
        raise SettingsError(name="broker", reason=reason) from error
    if not isinstance(kind, BrokerKind):
        reason = f"{entry} must be a BrokerKind, got {kind!r:.100}; {remedy}"
        raise SettingsError(name="broker", reason=reason)
    return kind


def _form(scheme: str) -> str:
    try:
        return _load(scheme).form or f"{scheme}://..."
    except SettingsError:  # a broken package must not hide the other kinds
        return f"{scheme}://..."


def _form_error(url: str) -> str:
    forms = dict.fromkeys(map(_form, _installed()))
    return wrong_form(url, *forms, other="; for another kind of broker, install its package")


def _rejecting(address_error: Callable[[str], str | None]) -> BrokerKind:
    def reject(url: str, app: str) -> Broker:
        raise SettingsError(name="broker", reason=str(address_error(url)))

    return BrokerKind(open=reject, address_error=address_error)


@functools.lru_cache(maxsize=64)
def kind_of(url: str) -> BrokerKind:
    """Return the kind of the broker at `url`, without opening it."""
    # For an invalid address, return a kind with defaults. Opening its broker raises the error.
    scheme, colon, _ = url.partition(":")
    if not colon or not (scheme in _own() or scheme in _installed()):
        return _rejecting(_form_error)
    load_error = functools.partial(parse_error, lambda url: _load(scheme))
    if load_error(url) is not None:
        return _rejecting(load_error)
    kind = _load(scheme)
    if kind.address_error(url) is not None:
        return _rejecting(kind.address_error)
    return kind


def schema_of(url: str) -> BrokerSchema:
    """Return the schema functions for `url`; raise UnsupportedError if its broker has no schema."""
    schema = kind_of(url).schema
    if schema is None:
        what = "create a schema"
        remedy = "workers and senders create what they need"
        raise UnsupportedError(
            broker=f"the broker {hide_credentials(url)}", what=what, remedy=remedy
        )
    return schema


def connector_of(url: str) -> Callable[[], Any]:
    """Return a function that opens a plain connection to the database at `url`.

    :raises UnsupportedError: `url` is not the address of a database server.
    """
    connector = kind_of(url).connector
    if connector is None:
        what = "open a database for other tables"
        remedy = "name a PostgreSQL database"
        raise UnsupportedError(broker=hide_credentials(url), what=what, remedy=remedy)
    return connector(url)


def open_broker(url: str, app: str, max_queues: int | None = None) -> Broker:
    """Open the broker at `url` for one app; create missing files and tables.

    :param url: `sqlite:PATH` (a file shared by the processes of this machine),
        `postgresql://USER@HOST/DATABASE`, `sqs://REGION/PREFIX`, `kinesis://REGION/STREAM`, or the
        address of an installed broker.
    :param app: the app's name. In a file or schema, each app has its own queues. In SQS the prefix
        separates apps. With Kinesis, each app reads the whole stream.
    :raises SettingsError: the scheme is unknown, or the address or the app's name is invalid.
    :raises DatabaseError: the broker cannot use the file; see the subclasses.
    :raises CredentialsError: the AWS credentials are missing, or AWS rejects them.
    :raises UnreachableError: the service does not respond.
    :raises UsageError: eventlet has patched this process.
    """
    check_no_eventlet()
    reason = name_error(app)
    if reason:
        raise SettingsError(name="app", reason=f"{app!r} cannot be a znode name: {reason}")
    broker = kind_of(url).open(url, app)
    broker.max_queues = max_queues
    return broker
