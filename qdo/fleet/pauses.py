"""Pauses queues in the whole fleet.

An operator's pause lasts until a set time, or until an operator resumes the queues. A *section* is
a pause that lasts as long as its process. `pause_machine` obeys the pauses in the workers.

Functions raise NodeRefusedError if the account may not read or change pauses, and
CoordinatorUnreachableError after a timeout. After a timeout, a change may have taken effect.
`record` makes the entry in the action log. `by` is the operator, unless the operator is the user of
this process.
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
    NotFoundError,
    PauseNotObeyedError,
    PausesUnreadableError,
    QueueNameError,
    RejectedError,
    SectionLostError,
    UsageError,
)
from qdo.fleet.actions import list_workers
from qdo.fleet.audit import AuditTrail
from qdo.fleet.audit_entries import Values
from qdo.fleet.names import overlap, writer
from qdo.fleet.pause_machine import MAX_PAUSES, MAX_REASON_CHARACTERS, Pause, PauseNode
from qdo.queues import MAX_GLOBS_CHARACTERS, MAX_NAME_LENGTH, QueueFilter, is_path_part, name_error
from qdo.system.clock import polls
from qdo.text import join_some

# A function that makes an entry for the action log from the pauses before and after a change.
Record = Callable[[Sequence[Pause], Sequence[Pause]], CreateOp]
# Time after which `wait_in_force` first calls `on_wait`.
_REPORT_SECONDS = 0.4
NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class PausesRead:
    """The pauses in force, and the workers that obey them."""

    node: PauseNode
    # Place of the last change in the coordinator's total order.
    zxid: int
    # For each worker, the place of the last change that the worker obeys.
    obeyed: dict[str, int]


def new_pause(
    queues: Iterable[str], reason: str = "", seconds: float | None = None, id: str = ""
) -> Pause:
    """Return a pause that is not in force yet; raise UsageError if a value is not valid.

    :param seconds: the duration of the pause; None for no end.
    """
    globs = tuple(dict.fromkeys(queues))
    if not globs:
        raise UsageError(reason="a pause must name queues, got no glob")
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
        raise UsageError(reason=f"a pause must last more than 0 seconds, got {seconds:g}")
    until = None if seconds is None else round(now + seconds, 3)
    return Pause(id or uuid.uuid4().hex, globs, reason, writer(), round(now, 3), until)


def check_matches(globs: Iterable[str], names: Collection[str]) -> None:
    """Raise NotFoundError for a glob that matches no queue, because it is probably a mistake."""
    for glob in globs:
        if not any(map(QueueFilter((glob,)).matcher(), names)):
            raise NotFoundError(what="queue that matches", name=glob)


def read_pauses(client: Client, layout: Layout) -> PausesRead:
    """Return the pauses in force, and the last change that each worker obeys."""
    answer = read(client, layout.fleet.holds)
    obeyed = _obeyed(client, layout, list_workers(client, layout))
    if isinstance(answer, NodeRead):
        node = PauseNode.parse(answer.data)
        return PausesRead(replace(node, pauses=in_force(client, node.pauses)), answer.mzxid, obeyed)
    return PausesRead(PauseNode(), 0, obeyed)


def in_force(client: Client, pauses: Iterable[Pause]) -> tuple[Pause, ...]:
    """Return the pauses whose makers still exist."""
    present = tuple(pauses)
    makers = sorted({pause.by for pause in present if pause.by})
    alive = {"", *(node.path for node in read_nodes(client, makers))}
    return tuple(pause for pause in present if pause.by in alive)


def add_pause(client: Client, layout: Layout, pause: Pause, *, record: Record | None = None) -> int:
    """Write a pause.

    For `wait_in_force`, return the place of the write in the coordinator's total order.

    Raise PausesUnreadableError if the present pauses cannot be read, and RejectedError if the node
    already has too many pauses.
    """
    path = layout.fleet.holds
    mine = pause.id.encode()
    entry: tuple[CreateOp, ...] = ()

    def decide(node: Node) -> list[Op]:
        nonlocal entry
        if not isinstance(node, NodeRead):  # no worker has ever started
            make_folder(client, path)
        pauses = (*in_force(client, _pauses(node)), pause)
        length = sum(len(glob) for each in pauses for glob in each.queues)
        if len(pauses) > MAX_PAUSES or length > MAX_GLOBS_CHARACTERS:
            raise RejectedError(
                reason=f"pauses must be at most {MAX_PAUSES} with globs of {MAX_GLOBS_CHARACTERS} "
                "characters together; end some of those that `qdo pause --list` lists"
            )
        entry = _recorded(record, (), (pause,))
        return [*_writing(path, node, pauses), *entry]

    def is_mine(node: NodeRead) -> bool:  # another operator may have ended the pause already
        return mine in node.data or any(isinstance(read(client, op.path), NodeRead) for op in entry)

    answer = change(client, path, decide, root=layout.root, is_mine=is_mine)
    return answer.zxid if answer is not None else 0


def end_pauses(
    client: Client, layout: Layout, ids: Iterable[str], *, record: Record | None = None
) -> list[Pause]:
    ended = set(ids)
    return _edit(client, layout, lambda pause: None if pause.id in ended else pause, record)


def resume_globs(
    client: Client, layout: Layout, globs: Iterable[str], *, record: Record | None = None
) -> list[Pause]:
    """Remove globs from the pauses of operators, and end pauses that have no globs left.

    Return the changed pauses. Sections do not change.
    """
    ended = set(globs)

    def without(pause: Pause) -> Pause | None:
        if pause.by:  # a section ends only through its process or its id
            return pause
        queues = tuple(glob for glob in pause.queues if glob not in ended)
        return replace(pause, queues=queues) if queues else None

    return _edit(client, layout, without, record)


def end_all(client: Client, layout: Layout, *, record: Record | None = None) -> list[Pause]:
    """End all pauses, even unreadable pauses; return the readable pauses."""
    ended: list[Pause] = []

    def decide(node: Node) -> list[Op] | None:
        present = PauseNode.parse(node.data) if isinstance(node, NodeRead) else PauseNode()
        ended[:] = present.pauses
        if present == PauseNode():
            return None
        return [*_writing(layout.fleet.holds, node, ()), *_recorded(record, ended, ())]

    change(client, layout.fleet.holds, decide, root=layout.root)
    return ended


def wait_in_force(
    client: Client,
    layout: Layout,
    pause: Pause,
    zxid: int,
    timeout_seconds: float,
    on_wait: Callable[[Sequence[str]], None] = lambda names: None,
    consequence: str = "it stays in force for all others; end it with `qdo resume --id {id}`",
) -> int:
    """Wait until no message of the paused queues runs and no earlier section pauses them.

    Return the number of workers that had to acknowledge the pause. Raise PauseNotObeyedError if a
    worker does not obey before the timeout, and SectionLostError if an operator ended this section.

    :param zxid: the place that `add_pause` returned.
    :param on_wait: a function to call with the names of the remaining workers whenever they change.
    """
    # List workers after writing the pause. Workers that register later read it before they start a
    # message.
    waiting = listed = list_workers(client, layout)
    names: Sequence[str] = ()
    reported: Sequence[str] = ()
    for waited in polls(timeout_seconds):
        obeyed = _obeyed(client, layout, waiting)
        waiting = [name for name, upto in obeyed.items() if upto < zxid]
        ahead = [] if not pause.by else _sections_ahead(client, layout, pause)
        names = [*waiting, *(f"section {each.id}" for each in ahead)]
        if not names:
            return len(listed)
        if names != reported and waited > _REPORT_SECONDS:
            reported = names
            on_wait(names)
    raise PauseNotObeyedError(
        id=pause.id,
        seconds=timeout_seconds,
        found="one does" if len(names) == 1 else f"{len(names)} do",
        names=join_some(names, NAMES_SHOWN),
        consequence=consequence.format(id=pause.id),
    )


def pause_text(pause: Pause) -> str:
    kind = "section" if pause.by else "paused"
    return f"{kind}: {pause.why}" if pause.why else f"{kind} by {pause.who or 'an unknown user'}"


def _obeyed(client: Client, layout: Layout, workers: Iterable[str]) -> dict[str, int]:
    """Return the zxid of the last change that each of these workers obeys."""
    nodes = read_nodes(client, [layout.worker(name) for name in workers])
    return {node.path.rpartition("/")[2]: WorkerNode.parse(node.data).holds for node in nodes}


def _sections_ahead(client: Client, layout: Layout, pause: Pause) -> list[Pause]:
    earlier: list[Pause] = []
    for each in _pauses(read(client, layout.fleet.holds)):
        if each.id == pause.id:
            return list(in_force(client, earlier))
        if each.by and any(overlap(a, b) for a in each.queues for b in pause.queues):
            earlier.append(each)
    raise SectionLostError(queues=" ".join(pause.queues), reason="an operator has ended it")


def _edit(
    client: Client, layout: Layout, edit: Callable[[Pause], Pause | None], record: Record | None
) -> list[Pause]:
    changed: list[Pause] = []

    def decide(node: Node) -> list[Op] | None:
        before = _pauses(node)
        after = [edit(pause) for pause in before]
        different = [pause for pause, new in zip(before, after, strict=True) if new != pause]
        if not different:
            return None  # the first try of this retry took effect, so keep its result
        changed[:] = different
        kept = [pause for pause in after if pause is not None]
        return [*_writing(layout.fleet.holds, node, kept), *_recorded(record, different, kept)]

    change(client, layout.fleet.holds, decide, root=layout.root)
    return changed


def _pauses(node: Node) -> tuple[Pause, ...]:
    present = PauseNode.parse(node.data) if isinstance(node, NodeRead) else PauseNode()
    if present.fault is not None:
        raise PausesUnreadableError(reason=present.fault)
    return present.pauses


def _recorded(
    record: Record | None, before: Sequence[Pause], after: Sequence[Pause]
) -> tuple[CreateOp, ...]:
    return () if record is None else (record(before, after),)


def _writing(path: str, node: Node, pauses: Iterable[Pause]) -> list[Op]:
    version = node.version if isinstance(node, NodeRead) else 0
    return [SetOp(path, PauseNode(tuple(pauses)).encode(), version)]


# --- with an entry in the action log ---


def pause_queues(client: Client, layout: Layout, pause: Pause, by: str = "") -> int:
    """Start a pause, with an entry in the action log.

    Return the place of the write, like `add_pause`.
    """
    with recorded(client, layout, "pause", pause.queues, pause.why, by) as record:
        return add_pause(client, layout, pause, record=record)


def resume_pause(client: Client, layout: Layout, id: str, reason: str, by: str = "") -> list[Pause]:
    """End a pause and return it; raise NotFoundError if the pause does not exist."""
    with recorded(client, layout, "resume", (id,), reason, by) as record:
        ended = end_pauses(client, layout, [id], record=record)
    if not ended:
        raise NotFoundError(what="pause", name=id)
    return ended


def chosen(found: PauseNode, globs: Sequence[str], id: str | None = None) -> list[Pause]:
    """Return the pauses with this id or one of these globs.

    Without an id or glob, return all pauses.

    Raise NotFoundError if no pause has the id, or no pause has one of the globs.
    """
    if not globs and id is None:
        return list(found.pauses)
    if found.fault is not None:
        raise PausesUnreadableError(reason=found.fault)
    if id is not None:
        named = [pause for pause in found.pauses if pause.id == id]
        if not named:
            raise NotFoundError(what="pause", name=id)
        return named
    pauses = [pause for pause in found.pauses if not pause.by]
    present = {glob for pause in pauses for glob in pause.queues}
    unknown = [glob for glob in globs if glob not in present]
    if unknown:
        raise NotFoundError(what="pause of", name=unknown[0])
    return [pause for pause in pauses if not set(globs).isdisjoint(pause.queues)]


@contextmanager
def recorded(
    client: Client, layout: Layout, command: str, globs: Sequence[str], reason: str, by: str = ""
) -> Iterator[Record]:
    with AuditTrail(client, layout, command, reason, by).change(" ".join(globs)) as entry:
        yield lambda before, after: entry(_logged(before), _logged(after))


def _logged(pauses: Sequence[Pause]) -> Values:
    return {pause.id[:8]: " ".join(pause.queues) for pause in pauses}
