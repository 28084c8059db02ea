"""Coordinators in databases answer as ZooKeeper does: the same random requests put to both."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.exceptions import KazooException
from kazoo.protocol.serialization import Create
from kazoo.protocol.states import Callback, EventType, ZnodeStat
from kazoo.security import OPEN_ACL_UNSAFE, make_acl, make_digest_acl

from qdo.coordination.client import Client, connect
from tests.support.zookeeper import Ensemble

STEPS = 400
NAMES = ("a", "b", "c")
BAD_PATHS = ("/", "/x//", "/a/\x01", "/a/\U0001f600", "/a/\ue000", "/a/b\uffff", "/\x85")
ACLS = (
    None,
    OPEN_ACL_UNSAFE,
    [make_digest_acl("user", "secret", all=True)],
    [make_acl("world", "anyone", read=True, create=True)],
    [make_acl("world", "anyone", read=True), make_digest_acl("user", "secret", write=True)],
    [make_acl("auth", "", all=True)],
    [make_acl("digest", "no-colon", all=True)],
    [make_acl("world", "someone", all=True)],
    [make_acl("nonsense", "x", all=True)],
    [],
)


class CoordinatorPair:
    """One of the two coordinators, with two sessions on it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clients: dict[str, Client] = {}
        self.events: list[tuple[str, str, str]] = []
        self.zxids: list[tuple[int, ...]] = []
        for name in ("one", "two"):
            self.open(name)

    def open(self, name: str) -> None:
        client = connect(self.url, session_timeout_seconds=8)
        client.open(10)
        self.clients[name] = client

    def reopen(self, name: str) -> None:
        self.close(name)
        self.open(name)

    def close(self, name: str) -> None:
        self.clients[name].stop()
        self.clients[name].close()

    def watch(self, name: str) -> Callable[[Any], None]:
        """Return a watcher that records events of nodes.

        kazoo also calls it, with NONE, when a connection drops, as one may on a busy machine:
        that is not an answer of the coordinator.
        """

        def note(event: Any) -> None:
            if event.type != EventType.NONE:
                self.events.append((name, event.type, event.path))

        return note

    def settle(self) -> None:
        """Wait until all events of changes made so far have been delivered."""
        for client in self.clients.values():
            client.exists("/")
            done = threading.Event()
            client.handler.dispatch_callback(Callback("watch", done.set, ()))
            assert done.wait(10)

    def plain(self, value: Any) -> Any:
        """Return an answer without its varying parts: zxids (kept aside), times, session ids."""
        if isinstance(value, ZnodeStat):
            self.zxids.append((value.czxid, value.mzxid, value.pzxid))
            owners = {0: "", **{c.client_id[0]: name for name, c in self.clients.items()}}
            return (
                value.version,
                value.cversion,
                value.aversion,
                owners[value.ephemeralOwner],
                value.dataLength,
                value.numChildren,
                value.mtime >= value.ctime,
            )
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return [self.plain(each) for each in value]
        if isinstance(value, Exception):
            return type(value).__name__
        return value

    def do(self, step: Callable[[CoordinatorPair], Any]) -> Any:
        try:
            answer = step(self)
        except KazooException as error:
            answer = error
        if isinstance(answer, list) and all(isinstance(each, str) for each in answer):
            answer = sorted(answer)
        return self.plain(answer)


def any_path(rng: random.Random, depth: int = 3) -> str:
    if rng.random() < 0.04:
        return rng.choice(BAD_PATHS)
    return "".join(f"/{rng.choice(NAMES)}" for _ in range(rng.randint(1, depth)))


def any_version(rng: random.Random) -> int:
    return rng.choice((-1, -1, -1, 0, 1, 2))


