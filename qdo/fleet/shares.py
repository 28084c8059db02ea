"""Plans and keeps one process's share of a limit. The class is a machine without I/O.

A process hands out the permits of its share from memory. Only shares go through the coordinator,
in the single node ``limits/<name>``. Seven rules keep the shares within the limit:

1. A process that wants permits adds itself to the node, at the version read. A process writes at
   most once in `WRITE_SECONDS`, and reduces its demand only after a while. After a conflict, the
   process repeats its write at once.
2. Every process in the node watches the node. If its share shrinks, a process lowers its own cap at
   once, and writes the smaller share when callers have returned enough permits. If its share grows,
   it writes the free part, and uses this part only after the acknowledgment of the write.
3. While another process would get nothing, a process with a share stops using the share after a
   while. Once callers have returned all permits, the process gives them up and moves itself to the
   end of the order. Only holders move to the end. Otherwise other processes would never get a turn.
4. A process that lacks permits removes holders whose worker or component node is gone. It lists
   workers and components *after* it has read the limit, because a holder's node exists before its
   entry. The starts of a removed holder become free one window later.
5. After a lost answer, a process writes the node again at the version read, and trusts only the
   answer to this write. A read proves nothing, because the old write could still take effect later.
6. Every write checks the worker node of its process. After the end of the lease, the cap counts as
   0.
7. A process that gives up permits deals them, in the same write, to processes that lack permits. A
   process that reads a larger share uses it, unless its own last write is in doubt. No other
   process lowers the share of a live process.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import partial

from qdo.coordination.protocol import machine as m
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.layout import Layout, clients_of, holder_of
from qdo.coordination.znodes.values import MAX_VALUE_BYTES
from qdo.fleet.limit_node import MISSING, DeclaredLimit, LimitNode, ShareHolder, ShareHolders
from qdo.fleet.permit_counts import PermitCount, StartCount, targets

# Time for which a process keeps a used permit that other processes wait for.
TURN_SECONDS = 0.1
# Minimum duration of a turn, as a multiple of the coordinator's answer time. A handover takes at
# least two answers.
TURN_ANSWERS = 10
# Maximum duration of a turn, even if answers are late.
LONGEST_TURN_SECONDS = 5.0
# Approximate time for which a process keeps a permit that it cannot use without the permit of
# another limit.
UNUSED_SECONDS = 1.0
# Time for which a process wants permits that it does not use, while no other process needs them.
IDLE_SECONDS = 1.0
# Time for which a process wants permits that it does not use, while another process needs them.
LACK_SECONDS = 0.1
# Minimum time between two writes of a limit.
WRITE_SECONDS = 0.05
# Interval of attempts to serve callers after the lease has ended.
LEASE_SECONDS = 0.25
# Interval of attempts to read or write a node after the coordinator has refused access.
REFUSED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The planned write of this process: the holders in order, and its cap after the write."""

    holders: ShareHolders
    cap: int


