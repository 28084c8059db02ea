"""What the leader does for queues that come and go; `census` decides, this acts upon it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Protocol

from qdo.brokers.base import Broker
from qdo.coordination import operator
from qdo.coordination.layout import QueueNode
from qdo.describe import describe
from qdo.errors import SpoiltNodeError
from qdo.worker.census import Census
from qdo.worker.registrar import Change

_log = logging.getLogger(__name__)

PARENTS_SECONDS = 1.0
"""How often the leader reads how far the parents are of queues that wait for them."""
LOOKED_THROUGH = 5000
"""Nodes read again with each list: an operator may have changed one."""
READ_AT_ONCE = 1000
"""Nodes made sense of in one go, some 10 ms, before everything else has its turn again."""
CHANGED_AT_ONCE = 100
"""Queues retired, brought back or laid to rest in one step, which must not take for ever."""
NAMES_SHOWN = 20
_NEVER = float("inf")


class Leader(Protocol):
    """What discovery needs of a member."""

    def is_leader(self) -> bool: ...

    def create_queues(self, names: Iterable[str], last: int = 0) -> None: ...

    def queue_names(self) -> Sequence[str] | None: ...

    def set_aside(self, names: frozenset[str]) -> None: ...

    def read_queues(self, names: Sequence[str]) -> Mapping[str, QueueNode]: ...

    def change_queue(self, change: Change, name: str) -> QueueNode: ...


class Tending:
    """Looks after the queues of a broker for one term of the leader.

    It runs in a greenlet of discovery's own: what it asks of broker and coordinator stops nobody.
    What fails is raised, and done with the next step.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._census = Census(broker.finished_text, broker.vanish_misses)
        self._names: Sequence[str] | None = None
        self._parents: dict[str, tuple[str, ...]] = {}
        self._round: list[str] = []
        self._said: frozenset[str] = frozenset()
        self._told: set[str] = set()
        self._spoilt: set[str] = set()
        self._parents_at = 0.0
        self._listed = 0

    @property
    def nodes(self) -> AbstractSet[str]:
        """The names of all queue nodes, as last seen."""
        return self._census.nodes

    def look(self, member: Leader) -> bool:
        """See which queues have nodes, the first time what is in them; False: not known yet.

        :raises CoordinatorUnreachableError: the connection is lost.
        """
        names = member.queue_names()
        if names is None:
            return False
        if names is not self._names:
            self._names = names
            self._census.nodes = frozenset(names)
        if not self._census.complete:
            self._read(member, list(names))
            self._census.complete = True
            self._say_aside(member)
        return True

    def listed(self, names: Sequence[str]) -> bool:
        """Take note of a list of the broker; False when it cannot say who has which parents."""
        if self._listed and not names and self._broker.vanish_misses is not None:
            _log.warning(
                "the broker lists none of its %d queues any more: %d such lists in a row, and they"
                " are retired",
                self._listed,
                self._broker.vanish_misses,
            )
        self._listed = len(names)
        if self._broker.finished_text is not None:
            known = self._parents.keys() - self._census.waiting  # these may be others by now
            try:
                self._parents = {
                    name: self._parents[name]
                    if name in known
                    else tuple(self._broker.parents(name))
                    for name in names
                }
            except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
                _log.warning("parents of queues cannot be told for now: %s", describe(error))
                return False
        self._tell_again(names)
        with_parents = {name: each for name, each in self._parents.items() if each}
        self._census.listed(names, with_parents)
        return True

    def _tell_again(self, names: Sequence[str]) -> None:
        """Say which queues are others than those that were finished."""
        census = self._census
        # What is finished was read before the list was asked for.
        again = {name for name in names if name in census.finished and self._broker.goes_on(name)}
        for name in sorted(again - census.again):
            _log.error(
                "queue %s stands still: it was done to its end, and it gets messages again, so that"
                " it is another one, made anew; begin with it by `qdo seek %s earliest --execute`",
                name,
                name,
            )
        census.again = again

    def look_through(self, member: Leader) -> None:
        """Read again some of the nodes that may have been changed by others, in turn."""
        if not self._round:
            self._round = list(self._census.aside)
            if self._broker.finished_text is not None:
                self._round = list(self._census.nodes)
        some, self._round = self._round[:LOOKED_THROUGH], self._round[LOOKED_THROUGH:]
        self._read(member, some)

    def act(self, member: Leader, fresh: Sequence[str], now: float) -> float:
        """Do what follows for these new queues and for all others; return a pause in seconds."""
        census = self._census
        if self._broker.finished_text is not None:
            # Of others nobody knows yet whether they have parents: the next list tells.
            fresh = [name for name in fresh if name in self._parents]
        begin = [name for name in fresh if not self._must_wait(name)]
        if census.waiting and now >= self._parents_at:
            self._parents_at = now + PARENTS_SECONDS
            self._read(member, census.awaited())
        ready = census.begin()
        _tell("%d queues begin, for all before them are finished: %s", ready)
        if begin:
            member.create_queues(begin)
        if ready:
            # They came out of queues of this app, unless these are its first queues of all.
            member.create_queues(ready, self._broker.heir_last if census.nodes else 0)
        self._tell_waiting()
        more = self._change(
            member,
            census.vanished(),
            operator.retire,
            "%d queues are retired, for the broker has them no more; their nodes stay, marked as"
            " deleted: %s",
        )
        more |= self._change(
            member, census.returned(), operator.bring_back, "%d queues are back: %s"
        )
        rest = partial(operator.lay_to_rest, finished=self._broker.finished_text or "")
        more |= self._change(
            member, census.done_for(), rest, "%d queues are finished and at rest: %s"
        )
        if more:
            return 0.0  # to say it of each part would have all queues shared out each time
        self._say_aside(member)
        busy = census.waiting or census.finished - census.aside
        return PARENTS_SECONDS if busy else _NEVER

    def _must_wait(self, name: str) -> bool:
        parents = self._parents.get(name, ())
        if parents and self._census.wait(name, parents):
            self._parents_at = 0.0
        return bool(parents)

    def _tell_waiting(self) -> None:
        waiting = set(self._census.waiting)
        _tell("%d queues wait until those before them are finished: %s", waiting - self._told)
        self._told = waiting

    def _change(self, member: Leader, names: list[str], change: Change, what: str) -> bool:
        """Change nodes; return whether some are left to be changed."""
        some = names[:CHANGED_AT_ONCE]
        done = []
        for name in some:
            try:
                member.change_queue(change, name)
            except SpoiltNodeError as error:
                if name not in self._spoilt:
                    self._spoilt.add(name)
                    _log.error("queue %s is left as it is: %s", name, describe(error))
            else:
                done.append(name)
        self._read(member, done)
        for name in some:
            self._census.settled(name)
        _tell(what, done)
        return len(names) > len(some)

    def _read(self, member: Leader, names: Sequence[str]) -> None:
        for start in range(0, len(names), READ_AT_ONCE):
            some = names[start : start + READ_AT_ONCE]
            self._census.read(some, member.read_queues(some))

    def _say_aside(self, member: Leader) -> None:
        if self._census.aside != self._said:
            self._said = frozenset(self._census.aside)
        # Said again each time: a rebalancer that took office anew has forgotten it.
        member.set_aside(self._said)


def _tell(what: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        more = "" if len(listed) <= NAMES_SHOWN else ", ..."
        _log.info(what, len(listed), ", ".join(listed[:NAMES_SHOWN]) + more)