def any_step(rng: random.Random) -> tuple[str, Callable[[CoordinatorPair], Any]]:
    """Return a description and a step that does the same on either world."""
    who = rng.choice(("one", "two"))
    path, version, data = any_path(rng), any_version(rng), rng.randbytes(rng.randint(0, 5))
    if rng.random() < 0.05:
        data = None  # type: ignore[assignment]
    ephemeral, sequence = rng.random() < 0.3, rng.random() < 0.3
    watched = rng.random() < 0.5
    acl = rng.choice(ACLS) if rng.random() < 0.2 else None

    def client(world: CoordinatorPair) -> Client:
        return world.clients[who]

    def watch(world: CoordinatorPair) -> Any:
        return world.watch(who) if watched else None

    def create(world: CoordinatorPair) -> Any:
        return client(world).create(
            path, data, acl=acl, ephemeral=ephemeral, sequence=sequence, include_data=watched
        )

    def raw_create(world: CoordinatorPair) -> Any:
        answer = client(world).handler.async_result()
        full = f"{client(world).chroot}{path}"
        client(world)._call(Create(full, data, acl or [], 0), answer)
        return answer.get()

    operations = [
        (rng.choice(("create", "set", "delete", "check")), any_path(rng), any_version(rng))
        for _ in range(rng.randint(0, 4))
    ]

    def multi(world: CoordinatorPair) -> Any:
        transaction = client(world).transaction()
        for kind, where, expected in operations:
            if kind == "create":
                transaction.create(where, b"multi", ephemeral=ephemeral, sequence=sequence)
            elif kind == "set":
                transaction.set_data(where, b"changed", expected)
            elif kind == "delete":
                transaction.delete(where, expected)
            else:
                transaction.check(where, expected)
        return transaction.commit()

    steps: list[tuple[int, str, Callable[[CoordinatorPair], Any]]] = [
        (8, f"create {path!r} {ephemeral=} {sequence=} {acl=}", create),
        (1, f"raw create {path!r} {acl=}", raw_create),
        (5, f"set {path!r} {version}", lambda w: client(w).set(path, data, version)),
        (4, f"delete {path!r} {version}", lambda w: client(w).delete(path, version)),
        (4, f"get {path!r}", lambda w: client(w).get(path, watch(w))),
        (4, f"exists {path!r}", lambda w: client(w).exists(path, watch(w))),
        (4, f"children {path!r}", lambda w: client(w).get_children(path, watch(w))),
        (2, f"children2 {path!r}", lambda w: client(w).get_children(path, include_data=True)[1]),
        (1, f"get_acls {path!r}", lambda w: client(w).get_acls(path)),
        (1, f"set_acls {path!r}", lambda w: client(w).set_acls(path, acl or [], version)),
        (6, f"multi {operations} {ephemeral=} {sequence=}", multi),
        (1, f"reopen {who}", lambda w: w.reopen(who)),
        (1, f"auth {who}", lambda w: client(w).add_auth("digest", "user:secret")),
        (1, f"sync {path!r}", lambda w: client(w).sync(path)),
    ]
    weights = [weight for weight, _, _ in steps]
    _, words, step = rng.choices(steps, weights)[0]
    return f"{who}: {words}", step


def check_zxids(left: list[tuple[int, ...]], right: list[tuple[int, ...]]) -> None:
    """Assert that zxids correspond: equal where equal, in the same order."""
    pairs = {
        (ours, theirs)
        for mine, yours in zip(left, right, strict=True)
        for ours, theirs in zip(mine, yours, strict=True)
    }
    ordered = sorted(pairs)
    assert len({ours for ours, _ in pairs}) == len(pairs)
    assert [theirs for _, theirs in ordered] == sorted({theirs for _, theirs in pairs})


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["embedded_url", "database_url"])
def test_same_answers(
    kind: str, seed: int, zookeeper_server: Ensemble, request: pytest.FixtureRequest
) -> None:
    """Data, versions, children, errors, stats and watch events agree, step by step."""
    rng = random.Random(seed)
    chroot = f"/differential-{kind}-{seed}-{rng.getrandbits(40):x}"
    ours = CoordinatorPair(f"{request.getfixturevalue(kind)}?chroot={chroot}")
    theirs = CoordinatorPair(zookeeper_server.url(chroot))
    history: list[str] = []
    try:
        for _ in range(STEPS):
            words, step = any_step(rng)
            history.append(words)
            assert ours.do(step) == theirs.do(step), "\n".join(history[-12:])
            ours.settle()
            theirs.settle()
            assert sorted(ours.events) == sorted(theirs.events), "\n".join(history[-12:])
            ours.events.clear()
            theirs.events.clear()
        check_zxids(ours.zxids, theirs.zxids)
    finally:
        for world in (ours, theirs):
            for name in world.clients:
                world.close(name)