class Planner:
    """Plans the shares of one process.

    :ivar act_at: the time at which the plan may change without an event.
    :ivar answer_seconds: time that the coordinator took for the last answer.
    :ivar changed: whether a plan made a count limited or unlimited. The caller resets this value.
    """

    def __init__(
        self, worker: str, clock: Callable[[], float], chance: Callable[[], float]
    ) -> None:
        self.act_at = float("inf")
        self.answer_seconds = 0.0
        self.changed = False
        self._worker = worker
        self._clock = clock
        self._chance = chance
        self._patience = chance()

    def plan(
        self, count: PermitCount, holders: ShareHolders, total: int | None, gone: Set[str]
    ) -> Plan:
        """Plan each process's part of `total` (None: any number). Lower this process's cap now."""
        now = self._clock()
        if (total is None) != count.unlimited:
            self.changed = True
            count.interrupt()
            count.unlimited = total is None
        rest = tuple(each for each in holders if each.worker not in gone)
        mine = next((each for each in rest if each.worker == self._worker), None)
        written = 0 if mine is None else mine.held
        if count.held != written:  # another process removed this process or gave it permits
            count.acknowledge(written, min(count.cap, written), now)
        if total is None:
            return Plan(tuple(each for each in rest if each is not mine), 0)
        wants = min(total, self._wants(count, mine, rest, total))
        if not wants and not written and not count.occupied:
            return Plan(tuple(each for each in rest if each is not mine), 0)
        own = ShareHolder(self._worker, written, wants)
        rest = tuple(own if each is mine else each for each in rest)
        if mine is None:
            rest = (*rest, own)
        elif self._turn_is_over(count, rest, total):
            # Move to the end in the write that gives up the last permit, because writes are 50 ms
            # apart.
            count.limit(0, now)
            if count.occupied:
                self.act_at = min(self.act_at, count.less_at(now))
                less = replace(own, held=min(written, count.occupied))
                rest = tuple(less if each is own else each for each in rest)
                return Plan(_deal(total, rest, less) if less.held < written else rest, 0)
            rest = (*(each for each in rest if each is not own), own)
        target = targets(total, rest)[rest.index(own)]
        if target < count.cap:
            count.limit(target, now)
        free = total - sum(each.held for each in rest)
        # Permits in use stay in the node until their callers return them.
        held = max(target, count.occupied)
        if held > target:
            self.act_at = min(self.act_at, count.less_at(now))
        if held > written:
            held = min(held, written + max(0, free))
        if not wants and not held:
            rest = tuple(each for each in rest if each is not own)
            return Plan(_deal(total, rest) if written else rest, 0)
        after = replace(own, held=held)
        rest = tuple(after if each is own else each for each in rest)
        return Plan(_deal(total, rest, after) if held < written else rest, target)

    def _wants(
        self, count: PermitCount, mine: ShareHolder | None, rest: ShareHolders, total: int
    ) -> int:
        now = self._clock()
        peak = min(total, count.wanted(now))
        before = 0 if mine is None else mine.wants
        if peak > before:
            return peak if peak > count.held or not before else before
        dealt = targets(total, rest)
        lack = any(dealt[index] < each.wants for index, each in enumerate(rest))
        seconds = LACK_SECONDS if lack else IDLE_SECONDS
        wants = before
        if now >= count.peak_since + seconds:
            wants = peak
            count.measure_again(now)
        less_at = now if count.demand(now) < wants else count.less_at(now)
        self.act_at = min(self.act_at, max(less_at, count.peak_since + seconds))
        return wants

    def _turn_is_over(self, count: PermitCount, rest: ShareHolders, total: int) -> bool:
        dealt = targets(total, rest)
        starved = any(each.wants and not dealt[index] for index, each in enumerate(rest))
        index = next(at for at, each in enumerate(rest) if each.worker == self._worker)
        # Only a process with a share moves to the end. Otherwise other processes would never get a
        # turn.
        if not starved or not rest[index].held or not dealt[index]:
            return False
        stay = min(LONGEST_TURN_SECONDS, max(TURN_SECONDS, TURN_ANSWERS * self.answer_seconds))
        if not count.used:
            stay += UNUSED_SECONDS * (0.5 + self._patience)
        over = count.got_at + stay
        if self._clock() < over:
            self.act_at = min(self.act_at, over)
            return False
        return True


def _deal(total: int, holders: ShareHolders, own: ShareHolder | None = None) -> ShareHolders:
    """Return the holders after giving the free permits to holders that lack permits."""
    free = total - sum(each.held for each in holders)
    dealt = []
    for each, target in zip(holders, targets(total, holders), strict=True):
        more = 0 if each is own else max(0, min(free, target - each.held))
        free -= more
        dealt.append(replace(each, held=each.held + more) if more else each)
    return tuple(dealt)


