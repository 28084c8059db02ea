"""Performs the actions that operators request from one worker, and logs the results. Does no I/O.

1.  An operator creates a node below ``actions/<worker>``. The node's name has the same form as the
    names in the action log.
2.  The worker claims the action: it writes `RUNNING` into the node, at the version that it read.
    Only then does it act. If the answer to this write is lost, a later read shows whether the write
    took effect, because the node names the claimer.
3.  One transaction deletes the node and writes an entry with the result into the action log. For an
    action that only reads, or that a program requests without a reason, the transaction writes an
    output instead. If the answer is lost and the node still exists, the worker writes the *same*
    entry again. Therefore the log has one entry for each action.

While a job blocks the event loop of the worker, its parent process also runs this machine. Both
processes may find an action, but only one process claims the action. The parent claims only the
actions in `perform`.

The worker does not begin expired, unknown or unreadable actions, but ends them with an entry. No
two workers ever have the same name. So if an action is marked as running but this worker has not
claimed it, another program wrote the action. A node that the worker may not read, write or delete
does not stop other actions.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from qdo.coordination.protocol import machine as m
from qdo.coordination.znodes.layout import FleetLayout
from qdo.coordination.znodes.values import encode, load, shown
from qdo.fleet.audit_entries import (
    MAX_KEYS,
    MAX_TEXT,
    AuditEntry,
    Values,
    cut,
    entry_name,
    entry_time,
)

_log = logging.getLogger(__name__)

# Maximum size of an action, and of an output. The machine rejects longer actions and cuts longer
# outputs.
MAX_ACTION_BYTES = 16 * 1024
MAX_OUTPUT_BYTES = 128 * 1024
# Maximum number of characters in the name of an action.
MAX_NAME = 50
# Latest possible expiry of an action, as a Unix time.
MAX_EXPIRES = 1e11
# Maximum time until an action expires. The worker rejects actions that expire later.
AHEAD_SECONDS = 3600.0
# Maximum number of actions in progress. Other actions wait.
AT_ONCE = 20
RUNNING = "running"
# The actors: the worker, or its parent process while a job blocks the worker.
WORKER = "worker"
PARENT = "parent"
# The outcomes of actions.
DONE = "done"
FAILED = "failed"
REJECTED = "rejected"
EXPIRED = "expired"
LOST = "lost"
# The action of `qdo cancel`, which `qdo action` does not offer.
CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Action:
    """One action for one worker."""

    name: str = ""
    args: Values = field(default_factory=dict)
    # Unix time after which the worker does not begin the action.
    expires: float = 0.0
    by: str = ""
    reason: str = ""
    # "" before an actor claims the action, then `RUNNING`.
    state: str = ""
    # The claimer, `WORKER` or `PARENT`.
    actor: str = ""
    # Whether the worker writes the result as an entry in the action log.
    logged: bool = True
    fault: str | None = None

    def encode(self) -> bytes:
        value = {
            "action": self.name,
            "args": dict(self.args),
            "expires": self.expires,
            "by": cut(self.by),
            "why": cut(self.reason),
            "state": self.state,
            "actor": self.actor,
        }
        return encode(value if self.logged else {**value, "logged": False})

    @classmethod
    def parse(cls, data: bytes) -> Action:
        """Return the action in a node, with a fault if another program wrote the node."""
        if len(data) > MAX_ACTION_BYTES:
            return cls(fault=f"the value must have at most {MAX_ACTION_BYTES} bytes")
        value, fault = load(data)
        fault = fault or _fault(value)
        if fault is not None:
            return cls(fault=fault)
        return cls(
            value["action"],
            value.get("args", {}),
            float(value["expires"]),
            cut(value.get("by", "")),
            cut(value.get("why", "")),
            value.get("state", ""),
            value.get("actor", ""),
            value.get("logged") is not False,
        )


def cut_output(text: str) -> str:
    """Return a text of at most `MAX_OUTPUT_BYTES`, cut after a whole line."""
    data = text.encode(errors="replace")
    if len(data) <= MAX_OUTPUT_BYTES:
        return data.decode()
    kept = data[: MAX_OUTPUT_BYTES - 100].decode(errors="ignore").rpartition("\n")[0]
    return f"{kept}\n... {len(data) - len(kept.encode())} bytes omitted\n"


def _fault(value: Mapping[str, Any]) -> str | None:
    name = value.get("action")
    args = value.get("args", {})
    expires = value.get("expires")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        return f"action must be a name, got {shown(name)}"
    if not isinstance(args, dict) or len(args) > MAX_KEYS or not all(map(_is_plain, args.values())):
        return f"args must be at most {MAX_KEYS} plain values, got {shown(args)}"
    if (
        not isinstance(expires, int | float)
        or isinstance(expires, bool)
        or not 0 <= expires <= MAX_EXPIRES
    ):
        return f"expires must be a Unix time, got {shown(expires)}"
    if value.get("state", "") not in ("", RUNNING):
        return f"state must be empty or {RUNNING}, got {shown(value['state'])}"
    if value.get("actor", "") not in ("", WORKER, PARENT):
        return f"actor must be {WORKER} or {PARENT}, got {shown(value['actor'])}"
    for key in ("by", "why"):
        if not isinstance(value.get(key, ""), str):
            return f"{key} must be a text, got {shown(value[key])}"
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return value is None or isinstance(value, bool | int | float)


class UnfitError(Exception):
    """The action cannot begin. The text is the reason."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an action.

    `text` is one line for the action log. The leader deletes `output` later.
    """

    text: str
    output: str = ""
    outcome: str = DONE


Finish = Callable[[Result], None]
# A function that performs an action with its arguments, and returns the result. If the function
# returns None, it calls `Finish` later. The function raises UnfitError if the action cannot begin.
Perform = Callable[[Values, Finish], "Result | None"]


def ended_entry(id: str, worker: str, action: Action, outcome: str, result: str) -> AuditEntry:
    """Return the action log's entry for an ended action."""
    # The target of an entry is the worker. For cancelled messages, the target is their queue, as in
    # the entries of commands.
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


