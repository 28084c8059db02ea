"""Holds: queues paused in the whole fleet, for a reason.

A *pause* lasts until a time, or until an operator resumes the queues. A *section* lasts as long as
its process. `hold_machine` has the part of the workers.

Calls raise NodeRefusedError if the account may not read or change holds, and
CoordinatorUnreachableError without an answer in time; a change may have taken effect then. `record`
makes the entry of the change in the action log. `by` is the operator, if it is not the user of this
process.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp, NodeRead, Op, SetOp
from qdo.coordination.transactions import Node, change, make_folder, read
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.errors import (
    HoldNotObeyedError,
    HoldsUnreadableError,
    NotFoundError,
    QueueNameError,
    RejectedError,
    SectionLostError,
    UsageError,
)
from qdo.fleet.actions import list_workers
from qdo.fleet.audit import AuditTrail
from qdo.fleet.audit_entries import Values
from qdo.fleet.hold_machine import MAX_HOLDS, MAX_REASON_CHARACTERS, Hold, HoldNode
from qdo.fleet.names import overlap, writer
from qdo.queues import (
    MAX_GLOBS_CHARACTERS,
    MAX_NAME_LENGTH,
    QueueFilter,
    is_path_part,
    name_error,
)
from qdo.system.polling import polls
from qdo.text import join_some

Record = Callable[[Sequence[Hold], Sequence[Hold]], CreateOp]
"""Makes an entry in the action log, from holds before and after a change."""
_REPORT_SECONDS = 0.4
"""A longer wait is reported."""
NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class HoldsRead:
    """The holds in force, and the workers that obey them.

    :ivar zxid: place of the last change in the coordinator's total order.
    :ivar obeyed: by worker, the place up to which it obeys.
    """

    node: HoldNode
    zxid: int
    obeyed: dict[str, int]


def new_hold(
    queues: Iterable[str], reason: str = "", seconds: float | None = None, id: str = ""
) -> Hold:
    """Return a hold that is not in force yet.

    :param seconds: how long it lasts; None for no end.
    :raises UsageError: a glob, the reason or the time is not valid.
    """
    globs = tuple(dict.fromkeys(queues))
    if not globs:
        raise UsageError(reason="a hold must name queues, got no glob")
    for glob in globs:
        if not is_path_part(glob) or len(glob) > MAX_NAME_LENGTH:
            raise QueueNameError(name=glob, reason=name_error(glob) or "it is too long")
    if len(reason) > MAX_REASON_CHARACTERS:
        limit = MAX_REASON_CHARACTERS
        raise UsageError(
            reason=f"a reason must have at most {limit} characters, got {len(reason)}; shorten it"
        )
    now = time.time()
    if seconds is not None and not 0 < seconds < 1e9:
        raise UsageError(reason=f"a hold must last more than 0 seconds, got {seconds:g}")
    until = None if seconds is None else round(now + seconds, 3)
    return Hold(id or uuid.uuid4().hex, globs, reason, writer(), round(now, 3), until)


def check_matches(globs: Iterable[str], names: Collection[str]) -> None:
    """Check that each glob matches a queue; another is probably a mistake.

    :raises NotFoundError: names the glob.
    """
    for glob in globs:
        if not any(map(QueueFilter((glob,)).matcher(), names)):
            raise NotFoundError(what="queue that matches", name=glob)


def read_holds(client: Client, layout: Layout) -> HoldsRead:
    """Return the holds in force, and up to where each worker obeys."""
    found = read(client, layout.fleet.holds)
    obeyed = _obeyed(client, layout, list_workers(client, layout))
    if isinstance(found, NodeRead):
        node = HoldNode.parse(found.data)
        return HoldsRead(replace(node, holds=in_force(client, node.holds)), found.mzxid, obeyed)
    return HoldsRead(HoldNode(), 0, obeyed)


def in_force(client: Client, holds: Iterable[Hold]) -> tuple[Hold, ...]:
    """Return the holds whose makers live; without a leader the others stay in the node."""
    found = tuple(holds)
    makers = sorted({hold.by for hold in found if hold.by})
    alive = {"", *(node.path for node in read_nodes(client, makers))}
    return tuple(hold for hold in found if hold.by in alive)


def add_hold(client: Client, layout: Layout, hold: Hold, *, record: Record | None = None) -> int:
    """Write a hold; return its place in the coordinator's total order. See `wait_in_force`.

    :raises HoldsUnreadableError: the present holds cannot be read.
    :raises RejectedError: there are too many.
    """
    path, mine = layout.fleet.holds, hold.id.encode()
    entry: tuple[CreateOp, ...] = ()

    def decide(node: Node) -> list[Op]:
        nonlocal entry
        if not isinstance(node, NodeRead):  # no worker has ever started
            make_folder(client, path)
        holds = (*in_force(client, _holds(node)), hold)
        length = sum(len(glob) for each in holds for glob in each.queues)
        if len(holds) > MAX_HOLDS or length > MAX_GLOBS_CHARACTERS:
            raise RejectedError(
                reason=f"holds must be at most {MAX_HOLDS} with globs of {MAX_GLOBS_CHARACTERS} "
                "characters together; end some of those that `qdo pause --list` lists"
            )
        entry = _recorded(record, (), (hold,))
        return [*_writing(path, node, holds), *entry]

    def is_mine(node: NodeRead) -> bool:  # another operator may have ended it already
        return mine in node.data or any(isinstance(read(client, op.path), NodeRead) for op in entry)

    answer = change(client, path, decide, root=layout.root, is_mine=is_mine)
    return answer.zxid if answer is not None else 0


def end_holds(
    client: Client, layout: Layout, ids: Iterable[str], *, record: Record | None = None
) -> list[Hold]:
    ended = set(ids)
    return _edit(client, layout, lambda hold: None if hold.id in ended else hold, record)


def end_pauses(
    client: Client, layout: Layout, globs: Iterable[str], *, record: Record | None = None
) -> list[Hold]:
    """Remove globs from all pauses, and end pauses without globs; return the changed ones."""
    ended = set(globs)

    def left(hold: Hold) -> Hold | None:
        if hold.by:
            return hold
        queues = tuple(glob for glob in hold.queues if glob not in ended)
        return replace(hold, queues=queues) if queues else None

    return _edit(client, layout, left, record)


def end_all(client: Client, layout: Layout, *, record: Record | None = None) -> list[Hold]:
    """End all holds, even unreadable ones; return the readable ones."""
    found: list[Hold] = []

    def decide(node: Node) -> list[Op] | None:
        found[:] = HoldNode.parse(node.data).holds if isinstance(node, NodeRead) else ()
        if not isinstance(node, NodeRead) or HoldNode.parse(node.data) == HoldNode():
            return None
        return [*_writing(layout.fleet.holds, node, ()), *_recorded(record, found, ())]

    change(client, layout.fleet.holds, decide, root=layout.root)
    return found


def wait_in_force(
    client: Client,
    layout: Layout,
    hold: Hold,
    zxid: int,
    timeout_seconds: float,
    on_wait: Callable[[Sequence[str]], None] = lambda names: None,
    consequence: str = "it stays in force for all others; end it with `qdo resume --id {id}`",
) -> int:
    """Wait until no message of a held queue runs, and no earlier section holds one of its queues.

    :param zxid: the place that `add_hold` returned.
    :param on_wait: called with the names of the remaining workers, when they change.
    :returns: the number of workers that had to obey.
    :raises HoldNotObeyedError: not in time.
    :raises SectionLostError: an operator ended this section.
    """
    # List them after the hold was written: later workers read it before they start anything.
    waiting = listed = list_workers(client, layout)
    names: Sequence[str] = ()
    reported: Sequence[str] = ()
    for waited in polls(timeout_seconds):
        obeyed = _obeyed(client, layout, waiting)
        waiting = [name for name, upto in obeyed.items() if upto < zxid]
        ahead = [] if not hold.by else _sections_ahead(client, layout, hold)
        names = [*waiting, *(f"section {each.id}" for each in ahead)]
        if not names:
            return len(listed)
        if names != reported and waited > _REPORT_SECONDS:
            reported = names
            on_wait(names)
    raise HoldNotObeyedError(
        id=hold.id,
        seconds=timeout_seconds,
        found="one does" if len(names) == 1 else f"{len(names)} do",
        names=join_some(names, NAMES_SHOWN),
        consequence=consequence.format(id=hold.id),
    )


def hold_text(hold: Hold) -> str:
    kind = "section" if hold.by else "paused"
    return f"{kind}: {hold.why}" if hold.why else f"{kind} by {hold.who or 'an unknown user'}"


def _obeyed(client: Client, layout: Layout, workers: Iterable[str]) -> dict[str, int]:
    """Return the zxid up to which each remaining worker obeys."""
    nodes = read_nodes(client, [layout.worker(name) for name in workers])
    return {node.path.rpartition("/")[2]: WorkerNode.parse(node.data).holds for node in nodes}


def _sections_ahead(client: Client, layout: Layout, hold: Hold) -> list[Hold]:
    holds = _holds(read(client, layout.fleet.holds))
    earlier: list[Hold] = []
    if all(each.id != hold.id for each in holds):
        raise SectionLostError(queues=" ".join(hold.queues), reason="an operator has ended it")
    for each in holds:
        if each.id == hold.id:
            break
        if each.by and any(overlap(a, b) for a in each.queues for b in hold.queues):
            earlier.append(each)
    return list(in_force(client, earlier))


def _edit(
    client: Client,
    layout: Layout,
    left: Callable[[Hold], Hold | None],
    record: Record | None,
) -> list[Hold]:
    changed: list[Hold] = []

    def decide(node: Node) -> list[Op] | None:
        found = _holds(node)
        after = [left(hold) for hold in found]
        different = [hold for hold, new in zip(found, after, strict=True) if new != hold]
        if not different:
            return None  # a repetition whose first try took effect
        changed[:] = different
        kept = [hold for hold in after if hold is not None]
        return [*_writing(layout.fleet.holds, node, kept), *_recorded(record, different, kept)]

    change(client, layout.fleet.holds, decide, root=layout.root)
    return changed


def _holds(node: Node) -> tuple[Hold, ...]:
    found = HoldNode.parse(node.data) if isinstance(node, NodeRead) else HoldNode()
    if found.fault is not None:
        raise HoldsUnreadableError(reason=found.fault)
    return found.holds


def _recorded(
    record: Record | None, before: Sequence[Hold], after: Sequence[Hold]
) -> tuple[CreateOp, ...]:
    return () if record is None else (record(before, after),)


def _writing(path: str, node: Node, holds: Iterable[Hold]) -> list[Op]:
    data = HoldNode(tuple(holds)).encode()
    if isinstance(node, NodeRead):
        return [SetOp(path, data, node.version)]
    return [SetOp(path, data, 0)]


# --- with an entry in the action log ---


def pause(client: Client, layout: Layout, hold: Hold, by: str = "") -> int:
    """Pause the queues of a hold; return its place, see `add_hold`."""
    with recorded(client, layout, "pause", hold.queues, hold.why, by) as record:
        return add_hold(client, layout, hold, record=record)


def resume_hold(client: Client, layout: Layout, id: str, reason: str, by: str = "") -> list[Hold]:
    """End a hold; return it, or raise NotFoundError."""
    with recorded(client, layout, "resume", (id,), reason, by) as record:
        ended = end_holds(client, layout, [id], record=record)
    if not ended:
        raise NotFoundError(what="hold", name=id)
    return ended


def chosen(found: HoldNode, globs: Sequence[str], id: str | None = None) -> list[Hold]:
    """Return the holds that end, or that lose one of these globs; all without globs and id.

    :raises NotFoundError: the hold does not exist, or no pause has one of these globs.
    :raises HoldsUnreadableError: the holds cannot be read.
    """
    if not globs and id is None:
        return list(found.holds)
    if found.fault is not None:
        raise HoldsUnreadableError(reason=found.fault)
    if id is not None:
        chosen = [hold for hold in found.holds if hold.id == id]
        if not chosen:
            raise NotFoundError(what="hold", name=id)
        return chosen
    pauses = [hold for hold in found.holds if not hold.by]
    present = {glob for hold in pauses for glob in hold.queues}
    unknown = [glob for glob in globs if glob not in present]
    if unknown:
        raise NotFoundError(what="pause of", name=unknown[0])
    return [hold for hold in pauses if not set(globs).isdisjoint(hold.queues)]


@contextmanager
def recorded(
    client: Client,
    layout: Layout,
    command: str,
    globs: Sequence[str],
    reason: str,
    by: str = "",
) -> Iterator[Record]:
    with AuditTrail(client, layout, command, reason, by).change(" ".join(globs)) as entry:
        yield lambda before, after: entry(_logged(before), _logged(after))


def _logged(holds: Sequence[Hold]) -> Values:
    return {hold.id[:8]: " ".join(hold.queues) for hold in holds}
