"""The copy of a folder against every order of changes, events, answers and lost connections.

A small coordinator applies random changes at random times. It answers requests in their order, and
passes on the events of a change before every answer from after it, as ZooKeeper does. Two mutants
show that the rules of the copy are needed, and that the test can tell.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from qdo.coordination.protocol.machine import (
    Callback,
    Children,
    ChildrenRead,
    CoordinatorRequest,
    Get,
    NodeMissing,
    NodeRead,
    NoResponse,
    Refused,
    Response,
    Sync,
    Synced,
    Watching,
    WatchTree,
)
from qdo.fleet import folder_view
from qdo.fleet.folder_view import CopiedNode, FolderView

FOLDER = "/documents/plans"
NAMES = ["a", "b", "c"]
STEPS = 120


class ViewWorld:
    """A coordinator with one client, whose machine is the copy."""

    def __init__(self, seed: int, kind: type[FolderView] = FolderView) -> None:
        self.random = random.Random(seed)
        self.view = kind(FOLDER, bytes.decode)
        self.nodes: dict[str, NodeRead] = {}
        self.zxid = 100
        self.asked: deque[tuple[CoordinatorRequest, Callback]] = deque()
        self.performed: deque[Callback] = deque()
        self.received: deque[Callable[[], object]] = deque()
        self.watching = False
        self.newest: dict[str, int] = {}
        self.losses = 0

    # --- the coordinator ---

    def lose(self) -> None:
        """Let a standby take over that lacks the last changes; later numbers are larger."""
        self.nodes = {
            name: node if self.random.random() < 0.5 else NodeRead(b"lost", 0, node.mzxid - 90)
            for name, node in self.nodes.items()
        }
        self.zxid += 1000
        self.losses += 1
        self.cut()

    def change(self) -> None:
        """Write, create or delete a node; its event is under way at once."""
        name = self.random.choice(NAMES)
        node = self.nodes.get(name)
        self.zxid += 1
        if node is not None and self.random.random() < 0.4:
            del self.nodes[name]
        else:
            version = 0 if node is None else node.version + 1
            self.nodes[name] = NodeRead(b"%d" % self.zxid, version, self.zxid)
        if self.watching:
            self.received.append(lambda: self.view.changed(f"{FOLDER}/{name}"))

    def answer(self) -> None:
        """Perform the oldest request; its answer is under way, behind the events so far."""
        request, then = self.asked.popleft()
        reply = self.reply(request)
        self.performed.append(then)
        self.received.append(lambda: self.performed.popleft()(reply))

    def reply(self, request: CoordinatorRequest) -> Response:
        if isinstance(request, WatchTree):
            self.watching = True
            return Watching()
        if isinstance(request, Children):
            return ChildrenRead(tuple(self.nodes))
        if isinstance(request, Sync):
            return Synced(self.zxid)
        assert isinstance(request, Get)
        return self.nodes.get(request.path.rpartition("/")[2], NodeMissing())

    # --- the client ---

    def connect(self) -> None:
        self.view.connected()
        self.send()

    def cut(self) -> None:
        """Lose the connection, with all that is under way, and connect again."""
        self.watching = False
        self.received.clear()
        waiting = [*self.performed, *(then for _, then in (*self.asked, *self.view.outbox))]
        self.performed.clear()
        self.asked.clear()
        self.view.outbox.clear()
        for then in waiting:
            then(NoResponse())
        self.view.suspended()
        self.connect()

    def receive(self) -> None:
        self.received.popleft()()
        if self.random.random() < 0.6:
            self.send()
        self.check_never_back()

    def send(self) -> None:
        """End a step of the loop: the machine sends what follows from its events."""
        self.view.flush()
        while self.view.outbox:
            self.asked.append(self.view.outbox.popleft())

    def check_never_back(self) -> None:
        for name, entry in self.view.entries.items():
            is_back = entry.mzxid < self.newest.get(name, 0)
            assert not is_back or entry.value == "lost", f"{name} went back"
            self.newest[name] = entry.mzxid

    def wait_fresh(self) -> None:
        """Ask for a copy as new as now; when it is reported, the copy must be that new."""
        before, now, losses = dict(self.nodes), self.zxid, self.losses

        def fresh() -> None:
            assert self.view.ltime >= now
            if losses != self.losses:
                return
            for name, node in before.items():
                gone = self.nodes.get(name) is None or self.nodes[name].mzxid > node.mzxid
                held = self.view.entries.get(name)
                assert gone or (held is not None and held.mzxid >= node.mzxid), f"{name} is old"
            for name, held in self.view.entries.items():
                was = before.get(name)
                assert was is not None or held.mzxid > now, f"{name} was deleted before"

        self.view.when_fresh(None, fresh)

    def settle(self) -> None:
        """Let everything that is under way arrive."""
        self.send()
        while self.asked or self.received:
            while self.asked:
                self.answer()
            while self.received:
                self.receive()
            self.send()


def play(seed: int, kind: type[FolderView] = FolderView) -> None:
    """Play one history, and compare the copy with the coordinator at its end."""
    world = ViewWorld(seed, kind)
    world.connect()
    for _ in range(STEPS):
        steps = [world.change, world.wait_fresh]
        steps += [world.answer] * 4 if world.asked else []
        steps += [world.receive] * 4 if world.received else []
        steps += [world.cut] if world.random.random() < 0.1 else []
        steps += [world.lose] if world.random.random() < 0.02 else []
        world.random.choice(steps)()
    world.settle()
    done: list[int] = []
    world.view.when_fresh(None, lambda: done.append(world.view.ltime))
    world.settle()
    assert done == [world.zxid]
    held = {name: entry.value.encode() for name, entry in world.view.entries.items()}
    assert held == {name: node.data for name, node in world.nodes.items()}


def play_many(kind: type[FolderView] = FolderView) -> None:
    for seed in range(2000):
        play(seed, kind)


def test_the_copy_is_never_old_when_it_says_that_it_is_new() -> None:
    play_many()


class ReadsBeforeItWatches(FolderView):
    """A mutant: a change between its reading and its watch is lost."""

    def connected(self) -> None:
        self.ask(Children(self._folder), self._read_first)

    def _read_first(self, answer: Response) -> None:
        self._children(answer)
        if not isinstance(answer, NoResponse):
            self.ask(WatchTree(self._folder), lambda _: None)


class ComparesVersions(FolderView):
    """A mutant: a node that was created again seems older than its predecessor."""

    def _apply(self, name: str, node: NodeRead, place: int) -> None:
        held = self.entries.get(name)
        if held is None or held.version < node.version:
            self.entries.pop(name, None)
            super()._apply(name, node, place)


class NeverGoesBack(FolderView):
    """A mutant: it keeps what the coordinator has lost."""

    def _apply(self, name: str, node: NodeRead, place: int) -> None:
        super()._apply(name, node, 0)


class TrustsTheSyncAlone(FolderView):
    """A mutant: it takes the time of a sync before it has read what changed until then."""

    def _synced(self, answer: Response, waiters: list[Callable[[], object]]) -> None:
        super()._synced(answer, waiters)
        for zxid, waiting in self._synced_at:
            self._places.append((0, zxid, waiting))
        self._synced_at.clear()
        self._advance()


@pytest.mark.parametrize(
    "mutant", [ReadsBeforeItWatches, ComparesVersions, NeverGoesBack, TrustsTheSyncAlone]
)
def test_a_copy_without_one_of_its_rules_is_found(mutant: type[FolderView]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        play_many(mutant)


# --- nodes that are not what they should be ---


def view_of(nodes: dict[str, Response]) -> FolderView:
    """Return a complete copy of some nodes."""
    view = FolderView(FOLDER, bytes.decode)
    view.connected()
    for _ in range(4):
        view.flush()
        while view.outbox:
            request, then = view.outbox.popleft()
            if isinstance(request, WatchTree):
                then(Watching())
            elif isinstance(request, Children):
                then(ChildrenRead(tuple(nodes)))
            elif isinstance(request, Sync):
                then(Synced(9))
            else:
                assert isinstance(request, Get)
                then(nodes[request.path.rpartition("/")[2]])
    assert view.ltime == 9
    return view


def test_an_unreadable_node_hides_no_other() -> None:
    nodes: dict[str, Response] = {
        "good": NodeRead(b"1", 0, 5),
        "bad": NodeRead(b"\xff", 0, 6),
        "protected": Refused("no right"),
    }
    entries = view_of(nodes).entries
    assert entries["good"] == CopiedNode("1", 0, 5, 1)
    assert entries["bad"].fault is not None
    assert entries["protected"].fault == "no right"


def test_a_folder_with_too_many_nodes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_view, "MAX_NODES", 2)
    view = view_of({name: NodeRead(b"1", 0, 5) for name in NAMES})
    assert len(view.entries) == 2
    assert view.fault is not None
    assert "2 nodes" in view.fault


def test_a_missing_folder_is_an_empty_copy() -> None:
    view = FolderView(FOLDER, bytes.decode)
    done: list[int] = []
    view.when_fresh(None, lambda: done.append(view.ltime))
    view.connected()
    view.outbox.popleft()[1](Watching())
    view.outbox.popleft()[1](NodeMissing())
    view.outbox.popleft()[1](Synced(7))
    view.flush()
    assert (done, view.entries) == ([7], {})
