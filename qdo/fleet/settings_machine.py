"""Checks and uses the live settings in the node `settings`.

A machine without I/O.

1.  An operator writes a proposal into the node `settings`, and *then* lists the workers. A later
    proposal replaces an earlier proposal.
2.  Every worker watches the node. A worker reads the node after every registration, before it
    starts a message, and again after every reconnection. The worker checks a proposal with its own
    code, and writes its answer into its component node: it accepts or refuses the proposal.
3.  When every listed worker has accepted the proposal or is gone, the author puts the proposal into
    force with one write at the version read. Therefore a replaced proposal cannot come into force.
4.  A worker uses a version in force only if its own code accepts the version. Otherwise the worker
    keeps its settings and logs an error. A process that did not answer before the timeout, or that
    started later, may refuse a version in force.

The node holds the text of the version in force, so a process never has a number without its text.
Answers name a proposal by its id, because a replacing proposal has the same number.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from qdo.coordination.protocol import machine as m
from qdo.coordination.znodes.layout import is_version_name
from qdo.coordination.znodes.values import encode, load, shown, text_of, unix_time
from qdo.errors import LiveSettingsSizeError

_log = logging.getLogger(__name__)

# Maximum size of the text of a version. The node has two texts, and JSON may need three times as
# many bytes.
MAX_TEXT_BYTES = 64 * 1024
MAX_WHY_CHARACTERS = 500
KEPT_VERSIONS = 100
_MAX_WHO_CHARACTERS = 200
_MAX_NUMBER = 10**9
_ID = re.compile(r"[0-9a-f]{8,32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class SettingsVersion:
    """One version of the live settings, in force or proposed."""

    # The id of the version. A repeated proposal gets another id.
    id: str
    # The number of the version. Only versions that come into force are counted.
    number: int
    # The settings as TOML.
    text: str
    who: str = ""
    # Unix time of the proposal, by the author's clock.
    at: float = 0.0
    why: str = ""

    def encode(self) -> bytes:
        return encode(asdict(self))

    @classmethod
    def parse(cls, value: Any) -> SettingsVersion:
        """Return a version from its JSON; raise ValueError for any other value."""
        if not isinstance(value, dict):
            raise ValueError(f"a version must be an object, got {shown(value)}")
        id = value.get("id")
        number = value.get("number")
        text = value.get("text")
        if not isinstance(id, str) or _ID.fullmatch(id) is None:
            raise ValueError(
                f"the id of a version must be 8 to 32 hexadecimal digits, got {shown(id)}"
            )
        if type(number) is not int or not 0 < number < _MAX_NUMBER:
            raise ValueError(
                f"the number of a version must be from 1 to {_MAX_NUMBER}, got {shown(number)}"
            )
        if not isinstance(text, str) or len(text.encode()) > MAX_TEXT_BYTES:
            raise ValueError(
                f"the text of a version must have at most {MAX_TEXT_BYTES} bytes, got {shown(text)}"
            )
        return cls(
            id,
            number,
            text,
            who=text_of(value.get("who"), _MAX_WHO_CHARACTERS),
            at=unix_time(value.get("at")) or 0.0,
            why=text_of(value.get("why"), MAX_WHY_CHARACTERS),
        )


def surplus_versions(names: Collection[str], now: float) -> list[str]:
    """Return the names of version nodes beyond the newest `KEPT_VERSIONS`."""
    versions = sorted(filter(is_version_name, names))
    return versions[:-KEPT_VERSIONS]


@dataclass(frozen=True, slots=True)
class SettingsNode:
    """The value of the node: the version in force, and the proposed version.

    Both versions are None in a node with a fault.
    """

    current: SettingsVersion | None = None
    proposal: SettingsVersion | None = None
    fault: str | None = None

    @property
    def number(self) -> int:
        return 0 if self.current is None else self.current.number

    @property
    def text(self) -> str:
        return "" if self.current is None else self.current.text

    @classmethod
    def parse(cls, data: bytes | None) -> SettingsNode:
        """Parse a node. One invalid version makes the whole node unreadable."""
        value, fault = load(data)
        if fault is not None:
            return cls(fault=fault)
        try:
            return cls(_version(value.get("current")), _version(value.get("proposal")))
        except ValueError as error:
            return cls(fault=str(error))

    def encode(self) -> bytes:
        found = {"current": self.current, "proposal": self.proposal}
        return encode({key: asdict(each) for key, each in found.items() if each is not None})


def _version(value: Any) -> SettingsVersion | None:
    return None if value is None else SettingsVersion.parse(value)


def check_size(text: str) -> None:
    """Raise LiveSettingsSizeError for live settings that are too long."""
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise LiveSettingsSizeError(limit=MAX_TEXT_BYTES, found=len(text.encode()))


class SettingsUser(Protocol):
    """A process with live settings."""

    @property
    def in_use(self) -> SettingsVersion | None: ...

    def check(self, version: SettingsVersion) -> str | None:
        """Return the reason for refusing a version, or None to accept the version."""

    def use(self, version: SettingsVersion | None) -> None:
        """Use a version that `check` has accepted. With None, use no live settings."""

    def answer(self, report: SettingsReport) -> None:
        """Publish the versions that this process uses, accepts and refuses."""


@dataclass(frozen=True, slots=True)
class SettingsReport:
    """A process's report on live settings, in its component node."""

    # Number of the version in use; 0 without live settings.
    uses: int = 0
    # Id of the accepted proposal, or of the accepted version in force, or "".
    accepts: str = ""
    # Id of the refused version, or "".
    refuses: str = ""
    why: str = ""

    def dump(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value != ""}

    @classmethod
    def parse(cls, value: Any) -> SettingsReport | None:
        if not isinstance(value, dict) or type(value.get("uses")) is not int:
            return None
        texts = (text_of(value.get(key)) for key in ("accepts", "refuses", "why"))
        return cls(value["uses"], *texts)


