"""Requests actions from workers, checks the arguments, and waits for the results.

Commands resolve globs. Therefore each worker gets its own node and returns its own result.
`action_machine` performs the actions in the workers.

Functions raise NodeRefusedError if the account may not list workers or request actions, and
CoordinatorUnreachableError after a timeout. After a timeout, some workers may have received their
requests.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from qdo.coordination.bulk_reads import names_below, read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol import machine as m
from qdo.coordination.transactions import commit_each, make_folder, read, settle
from qdo.coordination.znodes.layout import Layout, is_worker_name
from qdo.coordination.znodes.values import load
from qdo.errors import NodeRefusedError
from qdo.fleet.action_machine import DONE, LOST, Action, UnfitError
from qdo.fleet.audit_entries import MAX_TEXT, AuditEntry, Values, entry_name
from qdo.fleet.names import writer
from qdo.system.clock import clock, polls

# The outcome of an action if the result did not arrive before the timeout.
UNANSWERED = "unanswered"
PING, STACKS, LOG_LEVEL, DRAIN, RESTART, RELOAD = ACTIONS = (
    "ping",
    "stacks",
    "log-level",
    "drain",
    "restart",
    "reload",
)
# The action that `qdo ps` requests.
RUNS = "runs"
MAX_RUNS = 1000
LEVELS = ("debug", "info", "warning", "error")
MAX_LOG_LEVEL_SECONDS = 86_400.0
_NUMBER = re.compile("[0-9]{1,100}")


@dataclass(slots=True)
class Asked:
    """An action that a command requested from one worker."""

    worker: str
    # The name of the action's node and of its entry in the action log.
    id: str
    # "done", "failed", "rejected", "expired", "lost", or "unanswered".
    outcome: str = UNANSWERED
    result: str = ""
    # Seconds from the request until the command read the result; None before then.
    seconds: float | None = None
    # A longer result, such as stacks.
    output: str = ""
    # Whether the worker writes the result as an entry in the action log.
    logged: bool = True
    _began: float = field(default_factory=clock, repr=False)

    def end(self, outcome: str, result: str) -> None:
        self.outcome = outcome
        self.result = result
        self.seconds = clock() - self._began


def list_workers(client: Client, layout: Layout) -> list[str]:
    return list(filter(is_worker_name, names_below(client, layout.workers)))


def matching(workers: Sequence[str], glob: str) -> list[str]:
    return [name for name in workers if fnmatchcase(name, glob)]


def ask_workers(
    client: Client,
    layout: Layout,
    workers: Sequence[str],
    name: str,
    args: Values,
    *,
    within_seconds: float,
    reason: str = "",
    by: str = "",
    logged: bool = True,
) -> list[Asked]:
    """Request an action from each of these workers; return one record for each worker.

    :param within_seconds: time after which workers do not begin the action.
    :param by: the operator, unless the operator is the user of this process.
    :param logged: whether to log the action. The log never has actions that only read.
    """
    now = time.time()
    fleet = layout.fleet
    logged = logged and name != RUNS
    expires = round(now + within_seconds, 3)
    action = Action(name, args, expires, by or writer(), reason, logged=logged)
    asked = [Asked(each, entry_name(now, secrets.token_hex(4)), logged=logged) for each in workers]
    found = read_children(client, [fleet.actions])
    if fleet.actions not in found:
        make_folder(client, fleet.actions)
    folders = set(found.get(fleet.actions, []))
    pending = asked
    while pending:
        transactions = [_asking(layout, each, action, folders) for each in pending]
        answers = commit_each(client, transactions)
        if any(isinstance(answer, m.NoResponse) for answer in answers):
            settle(client, layout.root)
        again = []
        for each, ops, answer in zip(pending, transactions, answers, strict=True):
            if isinstance(answer, m.Rejected):
                if answer.fault is m.CommitError.OTHER:
                    raise NodeRefusedError(
                        path=ops[answer.index].path, account=client.access.account_name()
                    )
                if answer.index == 0:
                    each.end(LOST, "the worker is gone")
                else:  # another command has created the worker's folder
                    folders.add(each.worker)
                    again.append(each)
            elif not isinstance(answer, m.Committed) and not _is_asked(client, layout, each):
                again.append(each)
        pending = again
    return asked


def _asking(layout: Layout, asked: Asked, action: Action, folders: set[str]) -> list[m.Op]:
    folder = layout.fleet.actions_of(asked.worker)
    made: list[m.Op] = [] if asked.worker in folders else [m.CreateOp(folder, b"")]
    node = m.CreateOp(f"{folder}/{asked.id}", action.encode())
    return [m.CheckOp(layout.worker(asked.worker)), *made, node]


def _is_asked(client: Client, layout: Layout, asked: Asked) -> bool:
    """Return whether a transaction without an answer took effect."""
    fleet = layout.fleet
    # By now, the action may have ended with an entry or an output of this id.
    folders = fleet.actions_of(asked.worker), fleet.actionlog, fleet.actionoutput
    return any(isinstance(read(client, f"{path}/{asked.id}"), m.NodeRead) for path in folders)


def wait_for_results(
    client: Client, layout: Layout, asked: Sequence[Asked], timeout_seconds: float
) -> None:
    """Wait until all actions have ended, and record the results. Late actions stay "unanswered"."""
    waiting = {each.id: each for each in asked if each.seconds is None}
    for _ in polls(timeout_seconds, client.handler.sleep_func):
        _record(client, layout, waiting)
        if not waiting:
            return


def _record(client: Client, layout: Layout, waiting: dict[str, Asked]) -> None:
    """Record the results of ended actions, and remove these actions from `waiting`."""
    ended = []
    for node in read_nodes(client, [layout.fleet.log_entry(id) for id in waiting]):
        id = node.path.rpartition("/")[2]
        entry = AuditEntry.parse(id, node.data, node.written, node.refused)
        values: Mapping[str, object] = entry.after or {}
        each = waiting.pop(id)
        each.end(str(values.get("outcome", entry.fault or DONE)), str(values.get("result", "")))
        ended.append(each)
    folder = layout.fleet.actionoutput
    outputs = {f"{folder}/{each.id}": each for each in ended if each.outcome == DONE}
    for node in read_nodes(client, list(outputs)):
        outputs[node.path].output = node.data.decode(errors="replace")
    unlogged = {f"{folder}/{id}": id for id, each in waiting.items() if not each.logged}
    for node in read_nodes(client, list(unlogged)):
        value, fault = load(node.data)
        if fault is None and "outcome" in value:  # older versions of qdo write an entry instead
            each = waiting.pop(unlogged[node.path])
            each.end(str(value["outcome"]), str(value.get("result", "")))
            each.output = str(value.get("output", ""))


# --- the arguments of actions; the functions raise UnfitError for invalid arguments ---


def cancelled_in(args: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return the arguments of the action "cancel": a queue, and the positions of messages."""
    queue = args.get("queue")
    text = args.get("positions")
    numbers = str(text).split()
    are_numbers = numbers and all(_NUMBER.fullmatch(each) for each in numbers)
    if not isinstance(queue, str) or not are_numbers:
        raise UnfitError(f"queue and positions must be given, got {queue!r} and {text!r}")
    return queue, [int(each) for each in numbers]


