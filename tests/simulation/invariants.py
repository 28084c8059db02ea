"""The invariants, checked on every transaction and every start of a message.

The checks know the coordinator's total order and the ledger of messages, and nothing of the
machines: they read the published format with a parser of their own.

1. Each queue has at most one owner, and worker nodes agree with queue nodes, at every zxid.
2. `last` never goes back but by an operator's seek.
3. `last` passes only messages that were processed, or that an operator's seek passed over.
4. Messages start in order, right after `last`; a release waits for the message in flight and
   records all that was done, so that a graceful handover repeats nothing.
5. No queue is taken from a worker that should keep it.
6. Moves are the fewest possible (`World` counts them when nothing fails).
7. A message starts only while its worker's session lives and owns the queue; queue nodes are
   written through the session of the worker they name.
8. Fences grow strictly per queue.

And "marks": those of a failing message go with its queue, from claim to release to claim, until
`last` passes it or an operator moves the queue; "fence": only the elected rebalancer writes
assignments; "liveness": nothing is stuck.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from qdo.coordination.protocol.claims import Claim
from qdo.coordination.protocol.machine import NodeRead
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import OWNERS_GONE, FailureRecord
from qdo.coordination.znodes.worker_node import WorkerNode, parse_moves
from qdo.queues import QueueFilter
from tests.simulation.broker import SimulatedBroker
from tests.simulation.coordinator import Coordinator, LogEntry
from tests.simulation.tenure import QueueHistory, Tenure

OPERATOR = 1
"""The session of all operators."""
ROGUE = 2
"""The session of a rebalancer that knows no fence."""


def marks_behind(position: int, worker: str = "") -> FailureRecord:
    """Return marks of the message behind one that ended, as if it had failed, and begun again."""
    return FailureRecord(position + 10, 1 + position // 10 % 5, begun_by=(worker,))


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        self.invariant = invariant
        super().__init__(f"invariant {invariant}: {text}")


def _position(value: dict[str, Any]) -> int | None:
    """Return the `last` of a queue node, None for garbage."""
    text = str(value.get("last") or "0")
    return int(text) if text.isdigit() else None


class Checks:
    """Watches one history; raises `Violation` at the first thing that must not be.

    :ivar claims: how often queues were claimed.
    :ivar ledger: how many messages were started.
    :ivar peaceful: nothing fails, so nothing may be lost.
    """

    def __init__(self, coordinator: Coordinator, layout: Layout, broker: SimulatedBroker) -> None:
        self.coordinator = coordinator
        self.broker = broker
        self.claims = 0
        self.ledger = 0
        self.peaceful = False
        self._workers = layout.workers + "/"
        self._queues = layout.queues + "/"
        self._assignments = layout.assignments + "/"
        self._rebalancer = layout.rebalancer
        self._leader: object = None
        self._parsed: dict[bytes, dict[str, Any]] = {}
        self._state: dict[str, QueueHistory] = {}
        self._tenure_of: dict[Claim, Tenure] = {}
        self._granted_since: dict[str, list[tuple[int, frozenset[str]]]] = {}
        coordinator.observers.append(self.observe)

    # --- the total order ------------------------------------------------------------

    def observe(self, entry: LogEntry) -> None:
        """Check the changes of one transaction."""
        touched: dict[str, tuple[NodeRead | None, NodeRead | None] | None] = {}
        for path, before, after in entry.changes:
            if path.startswith(self._queues):
                touched[path[len(self._queues) :]] = (before, after)
            elif path.startswith(self._workers):
                for queue in self._listed(before) ^ self._listed(after):
                    touched.setdefault(queue, None)
                for queue in self._listed(after):
                    if not self._takes(after).takes(queue):
                        raise Violation("filters", f"{path} lists {queue}, which it does not take")
            elif path == self._rebalancer:
                self._leader = self._client(entry)
            elif path.startswith(self._assignments):
                if entry.session not in (0, ROGUE) and self._client(entry) != self._leader:
                    raise Violation("fence", f"a deposed rebalancer writes {path}")
                if after is None:
                    continue
                worker = path[len(self._assignments) :]
                grants = self._granted_since.setdefault(worker, [])
                grants.append((entry.zxid, self._listed(after)))
        for queue, change in touched.items():
            if change is not None:
                self._queue_written(entry, queue, *change)
            self._check_agreement(entry.zxid, queue)

    def _client(self, entry: LogEntry) -> object:
        """Return whose client wrote something: its session may have been replaced."""
        session = self.coordinator.sessions.get(entry.session)
        return session.link if session is not None else None

    def _value(self, node: NodeRead | None) -> dict[str, Any]:
        if node is None or not node.data:
            return {}
        value = self._parsed.get(node.data)
        if value is None:
            value = self._parsed[node.data] = json.loads(node.data)
        return value

    def _listed(self, node: NodeRead | None) -> frozenset[str]:
        return frozenset(self._value(node).get("queues") or ())

    @staticmethod
    def _takes(node: NodeRead | None) -> QueueFilter:
        return WorkerNode.parse(node.data if node is not None else b"").filter

    def _worker_node(self, worker: str) -> NodeRead | None:
        return self.coordinator.node(self._workers + worker) if worker else None

    def _check_agreement(self, zxid: int, queue: str) -> None:
        value = self._value(self.coordinator.node(self._queues + queue))
        owner = value.get("owner", "")
        listing = [
            name
            for name in self.coordinator.names(self._workers[:-1]) or ()
            if queue in self._listed(self._worker_node(name))
        ]
        if len(listing) > 1:
            raise Violation("1", f"at zxid {zxid} {queue} is listed by {listing}")
        alive = self._worker_node(owner) is not None
        if (listing[0] if listing else "") != (owner if alive else ""):
            raise Violation(
                "1", f"at zxid {zxid} {queue} names {owner!r}, alive {alive}, listed by {listing}"
            )

    def _queue_written(
        self, entry: LogEntry, queue: str, before: NodeRead | None, after: NodeRead | None
    ) -> None:
        old, new = self._value(before), self._value(after)
        state = self._state.setdefault(queue, QueueHistory())
        if before is None and "owner" not in new:
            state.last = _position(new)
            return
        tenure = state.tenures[-1] if state.tenures else None
        last, now = state.last, _position(new)
        if now is not None:
            state.last = now
        if entry.session in (0, OPERATOR):
            if now is None and tenure is not None:
                # A seek that the owner has not read yet is lost with the node's content.
                state.last = None
            if tenure is not None:
                tenure.deleted |= bool(new.get("deleted"))
                if old.get("seek", 0) != new.get("seek", 0) and now is not None:
                    tenure.seeks.append(now)
            if new.get("owner", "") not in ("", old.get("owner", "")):
                raise Violation("1", f"an operator made {new['owner']} the owner of {queue}")
            return
        owner, next_owner = old.get("owner", ""), new.get("owner", "")
        if now is None:
            raise Violation("2", f"a worker leaves garbage in {queue} at zxid {entry.zxid}")
        if last is None:
            # After garbage only the owner knows: somewhere in its run, or where it was sent.
            last = now
            if tenure is not None and now not in tenure.seeks:
                last = max(tenure.base, min(now, tenure.done))
        if now < last:
            raise Violation("2", f"{queue} went back from {last} to {now} at zxid {entry.zxid}")
        if old.get("seek", 0) != new.get("seek", 0):
            raise Violation("2", f"{queue}: a worker changed `seek` at zxid {entry.zxid}")
        if next_owner != owner and next_owner:
            self._check_writer(entry, queue, next_owner)
            if now != last:
                raise Violation("4", f"the claim of {queue} moved `last` from {last} to {now}")
            self.claims += 1
            self._check_marks_claimed(owner, old.get("failing"), new.get("failing"))
            state.tenures.append(Tenure(queue, next_owner, entry.zxid, now))
            state.tenures[-1].marks = new.get("failing")
            return
        self._check_writer(entry, queue, owner)
        if tenure is None or tenure.worker != owner:
            raise Violation("1", f"{queue} is written for {owner!r}, which never claimed it")
        if now > last and not (tenure.base <= last and now <= tenure.done):
            raise Violation(
                "3",
                f"{queue} went from {last} to {now} at zxid {entry.zxid}, but {owner} has only "
                f"processed what is after {tenure.base} up to {tenure.done}",
            )
        if not next_owner:
            self._released(tenure, now)
            self._check_marks_released(tenure, now, new.get("failing"))

    def _check_writer(self, entry: LogEntry, queue: str, worker: str) -> None:
        node = self._worker_node(worker)
        if node is None or node.ephemeral_owner != entry.session:
            raise Violation(
                "7",
                f"{queue} is written at zxid {entry.zxid} for {worker!r}, whose node "
                + ("is gone" if node is None else "belongs to another session"),
            )

    def _released(self, tenure: Tenure, last: int) -> None:
        tenure.released = True
        if tenure.in_flight is not None:
            raise Violation(
                "4", f"{tenure.queue} is released while {tenure.in_flight} is being processed"
            )
        if last < tenure.done and not tenure.seeks:
            raise Violation(
                "4", f"{tenure.queue} is released at {last}, done is up to {tenure.done}"
            )

    @staticmethod
    def _check_marks_claimed(
        owner: str, before: dict[str, Any] | None, after: dict[str, Any] | None
    ) -> None:
        """A claim counts the attempt that an owner had begun when it was gone, and no other."""
        expected = before
        if before is not None and owner and before["begun_by"][-1] == owner:
            error = f"{OWNERS_GONE}{owner}"
            expected = {**before, "attempts": before["attempts"] + 1, "error": error}
            expected["crashed"] = True
        if after != expected:
            raise Violation("marks", f"the claim after {owner!r} changed {before} to {after}")

    @staticmethod
    def _check_marks_released(tenure: Tenure, last: int, marks: dict[str, Any] | None) -> None:
        """The engine of the model marks the message behind each one that ends."""
        if tenure.seeks or last != tenure.done or tenure.done == tenure.base:
            return
        if marks is None or marks["position"] != str(marks_behind(last).position):
            raise Violation("marks", f"{tenure.queue} is released at {last} with {marks}")

    # --- the ledger -----------------------------------------------------------------

    def claimed(self, worker: str, claim: Claim) -> None:
        """A worker was notified that it owns a queue."""
        tenures = self._state.setdefault(claim.queue, QueueHistory()).tenures
        tenure = next((t for t in reversed(tenures) if t.worker == worker), None)
        if tenure is None:
            raise Violation("1", f"{worker} believes to own {claim.queue} but never claimed it")
        if tenure.fence:
            raise Violation("8", f"{worker} got two claims of one tenure of {claim.queue}")
        if claim.fence < tenure.zxid:
            raise Violation("8", f"{claim!r} has a fence below its transaction {tenure.zxid}")
        later = next((t for t in tenures if t.zxid > tenure.zxid), None)
        if later is not None and claim.fence >= later.zxid:
            raise Violation("8", f"{claim!r} has a fence as high as the next claim's")
        tenure.fence = claim.fence
        if claim.done != tenure.base:
            if claim.done not in tenure.seeks:
                raise Violation(
                    "4", f"{worker} begins {claim.queue} at {claim.done}, `last` is {tenure.base}"
                )
            self._go(tenure, claim.done)
        elif not tenure.seeks and tenure.marks != (claim.failure and claim.failure.dump()):
            raise Violation("marks", f"{claim!r} has {claim.failure}, found was {tenure.marks}")
        self._tenure_of[claim] = tenure

    def repositioned(self, old: Claim, new: Claim) -> None:
        """A worker was instructed to continue at another position of a queue."""
        tenure = self._tenure_of[old]
        if new.done not in tenure.seeks:
            raise Violation("4", f"{new!r} goes on at {new.done}, where no operator sent it")
        if new.failure is not None:
            raise Violation("marks", f"{new!r} keeps {new.failure} after an operator's seek")
        if new.fence != old.fence:
            raise Violation("8", f"{new!r} has another fence than {old!r}")
        self._tenure_of[new] = tenure

    def resumed(self, claim: Claim) -> None:
        """The engine continues with a claim that came with a seek: a new run begins."""
        self._go(self._tenure_of[claim], claim.done)

    @staticmethod
    def _go(tenure: Tenure, position: int) -> None:
        del tenure.seeks[: tenure.seeks.index(position) + 1]
        tenure.begin(position)

    def started(self, claim: Claim, position: int) -> None:
        """A worker starts a message."""
        self.ledger += 1
        tenure = self._tenure_of[claim]
        queue, worker = tenure.queue, tenure.worker
        if self._worker_node(worker) is None:
            raise Violation("7", f"{worker} starts {position} of {queue}, its session is gone")
        current = self._state[queue].tenures[-1]
        if current is not tenure or tenure.released:
            raise Violation(
                "4" if tenure.released else "1",
                f"{worker} starts {position} of {queue}, which is {current.worker}'s"
                + (", after releasing it" if tenure.released else ""),
            )
        if tenure.in_flight is not None:
            raise Violation("4", f"{worker} runs two messages of {queue} at once")
        expected = self.broker.next(queue, tenure.cursor)
        if position != expected:
            raise Violation(
                "4",
                f"{worker} starts {position} of {queue}, next after {tenure.cursor} is {expected}",
            )
        state = self._state[queue]
        if claim.fence < state.fence:
            raise Violation("8", f"{queue} is processed under {claim.fence} after {state.fence}")
        state.fence = claim.fence
        tenure.cursor = tenure.in_flight = position

    def ended(self, claim: Claim, position: int) -> None:
        """A worker ends a message."""
        tenure = self._tenure_of[claim]
        tenure.in_flight = None
        tenure.done = position

    def dropped(self, claim: Claim) -> None:
        """A message ended whose claim was lost: it counts for nothing."""
        self._tenure_of[claim].in_flight = None

    def check_release_wanted(self, worker: str, claim: Claim) -> None:
        """A worker released a queue on its own: some assignment since the claim must omit it."""
        tenure = self._tenure_of[claim]
        grants = self._granted_since.get(worker, [])
        ends = [zxid for zxid, _ in grants[1:]] + [1 << 62]
        since = [grant for (_, grant), end in zip(grants, ends, strict=True) if end >= tenure.zxid]
        if since and all(claim.queue in grant for grant in since) and not tenure.deleted:
            raise Violation("5", f"{worker} gives up {claim.queue}, which it should keep")

    def lost(self, worker: str, claim: Claim) -> None:
        """A worker was notified that it has lost a queue."""
        if self.peaceful:
            raise Violation("5", f"{worker} loses {claim!r} though nothing fails")

    def is_deleted(self, queue: str) -> bool:
        """Return whether a queue is marked as deleted."""
        return bool(self._value(self.coordinator.node(self._queues + queue)).get("deleted"))

    def owned_by(self, worker: str) -> frozenset[str]:
        """Return the queues that a worker's node lists."""
        return self._listed(self._worker_node(worker))

    # --- the end --------------------------------------------------------------------

    def _check_moved(
        self, queues: Iterable[str], workers: Mapping[str, QueueFilter]
    ) -> dict[str, str]:
        """Return the moves that count; each of them must have been carried out."""
        folder = self.coordinator.node(self._assignments[:-1])
        values = {name: self._value(self.coordinator.node(self._queues + name)) for name in queues}
        moves = {
            queue: worker
            for queue, worker in parse_moves(folder.data if folder else None).items()
            if queue in values and worker in workers and workers[worker].takes(queue)
        }
        for queue, worker in moves.items():
            value = values[queue]
            if not value.get("deleted") and value.get("owner") != worker:
                raise Violation("moves", f"{queue} was moved to {worker}, and is {value}")
        return moves

    def _queue_value(self, queue: str) -> dict[str, Any]:
        return self._value(self.coordinator.node(self._queues + queue))

    def check_healed(self) -> None:
        """When all faults are over everything is owned, balanced and processed."""
        workers = self.coordinator.names(self._workers[:-1]) or ()
        grants = [self._listed(self.coordinator.node(self._assignments + w)) for w in workers]
        kinds = [self._takes(self._worker_node(worker)) for worker in workers]
        names = self.coordinator.names(self._queues[:-1]) or ()
        moves = self._check_moved(names, dict(zip(workers, kinds, strict=True)))
        for kind in set(kinds):
            loads = [
                len(share)
                for name, share, each in zip(workers, grants, kinds, strict=True)
                if each == kind and name not in moves.values()
            ]
            if loads and max(loads) - min(loads) > 1:
                raise Violation("6", f"the load is out of balance: {loads}")
        taken = [queue for queue in names if any(kind.takes(queue) for kind in kinds)]
        granted = [queue for share in grants for queue in share]
        # The leader may not know yet that a queue is deleted.
        needed = [each for each in taken if not self._queue_value(each).get("deleted")]
        if len({*granted}) < len(granted) or not {*needed} <= {*granted} <= {*taken}:
            raise Violation("liveness", f"queues are granted twice, or not at all: {grants}")
        for queue in names:
            value = self._queue_value(queue)
            owner = value.get("owner", "")
            if value.get("deleted"):
                if owner in workers:
                    raise Violation("liveness", f"{queue} is deleted and still {owner}'s")
                continue
            if queue not in taken:
                if owner in workers:
                    raise Violation("filters", f"{queue} is {owner}'s, which does not take it")
                continue
            if owner not in workers:
                raise Violation("liveness", f"{queue} has no live owner (names {owner!r})")
            if queue not in self._listed(self.coordinator.node(self._assignments + owner)):
                raise Violation("liveness", f"{owner} keeps {queue}, which it should give up")
            last, end = _position(value), self.broker.end(queue)
            if last is None or last < end:
                raise Violation("liveness", f"{queue} of {owner} is stuck at {last} of {end}")
