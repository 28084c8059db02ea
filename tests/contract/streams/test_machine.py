"""Random histories of a stream, and the same with each rule left out.

V1  Messages of a key start for the first time in the order in which they were stored. None starts
    or repeats in a shard once a descendant has started one of that key.
V2  The shards that are not sealed have each key once.
V3  A sealed shard gets no message.
V4  A child starts when all its parents have recorded their ends.
V5  Every step may be repeated and interrupted: in the end, all messages are processed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from qdo.brokers import streams
from qdo.brokers.base import Outgoing, SendOptions
from qdo.brokers.embedded.writer import Transaction
from qdo.brokers.streams import StreamShard, find_shard, first_shards, key_hash
from qdo.coordination.znodes.queue_node import NEW, QueueNode
from qdo.positions import position_of_time
from qdo.testing.memory_broker import MemoryBroker, MemoryStore
from qdo.worker.duties.streams import ShardOpener
from tests.simulation.mutants.edits import mutated

KEYS = [next(f"k{n}" for n in range(999) if key_hash(f"k{n}") >= low) for low in ("", "30", "a0")]
EPOCH = 1_700_000_000.0


class BrokenRuleError(AssertionError):
    """An invariant does not hold."""


@dataclass
class StreamOwner:
    """The progress of a queue: recorded, and in the memory of its owner."""

    last: int = 0
    done: int = 0


class OldAnswers:
    """A reader of nodes, and a store, whose answers may be as old as the last but one."""

    def __init__(self, world: StreamWorld) -> None:
        self._world = world
        self._nodes: dict[str, int] = {}
        self._shards: list[StreamShard] = []

    def look(self) -> None:
        self._nodes = {name: self._world.known(name) for name in self._world.owners}
        self._shards = self._world.store.resharded()

    def read_queues(self, names: Sequence[str]) -> Mapping[str, QueueNode]:
        known = {name: last for name, last in self._nodes.items() if name in names}
        return {name: replace(NEW, last=last) for name, last in known.items()}

    def resharded(self) -> list[StreamShard]:
        return self._shards

    def open(self, queues: Any) -> None:
        self._world.store.open(queues)


class StreamWorld:
    """One history; raises BrokenRuleError.

    :param by_memory: whether nodes tell what owners have done, not what they have recorded.
    """

    def __init__(self, seed: int, by_memory: bool = False) -> None:
        self._dice = random.Random(seed)
        self._by_memory = by_memory
        self._now = EPOCH
        self._memory = MemoryStore(lambda: position_of_time(self._now))
        self.broker = MemoryBroker(self._memory, "app")
        self._stop = self.broker.listen(lambda names: None)
        self.store = self.broker.streams
        self.store.add(first_shards("s", 1 << self._dice.randrange(2)))
        self.owners: dict[str, StreamOwner] = {}
        self._maps = [self._open_shards(), self._open_shards()]
        self._answers = OldAnswers(self)
        self._started: dict[str, list[int]] = {key: [] for key in KEYS}
        """By key, the positions of first starts."""
        self._heirs: dict[str, set[str]] = {key: set() for key in KEYS}
        """By key, the shards that have started one."""
        self._sent = self._crashes = 0

    def known(self, name: str) -> int:
        return self.owners[name].done if self._by_memory else self.owners[name].last

    def play(self, steps: int) -> None:
        choices: list[Callable[[], None]] = [self._send, self._send, self._delay, self._refresh]
        choices += [self._pass_time, self._claim, self._start, self._start, self._record]
        choices += [self._crash, self._reshard, self._answers.look, self._open, self._open]
        for _ in range(steps):
            self._dice.choice(choices)()
            self._check()
        self._finish()

    def _open_shards(self) -> list[StreamShard]:
        return [each for each in self.store.shards("s") if each.end is None]

    def _message(self) -> Outgoing:
        key, known = self._dice.choice(KEYS), self._dice.choice(self._maps)
        queue = next(each.queue for each in known if each.has(key_hash(key)))
        self._sent += 1
        return Outgoing(queue, b"%d" % self._sent, key)

    def _send(self) -> None:
        message = self._message()
        self.broker.send(message)

    def _delay(self) -> None:
        message, due = self._message(), self._now + self._dice.randrange(1, 4)
        terms = SendOptions(due)
        self.broker.send(Outgoing(message.queue, message.body, message.key, None, terms))

    def _refresh(self) -> None:
        self._maps[self._dice.randrange(2)] = self._open_shards()

    def _pass_time(self) -> None:
        self._now += 1
        self._memory.tick()

    def _claim(self) -> None:
        for name in self.broker.catalog.names():
            self.owners.setdefault(name, StreamOwner())

    def _start(self) -> None:
        if not self.owners:
            return
        name = self._dice.choice([*self.owners])
        owner = self.owners[name]
        for position, _, key, _ in self.broker.reader(name, owner.done).fetch(1):
            assert key is not None
            self._check_start(name, key, position)
            owner.done = position

    def _check_start(self, name: str, key: str, position: int) -> None:
        shards = self.store.shards("s")
        shard, started = find_shard(shards, name), self._started[key]
        for parent in shard.parents:
            if self.owners.get(parent, StreamOwner()).last < (find_shard(shards, parent).end or 0):
                raise BrokenRuleError(f"V4: {name} starts before the end of {parent}")
        if {*_descendants(shards, name)} & self._heirs[key]:
            raise BrokenRuleError(f"V1: {name} starts {position} after a descendant")
        if position not in started:
            every = sorted(
                row[0]
                for each in shards
                for row in self.broker.reader(each.queue, 0).fetch(1000)
                if row[2] == key
            )
            if every[len(started)] != position:
                raise BrokenRuleError(f"V1: {name} starts {position} of {key} before others")
            started.append(position)
        self._heirs[key].add(name)

    def _record(self) -> None:
        for owner in self.owners.values():
            if self._dice.random() < 0.5:
                owner.last = owner.done

    def _crash(self) -> None:
        if self._crashes < 3:
            self._crashes += 1
            for owner in self.owners.values():
                owner.done = owner.last

    def _reshard(self) -> None:
        shards = self.store.shards("s")
        known = [each for each in shards if each.end is None]
        if len(shards) > 10:
            return
        if len(known) > 1 and self._dice.random() < 0.6:
            place = self._dice.randrange(len(known) - 1)
            pair = sorted(known, key=lambda each: each.low)[place : place + 2]
            self.store.add(streams.merge(shards, *(each.queue for each in pair)))
        else:
            self.store.add(streams.split(shards, self._dice.choice(known).queue))

    def _open(self) -> None:
        store: Any = self._answers
        ShardOpener(store).step(self._answers.read_queues)

    def _check(self) -> None:
        shards = self.store.shards("s")
        for key in KEYS:
            if sum(each.end is None and each.has(key_hash(key)) for each in shards) != 1:
                raise BrokenRuleError(f"V2: {key} has not one shard")
        for each in shards:
            if each.end is not None and self.broker.reader(each.queue, each.end).fetch(1):
                raise BrokenRuleError(f"V3: {each.queue} is sealed and got a message")

    def _finish(self) -> None:
        """V5: without further faults everything is processed."""
        self._now += 10
        self._memory.tick()
        states = [self._state()]
        while len(states) < 2 or states[-1] != states[-2]:
            self._claim()
            for name, owner in self.owners.items():
                for position, _, key, _ in self.broker.reader(name, owner.done).fetch(1):
                    self._check_start(name, key or "", position)
                    owner.done = position
                owner.last = owner.done
            self._answers.look()
            self._open()
            states.append(self._state())
        if sum(map(len, self._started.values())) != self._sent:
            raise BrokenRuleError("V5: not every message was processed")

    def _state(self) -> object:
        return self.store.shards(), {name: owner.done for name, owner in self.owners.items()}


def _descendants(shards: Sequence[StreamShard], name: str) -> list[str]:
    children = [each.queue for each in shards if name in each.parents]
    return [*children, *(each for child in children for each in _descendants(shards, child))]


def play_all(count: int, by_memory: bool = False) -> None:
    for seed in range(count):
        StreamWorld(seed, by_memory).play(80)


def test_random_histories_keep_every_rule(histories: int | None) -> None:
    play_all(histories or 600)


STREAMS = "qdo/brokers/streams.py"
STORE = "qdo/brokers/embedded/streams.py"
WRITER = "qdo/brokers/embedded/writer.py"
DELAYED = "qdo/brokers/embedded/delayed.py"
ROUTED = "message = each.outgoing()"
UNROUTED = f"{ROUTED}; transaction.tail_for = lambda each: transaction.tail(each.queue)"
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "children are visible at once": ("V4", STREAMS, "return not any(", "return True or any("),
    "one done parent is enough": ("V1", STREAMS, "return not any(", "return not all("),
    "a hidden parent counts as done": ("V1", STREAMS, "each.hidden or each.end", "each.end"),
    "senders go by their map": ("V3", WRITER, "known.queue_of(message.key)", "name"),
    "the end is not that of the seal": ("V3", STORE, "_END, (tail.head, ", "_END, (0, "),
    "delayed messages stay": ("V1", DELAYED, ROUTED, UNROUTED),
    "parents are not sealed": ("V2", STORE, "root is None or not", "False and not"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_rule_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, file, old, new = MUTANTS[name]
    module: Any = mutated(file, (old, new))
    if file == STREAMS:
        monkeypatch.setattr("qdo.worker.duties.streams.are_done", module.are_done)
    elif file == WRITER:
        monkeypatch.setattr(Transaction, "tail_for", module.Transaction.tail_for)
    elif file == STORE:
        monkeypatch.setattr("qdo.brokers.embedded.streams._add", module._add)
    else:
        monkeypatch.setattr("qdo.testing.memory_broker.move_due", module.move_due)
    with pytest.raises(BrokenRuleError, match=rf"^{expected}:"):
        play_all(600)


def test_done_is_not_enough() -> None:
    """What an owner has done and not recorded may run again, after its child has begun."""
    with pytest.raises(BrokenRuleError, match=r"^V4:"):
        play_all(600, by_memory=True)


def test_names_are_used_once() -> None:
    """A queue's node stays: a second queue of the name would begin at its end."""
    edit = ("        while name in used:", "        while False:")
    module: Any = mutated(STREAMS, edit)
    whole = first_shards("s", 1)
    shards = [*whole, *streams.split(whole, "s.-")]
    assert [each.queue for each in module.merge(shards, "s.-80", "s.80-")] == ["s.-"]
    assert [each.queue for each in streams.merge(shards, "s.-80", "s.80-")] == ["s.-.2"]
