"""A coordinator in memory with the actions of one worker, and the machines that do them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from qdo.coordination.protocol.machine import (
    Callback,
    Children,
    ChildrenRead,
    Commit,
    CommitError,
    Committed,
    CoordinatorRequest,
    CreateOp,
    DeleteOp,
    Get,
    NodeMissing,
    NodeRead,
    Rejected,
    Response,
    SetOp,
    Stat,
)
from qdo.coordination.znodes.layout import FleetLayout
from qdo.fleet.action_machine import (
    PARENT,
    WORKER,
    Action,
    ActionsWatch,
    Finish,
    Result,
    UnfitError,
)
from qdo.fleet.audit_entries import AuditEntry, entry_name

FLEET = FleetLayout("/app")
NAME = "worker-0000000001"
FOLDER = FLEET.actions_of(NAME)
NOW = 1_790_000_000.0


class ActionsWorld:
    """The nodes, and the actors that watch them.

    :ivar done: how often each action was done.
    """

    def __init__(self, kind: type[ActionsWatch] = ActionsWatch) -> None:
        self.nodes: dict[str, tuple[bytes, int]] = {}
        self.done: Counter[str] = Counter()
        self.folder = False
        self.worker = Actor(self, kind, WORKER)
        self.actors = [self.worker]

    def add_parent(self, kind: type[ActionsWatch] = ActionsWatch) -> Actor:
        """Let the parent of the worker act as well."""
        parent = Actor(self, kind, PARENT)
        self.actors.append(parent)
        parent.machine.connected()
        return parent

    def put(self, name: str, value: Action | bytes) -> None:
        self.folder = True
        data = value if isinstance(value, bytes) else value.encode()
        self.nodes[f"{FOLDER}/{name}"] = data, 0
        self.notify()

    def send(self, number: int, action: str = "mark", **args: Any) -> str:
        name = entry_name(NOW, f"{number:08x}")
        self.put(name, Action(action, {"id": name, **args}, NOW + 60, "ann@office"))
        return name

    def notify(self) -> None:
        for actor in self.actors:
            if actor.watched:
                actor.watched = False
                actor.machine.changed(FOLDER)

    def commit(self, commit: Commit) -> Response:
        for index, op in enumerate(commit.ops):
            node = self.nodes.get(op.path)
            if isinstance(op, CreateOp):
                if node is not None:
                    return Rejected(index, CommitError.NODE_EXISTS)
            elif node is None:
                return Rejected(index, CommitError.NO_NODE)
            elif op.version != node[1]:
                return Rejected(index, CommitError.BAD_VERSION)
        for op in commit.ops:
            if isinstance(op, DeleteOp):
                del self.nodes[op.path]
            elif isinstance(op, SetOp):
                self.nodes[op.path] = op.data, op.version + 1
            elif isinstance(op, CreateOp):
                self.nodes[op.path] = op.data, 0
        return Committed(1, tuple(getattr(op, "version", -1) + 1 for op in commit.ops))

    def finish(self) -> None:
        """Let everybody do everything."""
        while sum(actor.step() for actor in self.actors):
            pass

    def entries(self) -> list[AuditEntry]:
        log = {path: data for path, (data, _) in self.nodes.items() if "/actionlog/" in path}
        return [AuditEntry.parse(path.rpartition("/")[2], data) for path, data in log.items()]

    def outcomes(self) -> list[Any]:
        return [(entry.after or {}).get("outcome") for entry in self.entries()]

    def outputs(self) -> list[str]:
        return [data.decode() for path, (data, _) in self.nodes.items() if "/actionoutput/" in path]

    def waiting(self) -> list[str]:
        """Return the actions that have not ended."""
        return [path for path in self.nodes if path.startswith(FOLDER)]


class Actor:
    """A machine with its connection."""

    def __init__(self, world: ActionsWorld, kind: type[ActionsWatch], name: str) -> None:
        self.answers: deque[tuple[Callback, Response]] = deque()
        self.called: deque[Callable[[], object]] = deque()
        self.unfinished: deque[Finish] = deque()
        self.watched = False
        self._world = world
        table = {"mark": self._mark, "later": self._later}
        if name == WORKER:
            table |= {"fail": self._fail, "unfit": self._unfit}
        call = self.called.append
        self.machine = kind(FLEET, NAME, table, wall=lambda: NOW, call=call, actor=name)

    # --- what the actions do --------------------------------------------------------------

    def _mark(self, args: Any, finish: Finish) -> Result | None:
        self._world.done[args["id"]] += 1
        return Result("marked", args.get("output", ""))

    def _later(self, args: Any, finish: Finish) -> Result | None:
        self._world.done[args["id"]] += 1
        self.unfinished.append(finish)
        return None

    def _fail(self, args: Any, finish: Finish) -> Result | None:
        raise ValueError("no")

    def _unfit(self, args: Any, finish: Finish) -> Result | None:
        raise UnfitError("not today")

    # --- the connection -------------------------------------------------------------------

    def answer(self, request: CoordinatorRequest) -> Response:
        """Perform a request."""
        world = self._world
        if isinstance(request, Stat):
            self.watched = True
            return NodeRead(b"", 0) if world.folder else NodeMissing()
        if isinstance(request, Children):
            if not world.folder:
                return NodeMissing()
            self.watched = True
            return ChildrenRead(tuple(path.rpartition("/")[2] for path in world.waiting()))
        if isinstance(request, Get):
            node = world.nodes.get(request.path)
            return NodeMissing() if node is None else NodeRead(*node)
        assert isinstance(request, Commit)
        return world.commit(request)

    def step(self) -> bool:
        """Do one thing; return whether there was one."""
        machine = self.machine
        if self.called:
            self.called.popleft()()
        elif machine.outbox:
            request, then = machine.outbox.popleft()
            self.answers.append((then, self.answer(request)))
            if isinstance(request, Commit):
                self._world.notify()
        elif self.answers:
            then, answer = self.answers.popleft()
            then(answer)
        elif self.unfinished:
            partial(self.unfinished.popleft(), Result("marked"))()
        else:
            return False
        return True