class LimitShare(m.Machine):
    """One registration's share of one limit.

    :ivar fault: reason why the limit has no permits at all; None if a caller can wait for a permit.
    :ivar has_asked: whether the coordinator knows that this process wants permits.
    :param worker: name of the worker node, or "client/" and the name of a component's node.
    :param declared: the app's terms for the limit, which apply unless an operator has set other
        terms.
    :param on_change: a function to call when callers may take more permits, or when `fault` has
        changed.
    """

    def __init__(
        self,
        layout: Layout,
        limit: str,
        worker: str,
        lease: Lease,
        *,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        chance: Callable[[], float],
        declared: DeclaredLimit | None = None,
    ) -> None:
        super().__init__()
        self.limit = limit
        self.fault: str | None = None
        self.has_asked = False
        self.permits = PermitCount()
        self.starts = StartCount()
        self.counts: tuple[PermitCount, ...] = (self.permits, self.starts)
        self._worker = worker
        self._lease = lease
        self._clock = clock
        self._on_change = on_change
        self._path = layout.fleet.limit(limit)
        self._own = holder_of(layout.root, worker)
        self._folders = {"": layout.workers, "client/": clients_of(layout.root)}
        self._node: LimitNode | None = None
        self._version = 0
        self._names: frozenset[str] | None = None
        self._gone: frozenset[str] = frozenset()
        self._gone_at: dict[str, float] = {}
        self._up = self._busy = self._in_doubt = self._watched = self._lapsed = False
        self._is_listed = False
        self._told = self._conflicts = 0
        self._earns = False
        self._write_at = self._act_at = 0.0
        self._retry_at = float("inf")
        self._chance = chance
        self._declared = declared
        self._has_folder = True
        self._planner = Planner(worker, clock, chance)

    # --- used by the engine, in the greenlet of a turn -----------------------------------

    def has_free(self) -> bool:
        now = self._clock()
        if now >= self._lease.until or self.fault is not None:
            return False
        return self.permits.has_free(now) and self.starts.has_free(now)

    @property
    def has_share(self) -> bool:
        """Whether this process has a share, so a caller will return a permit."""
        return self.fault is None and all(count.unlimited or count.cap for count in self.counts)

    @property
    def why(self) -> str | None:
        """The reason why the limit allows no permits at all, or None."""
        stopped = self.fault is None and self._node is not None and self._node.max == 0
        return "its max is 0" if stopped else self.fault

    @property
    def known_fault(self) -> str | None:
        """The fault of the present node; None if there is no fault, or before the first read."""
        return None if self._node is None else self.fault

    def take(self) -> None:
        """Take a permit and a start. Call `has_free` first."""
        self.permits.take()
        self.starts.take()

    def give_back(self) -> bool:
        """Give back a permit.

        Return True if the node must change and the caller must wake the loop.
        """
        count = self.permits
        count.give_back()
        return count.in_use >= count.cap and count.held > count.cap

    def wait(self, count: int) -> bool:
        """Set the number of waiting callers; return True if the caller must wake the loop."""
        permits = self.permits
        before = permits.waiting
        permits.waiting = self.starts.waiting = count
        return count > before and (not before or permits.in_use + count > self._told)

    # --- events ---------------------------------------------------------------------------

    def connected(self) -> None:
        self._forget()
        self._up = True

    def suspended(self) -> None:
        self._forget()
        self._up = False

    def _forget(self) -> None:
        self._node = self._names = None
        self._watched = self._busy = False

    def changed(self, path: str) -> None:
        if path == self._path:
            self._node = None
            self._watched = False
        else:
            self._names = None
            if self._lacks():
                self._node = None

    def tick(self) -> None:
        now = self._clock()
        if now >= self._retry_at:
            self._node = None
            self._retry_at = float("inf")
        if now >= self._act_at:
            self._act_at = float("inf")
        self._earns = False
        self._on_change()

    def due(self) -> float:
        if not self._up:
            return float("inf")
        return min(self._act_at, self._retry_at, self._next_start())

    def awaits_token(self) -> bool:
        """Whether a caller lacks only a token and the loop does not know this yet."""
        return not self._earns and self._lacks_token(self._clock())

    def _lacks_token(self, now: float) -> bool:
        starts = self.starts
        able = starts.waiting and self.fault is None and now < self._lease.until
        return bool(able) and self.permits.has_free(now) and not starts.has_free(now)

    def _next_start(self) -> float:
        # The loop must know the time at which a waiting caller gets its missing token.
        now = self._clock()
        if self._lacks_token(now):
            self._earns = True
            return self.starts.next_at(now)
        return float("-inf") if self._earns else float("inf")

    def flush(self) -> None:
        if not self._up or self._busy or not self._is_active():
            return
        node = self._node
        if node is None or (self._lacks() and self._names is None and self._has_strangers(node)):
            self._busy = self._watched = True
            self.ask(m.Get(self._path, watch=True), self._read)
        elif node.fault is None:
            self._advance(node)
        self._look_at_lease()

    def _look_at_lease(self) -> None:
        # No event announces that the lease is valid again, so check while callers wait.
        now = self._clock()
        lapsed = self._lapsed
        self._lapsed = self._lacks() and now >= self._lease.until
        if self._lapsed:
            self._act_at = min(self._act_at, now + LEASE_SECONDS)
        elif lapsed:
            self._on_change()

    def _is_active(self) -> bool:
        # A listed process reads each change, even if it needs no permits. Otherwise its last
        # `wants` would withhold permits from other processes.
        is_told = self._declared is None or self._declared.is_told
        return (
            not is_told
            or self._is_listed
            or any(count.waiting or count.held or count.in_use for count in self.counts)
        )

    # --- answers --------------------------------------------------------------------------

    def ask(self, request: m.CoordinatorRequest, then: m.Callback) -> None:
        asked_at = self._clock()

        def answered(answer: m.Response) -> None:
            self._planner.answer_seconds = self._clock() - asked_at
            then(answer)

        super().ask(request, answered)

    def _read(self, answer: m.Response) -> None:
        self._busy = False
        if isinstance(answer, m.NoResponse):
            return
        if isinstance(answer, m.NodeRead):
            node = LimitNode.parse(answer.data)
            self._version = answer.version
            self._gone_at = {k: at for k, at in self._gone_at.items() if k in node.workers}
        elif isinstance(answer, m.NodeMissing):
            node = LimitNode(fault=MISSING)
        else:
            node = self._refused(answer)
        if self._declared is not None:
            after = self._declared.changed(node)
            if after is not None:
                self._declare(after, node.fault == MISSING)
                return
            self._declared.is_told = True
        self._gone = frozenset()
        self._is_listed = self._in_doubt or self._worker in node.workers
        # If an event arrived before this answer, the node may have changed after the read.
        self._node = node if self._watched else None
        self.fault = node.fault
        if node.fault is not None:
            for count in self.counts:
                count.acknowledge(0, 0, self._clock())
                count.unlimited = False
        elif self._has_strangers(node):
            self._list("")
        self._on_change()

    def _declare(self, node: LimitNode, is_new: bool) -> None:
        # `flush` reads the limit again after every answer to this write.
        data = node.encode()
        write: m.Op = (
            m.CreateOp(self._path, data) if is_new else m.SetOp(self._path, data, self._version)
        )
        folder = self._path.rpartition("/")[0]
        made = () if self._has_folder else (m.CreateOp(folder, b""),)
        self._busy = True

        def answered(answer: m.Response) -> None:
            self._busy = False
            if isinstance(answer, m.Rejected):
                self._has_folder = not (answer.fault is m.CommitError.NO_NODE and answer.index)
                if answer.fault is m.CommitError.OTHER:
                    self._node = self._refused(answer)
                    self.fault = self._node.fault
                    self._on_change()

        self.ask(m.Commit((m.CheckOp(self._own), *made, write)), answered)

    def _refused(self, answer: m.Response) -> LimitNode:
        """Return an unusable limit, and retry the request later."""
        self._retry_at = self._clock() + REFUSED_SECONDS
        reason = answer.reason if isinstance(answer, (m.Refused, m.Rejected)) else "no answer"
        return LimitNode(fault=f"the coordinator refuses it: {reason}")

    def _has_strangers(self, node: LimitNode) -> bool:
        """Return whether the node lists a process that may be gone."""
        known = {self._worker} if self._names is None else self._names
        return not known >= node.workers

    def _list(self, prefix: str) -> None:
        self._busy = True
        self.ask(m.Children(self._folders[prefix], watch=True), partial(self._listed, prefix))

    def _listed(self, prefix: str, answer: m.Response) -> None:
        self._busy = False
        if isinstance(answer, m.NoResponse) or self._node is None:
            return
        alive = holders = {each for each in self._node.workers if ("/" in each) == bool(prefix)}
        # If the list cannot be read, treat all holders as alive.
        if isinstance(answer, (m.ChildrenRead, m.NodeMissing)):
            alive = {prefix + name for name in getattr(answer, "names", ())}
        if not prefix:
            self._names = frozenset(alive)
        elif self._names is not None:  # otherwise a worker has left since
            self._names |= alive
        self._gone |= holders - alive
        for each in holders - alive:
            self._gone_at.setdefault(each, self._clock())
        if not prefix and any("/" in each for each in self._node.workers):
            self._list("client/")

    # --- what to write --------------------------------------------------------------------

    def _advance(self, node: LimitNode) -> None:
        now = self._clock()
        may_write = self._in_doubt or now >= self._write_at
        self.starts.set_rate((node.rate or 0.0) / node.burst, now)
        burst = node.burst if node.rate is not None else None
        planner = self._planner
        planner.act_at = float("inf")
        planner.changed = False
        permits = planner.plan(self.permits, node.permits, node.max, self._gone)
        # The last starts of a departed holder count for one more window.
        over = {each: self._gone_at[each] + self.starts.window_seconds for each in self._gone}
        rested = {each for each in self._gone if over[each] <= now}
        starts = planner.plan(self.starts, node.starts, burst, rested)
        self._act_at = min(planner.act_at, *(at for at in over.values() if at > now), float("inf"))
        if planner.changed:
            self._on_change()
        after = replace(node, permits=permits.holders, starts=starts.holders)
        self._told = next((each.wants for each in node.permits if each.worker == self._worker), 0)
        if after == node and not self._in_doubt:
            self._raise_caps(permits, starts)
            return
        if not may_write:
            self._act_at = min(self._act_at, self._write_at)
            return
        if len(data := after.encode()) > MAX_VALUE_BYTES:
            return  # too long for the coordinator. Other processes may leave the node.
        self._write_at = now + WRITE_SECONDS
        self._busy = self._is_listed = True

        def answered(answer: m.Response) -> None:
            self._written(after, (permits, starts), answer)

        self.ask(
            m.Commit((m.CheckOp(self._own), m.SetOp(self._path, data, self._version))), answered
        )

    def _raise_caps(self, *plans: Plan) -> None:
        # Use the permits that became free since the last write, and the permits that other
        # processes gave.
        for count, plan in zip(self.counts, plans, strict=True):
            cap = min(plan.cap, count.held)
            if count.cap < cap:
                count.limit(cap, self._clock())
                self._on_change()

    def _lacks(self) -> bool:
        return any(count.waiting for count in self.counts)

    def _written(self, after: LimitNode, plans: tuple[Plan, Plan], answer: m.Response) -> None:
        self._busy = False
        now = self._clock()
        if isinstance(answer, m.NoResponse):
            self._in_doubt = True
        elif isinstance(answer, m.Committed):
            self._in_doubt = False
            self._is_listed = self.has_asked = self._worker in after.workers
            self._conflicts = 0
            for count, plan in zip(self.counts, plans, strict=True):
                own = (each.held for each in plan.holders if each.worker == self._worker)
                count.acknowledge(next(own, 0), plan.cap, now)
            self._node = after if self._watched else None
            self._version = answer.versions[1]
            self._on_change()
        else:
            self._node = None  # another process wrote first
            # Retry at once, but avoid repeated conflicts in step with the other process.
            self._write_at = now + (self._chance() * WRITE_SECONDS if self._conflicts else 0.0)
            self._conflicts += 1
            if isinstance(answer, m.Rejected) and answer.refuses(answer.index):
                self._node = self._refused(answer)
                self.fault = self._node.fault
                self._on_change()