def unlogged_result(entry: AuditEntry, output: str) -> bytes:
    """Return the output of an action that has no entry in the action log."""
    return encode({**(entry.after or {}), "output": output})


@dataclass(slots=True)
class _Underway:
    """An action that this machine claims."""

    action: Action
    version: int = -1
    begun: bool = False  # this machine has claimed the action and never begins it again
    entry: AuditEntry | None = None
    output: str = ""


class ActionsWatch(m.Machine):
    """Claims the actions of one worker, acts, and writes the results into the action log.

    :param call: a function that calls another function on the loop of this machine.
    :param actor: `WORKER`, or `PARENT`, which claims only the actions in `perform`.
    """

    def __init__(
        self,
        fleet: FleetLayout,
        worker: str,
        perform: Mapping[str, Perform],
        *,
        wall: Callable[[], float],
        call: Callable[[Callable[[], object]], object],
        actor: str = WORKER,
    ) -> None:
        super().__init__()
        self._closing = False
        self._fleet = fleet
        self._worker = worker
        self._folder = fleet.actions_of(worker)
        self._perform = perform
        self._wall = wall
        self._call = call
        self._actor = actor
        self._claimed: dict[str, _Underway] = {}
        self._asked: set[str] = set()
        self._passed: set[str] = set()

    def close(self) -> None:
        """Claim no more actions, but let claimed actions end."""
        self._closing = True

    @property
    def ended(self) -> bool:
        return self._closing and not self._claimed

    def connected(self) -> None:
        self._asked.clear()
        self._list()

    def changed(self, path: str) -> None:
        self._list()

    # --- reading ------------------------------------------------------------------------

    def _list(self) -> None:
        self.ask(m.Children(self._folder, watch=True), self._listed)

    def _listed(self, answer: m.Response) -> None:
        if isinstance(answer, m.Refused):
            _log.error(
                "cannot list %s: %s; this worker does no actions; correct it with `qdo admin acl"
                " apply`",
                self._folder,
                answer.reason,
            )
        if isinstance(answer, m.NodeMissing):
            # Only `Stat` arms a watch on a node that does not exist.
            self.ask(m.Stat(self._folder, watch=True), self._looked)
        if not isinstance(answer, m.ChildrenRead):
            return
        self._passed.intersection_update(answer.names)
        for name in set(self._claimed).difference(answer.names, self._asked):
            del self._claimed[name]  # the action has ended, but the answer was lost
        waiting = sorted(set(answer.names) - self._passed - self._asked)
        for name in waiting[: max(0, AT_ONCE - len(self._asked))]:
            self._read(name)

    def _looked(self, answer: m.Response) -> None:
        if isinstance(answer, m.NodeRead):
            self._list()  # the folder was created after the first request

    def _read(self, name: str) -> None:
        self._asked.add(name)
        self.ask(m.Get(self._path(name)), partial(self._got, name))

    def _got(self, name: str, answer: m.Response) -> None:
        if isinstance(answer, m.NoResponse):
            return  # the machine lists again after the reconnection
        if isinstance(answer, m.Refused):
            self._refuse(name, answer.reason)
        elif isinstance(answer, m.NodeRead):
            self._decide(name, answer)
        else:
            self._forget(name)

    def _decide(self, name: str, node: m.NodeRead) -> None:
        action = Action.parse(node.data)
        mine = self._claimed.get(name)
        running = action.fault is None and action.state == RUNNING
        if mine is not None and mine.begun:
            mine.version = node.version
            self._end(name, mine)  # this call does nothing before the action has ended
        elif running and action.actor == self._actor and mine is not None:
            self._begin(name, mine, node.version)
        elif mine is not None and not running and action.fault is None:
            # The answer was lost, and this read may be stale. Another write shows the outcome.
            self._claim(name, action, node.version)
        elif self._is_for_another(action, running):
            self._pass_over(name)
        elif fault := self._fault(action, running):
            self._end_unbegun(name, action, REJECTED, fault, node.version)
        elif self._is_over(action):
            self._end_unbegun(name, action, EXPIRED, self._lateness(action), node.version)
        else:
            self._claimed[name] = _Underway(action)
            self._claim(name, action, node.version)

    def _is_for_another(self, action: Action, running: bool) -> bool:
        if (running and action.actor == PARENT) or self._closing:
            return True
        if self._actor == WORKER:
            return False
        return running or self._fault(action, running) is not None or self._is_over(action)

    def _is_over(self, action: Action) -> bool:
        return action.expires <= self._wall()

    def _lateness(self, action: Action) -> str:
        # A large lateness reveals a wrong clock.
        return f"{self._wall() - action.expires:.1f} s too late by the clock of this host"

    def _fault(self, action: Action, running: bool) -> str | None:
        if action.fault is not None:
            return action.fault
        if running:
            return "this worker has not begun the action"
        if action.name not in self._perform:
            return "this worker does not know the action"
        if action.expires > self._wall() + AHEAD_SECONDS:
            return f"expires must be at most {AHEAD_SECONDS:.0f} s ahead"
        return None

    # --- acting -------------------------------------------------------------------------

    def _claim(self, name: str, action: Action, version: int) -> None:
        claim = replace(action, state=RUNNING, actor=self._actor).encode()
        write = m.SetOp(self._path(name), claim, version)
        self.ask(m.Commit((write,)), partial(self._answered_claim, name))

    def _answered_claim(self, name: str, answer: m.Response) -> None:
        if isinstance(answer, m.Committed):
            self._begin(name, self._claimed[name], answer.versions[0])
        elif isinstance(answer, m.Rejected):
            if answer.fault is m.CommitError.OTHER:
                self._refuse(name, answer.reason)
            else:
                # Another program changed or deleted the node, or an earlier claim took effect late.
                self._read(name)

    def _begin(self, name: str, mine: _Underway, version: int) -> None:
        mine.version = version
        mine.begun = True

        def finish(result: Result) -> None:
            self._call(partial(self._finished, name, mine, result))

        action = mine.action
        if self._is_over(action):  # the answer was slow, or this process was suspended
            self._finished(name, mine, Result(self._lateness(action), outcome=EXPIRED))
            return
        try:
            result: Result | None = self._perform[action.name](action.args, finish)
        except UnfitError as error:
            result = Result(str(error), outcome=REJECTED)
        except Exception as error:  # noqa: BLE001 - it ends this action only
            _log.exception(
                "the action %s of %s failed; its result has the error", action.name, action.by
            )
            result = Result(f"{type(error).__name__}: {error}", outcome=FAILED)
        if result is not None:
            self._finished(name, mine, result)

    def _finished(self, name: str, mine: _Underway, result: Result) -> None:
        if self._claimed.get(name) is not mine or mine.entry is not None:
            return  # the node has vanished
        mine.entry = self._entry(name, mine.action, result.outcome, result.text)
        mine.output = cut_output(result.output)
        self._end(name, mine)

    def _end_unbegun(
        self, name: str, action: Action, outcome: str, reason: str, version: int
    ) -> None:
        # The action is not claimed. After a conflict, read the node and decide again, because the
        # other actor may have claimed the action meanwhile.
        entry = self._entry(name, action, outcome, reason)
        self._end(name, _Underway(action, version, entry=entry))

    def _entry(self, name: str, action: Action, outcome: str, result: str) -> AuditEntry:
        id = name if entry_time(name) else self._other_name(name)
        return ended_entry(id, self._worker, action, outcome, result)

    def _other_name(self, name: str) -> str:
        return entry_name(self._wall(), f"{zlib.crc32(name.encode()):08x}")

    def _end(self, name: str, mine: _Underway) -> None:
        if mine.entry is None:
            return
        id = mine.entry.id
        entry = m.CreateOp(self._fleet.log_entry(id), mine.entry.encode())
        output = f"{self._fleet.actionoutput}/{id}"
        ops: list[m.Op] = [m.DeleteOp(self._path(name), mine.version)]
        if not mine.action.logged:
            ops.append(m.CreateOp(output, unlogged_result(mine.entry, mine.output)))
        elif mine.output:
            ops += [entry, m.CreateOp(output, mine.output.encode())]
        else:
            ops.append(entry)
        self.ask(m.Commit(tuple(ops)), partial(self._ended, name, mine))

    def _ended(self, name: str, mine: _Underway, answer: m.Response) -> None:
        entry = mine.entry
        if entry is None or isinstance(answer, m.NoResponse):
            return  # the machine reads again after the reconnection
        if isinstance(answer, m.Committed):
            outcome = (entry.after or {}).get("outcome")
            _log.info("%s of %s: %s", entry.command, entry.by or "an unknown user", outcome)
            self._forget(name)
        elif isinstance(answer, m.Rejected):
            if answer.index == 2:  # for example, the folder of outputs is missing
                mine.output = ""
                self._end(name, mine)
            elif answer.index == 1 and answer.fault is m.CommitError.NODE_EXISTS:
                # Another program has used the entry's name for the action.
                mine.entry = replace(entry, id=self._other_name(name))
                self._end(name, mine)
            elif answer.index == 1 and not mine.action.logged:
                # The output cannot be written, for example without its folder. Write an entry
                # instead, because the requester also reads the log.
                mine.action = replace(mine.action, logged=True)
                self._end(name, mine)
            elif answer.index == 1 or answer.fault is m.CommitError.OTHER:
                self._refuse(name, answer.reason or answer.fault.value)
            else:
                self._read(name)

    # --- the end ------------------------------------------------------------------------

    def _refuse(self, name: str, reason: str) -> None:
        path = self._path(name)
        _log.error("cannot end the action %s: %s; delete it by hand", path, reason)
        self._pass_over(name)

    def _pass_over(self, name: str) -> None:
        self._passed.add(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._claimed.pop(name, None)
        full = len(self._asked) >= AT_ONCE
        self._asked.discard(name)
        if full:
            self._list()

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"
