"""The holders of an app's locks, and the waiting processes."""

from __future__ import annotations

from dataclasses import dataclass

from qdo.coordination.bulk_reads import names_below, read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import load, unix_time
from qdo.fleet.lock_contender import Contender


@dataclass(frozen=True, slots=True)
class LockRow:
    """One contender for a lock."""

    lock: str
    shared: bool
    holds: bool
    # The user, host and process of the contender; "" if unknown.
    who: str
    why: str
    # Unix time, by the contender's clock, at which the contender began to wait; None if unknown.
    since: float | None


def locks(client: Client, layout: Layout) -> list[LockRow]:
    """Return the contenders of every lock, in their order."""
    names = names_below(client, layout.fleet.locks)
    contenders = read_children(client, [layout.fleet.lock(name) for name in names])
    return [row for path in contenders for row in _of_lock(client, path, contenders[path])]


def _of_lock(client: Client, path: str, names: list[str]) -> list[LockRow]:
    contenders = sorted(
        (each for each in map(Contender.parse, names) if each is not None),
        key=lambda each: each.number,
    )
    nodes = read_nodes(client, [f"{path}/{each.name}" for each in contenders])
    values = {node.path.rpartition("/")[2]: load(node.data)[0] for node in nodes}
    rows = []
    for contender in contenders:
        if contender.name not in values:
            continue  # the contender has left
        value = values[contender.name]
        who = value.get("who")
        why = value.get("why")
        rows.append(
            LockRow(
                path.rpartition("/")[2],
                not contender.exclusive,
                not any(contender.waits_for(other) for other in contenders),
                who if isinstance(who, str) else "",
                why if isinstance(why, str) else "",
                unix_time(value.get("at")),
            )
        )
    return rows
