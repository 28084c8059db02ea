"""Operators that ask workers for actions, the workers and parents that act, and the checks.

A parent acts for its worker while a job blocks that, and for a while afterwards, over a session of
its own. It may die; then its worker drains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from qdo.coordination.client import Client
from qdo.coordination.kazoo_driver import KazooDriver
from qdo.coordination.machine_loop import MachineLoop
from qdo.coordination.protocol.machine import CheckOp, CreateOp, DeleteOp, Op
from qdo.coordination.znodes.layout import is_worker_name
from qdo.fleet.action_machine import (
    DONE,
    EXPIRED,
    LOST,
    PARENT,
    WORKER,
    Action,
    ActionsWatch,
    Finish,
    Result,
    ended_entry,
)
from qdo.fleet.audit_entries import AuditEntry, entry_name
from tests.simulation.client import LinkClient, LinkPerformer
from tests.simulation.coordinator import Coordinator, LogEntry
from tests.simulation.invariants import OPERATOR, Violation
from tests.simulation.network import Link

if TYPE_CHECKING:
    from qdo.coordination.znodes.layout import Layout
    from tests.simulation.registration import SimulatedMember

EPOCH = 1_790_000_000.0
"""Unix time at which histories begin."""
PARENTS = 0.5
"""How many workers have a parent that acts for them at some time."""
CLEAN_SECONDS = 1.0


class ActionBook:
    """The actions of a world, and what must hold of them.

    A1: an action is done at most once. A2: it ends with one entry, which tells what happened, in
    the transaction that deletes it. A3: it is not begun after it has expired. A4: it ends.

    :ivar healed: parents do not die any more.
    """

    def __init__(self, coordinator: Coordinator, layout: Layout) -> None:
        self.healed = False
        self.layout = layout
        self.coordinator = coordinator
        self.schedule = coordinator.schedule
        self._fleet = layout.fleet
        self._asked: dict[str, float] = {}
        self._done: Counter[str] = Counter()
        self._parents: list[SimulatedParent] = []
        self._fault: Violation | None = None
        coordinator.observers.append(self._committed)
        self.schedule.after(CLEAN_SECONDS, self._clean)

    def wall(self) -> float:
        return EPOCH + self.schedule.now

    # --- operators ------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask some worker for several actions, if it is registered."""
        coordinator, random = self.coordinator, self.schedule.random
        names = [*filter(is_worker_name, coordinator.names(self.layout.workers) or ())]
        if not names or coordinator.down:
            return
        worker = random.choice(names)
        folder = self._fleet.actions_of(worker)
        for _ in range(random.choice((1, 1, 2, 4))):
            name = entry_name(self.wall(), f"{len(self._asked):08x}")
            expires = self.wall() + random.choice((0.1 * random.random(), 1.0, 100.0))
            action = Action(random.choice(("at once", "later")), {"id": name}, expires)
            ops: list[Op] = [CheckOp(self.layout.worker(worker))]
            if coordinator.node(folder) is None:
                ops.append(CreateOp(folder, b""))
            self._asked[name] = expires
            coordinator.commit(OPERATOR, (*ops, CreateOp(f"{folder}/{name}", action.encode())))
            self.schedule.note("an operator asks %s for %s", worker, name)

    def _clean(self) -> None:
        """End the actions of workers that are gone, as the leader does."""
        self.schedule.after(CLEAN_SECONDS, self._clean)
        coordinator = self.coordinator
        gone = set(coordinator.names(self._fleet.actions) or ())
        for worker in sorted(gone.difference(coordinator.names(self.layout.workers) or ())):
            folder = self._fleet.actions_of(worker)
            for name in coordinator.names(folder) or ():
                node = coordinator.node(f"{folder}/{name}")
                if node is not None:
                    entry = ended_entry(name, worker, Action.parse(node.data), LOST, "")
                    write = CreateOp(self._fleet.log_entry(name), entry.encode())
                    delete = DeleteOp(f"{folder}/{name}", node.version)
                    coordinator.commit(OPERATOR, (delete, write))

    # --- actors ---------------------------------------------------------------------------

    def join(self, member: SimulatedMember, worker: str) -> ActionsWatch:
        """Return the machine of a worker; it may have a parent that acts, too."""
        if self.schedule.chance() < PARENTS:
            parent = SimulatedParent(self, worker, member)
            self._parents.append(parent)
            self.schedule.after(4.0 * self.schedule.chance(), parent.start)
        return self.watch(worker, member.call, member.process.run, WORKER)

    def watch(
        self,
        worker: str,
        call: Callable[[Callable[[], object]], None],
        run: Callable[..., None],
        actor: str,
    ) -> ActionsWatch:
        """Return the machine of an actor.

        :param call: calls a function on its loop.
        :param run: calls a function in its process.
        """

        def at_once(args: Any, finish: Finish) -> Result | None:
            self._do(args["id"], actor)
            return Result("")

        def later(args: Any, finish: Finish) -> Result | None:
            self._do(args["id"], actor)
            self.schedule.after(2.0 * self.schedule.chance(), run, finish, Result(""))
            return None

        table = {"at once": at_once, "later": later}
        return ActionsWatch(self._fleet, worker, table, wall=self.wall, call=call, actor=actor)

    # --- checks ---------------------------------------------------------------------------

    def _do(self, name: str, actor: str) -> None:
        # The machine catches all errors of an action, so they are raised later.
        self.schedule.note("the %s does %s", actor, name)
        self._done[name] += 1
        if self._done[name] > 1:
            self._fault = self._fault or Violation("A1", f"{name} is done again")
        if self.wall() >= self._asked[name]:
            self._fault = self._fault or Violation("A3", f"{name} is begun too late")

    def _committed(self, entry: LogEntry) -> None:
        if self._fault is not None:
            raise self._fault
        prefix, log = f"{self._fleet.actions}/", f"{self._fleet.actionlog}/"
        ended = [
            path.removeprefix(prefix).split("/")
            for path, before, after in entry.changes
            if path.startswith(prefix) and before is not None and after is None
        ]
        logged = {
            path.removeprefix(log): AuditEntry.parse("", after.data)
            for path, before, after in entry.changes
            if path.startswith(log) and before is None and after is not None
        }
        if {name for _, name in ended} != set(logged):
            raise Violation("A2", f"{ended} are deleted, and {[*logged]} are logged")
        for worker, name in ended:
            outcome = (logged[name].after or {}).get("outcome")
            done = self._done[name]
            gone = self.coordinator.node(self.layout.worker(worker)) is None
            fits = {DONE: done == 1, EXPIRED: done == 0, LOST: gone}
            if not fits.get(str(outcome), False):
                raise Violation("A2", f"{name} of {worker}: {outcome}, done {done} times")

    def check_ended(self) -> None:
        """Require that nothing waits any more."""
        for worker in self.coordinator.names(self._fleet.actions) or ():
            left = self.coordinator.names(self._fleet.actions_of(worker))
            if left:
                raise Violation("A4", f"{worker} does not end {left}")
        for parent in self._parents:
            if not parent.is_over:
                raise Violation("A4", f"the parent of {parent.worker} does not end")


