"""Queues added up by a part of their names, by owner or by state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdo.ops.items import Judged
    from qdo.ops.status import QueueStatus
    from qdo.ops.verdicts import Verdict

_SEPARATOR = re.compile(r"[-_./:]")


def _prefix(status: QueueStatus, verdict: Verdict) -> str:
    return _SEPARATOR.split(status.queue, maxsplit=1)[0] or status.queue


def _owner(status: QueueStatus, verdict: Verdict) -> str:
    return "none" if status.owner is None or status.owner_gone else status.owner


def _state(status: QueueStatus, verdict: Verdict) -> str:
    return verdict.state.value


GROUPINGS: Mapping[str, Callable[[QueueStatus, Verdict], str]] = MappingProxyType(
    {"prefix": _prefix, "owner": _owner, "state": _state}
)


def group_items(judged: Judged, by: str) -> list[dict[str, Any]]:
    """Return the items of qdo.groups/1, the worst state first.

    A sum is None if a part of it is unknown; the greatest age is that of the known ones.
    """
    groups: dict[str, list[tuple[QueueStatus, Verdict]]] = {}
    for each in judged:
        groups.setdefault(GROUPINGS[by](*each), []).append(each)
    ranked = [(_worst(members).state.rank, name, members) for name, members in groups.items()]
    return [_item(name, members) for _, name, members in sorted(ranked, key=lambda each: each[:2])]


def _worst(members: Judged) -> Verdict:
    return min((verdict for _, verdict in members), key=lambda each: each.state.rank)


def _item(name: str, members: Judged) -> dict[str, Any]:
    ages = [each.behind_seconds for each, _ in members if each.behind_seconds is not None]
    attention = [v for _, v in members if v.state.needs_attention]
    return {
        "group": name,
        "queues": len(members),
        "state": _worst(members).state.value,
        "attention": len(attention),
        "behind_seconds": max(ages, default=None),
        "backlog": _sum([each.backlog for each, _ in members]),
        "approximate": any(each.approximate for each, _ in members),
        "dead_letters": _sum([each.dead_letters for each, _ in members]),
    }


def _sum(counts: list[int | None]) -> int | None:
    known = [each for each in counts if each is not None]
    return sum(known) if len(known) == len(counts) else None
