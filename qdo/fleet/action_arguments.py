"""The actions that operators can ask for, and their arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from qdo.fleet.protocol.action_results import UnfitError
from qdo.fleet.protocol.audit_entries import MAX_TEXT, Values

_NUMBER = re.compile("[0-9]{1,100}")

PING, STACKS, LOG_LEVEL, DRAIN, RESTART, PROFILE, RELOAD = ACTIONS = (
    "ping",
    "stacks",
    "log-level",
    "drain",
    "restart",
    "profile",
    "reload",
)
RUNS = "runs"
"""Asked for by `qdo ps`."""
MAX_RUNS = 1000
LEVELS = ("debug", "info", "warning", "error")
MAX_PROFILE_SECONDS = 60.0
MAX_LOG_LEVEL_SECONDS = 86_400.0
_LIMITS: Mapping[str, float] = MappingProxyType(
    {PROFILE: MAX_PROFILE_SECONDS, LOG_LEVEL: MAX_LOG_LEVEL_SECONDS}
)


def cancelled_in(args: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return the arguments of the action "cancel": `queue`, and the positions in `positions`.

    :raises UnfitError: they are not a text and decimal numbers.
    """
    queue, text = args.get("queue"), args.get("positions")
    found = str(text).split()
    if (
        not isinstance(queue, str)
        or not found
        or not all(_NUMBER.fullmatch(each) for each in found)
    ):
        raise UnfitError(f"queue and positions must be given, got {queue!r} and {text!r}")
    return queue, [int(each) for each in found]


def cancelling(queue: str, positions: Sequence[int]) -> list[Values]:
    """Return the arguments of one or more actions that cancel messages.

    Several, because the values of an action are short.
    """
    batches: list[str] = []
    for position in map(str, positions):
        if batches and len(batches[-1]) + len(position) < MAX_TEXT:
            batches[-1] += f" {position}"
        else:
            batches.append(position)
    return [{"queue": queue, "positions": each} for each in batches]


def seconds_of(action: str, args: Mapping[str, Any]) -> float:
    """Return the argument `seconds` of an action.

    :raises UnfitError: it is not a number within the limit of the action.
    """
    found, most = args.get("seconds"), _LIMITS[action]
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= most:
        raise UnfitError(f"seconds must be more than 0 and at most {most:g}, got {found!r}")
    return float(found)


def level_of(args: Mapping[str, Any]) -> str:
    """Return the argument `level` of the action "log-level".

    :raises UnfitError: it is not a level.
    """
    found = args.get("level")
    if found not in LEVELS:
        raise UnfitError(f"level must be one of {', '.join(LEVELS)}, got {found!r}")
    return str(found)


def runs_of(args: Mapping[str, Any]) -> tuple[str, int]:
    """Return the arguments of the action "runs": a glob of queues, and how many messages at most.

    :raises UnfitError: one has the wrong type.
    """
    glob, most = args.get("queues"), args.get("most")
    if not isinstance(glob, str) or type(most) is not int or not 0 < most <= MAX_RUNS:
        raise UnfitError(
            f"queues must be a glob and most from 1 to {MAX_RUNS}, got {glob!r} and {most!r}"
        )
    return glob, most
