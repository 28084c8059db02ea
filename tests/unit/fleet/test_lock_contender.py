"""Contenders for a lock against every order of requests, lost answers, cancels and dead sessions.

Several clients contend for one lock at a small coordinator. A connection is lost with any number of
its requests performed and none of the rest. The folder of the lock is deleted when it is empty.
Mutants show that the rules are needed, and that the test can tell.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from qdo.coordination.protocol.machine import (
    Callback,
    CheckOp,
    Children,
    ChildrenRead,
    Commit,
    CommitError,
    Committed,
    CoordinatorRequest,
    Create,
    Created,
    CreateOp,
    DeleteOp,
    Get,
    NodeMissing,
    NodeRead,
    NoResponse,
    Rejected,
    Response,
    Stat,
)
from qdo.coordination.protocol.registration import Registration
from qdo.fleet.lock_contender import Contender, LockContender

FOLDER = "/locks/export"
CLIENTS = 4
STEPS = 250


class LockClient:
    """A session with one contender after the other."""

    def __init__(self, world: LockWorld, session: int) -> None:
        self.world = world
        self.session = session
        self.contenders: list[LockContender] = []
        self.asked: deque[tuple[LockContender, CoordinatorRequest, Callback]] = deque()
        self.received: deque[Callable[[], object]] = deque()
        self.performed: deque[Callback] = deque()
        self.watched: dict[str, list[LockContender]] = {}
        self.connected = True

    def contend(self, shared: bool) -> None:
        self.world.make_folder()
        number = self.world.next_id()
        contender = self.world.kind(
            FOLDER, f"{number:08x}", b"", self.session, shared=shared, on_change=lambda: None
        )
        self.contenders.append(contender)
        if self.connected:
            contender.connected()
            self.send()

    def leave(self, contender: LockContender) -> None:
        contender.leave()
        self.send()

    def send(self) -> None:
        for contender in self.contenders:
            while contender.outbox:
                request, then = contender.outbox.popleft()
                self.asked.append((contender, request, then))

    def perform(self) -> None:
        """Perform the oldest request; its answer is under way."""
        contender, request, then = self.asked.popleft()
        reply = self.world.reply(self, contender, request)
        self.performed.append(then)
        self.received.append(lambda: self.performed.popleft()(reply))

    def receive(self) -> None:
        self.received.popleft()()
        self.send()

    def cut(self) -> None:
        """Lose the connection: any prefix of the requests was performed."""
        for _ in range(self.world.random.randint(0, len(self.asked))):
            self.perform()
        self.connected = False
        waiting = [*self.performed, *(then for _, _, then in self.asked)]
        self.received.clear()
        self.performed.clear()
        self.asked.clear()
        self.watched.clear()
        for then in waiting:
            then(NoResponse())
        for contender in self.contenders:
            for _, then in contender.outbox:
                then(NoResponse())
            contender.outbox.clear()
            contender.suspended()

    def reconnect(self) -> None:
        self.connected = True
        for contender in self.contenders:
            contender.connected()
        self.send()


def still_contends(contender: LockContender) -> bool:
    """Return whether it has not left, as it may do by itself only if it cannot make the folder."""
    assert contender._leaving or not contender.left
    return not contender._leaving


class LockWorld:
    """A coordinator with one lock, and its clients."""

    def __init__(self, seed: int, kind: type[LockContender] = LockContender) -> None:
        self.random = random.Random(seed)
        self.kind = kind
        self.nodes: dict[str, tuple[int, int]] = {}
        self.zxid = 0
        self.number = 0
        self.folder = False
        self.refuses_folders = self.random.random() < 0.5
        self.deletions = 0
        self.made_again = 0
        self.contention = self.random.choice((1.0, 0.05))
        self.ids = 0
        self.sessions = 0
        self.clients = [self.client() for _ in range(CLIENTS)]
        self.last_exclusive = 0
        self.holds = 0

    def make_folder(self) -> None:
        if not self.folder:
            self.folder, self.number = True, 0

    def delete_folder(self) -> None:
        self.deletions += 1
        self.folder = False

    def next_id(self) -> int:
        self.ids += 1
        return self.ids

    def client(self) -> LockClient:
        self.sessions += 1
        return LockClient(self, self.sessions)

    def reply(
        self, client: LockClient, contender: LockContender, request: CoordinatorRequest
    ) -> Response:
        if isinstance(request, Create | Children) and not self.folder:
            return NodeMissing()
        if isinstance(request, Create):
            self.zxid += 1
            path = f"{request.path}{self.number:010}"
            self.number += 1
            self.nodes[path] = client.session, self.zxid
            return Created(path)
        if isinstance(request, Children):
            return ChildrenRead(tuple(path.rpartition("/")[2] for path in self.nodes))
        if isinstance(request, Commit):
            return self.commit(request)
        assert isinstance(request, Get | Stat)
        if request.watch:
            watching = client.watched.setdefault(request.path, [])
            watching += [contender] if contender not in watching else []
        found = self.nodes.get(request.path)
        return NodeMissing() if found is None else NodeRead(b"", 0, found[1], found[0])

    def commit(self, request: Commit) -> Response:
        (op,) = request.ops
        if isinstance(op, CheckOp):
            return Committed(0, (-1,)) if self.folder else Rejected(0, CommitError.NO_NODE)
        if isinstance(op, CreateOp):
            return self.make_asked_folder()
        assert isinstance(op, DeleteOp)
        if op.path not in self.nodes:
            return Rejected(0, CommitError.NO_NODE)
        self.remove(op.path)
        return Committed(self.zxid, (-1,))

    def make_asked_folder(self) -> Response:
        if self.folder:
            return Rejected(0, CommitError.NODE_EXISTS)
        if self.refuses_folders:
            return Rejected(0, CommitError.OTHER, "its ACL")
        self.make_folder()
        self.made_again += 1
        return Committed(self.zxid, (0,))

    def remove(self, path: str) -> None:
        self.zxid += 1
        del self.nodes[path]
        for client in self.clients:
            for contender in client.watched.pop(path, ()):
                client.received.append(lambda contender=contender: contender.changed(path))  # type: ignore[misc]

    def expire(self, client: LockClient) -> None:
        """End a session; its process learns of it, and makes a new one."""
        for path, (session, _) in list(self.nodes.items()):
            if session == client.session:
                self.remove(path)
        self.clients[self.clients.index(client)] = self.client()

    def contenders(self) -> list[LockContender]:
        return [contender for client in self.clients for contender in client.contenders]

    def holders(self) -> list[LockContender]:
        return [
            contender
            for contender in self.contenders()
            if contender.fence and not contender.left and not contender._leaving
        ]

    def check(self) -> None:
        """Holders are one, or all shared; exclusive ones come in the order of their fences."""
        holders = self.holders()
        exclusive = [each for each in holders if each._stem.startswith("x")]
        assert not exclusive or len(holders) == 1, "two holders"
        for each in exclusive:
            assert each.fence >= self.last_exclusive, "a fence went back"
            self.holds += each.fence > self.last_exclusive
            self.last_exclusive = each.fence

    def step(self) -> None:
        client = self.random.choice(self.clients)
        steps: list[Callable[[], object]] = [client.perform] * 6 if client.asked else []
        steps += [client.receive] * 6 if client.received else []
        waiting = [each for each in client.contenders if still_contends(each)]
        if len(waiting) < 2 and self.random.random() < self.contention:
            steps.append(lambda: client.contend(self.random.random() < 0.4))
        if waiting:
            steps.append(lambda: client.leave(self.random.choice(waiting)))
        if client.connected:
            steps += [client.cut] if self.random.random() < 0.1 else []
        else:
            steps.append(client.reconnect)
        if self.random.random() < 0.01:
            steps.append(lambda: self.expire(client))
        if self.folder and not self.nodes:
            steps.append(self.delete_folder)
        if steps:
            self.random.choice(steps)()

    def settle(self) -> None:
        """Let everything that is under way arrive."""
        for _ in range(2000):
            busy = False
            for client in self.clients:
                if not client.connected:
                    client.reconnect()
                while client.asked or client.received:
                    busy = True
                    if client.asked:
                        client.perform()
                    else:
                        client.receive()
                    self.check()
            if not busy:
                return
        raise AssertionError("the contenders never come to rest")


def play(seed: int, kind: type[LockContender] = LockContender) -> LockWorld:
    """Play one history."""
    world = LockWorld(seed, kind)
    for _ in range(STEPS):
        world.step()
        world.check()
    # Each contender that still waits gets the lock once those before have left.
    world.settle()
    while waiting := [each for each in world.contenders() if still_contends(each)]:
        holders = world.holders()
        assert holders, "a contender waits for a lock without a holder"
        for client in world.clients:
            for contender in client.contenders:
                if contender in holders:
                    client.leave(contender)
        world.settle()
        assert len(waiting) > sum(map(still_contends, world.contenders()))
    assert not world.nodes, "the node of a contender who has left remains"
    return world


def play_many(kind: type[LockContender] = LockContender) -> list[LockWorld]:
    return [play(seed, kind) for seed in range(600)]


def test_holders_exclude_each_other_and_nobody_starves() -> None:
    worlds = play_many()
    assert sum(world.holds for world in worlds) > 1000
    assert sum(world.deletions for world in worlds) > 300
    assert sum(world.made_again for world in worlds) > 20
    assert any(each.homeless for world in worlds for each in world.contenders())


class CreatesAgain(LockContender):
    """A mutant: after a lost answer it creates another node, without looking for the first."""

    def connected(self) -> None:
        if self.path is None and not self._leaving:
            self._create()
        else:
            super().connected()


class ForgetsOnCancel(LockContender):
    """A mutant: a contender that leaves before the answer to the creation does not wait for it."""

    def connected(self) -> None:
        if self.path is None and self._leaving:
            self._gone()
        else:
            super().connected()


class SharedWaitsForNobody(LockContender):
    """A mutant: a shared contender does not wait for an exclusive one."""

    def _surveyed(self, answer: Response) -> None:
        alone = self._stem.startswith("s") and isinstance(answer, ChildrenRead)
        super()._surveyed(ChildrenRead(()) if alone else answer)


class LooksOnlyOnce(LockContender):
    """A mutant: it takes the end of the contender ahead for its turn."""

    def changed(self, path: str) -> None:
        if path == self._watched:
            self._surveyed(ChildrenRead(()))


class DoesNotWatchAgain(LockContender):
    """A mutant: after a reconnection it waits for a watch that is lost."""

    def connected(self) -> None:
        if self.path is None or self._leaving:
            super().connected()


class NeedsNoFolder(LockContender):
    """A mutant: without a folder it waits for an answer that never comes."""

    def _find_no_folder(self) -> None:
        pass


class ContendsAgain(LockContender):
    """A mutant: without a folder it leaves, but it creates its node after a reconnection."""

    def _find_no_folder(self) -> None:
        super()._find_no_folder()
        self._leaving = False


class TakesNoFolderForNoAnswer(LockContender):
    """A mutant: it does not ask behind its barrier whether the folder is still there."""

    def _barrier_done(self, answer: Response) -> None:
        Registration._barrier_done(self, answer)


@pytest.mark.parametrize("mutant", LockContender.__subclasses__())
def test_a_contender_without_one_of_its_rules_is_found(mutant: type[LockContender]) -> None:
    with pytest.raises(AssertionError):
        play_many(mutant)


@pytest.mark.parametrize("name", ["x-1", "lock", "x-0000000g-0000000001", "x--1", "X-00000000-1"])
def test_nodes_of_other_programs_are_no_contenders(name: str) -> None:
    assert Contender.parse(name) is None


def test_order_of_contenders() -> None:
    def contender(name: str) -> Contender:
        found = Contender.parse(name)
        assert found is not None
        return found

    first = contender("s-00000000-0000000001")
    second = contender("x-00000000-0000000002")
    third = contender("s-ffffffff-0000000003")
    assert not first.waits_for(second)
    assert second.waits_for(first)
    assert third.waits_for(second)
    assert not third.waits_for(first)
    assert issubclass(LockContender, Registration)