class SimulatedParent:
    """What a parent runs for one worker: a machine in a session of its own.

    :ivar is_over: whether it has not begun, or has ended everything.
    """

    def __init__(self, book: ActionBook, worker: str, member: SimulatedMember) -> None:
        self.worker = worker
        self.is_over = True
        self._book = book
        self._member = member
        self._schedule = book.schedule
        self._dead = self._woken = False

    def start(self) -> None:
        """Connect, and act for a while."""
        self.is_over = False
        client = LinkClient(self._wake)
        self._loop = MachineLoop(
            cast(Client, client), before_flush=lambda: None, after_step=lambda: None
        )
        self._link = Link(
            self._book.coordinator,
            f"parent-of-{self.worker}",
            self._member.link.timeout,
            self._run,
            on_connected=lambda session, new, heard_at: self._loop.put(self._connected),
            on_suspended=lambda: self._loop.put(self._suspended),
            on_expired=lambda: self._loop.put(self._suspended),
        )
        client.lose = self._link.lose
        self._loop.driver = cast(KazooDriver, LinkPerformer(self._link, self._loop.put))
        self._loop.running = True
        self._watch = self._book.watch(self.worker, self._loop.put, self._run, PARENT)
        self._loop.machines.append(self._watch)
        self._link.connect()
        chance, after = self._schedule.chance, self._schedule.after
        for _ in range(self._schedule.random.choice((0, 1, 3, 6))):
            lost = 2.0 * chance()
            after(lost, self._run, self._link.lose)
            if chance() < 0.3:  # and the loop of the worker runs again
                after(lost + 0.05 * chance(), self._run, self._loop.put, self._watch.close)
        if chance() < 0.2:
            after(3.0 * chance(), self._die)
        after(3.0 * chance(), self._run, self._loop.put, self._watch.close)
        after(1.0, self._end)

    def _run(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._dead:
            function(*arguments)

    def _die(self) -> None:
        """Die; the worker drains, as it does when its parent is gone."""
        if not (self.is_over or self._book.healed):
            self._schedule.note("the parent of %s dies", self.worker)
            self._dead = self.is_over = True
            self._link.die()
            self._member.process.drain()

    def _end(self) -> None:
        """End the session when everything has ended."""
        if self._dead:
            return
        if self._watch.ended:
            self._dead = self.is_over = True
            self._link.close()
        else:
            self._schedule.after(0.2, self._end)

    def _connected(self) -> None:
        self._suspended()
        self._loop.connected()

    def _suspended(self) -> None:
        if self._loop.up:
            self._loop.suspended()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._schedule.after(0.001, self._run, self._step)

    def _step(self) -> None:
        self._woken = False
        self._loop.step(0.0)
