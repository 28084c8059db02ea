"""A queue of SQS, the workers that own it in turn, what befalls them, and what must hold.

==========================  ==================================================================
what must hold              when it is looked at
==========================  ==================================================================
nothing is lost             the story is over: each message has ended, and is deleted
order within a group        a job starts: every message before its own has ended
nothing is deleted undone   SQS deletes a message
nothing done runs again     a job starts; except messages that its worker could not record
                            before it died, and messages that SQS took back during the job
it resumes                  the story is over: all is done within a quarter of an hour
it does not spin            always; and an idle queue costs a poll each 40 s
it comes to an end          a closed receiver leaves nothing behind
==========================  ==================================================================
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

import qdo.brokers.sqs.consumer
import qdo.brokers.sqs.in_flight
import qdo.brokers.sqs.receive
import qdo.brokers.sqs.subscription
import qdo.brokers.sqs.visibility
import qdo.worker.engine.lanes
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.sqs.codec import SQS_POSITIONS
from qdo.coordination.protocol.claims import Claim, OwnedQueue
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.jobs.options import Order
from qdo.message import Message
from tests.simulation.sqs.server import RequestFaults, SimulatedSqs
from tests.simulation.sqs.virtual_time import Moments
from tests.simulation.sqs.worker import SESSION_SECONDS, WAIT_SECONDS, SimulatedWorker

CONSUMING = (
    qdo.brokers.sqs.consumer,
    qdo.brokers.sqs.in_flight,
    qdo.brokers.sqs.receive,
    qdo.brokers.sqs.subscription,
    qdo.brokers.sqs.visibility,
)
"""The modules that consume: in the simulation they have its time."""

PATIENCE_SECONDS = 900.0
IDLE_LOOK_SECONDS = 800.0

LIKELY: Mapping[str, int] = {
    "send": 8,
    "slow": 3,
    "hand over": 3,
    "faults": 3,
    "calm": 3,
    "kill": 2,
    "stop": 1,
    "away": 1,
    "theft": 1,
    "outage": 1,
}
"""The possible events, and their relative frequency."""


class BrokenInvariant(AssertionError):
    """An invariant does not hold."""


@dataclass
class Fact:
    """A sent message, and its history.

    :ivar fails: attempts that fail.
    :ivar ended: workers under which it ended, each with the time.
    :ivar excused: it may run again although it ended.
    """

    group: str
    seconds: float
    fails: int
    ended: list[tuple[SimulatedWorker, float]] = field(default_factory=list)
    excused: bool = False


class SqsWorld:
    """See the module's docstring.

    :param kind: "fifo" or "standard".
    :ivar bury_seconds: possible times for storing a dead letter.
    """

    def __init__(self, seed: int, kind: str, order: Order, batch: int | None = None) -> None:
        self.chance = random.Random(f"{seed} {kind} {order} {batch}")
        self.moments = Moments()
        self.queue = "q.fifo" if kind == "fifo" else "q"
        self.server = SimulatedSqs(self.queue, self.moments, random.Random(self.chance.random()))
        self.server.deleted = self._deleted
        self.facts: dict[int, Fact] = {}
        self.running: dict[int, SimulatedWorker] = {}
        self.workers: list[SimulatedWorker] = []
        self.owner: SimulatedWorker | None = None
        self.broken: list[str] = []
        self.story: list[str] = []
        self._order: Order = order
        self._batch = batch
        self._node = QueueNode()
        self._fence = 0
        self._recorded_at: dict[SimulatedWorker, float] = {}
        self.away_until = 0.0
        self.bury_seconds = (0.01, 0.5, 0.5, 100.0)

    # --- acts of the coordinator ---------------------------------------------------------

    def begin_worker(self, left: list[tuple[str, str]] = []) -> SimulatedWorker:  # noqa: B006 - read
        worker = SimulatedWorker(
            f"worker-{len(self.workers):010d}",
            self.server,
            self._order,
            self._job,
            self._buried,
            self._record,
            left,
            self._lost,
            lambda: not self.away,
            batch=self._batch,
        )
        self.workers.append(worker)
        return worker

    @property
    def away(self) -> bool:
        """Whether the coordinator does not answer; sessions outlive that."""
        return self.moments.now < self.away_until

    def _claim(self, worker: SimulatedWorker) -> None:
        self._fence += 1
        self._node = self._node.owned_by(worker.name)
        claim = Claim.of(self.queue, self._fence, self._node, worker.lease, SQS_POSITIONS)
        self.owner = worker
        self._recorded_at[worker] = self.moments.now
        worker.claim(claim)

    def _record(self, worker: SimulatedWorker, claim: Claim, final: bool) -> None:
        if self.away and final:
            worker.life_later(1.0, lambda: self._record(worker, claim, final))
        if worker is not self.owner or worker.lost or self.away:
            return
        slot = OwnedQueue(self.queue)
        slot.node, slot.claim = self._node, claim
        node = slot.final() if final else slot.progressed()
        self._node = QueueNode.parse(node.encode())
        self._recorded_at[worker] = self.moments.now
        if final:
            self.owner = None

    def _end_session(self, worker: SimulatedWorker) -> None:
        """End a session: the coordinator has not had contact with its worker for too long."""
        worker.in_session = False
        since = self._recorded_at.get(worker, 0.0)
        for fact in self.facts.values():
            if any(each is worker and at >= since for each, at in fact.ended):
                fact.excused = True
        if self.owner is worker:
            self.owner = None
            self._node = self._node.owned_by("")

    # --- jobs ---------------------------------------------------------------------------

    def _job(self, worker: SimulatedWorker, messages: Sequence[Message]) -> None:
        """Run a batch, or a message: they all end, or none does."""
        numbers = [int(message.body["n"]) for message in messages]
        for at, number in enumerate(numbers):
            self._check_start(worker, number, numbers[:at])
        facts = [self.facts[number] for number in numbers]
        self.running |= dict.fromkeys(numbers, worker)
        try:
            self.moments.sleep(sum(fact.seconds for fact in facts))
            for fact in facts:
                if fact.fails:
                    fact.fails -= 1
                    raise ValueError("this attempt fails")
            for fact in facts:
                fact.ended.append((worker, self.moments.now))
                fact.excused |= not worker.in_session
        finally:
            for number in numbers:
                if self.running.get(number) is worker:
                    del self.running[number]

    def _check_start(self, worker: SimulatedWorker, number: int, along: Sequence[int]) -> None:
        fact = self.facts[number]
        if fact.ended and not fact.excused:
            self._note(f"message {number} runs again under {worker.name}: it had ended")
        if self.running.get(number) is worker:
            self._note(f"message {number} runs twice at once under {worker.name}")
        if self.queue.endswith(".fifo"):
            for before, other in self.facts.items():
                if before >= number:
                    break
                if other.group == fact.group and not other.ended and before not in along:
                    self._note(f"message {number} of group {fact.group} starts before {before}")

    def _buried(self, worker: SimulatedWorker, letter: DeadLetterRecord) -> None:
        self.moments.sleep(self.chance.choice(self.bury_seconds))
        fact = self.facts[int(json.loads(letter.body)["n"])]
        fact.ended.append((worker, self.moments.now))
        fact.excused |= not worker.in_session

    def _lost(self, worker: SimulatedWorker, position: int) -> None:
        number = int(str(uuid.UUID(int=position & ((1 << 128) - 1)))[-12:])
        self.facts[number].excused = True

    def _deleted(self, number: int) -> None:
        if not self.facts[number].ended:
            self._note(f"message {number} is deleted and was not done")

    def _note(self, what: str) -> None:
        self.broken.append(f"{self.moments.now:.2f}: {what}")

    # --- events -------------------------------------------------------------------------

    def send(self, count: int, groups: int, slow: float = 0.0) -> None:
        chance = self.chance
        for _ in range(count):
            group = f"g{chance.randrange(groups)}"
            number = self.server.send({}, group)
            seconds = chance.choice((0.0, 0.01, 0.1, 1.0))
            if chance.random() < slow:
                seconds = chance.uniform(20.0, 150.0)
            fails = chance.choice((1, 2, 99)) if chance.random() < 0.05 else 0
            self.facts[number] = Fact(group, seconds, fails)

    def hand_over(self) -> None:
        """Release the queue, as after a rebalance."""
        if self.owner is not None and not self.owner.life.stopped and not self.away:
            for claim in list(self.owner.claims.values()):
                self.owner.release(claim)

    def kill(self, worker: SimulatedWorker, gives_back: bool) -> None:
        """Kill a worker; if its parent lives, the successor releases its messages."""
        self.moments.end(worker.life)
        self.workers.remove(worker)
        for number in [n for n, each in self.running.items() if each is worker]:
            del self.running[number]
        self._end_session(worker)
        self.begin_worker(list(worker.book.places.values()) if gives_back else [])

    def stop(self, worker: SimulatedWorker, seconds: float) -> None:
        """Stop a process for a while, as SIGSTOP does."""
        if worker.life.stopped or not worker.in_session:
            return
        worker.life.stopped = True
        if seconds >= SESSION_SECONDS:
            self.moments.later(SESSION_SECONDS, lambda: self._end_session(worker), None)
        self.moments.later(seconds, lambda: self._resume(worker, seconds), None)

    def _resume(self, worker: SimulatedWorker, seconds: float) -> None:
        if worker.life.dead:
            return
        self.moments.resume(worker.life)
        if seconds >= SESSION_SECONDS:
            pause = self.chance.uniform(0.0, 0.5)
            self.moments.later(pause, lambda: self._find_out(worker), worker.life)

    def _find_out(self, worker: SimulatedWorker) -> None:
        """Have a worker learn that its session is gone; another one takes its place."""
        worker.lose()
        worker.stop()
        self.workers.remove(worker)
        self.begin_worker()

    def happen(self) -> None:
        """Let something happen."""
        chance = self.chance
        awake = [each for each in self.workers if not each.life.stopped]
        what = chance.choices(list(LIKELY), list(LIKELY.values()))[0]
        self.story.append(f"{self.moments.now:.2f}: {what}")
        match what:
            case "send":
                self.send(chance.randrange(1, 30), chance.choice((1, 3, 20)))
            case "slow":
                self.send(chance.randrange(1, 8), 4, slow=0.5)
            case "hand over":
                self.hand_over()
            case "kill" if awake:
                self.kill(chance.choice(awake), chance.random() < 0.5)
            case "stop" if awake:
                self.stop(chance.choice(awake), chance.choice((1.0, 5.0, 20.0, 100.0)))
            case "away":
                self.away_until = self.moments.now + chance.choice((5.0, 20.0, 100.0))
            case "theft":
                stolen = self.server.steal(chance.choice((0.1, 0.5)))
                for number in stolen if self.queue == "q" else ():
                    # A delete with an old receipt then has no effect and returns no error.
                    self.facts[number].excused = True
            case "outage":
                self.server.faults.dead = True
                seconds = chance.choice((1.0, 10.0, 90.0))
                self.moments.later(seconds, self._calm, None)
            case "faults":
                self.server.faults = RequestFaults(
                    chance.choice((0.0, 0.1)), chance.choice((0.0, 0.1)), chance.choice((0, 0.2))
                )
            case "calm":
                self._calm()

    def _calm(self) -> None:
        self.server.faults = RequestFaults()

    def _assign(self) -> None:
        """Act as the rebalancer: assign unowned queues after a short time."""
        awake = [each for each in self.workers if not each.life.stopped and each.in_session]
        if self.owner is None and awake and not self.away:
            self._claim(self.chance.choice(awake))

    # --- the whole story ----------------------------------------------------------------

    def tell(self, events: int) -> None:
        """Let a story happen, and look whether everything held.

        :raises BrokenInvariant: something did not.
        """
        for _ in range(2):
            self.begin_worker()
        for _ in range(events):
            self.happen()
            self.go_on(self.chance.choice((0.1, 0.5, 3.0, 3.0, 20.0)))
        self.finish()

    def finish(self) -> None:
        """Stop all faults; check that all messages are done, and which are left then."""
        self._calm()
        until = self.moments.now + PATIENCE_SECONDS + 5 * sum(f.seconds for f in self._open())
        while self.server.queue.messages and self.moments.now < until:
            self.go_on(5.0)
        if self.server.queue.messages:
            left = [n for n in self.facts if n in self.server.queue.messages]
            raise BrokenInvariant(f"it does not go on: {left[:20]} are left")
        never = [n for n, fact in self.facts.items() if not fact.ended]
        if never:
            raise BrokenInvariant(f"never done: {never}")
        self._idle()
        self._close()

    def _open(self) -> Iterator[Fact]:
        return (fact for fact in self.facts.values() if not fact.ended)

    def go_on(self, seconds: float) -> None:
        """Let time pass."""
        until = self.moments.now + seconds
        while self.moments.now < until:
            self._assign()
            self.moments.pass_until(min(until, self.moments.now + 0.5))
            if self.broken:
                raise BrokenInvariant("; ".join(self.broken[:5]))

    def _idle(self) -> None:
        """Check the cost of an idle queue."""
        self.go_on(200.0)
        self.server.requests.clear()
        self.go_on(IDLE_LOOK_SECONDS)
        polls = self.server.requests.pop("ReceiveMessage", 0)
        most = IDLE_LOOK_SECONDS / (WAIT_SECONDS + 18.0) + 2
        if not 15 <= polls <= most or self.server.requests:
            raise BrokenInvariant(
                f"an idle queue costs {polls} polls and {dict(self.server.requests)}"
            )

    def _close(self) -> None:
        """Check the remains of workers that have stopped."""
        self.hand_over()
        self.moments.pass_until(self.moments.now + 1.0)
        if self.owner is not None:
            raise BrokenInvariant("an idle queue is not released")
        for worker in self.workers:
            worker.stop()
        self.moments.pass_until(self.moments.now + WAIT_SECONDS + 1.0)
        for worker in self.workers:
            if not worker.stopped or worker.book.places:
                raise BrokenInvariant(f"{worker.name} does not come to an end")


@contextmanager
def world(seed: int, kind: str, order: Order, batch: int | None = None) -> Iterator[SqsWorld]:
    """Give a world in which the engine runs, in place of gevent's time."""
    made = SqsWorld(seed, kind, order, batch)
    with pytest.MonkeyPatch.context() as patch:
        for module in (*CONSUMING, qdo.worker.engine.lanes):
            if hasattr(module, "gevent"):
                patch.setattr(module, "gevent", made.moments)
        patch.setattr(qdo.worker.engine.lanes, "Event", made.moments.event)
        patch.setattr(qdo.brokers.sqs.consumer, "Event", made.moments.event)
        yield made
        made.moments.drop()