class SettingsWatch(m.Machine):
    """Reads the live settings, and tells this process to check and use them."""

    def __init__(self, path: str, user: SettingsUser) -> None:
        super().__init__()
        self._path = path
        self._user = user
        self._report = SettingsReport()
        self._accepted: SettingsVersion | None = None
        self._refused_id = self._reported_fault = ""
        self._waiting: list[Callable[[], object]] = []
        self._was_read = False

    def when_read(self, then: Callable[[], object]) -> None:
        """Call a function after the first read of the node, or now if this read has ended."""
        if self._was_read:
            then()
        else:
            self._waiting.append(then)

    def connected(self) -> None:
        self._read()

    def changed(self, path: str) -> None:
        if path == self._path:
            self._read()

    def _read(self) -> None:
        self.ask(m.Get(self._path, watch=True), self._got)

    def _got(self, answer: m.Response) -> None:
        if isinstance(answer, m.NoResponse):
            return  # the machine reads again after the reconnection
        node = SettingsNode()
        if isinstance(answer, m.Refused):
            node = SettingsNode(fault=answer.reason)
        elif isinstance(answer, m.NodeRead):
            node = SettingsNode.parse(answer.data)
        if node.fault is None and isinstance(answer, m.NodeRead | m.NodeMissing):
            self._reported_fault = ""
            self._take(node)
        elif node.fault is not None:
            self._log_fault(node.fault)
        self._was_read = True
        waiting = self._waiting
        self._waiting = []
        for then in waiting:
            then()

    def _take(self, node: SettingsNode) -> None:
        """Use the version in force if this process accepts it, and judge the proposal."""
        judged = node.current
        why = self._use(node.current)
        if node.proposal is not None:
            judged = node.proposal
            why = self._user.check(node.proposal)
        self._accepted = judged if why is None else None
        id = "" if judged is None else judged.id
        in_use = self._user.in_use
        uses = 0 if in_use is None else in_use.number
        accepted = SettingsReport(uses, accepts=id)
        report = accepted if why is None else SettingsReport(uses, refuses=id, why=why)
        if report != self._report:
            self._report = report
            self._user.answer(report)

    def _use(self, current: SettingsVersion | None) -> str | None:
        """Use the version in force, or return the reason why this process refuses it."""
        before = self._user.in_use
        if before == current:
            return None
        # An accepted proposal comes into force unchanged. Compare more than the id, because an
        # operator may have edited the node by hand.
        known = current is None or current == self._accepted
        why = None if known or current is None else self._user.check(current)
        if why is None:
            self._user.use(current)
        elif current is not None and self._refused_id != current.id:
            self._refused_id = current.id
            _log.error(
                "live settings %d are in force, but this process refuses them: %s; it keeps %s."
                " Correct them with `qdo settings edit`, or update this process",
                current.number,
                why,
                f"version {before.number}" if before else "its own settings",
            )
        return why

    def _log_fault(self, fault: str) -> None:
        if fault != self._reported_fault:
            self._reported_fault = fault
            _log.error(
                "cannot read %s: %s; this process keeps its settings. Correct the node with"
                " `qdo settings rollback`",
                self._path,
                fault,
            )
