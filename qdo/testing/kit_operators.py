"""Executes operator calls such as `app.cancel` in a testing kit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qdo.coordination.queue_admin import Change, chosen, with_decision
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import NotFoundError, UsageError
from qdo.fleet import pauses
from qdo.fleet.owners import Owner
from qdo.fleet.pause_machine import Pause, PauseNode
from qdo.ops.cancel import Cancellation, result_of
from qdo.ops.decisions import OperatorDecision, ids_of, which_of
from qdo.ops.peek import Kind, PeekedMessage, check_names, find_messages, peek_behind
from qdo.testing.faults import SendingBroker
from qdo.testing.process import Process
from qdo.testing.state import State

if TYPE_CHECKING:
    from qdo.testing.memory_fleet import KitPauses


class KitOperators:
    """Executes operator calls on a kit, between messages and within jobs."""

    def __init__(
        self,
        world: State,
        sender: SendingBroker,
        process: Callable[[], Process],
        change: Callable[[str, Change], None],
    ) -> None:
        self._world = world
        self._sender = sender
        self._process = process
        self._change = change
        self._gone: set[str] = set()

    def cancel(
        self, queue: str, ids: Sequence[str], reason: str, timeout_seconds: float
    ) -> list[Cancellation]:
        node = self._node(queue)
        names = check_names(ids)
        before = frozenset(self._gone)
        found = find_messages(self._sender, queue, node.last, names)
        delayed = {each.delayed.number: each.id for each in found.values() if each.delayed}
        self._sender.delayed.discard(queue, delayed)
        if reason:  # without an entry in the action log, a fleet forgets cancelled messages
            self._gone.update(delayed.values())
        positions = [each.position for each in found.values() if each.position is not None]
        outcomes = self._process().cancel(queue, positions) if positions else {}
        answers = {position: (each.value, "") for position, each in outcomes.items()}
        return [result_of(name, found.get(name), answers, before) for name in names]

    def peek(self, queue: str, kinds: Collection[Kind], limit: int) -> list[PeekedMessage]:
        return list(peek_behind(self._sender, queue, self._node(queue), kinds, limit))

    def owner(self, queue: str) -> Owner | None:
        self._sender.deliver()
        worker = self._world.record.node(queue).owner
        return Owner(queue, worker) if worker else None

    def pause(self, pause: Pause, allow_none: bool, timeout_seconds: float) -> None:
        if not allow_none:
            pauses.check_matches(pause.queues, self._sender.catalog.names())
        if pause.until is not None:
            raise UsageError(reason="seconds must be None in a TestKit; call resume when they end")
        self._pauses.replace([*self._pauses.pauses, pause])

    def resume(self, queues: Sequence[str], reason: str) -> None:
        pauses.chosen(PauseNode(tuple(self._pauses.pauses)), queues)
        remaining = [
            replace(each, queues=tuple(glob for glob in each.queues if glob not in queues))
            for each in self._pauses.pauses
        ]
        self._pauses.replace([each for each in remaining if each.queues])

    def decide(
        self, queue: str, decision: OperatorDecision, ids: Sequence[str], every: bool, reason: str
    ) -> list[str | None]:
        node = self._node(queue)
        names = ids_of(self._sender, self._sender.positions, queue, node)
        which = which_of(queue, node, names, ids, every)
        decided = chosen(node, queue, which)
        self._change(queue, lambda each: with_decision(each, queue, decision, which))
        return [names.get(each.position) for each in decided]

    def _node(self, queue: str) -> QueueNode:
        self._sender.deliver()
        if queue not in self._sender.catalog.names():
            raise NotFoundError(what="queue", name=queue)
        return self._world.record.node(queue)

    @property
    def _pauses(self) -> KitPauses:
        return self._world.pauses
