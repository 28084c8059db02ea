"""Machines without I/O that obey the pauses of the fleet. The node `holds` names the paused queues.

1.  An operator or a section writes the pause into the node `holds`, and *then* lists the workers.
2.  A worker reads the node `holds` after every registration, before it starts a message. So a
    worker that registers after the listing knows the pause. The worker watches the node, and reads
    the node again after every reconnection. After a read, it starts no message of matching queues.
3.  When no message of a paused queue is in flight any more, the worker acknowledges the pause. The
    worker writes the mzxid of the node `holds` into its own node. The version is not suitable,
    because the versions of a recreated node begin at 0 again.
4.  The pause is in force once every listed worker has acknowledged the pause or is gone.
5.  A pause ends when an operator, its maker or the leader removes the pause from the node. A pause
    that names the node of its maker also ends when the maker's node is gone. No later node ever has
    the same name.

Only the leader removes expired pauses, so only one clock matters. Without a leader, pauses last
longer, which is safe. If the node is unreadable, the last readable pauses stay in force.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from qdo.coordination.protocol import machine as m
from qdo.coordination.znodes.values import encode, load, shown, string_tuple, text_of, unix_time
from qdo.queues import MAX_GLOBS_CHARACTERS, QueueFilter, is_path_part

_log = logging.getLogger(__name__)

# Maximum number of pauses. Every worker compares every queue with all pauses.
MAX_PAUSES = 100
MAX_REASON_CHARACTERS = 500
# Maximum size of the node in bytes, which is twice the size of `MAX_PAUSES` ordinary pauses.
MAX_BYTES = 64 * 1024
# Interval at which a worker checks whether messages of paused queues have ended.
LOOK_SECONDS = 0.01
# Interval at which the leader checks for expired pauses.
CLEAN_SECONDS = 1.0
_ID = re.compile(r"[0-9a-f]{8,32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Pause:
    """Paused queues."""

    id: str
    queues: tuple[str, ...]
    why: str = ""
    # User and host of the pause's maker.
    who: str = ""
    # Unix time of the start by the maker's clock. `until` is the end by the same clock; None for no
    # end.
    at: float = 0.0
    until: float | None = None
    # Path of the ephemeral node of a section's maker. The section ends with this node. "" for an
    # operator's pause.
    by: str = ""

    def is_over(self, now: float) -> bool:
        return self.until is not None and now >= self.until

    def dump(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}


@dataclass(frozen=True, slots=True)
class PauseNode:
    """The value of the node: the pauses in the order of their creation.

    A node with a fault has no pauses.
    """

    pauses: tuple[Pause, ...] = ()
    fault: str | None = None

    @classmethod
    def parse(cls, data: bytes | None) -> PauseNode:
        """Parse a node. One invalid pause makes the whole node unreadable."""
        if data is not None and len(data) > MAX_BYTES:
            return cls(fault=f"it must have at most {MAX_BYTES} bytes, got {len(data)}")
        value, fault = load(data)
        if fault is not None:
            return cls(fault=fault)
        found = value.get("holds", [])
        if not isinstance(found, list) or len(found) > MAX_PAUSES:
            reason = f"the key 'holds' must be a list of at most {MAX_PAUSES}, got {shown(found)}"
            return cls(fault=reason)
        try:
            pauses = tuple(map(_parsed, found))
        except ValueError as error:
            return cls(fault=str(error))
        if sum(len(glob) for pause in pauses for glob in pause.queues) > MAX_GLOBS_CHARACTERS:
            reason = f"globs must have at most {MAX_GLOBS_CHARACTERS} characters together"
            return cls(fault=reason)
        return cls(pauses)

    def encode(self) -> bytes:
        return encode({"holds": [pause.dump() for pause in self.pauses]})


def _parsed(value: Any) -> Pause:
    if not isinstance(value, dict):
        raise ValueError(f"a pause must be an object, got {shown(value)}")
    id = value.get("id")
    globs = value.get("queues")
    by = value.get("by")
    until = value.get("until")
    queues = string_tuple(globs)
    if not isinstance(id, str) or _ID.fullmatch(id) is None:
        raise ValueError(f"the id of a pause must be 8 to 32 hexadecimal digits, got {shown(id)}")
    if not isinstance(globs, list) or len(queues) != len(globs) or not all(queues) or not queues:
        raise ValueError(f"the queues of pause {id} must be a list of globs, got {shown(globs)}")
    if by is not None and not _is_path(by):
        raise ValueError(f"the maker of pause {id} must be the path of a node, got {shown(by)}")
    if until is not None and unix_time(until) is None:
        raise ValueError(f"the end of pause {id} must be a Unix time, got {shown(until)}")
    why = text_of(value.get("why"), MAX_REASON_CHARACTERS)
    who = text_of(value.get("who"), 200)
    at = unix_time(value.get("at")) or 0.0
    return Pause(id, queues, why, who, at, unix_time(until), by or "")


def _is_path(value: Any) -> bool:
    return (
        isinstance(value, str)
        and len(value) < 1000
        and value.startswith("/")
        and all(map(is_path_part, value[1:].split("/")))
    )


def paused_queues(pauses: Iterable[Pause]) -> Callable[[str], bool] | None:
    """Return a function that tells whether a queue is paused; None without pauses."""
    globs = tuple(dict.fromkeys(glob for pause in pauses for glob in pause.queues))
    return QueueFilter(globs).matcher() if globs else None


def pauses_of(queue: str, pauses: Iterable[Pause]) -> tuple[Pause, ...]:
    return tuple(pause for pause in pauses if QueueFilter(pause.queues).takes(queue))


class StandstillGate(Protocol):
    """Pauses queues of this worker."""

    def apply(self, pauses: Sequence[Pause]) -> None:
        """Start no message of queues that match these pauses. Let all other queues continue."""

    def in_flight(self) -> bool: ...


class PauseWatch(m.Machine):
    """Reads the pauses, passes them to the gate, and acknowledges them.

    :param acknowledge: a function that writes an mzxid into the worker's own node.
    """

    def __init__(
        self,
        path: str,
        gate: StandstillGate,
        *,
        acknowledge: Callable[[int], object],
        is_leader: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        super().__init__()
        self._path = path
        self._gate = gate
        self._acknowledge = acknowledge
        self._is_leader = is_leader
        self._clock = clock
        self._wall = wall
        self._node = PauseNode()
        self._version = -1
        self._unacknowledged = 0
        self._gone: set[str] = set()
        self._up = False
        self._look_at = self._clean_at = float("inf")
        self._cleaning = False
        self._reported = ""

    # --- the session --------------------------------------------------------------------

    def connected(self) -> None:
        self._up = True
        self._cleaning = False
        self._read()

    def suspended(self) -> None:
        self._up = False

    def changed(self, path: str) -> None:
        if path == self._path:
            self._read()
        else:
            self._look_for_maker(path)

    # --- reading ------------------------------------------------------------------------

    def _read(self) -> None:
        self.ask(m.Get(self._path, watch=True), self._got)

    def _got(self, answer: m.Response) -> None:
        if isinstance(answer, m.NoResponse):
            return  # the machine reads again after the reconnection
        fault = answer.reason if isinstance(answer, m.Refused) else None
        node = self._node
        if isinstance(answer, m.NodeMissing):
            node = PauseNode()
        elif isinstance(answer, m.NodeRead):
            found = PauseNode.parse(answer.data)
            fault = found.fault
            node = self._node if fault is not None else found
        self._report(fault)
        self._node = node
        self._version = answer.version if isinstance(answer, m.NodeRead) and not fault else -1
        self._apply()
        # An empty node needs no acknowledgment, because no operator waits for it.
        if isinstance(answer, m.NodeRead) and fault is None and node.pauses:
            self._unacknowledged = answer.mzxid
        for maker in {pause.by for pause in node.pauses if pause.by} - self._gone:
            self._look_for_maker(maker)

    def _report(self, fault: str | None) -> None:
        if fault and fault != self._reported:
            _log.error(
                "cannot read %s: %s; the last readable pauses stay in force, and this worker does"
                " not obey later ones; correct the node with `qdo resume --all --yes`",
                self._path,
                fault,
            )
        self._reported = fault or ""

    def _look_for_maker(self, path: str) -> None:
        self.ask(m.Stat(path, watch=True), partial(self._maker, path))

    def _maker(self, path: str, answer: m.Response) -> None:
        if isinstance(answer, m.NodeMissing) and path not in self._gone:
            self._gone.add(path)
            self._apply()

    def _apply(self) -> None:
        pauses = self._node.pauses
        # Ignore pauses whose makers are gone. The leader may take a second to remove these pauses.
        self._gone &= {pause.by for pause in pauses}
        self._gate.apply([pause for pause in pauses if pause.by not in self._gone])
        now = self._clock()
        self._look_at = now
        self._clean_at = now + CLEAN_SECONDS if pauses else float("inf")

    # --- acknowledging and cleaning -----------------------------------------------------

    def tick(self) -> None:
        now = self._clock()
        if now >= self._look_at:
            self._look_at = float("inf")
            if self._unacknowledged:
                self._acknowledge_if_free(now)
        if now >= self._clean_at:
            self._clean_at = now + CLEAN_SECONDS
            if self._is_leader() and not self._cleaning:
                self._clean()

    def due(self) -> float:
        return min(self._look_at, self._clean_at) if self._up else float("inf")

    def _acknowledge_if_free(self, now: float) -> None:
        if self._gate.in_flight():
            self._look_at = now + LOOK_SECONDS
        else:
            self._acknowledge(self._unacknowledged)
            self._unacknowledged = 0

    def _clean(self) -> None:
        pauses = self._node.pauses
        now = self._wall()
        over = [pause for pause in pauses if pause.by in self._gone or pause.is_over(now)]
        # A missing or unreadable node has no version and no pauses to remove.
        if over and self._version >= 0:
            self._cleaning = True
            remaining = PauseNode(tuple(pause for pause in pauses if pause not in over))
            write = m.SetOp(self._path, remaining.encode(), self._version)
            self.ask(m.Commit((write,)), partial(self._cleaned, over))

    def _cleaned(self, over: Sequence[Pause], answer: m.Response) -> None:
        # After a conflicting change, the watch causes another read.
        self._cleaning = False
        for pause in over:
            _log.info("pause %s of %s has ended", pause.id, " ".join(pause.queues))


class SectionWatch(m.Machine):
    """Tells the maker of a section that an operator has ended the section.

    :ivar ended: whether the node no longer has the section. Once True, the value stays True.
    """

    def __init__(self, path: str, id: str) -> None:
        super().__init__()
        self.ended = False
        self._path = path
        self._id = id

    def connected(self) -> None:
        self._read()

    def changed(self, path: str) -> None:
        self._read()

    def _read(self) -> None:
        if not self.ended:
            self.ask(m.Get(self._path, watch=True), self._got)

    def _got(self, answer: m.Response) -> None:
        if isinstance(answer, m.NodeMissing):
            self.ended = True
        elif isinstance(answer, m.NodeRead):
            # Workers still obey the pauses that they read before the node became unreadable.
            node = PauseNode.parse(answer.data)
            self.ended = node.fault is None and all(pause.id != self._id for pause in node.pauses)
