"""The results of actions, and how they are logged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qdo.fleet.action_node import Action
from qdo.fleet.protocol.audit_entries import AuditEntry, Values

DONE, FAILED, REJECTED, EXPIRED, LOST = "done", "failed", "rejected", "expired", "lost"
"""The outcomes of actions."""
CANCEL = "cancel"
"""The action of `qdo cancel`, which `qdo action` does not offer."""


class UnfitError(Exception):
    """The action cannot be begun; the text says why."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an action.

    :ivar text: one line for the action log.
    :ivar output: a longer text, which is kept for a while.
    """

    text: str
    output: str = ""
    outcome: str = DONE


Finish = Callable[[Result], None]
Perform = Callable[[Values, Finish], "Result | None"]
"""Does an action with its arguments. Returns its result; or None, and calls the function later.

Raises UnfitError if the action cannot be begun.
"""


def ended_entry(id: str, worker: str, action: Action, outcome: str, result: str) -> AuditEntry:
    """Return the entry of an action that has ended.

    Its target is the worker; or the queue whose messages were cancelled, as if by a command.
    """
    ended: Values = {"outcome": outcome, "result": result}
    queue = action.args.get("queue")
    of_queue = action.name == CANCEL and isinstance(queue, str)
    if of_queue:
        ended = {**ended, "worker": worker}
    return AuditEntry(
        id,
        0.0,
        by=action.by,
        command=action.name if of_queue else f"action {action.name}".rstrip(),
        target=str(queue) if of_queue else worker,
        before={},
        after={**ended, **{key: value for key, value in action.args.items() if key not in ended}},
        reason=action.reason,
    )
