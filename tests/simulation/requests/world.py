"""The workers, leaders, askers and operators of one history, and what befalls them."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, suppress
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import ujson
from greenlet import getcurrent

import qdo.requests.jobs
import qdo.requests.replies
import qdo.worker.pools.returner
import qdo.worker.pools.subscription
from qdo.brokers.requests import OVER, PAUSED, NewRequest
from qdo.coordination.protocol.lease import Lease
from qdo.errors import RejectedError, UnreachableError
from qdo.message import Message
from qdo.outcomes import DeadLetter, Retry
from qdo.requests.calls import Handle
from qdo.requests.jobs import ENDED, Request, answering, reporting
from qdo.settings.live import SettingsInForce
from qdo.settings.settings import Settings
from qdo.worker.pools.returner import Returner
from qdo.worker.pools.subscription import PoolSubscription
from tests.simulation.invariants import Violation
from tests.simulation.requests.processes import CheckedStore, SimulatedHost, Tasks
from tests.simulation.schedule import Schedule

TIMEOUT, ATTEMPTS = 1.0, 3
FAULTY_SECONDS, PATIENCE_SECONDS = 5.0, 30.0


class StoreLink:
    """The store as a process reaches it."""

    def __init__(self, world: PoolWorld) -> None:
        self.world = world

    def _send(self, name: str, *args: Any, **options: Any) -> Any:
        return self.world.store.send(name, args, options)


for _name in (
    "ask",
    "take",
    "note",
    "end",
    "put_back",
    "retry",
    "mark",
    "owners",
    "give_back",
    "find",
):
    setattr(StoreLink, _name, partialmethod(StoreLink._send, _name))


class JobInterrupted(BaseException):
    """The engine ends a job."""


class PoolSlot:
    """A pool in the engine of one registration.

    :ivar runs: tasks of the jobs that run, by position.
    """

    def __init__(
        self, world: PoolWorld, host: SimulatedHost, pool: str, name: str, lease: Lease
    ) -> None:
        self.world, self.host, self.pool, self.lease = world, host, pool, lease
        self.is_open = True
        self.runs: dict[int, Any] = {}
        self._rows: dict[int, Any] = {}
        self._lanes = world.random.choice((1, 1, 2, 3))
        self.subscription = PoolSubscription(
            world.sender,
            world.sender.broker.requests,
            pool,
            name,
            lambda held: self._lanes - held,
            lambda: None,
            world.store.unix_time,
            turn=len(world.names),
        )
        self.subscription.subscribe(pool, 0, (), self._end_job)
        self.subscription.may_start = self.may_start
        self.subscription.in_flight = lambda: [*self.runs]

    def in_force(self) -> bool:
        return self.is_open and self.world.schedule.now < self.lease.until

    def may_start(self) -> bool:
        return self.in_force()

    def work(self) -> None:
        reader = self.subscription.reader(0)
        while self.is_open:
            with suppress(UnreachableError):
                self.subscription.look(0.0)
                self._rows.update((row[0], row) for row in reader.fetch(10))
            self._start()
            self.world.tasks.sleep(0.02 + 0.25 * self.world.schedule.chance())
        while self.runs:
            self.world.tasks.sleep(0.05)
        self.subscription.close()

    def _start(self) -> None:
        for position, row in list(self._rows.items()):
            if not self.subscription.is_held(position):
                if position not in self.runs:
                    del self._rows[position]
                    self.subscription.done(position)
            elif position not in self.runs and self.may_start():
                self.runs[position] = self.world.tasks.spawn(self._run, row)

    def _end_job(self, position: int) -> None:
        self.world.tasks.later(0.0, self.runs[position], JobInterrupted())

    def _run(self, row: Any) -> None:
        position, body, _, headers = row
        failure = self.subscription.failure(position)
        failed = failure.attempts if failure else 0
        request = Message(
            self.pool, position, ujson.loads(body), headers=json.loads(headers), attempt=failed + 1
        )
        task: Any = getcurrent()
        task.slot = self
        try:
            if failed >= ATTEMPTS:
                self.subscription.finish(position, "failed", "crashed")
            else:
                self.world.begin(self, request)
                call = reporting(answering(self.world.sender, self._act))
                if call(request, None) is ENDED:
                    self.subscription.reported(position)
        except JobInterrupted:
            pass
        except Violation:
            raise
        except Exception as error:  # noqa: BLE001 - as the engine does
            if self.is_open and self.subscription.is_held(position):
                self._apply(position, failed, error)
        self.world.running.discard((self, request.id))
        del self.runs[position]
        if self.subscription.is_held(position):
            del self._rows[position]
            self.subscription.done(position)

    def _act(self, request: Request, context: Any) -> str:
        """Run the job: what is stored after it has ended is no part of it."""
        try:
            return self.world.act(request)
        finally:
            self.world.running.discard((self, request.id))

    def _apply(self, position: int, failed: int, error: Exception) -> None:
        if isinstance(error, Retry):
            self.subscription.put_back(position, failed, 0.0, "stopping")
        elif failed + 1 < ATTEMPTS and not isinstance(error, DeadLetter):
            self.subscription.put_back(position, failed + 1, 0.2, "failed")
        else:
            self.subscription.finish(position, "failed", str(error))


class PoolWorld:
    """One history.

    :ivar names: when the node of each worker was made, and when it was gone.
    :ivar running: the jobs that run, with their slots.
    """

    reused_names = False

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.schedule = schedule = Schedule(seed, tracing=tracing)
        self.random = schedule.random
        self.tasks = Tasks(schedule)
        self.store = CheckedStore(self.tasks, self.random.choice((0.0, 0.1, 0.3)))
        requests = StoreLink(self)
        broker = SimpleNamespace(requests=requests)
        self.sender: Any = SimpleNamespace(broker=broker, ready=lambda messages: messages)
        self.names: list[tuple[str, float, list[float]]] = []
        self.hosts: list[SimulatedHost] = []
        self.running: set[tuple[PoolSlot, str]] = set()
        self.healed = False
        self._plans: dict[str, list[str]] = {}
        self._cancelled: set[tuple[str, int]] = set()
        self._resumed: set[tuple[str, int, int]] = set()
        self._values = 0

    # --- what workers do -----------------------------------------------------------------

    def work(self, number: int) -> None:
        host = SimulatedHost(self.tasks, number)
        self.hosts.append(host)
        host.spawn(self._register, host, number)

    def _register(self, host: SimulatedHost, number: int) -> None:
        """Register under a name that was never used, again and again."""
        sleep, chance = self.tasks.sleep, self.schedule.chance
        while True:
            sleep(0.005 + 0.1 * chance() ** 3)
            name = f"w{number}" if self.reused_names else f"w{number}-{len(self.names)}"
            if self.reused_names and name in self.workers(self.schedule.now):
                continue
            gone, began = [0.0], self.schedule.now
            self.names.append((name, began, gone))
            gone[0] = began + TIMEOUT
            sleep(0.005 + 0.1 * chance() ** 3)
            lease = Lease(TIMEOUT, began)
            slots = [PoolSlot(self, host, pool, name, lease) for pool in ("p", "r")]
            host.slots, host.gone = slots, gone
            for slot in slots:
                self.tasks.spawn(slot.work)
            while True:
                sleep(0.1)
                sent = self.schedule.now
                if sent < host.cut_until:
                    continue
                if gone[0] < sent:
                    break
                gone[0] = sent + TIMEOUT
                sleep(0.002 + 0.1 * chance() ** 3)
                lease.heard(sent)
                self._check_runs()
            lease.end()
            for slot in slots:
                slot.is_open = False

    def workers(self, at: float) -> set[str]:
        return {name for name, began, gone in self.names if began <= at < gone[0]}

    def begin(self, slot: PoolSlot, request: Message) -> None:
        """Start a job; none may run whose lease is valid."""
        self.schedule.note("starts %s %s", request.id, request.headers["qdo-take"])
        if any(id == request.id and each.in_force() for each, id in self.running):
            raise Violation("R2", f"{request.id} starts while it runs")
        self.running.add((slot, request.id))
        if request.id in self.store.never:
            raise Violation("R8", f"{request.id} runs after its end")

    def _check_runs(self) -> None:
        valid = [id for slot, id in self.running if slot.in_force()]
        if len(valid) > len({*valid}):
            raise Violation("R2", f"two run one of {valid}")

    def act(self, request: Request) -> str:
        """Run the job of a request: work, and what its plan says."""
        for step in self._plans[request.id]:
            self.tasks.sleep(0.3 * self.schedule.chance() ** 2)
            if step == "fail" and request.attempt <= self.random.randint(1, ATTEMPTS):
                raise ValueError("it fails")
            if step == "note":
                request._noted_at = -1.0
                request.progress("on its way")
            if step == "pause":
                resumed = (request.id, request.take, request.pause())
                if resumed in self._resumed:
                    raise Violation("pause", f"{resumed} goes on twice by one value")
                self._resumed.add(resumed)
            while step == "endless":
                self.tasks.sleep(1.0)
        return "done"

    # --- what others do ------------------------------------------------------------------

    def lead(self) -> None:
        """Believe to lead, and give back."""
        returner = Returner(self.sender, self.sender.broker.requests, SettingsInForce(Settings()))
        client: Any = SimpleNamespace(synced=0.0, world=self)
        layout: Any = SimpleNamespace(workers="workers")
        while True:
            with suppress(UnreachableError):
                returner._give_back(client, layout, None)  # type: ignore[arg-type]
            self.tasks.sleep(0.2 + 0.5 * self.schedule.chance())

    def current_names(self, client: Any, *, sync: bool) -> set[str]:
        """List workers as a server that lags knows them, but not less than at the last sync."""
        self.tasks.sleep(0.002 + 0.5 * self.schedule.chance() ** 3)
        now = self.schedule.now
        client.synced = max(client.synced, now if sync else now - 2.0 * self.schedule.chance())
        self.tasks.sleep(0.002 + 0.5 * self.schedule.chance() ** 3)
        lag = (self.schedule.now - client.synced) * self.schedule.chance()
        return self.workers(client.synced + lag)

    def ask(self, id: str) -> None:
        due = self.store.unix_time() + 2.0 if self.schedule.chance() < 0.2 else 0.0
        reply = json.dumps({"then": "q", "events": self.schedule.chance() < 0.3})
        priority = self.random.choice((0, 5, 5, 9))
        new = NewRequest(self.random.choice("pr"), id, (b"1", None), b"d", priority, due, reply)
        answer: list[bool] = []
        while not answer:
            with suppress(UnreachableError):
                answer = self.sender.broker.requests.ask([new])
        if id not in self.store.rows:
            raise Violation("R1", f"{id} was asked for, and is not stored")

    def operate(self) -> None:
        """Cancel, resume and retry, as operators do."""
        while True:
            self.tasks.sleep(0.1 + 0.6 * self.schedule.chance())
            for id, row in list(self.store.rows.items()):
                handle = Handle(self.sender, id)
                try:
                    if self.healed and row[4] == OVER:
                        continue
                    if self._should_cancel(id, row[4]):  # first: a late note may call it paused
                        self.store.asked_to_end.add(id)
                        when = id, self.store.retried[id]
                        if handle.cancel("enough"):
                            self._cancelled.add(when)
                    elif row[4] == PAUSED and (self.healed or self.schedule.chance() < 0.5):
                        self._values += 1
                        if self.schedule.chance() < 0.7:
                            handle.resume(self._values)
                            continue
                        self.tasks.sleep(1.5 * self.schedule.chance())  # it answers what it saw
                        answer = json.dumps({"resume": self._values})
                        self.sender.broker.requests.mark(id, answer, row[9])
                    elif row[4] == OVER and self.schedule.chance() < 0.05:
                        self.sender.broker.requests.retry(id)
                except (UnreachableError, RejectedError):
                    continue

    def _should_cancel(self, id: str, state: int) -> bool:
        if self.healed:
            found = id, self.store.retried[id]
            return "endless" in self._plans[id] and found not in self._cancelled
        return self.schedule.chance() < (0.25 if state == PAUSED else 0.04)

    # --- the whole history ---------------------------------------------------------------

    def tell(self) -> None:
        """Let all happen; raise the violation of an invariant."""
        for number in range(self.random.choice((2, 3))):
            self.work(number)
        others = SimulatedHost(self.tasks, -1)
        for _ in range(self.random.choice((1, 1, 2))):
            others.spawn(self.lead)
        for _ in range(2):
            others.spawn(self.operate)
        for number in range(self.random.randint(2, 6)):
            steps = ("work", "work", "fail", "note", "pause", "pause", "endless")
            self._plans[str(number)] = self.random.choices(steps, k=self.random.randint(1, 3))
            at = 2.0 * self.schedule.chance() ** 2
            for _ in range(self.random.choice((1, 1, 2))):
                self.schedule.at(at, others.spawn, self.ask, str(number))
        until = FAULTY_SECONDS * self.schedule.chance()
        while self.schedule.now < until:
            self.schedule.run(self.schedule.now + 0.6 * self.schedule.chance())
            self._befall()
        self._heal()

    def _befall(self) -> None:
        host = self.random.choice(self.hosts)
        until = self.schedule.now + 2.5 * self.schedule.chance()
        match self.random.choice(("none", "none", "cut", "stop", "kill")):
            case "cut":
                host.cut_until = until
            case "stop":
                host.stopped_until = until
            case "kill":
                host.alive = False
                self.running = {each for each in self.running if each[0].host is not host}
                self.hosts.remove(host)
                if self.schedule.chance() < 0.5:  # its parent closes its session
                    host.gone[0] = min(host.gone[0], self.schedule.now)
                self.work(host.number)

    def _heal(self) -> None:
        self.healed, self.store.faults = True, 0.0
        self.schedule.run(self.schedule.now + 3.0)
        until = self.schedule.now + PATIENCE_SECONDS
        while self._left():
            if self.schedule.now > until:
                raise Violation("R9", f"it does not end: {self._left()}")
            self.schedule.run(self.schedule.now + 0.5)

    def _left(self) -> list[Any]:
        """Return what is not over, or still takes a seat."""
        slots = [slot for host in self.hosts for slot in host.slots]
        held = [slot.pool for slot in slots if slot.subscription.running or slot.runs]
        return [*(row for row in self.store.rows.values() if row[4] != OVER), *held]


def current_names(client: Any, path: str) -> set[str]:
    found: set[str] = client.world.current_names(client, sync=True)
    return found


def play(seed: int, *, tracing: bool = False) -> tuple[Violation | None, PoolWorld]:
    """Play one history; return the violated invariant, if any."""
    world = PoolWorld(seed, tracing=tracing)
    with pytest.MonkeyPatch.context() as patch:
        subscription, jobs = qdo.worker.pools.subscription, qdo.requests.jobs
        for module in (subscription, jobs):
            patch.setattr(module, "clock", lambda: world.schedule.now)
        patch.setattr(subscription, "gevent", world.tasks)
        patch.setattr(qdo.requests.replies, "random", world.random)
        patch.setattr(subscription, "Semaphore", nullcontext)
        patch.setattr(jobs, "time", world.tasks)
        patch.setattr(qdo.requests.replies, "time", world.tasks)
        patch.setattr(qdo.worker.pools.returner, "current_names", current_names)
        patch.setattr(Message, "stopping", property(lambda _: not getcurrent().slot.is_open))
        try:
            world.tell()
        except Violation as violation:
            return violation, world
        except Exception as error:  # noqa: BLE001 - a bug, or a mutant
            return Violation("crash", repr(error)), world
        finally:
            world.store.close()
    return None, world


if __name__ == "__main__":
    found, played = play(int(sys.argv[1]), tracing=True)
    print("\n".join(played.schedule.trace or []), found or "nothing violated", sep="\n")