def cancelling(queue: str, positions: Sequence[int]) -> list[Values]:
    """Return the arguments of actions that cancel messages."""
    # Many messages need several actions, because the values of nodes are limited in size.
    batches: list[str] = []
    for position in map(str, positions):
        if batches and len(batches[-1]) + len(position) < MAX_TEXT:
            batches[-1] += f" {position}"
        else:
            batches.append(position)
    return [{"queue": queue, "positions": each} for each in batches]


def seconds_of(args: Mapping[str, Any]) -> float:
    seconds = args.get("seconds")
    most = MAX_LOG_LEVEL_SECONDS
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= most:
        raise UnfitError(f"seconds must be more than 0 and at most {most:g}, got {seconds!r}")
    return float(seconds)


def level_of(args: Mapping[str, Any]) -> str:
    found = args.get("level")
    if found not in LEVELS:
        raise UnfitError(f"level must be one of {', '.join(LEVELS)}, got {found!r}")
    return str(found)


def runs_of(args: Mapping[str, Any]) -> tuple[str, int]:
    """Return the arguments of the action "runs": a glob of queues, and a limit of messages."""
    glob = args.get("queues")
    most = args.get("most")
    if not isinstance(glob, str) or type(most) is not int or not 0 < most <= MAX_RUNS:
        raise UnfitError(
            f"queues must be a glob and most from 1 to {MAX_RUNS}, got {glob!r} and {most!r}"
        )
    return glob, most
