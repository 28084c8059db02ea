"""Every znode path of qdo and the JSON in it, in one place.

========================  ====================  ==================================================
node                      kind                  value
========================  ====================  ==================================================
workers/worker-N          ephemeral sequential  ``{"queues": [...]}``; ``"reread"`` after a seek,
                                                ``"takes"`` if it takes only some queues
queues/<queue>            persistent            ``{"last": "N"}``; ``owner``, ``seek``,
                                                ``position``, ``failing`` or ``blocked``,
                                                ``above``, ``also``, ``unconfirmed``
assignments/worker-N      persistent            ``{"queues": [...]}``
rebalancer                persistent            ``{"worker": "worker-N"}``; its version is a fence
election/candidate-N      ephemeral sequential  ``{"worker": "worker-N"}``
components/<kind>/host-N  ephemeral sequential  host, pid, version, started, state, ...
bells/<queue>             persistent            none; its version counts the rings of senders
========================  ====================  ==================================================
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ujson

from qdo.errors import SettingsError
from qdo.filters import EVERYTHING, QueueFilter
from qdo.names import check_queue_name as check_queue_name
from qdo.names import is_path_part
from qdo.names import name_fault as name_fault
from qdo.positions import TIMES, Positions

DEFAULT_NAMESPACE = "/mozilla/services/qdo"
MAX_VALUE_BYTES = 512 * 1024
"""Largest value sent: ZooKeeper answers an oversize request by dropping the connection."""
MAX_TRANSACTION_BYTES = 768 * 1024
MAX_LAST = 2**63 - 1
"""`last` is held in 64 bits; a UUIDv1 timestamp has 60."""
_MAX_DIGITS = 100
MAX_POSITION = 10**_MAX_DIGITS - 1
"""A broker's positions may be wider than times; see `qdo.positions`."""
WORKER_STEM = "worker-"
_WORKER = re.compile(r"worker-[0-9]{10,}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one app."""

    root: str

    @classmethod
    def of(cls, app: str, namespace: str = DEFAULT_NAMESPACE) -> Layout:
        """Return the layout of `app` below `namespace`; raise SettingsError for a bad name."""
        reason = name_fault(app)
        if reason:
            raise SettingsError(name="app", reason=f"{app!r} cannot be a znode name: {reason}")
        if not namespace.startswith("/") or any(map(name_fault, namespace.strip("/").split("/"))):
            raise SettingsError(
                name="namespace", reason=f"{namespace!r} is no absolute znode path such as /a/b"
            )
        return cls(f"{namespace.rstrip('/')}/{app}")

    @property
    def workers(self) -> str:
        return f"{self.root}/workers"

    @property
    def queues(self) -> str:
        return f"{self.root}/queues"

    @property
    def assignments(self) -> str:
        return f"{self.root}/assignments"

    @property
    def rebalancer(self) -> str:
        return f"{self.root}/rebalancer"

    @property
    def election(self) -> str:
        return f"{self.root}/election"

    @property
    def components(self) -> str:
        return f"{self.root}/components"

    @property
    def bells(self) -> str:
        return f"{self.root}/bells"

    @property
    def persistent(self) -> tuple[str, ...]:
        """Every node that must stand before a worker registers."""
        return (
            self.workers,
            self.queues,
            self.assignments,
            self.rebalancer,
            self.election,
            self.components,
        )

    def worker(self, name: str) -> str:
        return f"{self.root}/workers/{name}"

    def queue(self, name: str) -> str:
        return f"{self.root}/queues/{name}"

    def bell(self, queue: str) -> str:
        return f"{self.root}/bells/{queue}"

    def assignment(self, worker: str) -> str:
        return f"{self.root}/assignments/{worker}"


def is_worker_name(name: str) -> bool:
    """Return whether a node below `workers` is a worker's, and not some other tool's."""
    return _WORKER.fullmatch(name) is not None


# --- values -----------------------------------------------------------------------


def _load(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def encode(value: dict[str, Any]) -> bytes:
    """Return the JSON of a node."""
    return ujson.dumps(value, ensure_ascii=True, escape_forward_slashes=False).encode()


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    # One text for one name: it stands in several nodes, and a worker keeps all of them.
    return tuple(sys.intern(item) for item in value if isinstance(item, str))


@dataclass(frozen=True, slots=True)
class WorkerNode:
    """What a worker handles now.

    :ivar reread: queues that an operator moved and whose node the worker must read again.
    :ivar draining: the worker gives its queues back and takes no new ones.
    :ivar takes: which queues it may be granted; everything where the node does not say it.
    """

    queues: tuple[str, ...] = ()
    reread: tuple[str, ...] = ()
    draining: bool = False
    takes: QueueFilter = EVERYTHING

    @classmethod
    def parse(cls, data: bytes) -> WorkerNode:
        value = _load(data) or {}
        return cls(
            _names(value.get("queues")),
            _names(value.get("reread")),
            bool(value.get("draining", False)),
            _filter(value.get("takes")),
        )

    def encode(self) -> bytes:
        value: dict[str, Any] = {"queues": list(self.queues)}
        if self.reread:
            value["reread"] = list(self.reread)
        if self.draining:
            value["draining"] = True
        if self.takes != EVERYTHING:
            value["takes"] = {
                "queues": list(self.takes.queues),
                "exclude": list(self.takes.exclude),
            }
        return encode(value)


def _filter(value: Any) -> QueueFilter:
    if not isinstance(value, dict):
        return EVERYTHING
    return QueueFilter(
        _names(value.get("queues")) or EVERYTHING.queues, _names(value.get("exclude"))
    )


def parse_assignment(data: bytes) -> frozenset[str]:
    """Return the queues of an assignment node; garbage grants nothing.

    Their names become paths, and what cannot be in a path would break the connection.
    """
    return frozenset(filter(is_path_part, _names((_load(data) or {}).get("queues"))))


def encode_queues(queues: Iterable[str]) -> bytes:
    """Return the value of an assignment node."""
    return encode({"queues": sorted(queues)})


VERDICTS = ("skip", "dead-letter")
"""What an operator may decide on a message, to be acted upon by the owner of its queue."""
MARKS_ERROR_CHARACTERS = 300
"""An error in a queue node is cut there: nodes of thousands of queues must stay small."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What is known of a message behind `last` whose attempts failed; it outlives its worker.

    Stands in the queue node as ``failing``, or as ``blocked`` while the queue waits for an
    operator.

    :ivar attempts: how many attempts failed, or ended with their process.
    :ivar error: how the last one did, as one line.
    :ivar crashed: the last one ended with its process.
    :ivar due: Unix time before which it should not run again, 0 for any.
    :ivar since: Unix time since when its queue is blocked, 0 while it is not.
    :ivar verdict: what an operator decided: "", "skip" or "dead-letter".
    :ivar pause: seconds from the last attempt to `due`, 0 where that is not known: nobody need
        wait for longer, whatever the clock says.
    """

    position: int
    attempts: int
    error: str = ""
    crashed: bool = False
    due: float = 0.0
    since: float = 0.0
    verdict: str = ""
    pause: float = 0.0

    @property
    def blocked(self) -> bool:
        """Whether the queue waits for an operator."""
        return self.since > 0

    @classmethod
    def parse(cls, value: Any) -> Marks | None:
        """Read them; None for what cannot be read: its message then counts from 1 again."""
        if not isinstance(value, dict):
            return None
        position, fault = _parse_last(value.get("position"), MAX_POSITION)
        attempts = value.get("attempts")
        if fault or not position or isinstance(attempts, bool) or not isinstance(attempts, int):
            return None
        return cls(
            position,
            max(0, attempts),
            str(value.get("error", "")),
            bool(value.get("crashed", False)),
            _moment(value.get("due")),
            _moment(value.get("since")),
            verdict if (verdict := value.get("verdict")) in VERDICTS else "",
            _moment(value.get("pause")),
        )

    def dump(self) -> dict[str, Any]:
        """Return what stands in the queue node."""
        value: dict[str, Any] = {
            "position": str(self.position),
            "attempts": self.attempts,
            "error": self.error[:MARKS_ERROR_CHARACTERS],
        }
        for name in ("crashed", "due", "pause", "since", "verdict"):
            if getattr(self, name):
                value[name] = getattr(self, name)
        return value


def _moment(value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < 1e12 else 0.0


@dataclass(frozen=True, slots=True)
class Above:
    """What is known beyond `last` of a queue whose messages are not done in line.

    Stands in the queue node as ``above``, pairs of numbers: how far behind the run before it (or
    `last`) a run of done messages begins, and how much further its newest one lies; and as
    ``also``, marks like ``failing``.

    :ivar runs: first and newest position of each run of messages that are done, ascending.
    :ivar marks: of the messages that fail, apart from the one in the node's `marks`.
    """

    runs: tuple[tuple[int, int], ...] = ()
    marks: tuple[Marks, ...] = ()

    @classmethod
    def parse(cls, last: int, runs: Any, marks: Any) -> Above | None:
        """Read it; what cannot be read is left out: its messages then run again."""
        found = cls(
            tuple(_parse_runs(last, runs)),
            tuple(
                each
                for value in (marks if isinstance(marks, list) else ())
                if (each := Marks.parse(value)) is not None and each.position > last
            ),
        )
        return found if found.runs or found.marks else None

    def dump(self, last: int) -> dict[str, Any]:
        """Return what stands in the queue node."""
        pairs = []
        before = last
        for first, newest in self.runs:
            pairs.append([first - before, newest - first])
            before = newest
        value: dict[str, Any] = {"above": pairs} if pairs else {}
        if self.marks:
            value["also"] = [each.dump() for each in self.marks]
        return value


def _parse_runs(last: int, value: Any) -> Iterator[tuple[int, int]]:
    before = last
    for pair in value if isinstance(value, list) else ():
        whole = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not whole or pair[0] < 1 or pair[1] < 0 or before + sum(pair) > MAX_POSITION:
            return
        first = before + pair[0]
        before = first + pair[1]
        yield first, before


@dataclass(frozen=True, slots=True)
class QueueNode:
    """How far a queue has been processed, and by whom it is handled.

    :ivar last: everything up to this position is done; 0 before the first message.
    :ivar owner: name of the owning worker node, "" while free; so is what names no znode.
    :ivar seek: how often operators moved `last`.
    :ivar position: the broker's own position, for brokers whose positions are no times.
    :ivar deleted: marked as deleted: nobody claims it.
    :ivar fault: why the node's `last` cannot be read; such a queue is not processed.
    :ivar marks: of the message behind `last` that fails, None while none does.
    :ivar above: what is done or fails beyond it, None where messages are done in line.
    :ivar extra: keys of others, kept as they are.
    :ivar unconfirmed: names of messages that are done and that the broker may deliver again
        nevertheless; see `Subscription.unconfirmed`.
    """

    last: int = 0
    owner: str = ""
    seek: int = 0
    position: str | None = None
    deleted: bool = False
    fault: str | None = None
    marks: Marks | None = None
    extra: tuple[tuple[str, Any], ...] = ()
    above: Above | None = None
    unconfirmed: tuple[str, ...] = ()

    @property
    def blocking(self) -> tuple[Marks, ...]:
        """The marks of the messages that wait for an operator, those of the foremost first."""
        others = () if self.above is None else self.above.marks
        return tuple(each for each in (self.marks, *others) if each is not None and each.blocked)

    @classmethod
    def parse(cls, data: bytes) -> QueueNode:
        """Read a node; never raises: what cannot be read is said in `fault`.

        An empty value is a queue of which nothing was processed. `last` may end in an L, as
        old writers left it, and have spaces around.
        """
        if not data.strip():
            return cls()
        value = _load(data)
        if value is None:
            return cls(fault=f"the value is no JSON object: {data[:60]!r}")
        last, fault = _parse_last(value.pop("last", ""))
        owner = value.pop("owner", "")
        seek = value.pop("seek", 0)
        position = value.pop("position", None)
        deleted = value.pop("deleted", False)
        failing, blocked = value.pop("failing", None), value.pop("blocked", None)
        marks = Marks.parse(blocked if blocked is not None else failing)
        above = Above.parse(last, value.pop("above", None), value.pop("also", None))
        unconfirmed = _names(value.pop("unconfirmed", None))
        return cls(
            last=last,
            owner=owner if isinstance(owner, str) and is_path_part(owner) else "",
            seek=seek if isinstance(seek, int) else 0,
            position=position if isinstance(position, str) else None,
            deleted=bool(deleted),
            fault=fault,
            marks=marks if marks is not None and marks.position > last else None,
            extra=tuple(value.items()),
            above=above,
            unconfirmed=unconfirmed,
        )

    def checked(self, positions: Positions) -> QueueNode:
        """Return the node with a `fault` if its `position` is none of the broker's."""
        if positions is not TIMES and self.fault is None:
            try:
                positions.begin(self.last, self.position)
            except ValueError as error:
                return replace(self, fault=f"the position cannot be read: {error}")
        return self

    def encode(self) -> bytes:
        value: dict[str, Any] = {"last": str(self.last) if self.last else ""}
        if self.owner:
            value["owner"] = self.owner
        if self.seek:
            value["seek"] = self.seek
        if self.position is not None:
            value["position"] = self.position
        if self.deleted:
            value["deleted"] = True
        if self.marks is not None:
            value["blocked" if self.marks.blocked else "failing"] = self.marks.dump()
        if self.above is not None:
            value.update(self.above.dump(self.last))
        if self.unconfirmed:
            value["unconfirmed"] = list(self.unconfirmed)
        value.update(self.extra)
        return encode(value)

    def owned_by(self, worker: str) -> QueueNode:
        return replace(self, owner=worker)

    def moved_to(
        self, last: int, position: str | None = None, done: int | None = None
    ) -> QueueNode:
        """Return the node with another `last`; marks of what lies before it are dropped.

        What is known beyond `last` counts from it: whoever keeps that says it anew.

        :param done: `last` as a position of the broker, where its positions are no times.
        """
        marks = self.marks
        done = last if done is None else done
        # Not `replace`, which takes three times as long: 6 % of a checkpoint.
        return QueueNode(
            last,
            self.owner,
            self.seek,
            position,
            self.deleted,
            self.fault,
            marks if marks is None or marks.position > done else None,
            self.extra,
        )

    def marked(self, marks: Marks | None) -> QueueNode:
        """Return the node with these marks, unless their message is done."""
        kept = marks if marks is None or marks.position > self.last else None
        return self if kept == self.marks else replace(self, marks=kept)


def _parse_last(text: Any, most: int = MAX_LAST) -> tuple[int, str | None]:
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text <= most:
        return text, None
    if not isinstance(text, str):
        return 0, f"last is no decimal string: {text!r}"
    digits = text.strip().removesuffix("L").strip()
    if not digits:
        return 0, None if not text.strip() else f"last is no decimal string: {text!r}"
    if not (digits.isascii() and digits.isdigit()):
        return 0, f"last is no decimal string: {text!r}"
    # The length first: Python refuses to read thousands of digits.
    if len(digits) > _MAX_DIGITS or int(digits) > most:
        return 0, f"last is beyond any position: {digits[:60]}"
    return int(digits), None
