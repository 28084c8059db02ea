"""The duty that sends timers: two workers that believe they lead, late statements, and deaths."""

from __future__ import annotations

import random
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gevent
import pytest
import ujson

import qdo
from qdo.brokers.base import Outgoing
from qdo.coordination.bulk_reads import NodeValue
from qdo.coordination.protocol.machine import (
    ANY_VERSION,
    CheckOp,
    CommitError,
    Committed,
    CreateOp,
    DeleteOp,
    NoResponse,
    Rejected,
    SetOp,
)
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import CoordinatorUnreachableError, UnsupportedError, UsageError
from qdo.settings.settings import Settings
from qdo.testing.clock import START, Clock
from qdo.testing.memory_broker import MemoryBroker, MemoryStore
from qdo.text import iso_time
from qdo.worker.duties.timers import UNUSED_SECONDS, TimerSender
from tests.simulation.mutants.edits import Edit
from tests.support.fakes.scripted_broker import ScriptedBroker
from tests.support.paths import ROOT

LAYOUT = Layout.of("clock")
DUTY, NODE, SENDING = (
    "qdo/worker/duties/timers.py",
    "qdo/fleet/timer_node.py",
    "qdo/sending/timers.py",
)
NO_FENCE = Edit(
    NODE,
    "[(self._fence, op) for op in ops])\n        return {",
    "[(op,) for op in ops])\n        return {",
)
VERSION = "SetOp(path, node.encode(), "
NO_VERSION = Edit(NODE, f"{VERSION}node.version)", f"{VERSION}-1)")
RECORD = "        self._record(ledger, changed)\n\n    def _waits"
MUTANTS: dict[str, tuple[str, tuple[Edit, ...]]] = {
    "recorded before it is sent": (
        "T1: not stored",
        (
            Edit(DUTY, "(*quiet, *self._sent(due, now))", "(*quiet, *due)"),
            Edit(DUTY, RECORD, RECORD.replace("\n\n", "\n        self._sent(due, now)\n\n")),
        ),
    ),
    "no deduplication key": (
        "T1: stored twice",
        (Edit(SENDING, "if can.dedup and not runs", "if False"),),
    ),
    "the window is over before a repetition": (
        "T1: stored twice",
        (Edit(SENDING, "WINDOW_SECONDS = 604_800.0", "WINDOW_SECONDS = 0.5"),),
    ),
    "neither version nor fence": ("T2: last decreased", (NO_VERSION, NO_FENCE)),
    "no version": ("T2: last decreased", (NO_VERSION,)),
    "no fence": ("", (NO_FENCE,)),
}
"""A rule that is left out, and the invariant that breaks; "" for a second line of defense."""


class Died(BaseException):
    """A worker is killed."""


class Believer:
    """The leadership of a worker, as it believes: `fence` is None if it knows that it is over."""

    def __init__(self, world: TimerWorld) -> None:
        self._world = world
        self.fence: int | None = None

    def is_leader(self) -> bool:
        return self.fence is not None

    def do_chore(self, chore: Callable[[Any, Layout, CheckOp], int]) -> int:
        return 0 if self.fence is None else chore(self._world, LAYOUT, CheckOp("", self.fence))


class TimerWorld:
    """A coordinator and a broker in memory, on a virtual clock, with faults from a seed.

    :ivar stored: times of the messages that the broker has stored, by timer.
    :ivar full: a queue that takes no messages, "*": the broker does not answer.
    :ivar begin: when the first leader made the last node.
    :ivar writes: transactions that were requested.
    """

    def __init__(self, app: qdo.App, edits: Sequence[Edit] = (), seed: int | None = None) -> None:
        self.app = app
        self.clock = Clock()
        self.store = MemoryStore(self.clock.position)
        self.broker = BrokerOfWorld(self)
        self.nodes: dict[str, tuple[bytes, int, float]] = {}
        self.violations: list[str] = []
        self.writes = self.reads = 0
        self.begin = START
        self.full = ""
        self._dice = None if seed is None else random.Random(seed)
        self._late: list[Callable[[], object]] = []
        self._fence = self._names = 0
        self._busy: list[int] = []
        modules = {path: self._module(path, edits) for path in (NODE, SENDING, DUTY)}
        for name in ("commit_each", "read_nodes", "names_below", "make_folder"):
            vars(modules[NODE])[name] = getattr(self, name)
        self._modules = modules
        self.workers = [self._worker(), self._worker()]
        self.elect(0)

    @staticmethod
    def _module(path: str, edits: Sequence[Edit]) -> types.ModuleType:
        text = Path(ROOT / path).read_text()
        for edit in edits:
            text = edit.apply(text) if edit.file == path else text
        module = types.ModuleType(path.removesuffix(".py").replace("/", "."))
        exec(compile(text, path, "exec", dont_inherit=True), vars(module))
        return module

    def _worker(self) -> tuple[Any, Any]:
        member = types.SimpleNamespace(name=f"worker-{self._names:010}", leader=Believer(self))
        self._names += 1
        send = self._modules[SENDING].send_occurrences
        duty = self._modules[DUTY].TimerSender(
            self.app,
            self.broker,
            send=lambda due: send(self.app, due),
            ledger=self._modules[NODE].TimerLedger,
            now=lambda: self.clock.now,
        )
        return duty, member

    def elect(self, index: int) -> None:
        self._fence += 1
        self.workers[index][1].leader.fence = self._fence

    def step(self, index: int) -> float:
        """Let a worker act once; one that is killed is replaced."""
        duty, member = self.workers[index]
        self._busy.append(index)
        try:
            return float(duty.step(member))
        except Died:
            self.workers[index] = self._worker()
            return 0.0
        finally:
            self._busy.pop()

    def play(self, steps: int) -> None:
        """Let everything happen in a random order."""
        dice = self._dice
        assert dice is not None
        for _ in range(steps):
            self._happen(dice)
        for each in self._late:
            each()
        self._dice = None
        self.elect(0)
        while self.step(0) != 1.0:  # the leader ends all doubt once the faults end
            pass

    def _happen(self, dice: random.Random) -> None:
        what, index = dice.choice("ssssmmedk"), dice.randrange(2)
        if what == "s" and index not in self._busy:
            self.step(index)
        elif what == "m":
            self.clock.move(dice.choice((1.0, 7.0)))
        elif what == "e":
            self.elect(index)
        elif what == "k":
            self.workers[index][1].leader.fence = None
        elif what == "d" and self._late:
            self._late.pop(dice.randrange(len(self._late)))()

    def meet(self, act: Callable[[], Any]) -> Any:
        """Do something now or later, and answer, lose the answer or kill the caller.

        Other workers act before and after it.
        """
        dice = self._dice
        if dice is None:
            return act()
        for _ in range(dice.choice((0, 0, 2)) if len(self._busy) < 2 else 0):
            self._happen(dice)
        fate = dice.choice(("done",) * 6 + ("late", "lost", "died before", "died after"))
        if fate == "died before":
            raise Died
        if fate == "late":
            self._late.append(act)
        answer = None if fate == "late" else act()
        if fate == "died after":
            raise Died
        for _ in range(dice.choice((0, 0, 2)) if len(self._busy) < 2 else 0):
            self._happen(dice)
        return answer if fate == "done" else None

    # --- the coordinator ---

    def names_below(self, client: object, path: str) -> list[str]:
        self.reads += 1
        return sorted(each.rpartition("/")[2] for each in self.nodes if each.startswith(path))

    def read_nodes(self, client: object, paths: Sequence[str]) -> list[NodeValue]:
        self.reads += 1
        found = [(path, *self.nodes[path]) for path in paths if path in self.nodes]
        return [NodeValue(path, data, version, 0, at) for path, data, version, at in found]

    def make_folder(self, client: object, path: str) -> None:
        """Do nothing: `nodes` has no folders."""

    def commit_each(self, client: object, transactions: Sequence[Any]) -> list[Any]:
        self.writes += len(transactions)
        answers = [self.meet(lambda ops=ops: self._commit(ops)) for ops in transactions]
        return [NoResponse() if each is None else each for each in answers]

    def _commit(self, ops: Sequence[Any]) -> Committed | Rejected:
        for index, op in enumerate(ops):
            node = self.nodes.get(op.path)
            if isinstance(op, CheckOp):
                is_right = op.version == self._fence
            elif isinstance(op, CreateOp):
                is_right = node is None
            else:
                is_right = node is not None and op.version in (ANY_VERSION, node[1])
            if not is_right:
                return Rejected(index, CommitError.BAD_VERSION)
        op = ops[-1]
        if isinstance(op, DeleteOp):
            del self.nodes[op.path]
        else:
            self._check(op)
            version = self.nodes[op.path][1] + 1 if isinstance(op, SetOp) else 0
            self.nodes[op.path] = op.data, version, self.clock.now
        return Committed(0, ())

    def _check(self, op: SetOp | CreateOp) -> None:
        name, last = op.path.rpartition("/")[2], ujson.loads(op.data)["last"]
        if isinstance(op, CreateOp):
            self.begin = self.clock.now
        else:
            before = ujson.loads(self.nodes[op.path][0])["last"]
            if last < before:
                self.violations.append(f"T2: last decreased from {before} to {last}")
            if last > before and last not in self.stored[name]:
                self.violations.append(f"T1: not stored: {name} at {last}")
        for at, count in self.stored[name].items():
            if count > 1:
                self.violations.append(f"T1: stored twice: {name} at {at}")

    # --- the broker ---

    @property
    def stored(self) -> defaultdict[str, Counter[str]]:
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for queue in self.store.contents["clock"].queues.values():
            for row in queue.rows:
                body = ujson.loads(row.body)
                found[body["timer"]][body["at"]] += 1
        return found


class BrokerOfWorld(MemoryBroker):
    """Sends as the world wants."""

    def __init__(self, world: TimerWorld) -> None:
        super().__init__(world.store, "clock")
        self._world = world

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        if self._world.full == "*":
            raise CoordinatorUnreachableError(url="memory", reason="it is down")
        if any(each.queue == self._world.full for each in messages):
            raise UsageError(reason="this queue takes no messages")
        ids: list[str] | None = self._world.meet(lambda: MemoryBroker.send_many(self, messages))
        if ids is None:
            raise CoordinatorUnreachableError(url="memory", reason="no answer")
        return ids


@contextmanager
def world_of(app: qdo.App, *edits: Edit, seed: int | None = None) -> Iterator[TimerWorld]:
    world = TimerWorld(app, edits, seed)
    with world.clock.installed(), app.override_broker(world.broker, Settings(app="clock")):
        yield world


def declared() -> qdo.App:
    app = qdo.App("clock")
    app.timer("each", every_seconds=10, queue="each", missed="all")
    app.timer("once", every_seconds=7, queue="once")
    return app


def played(edits: Sequence[Edit], seed: int) -> list[str]:
    """Return the violations of a history; at its end, all occurrences since the first node."""
    with world_of(declared(), *edits, seed=seed) as world:
        world.play(60)
        stored, begin = world.stored["each"], int(world.begin - START)
        due = [at for at in range(10, int(world.clock.passed()) + 1, 10) if at > begin]
        missing = [at for at in due if iso_time(START + at) not in stored]
        world.violations += [f"T1: not stored: each at {at}" for at in missing]
        return world.violations


def test_each_occurrence_is_stored_once_whatever_fails(pytestconfig: pytest.Config) -> None:
    histories = pytestconfig.getoption("histories") or 300
    assert [found for seed in range(histories) if (found := played((), seed))] == []


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_rule_is_found(name: str) -> None:
    breaks, edits = MUTANTS[name]
    for seed in range(300):
        if found := played(edits, seed):
            assert breaks, found
            assert any(each.startswith(breaks) for each in found), found
            return
    assert not breaks


# --- the duty without faults ------------------------------------------------------------


def sent(world: TimerWorld, name: str) -> list[tuple[int, int]]:
    """Return seconds since the start, and `missed`, of each message of a timer."""
    rows = world.store.contents["clock"].queue(name).rows
    bodies = [ujson.loads(row.body) for row in rows]
    begin = datetime.fromtimestamp(START, timezone.utc)
    times = [datetime.strptime(each["at"], "%Y-%m-%dT%H:%M:%S%z") - begin for each in bodies]
    return [
        (int(at.total_seconds()), each["missed"]) for at, each in zip(times, bodies, strict=True)
    ]


def wait(world: TimerWorld, seconds: float) -> None:
    """Let the leader act as its own loop would, until this time has passed."""
    end = world.clock.passed() + seconds
    while (pause := world.step(0)) <= end - world.clock.passed():
        world.clock.move(pause)
    world.clock.move_to(end)


def test_idle_timers_read_and_write_nothing() -> None:
    app = qdo.App("clock")
    app.timer("yearly", "0 0 1 1 *", queue="yearly")
    with world_of(app) as world:
        wait(world, 1.0)
        before = world.writes, world.reads
        wait(world, 86_400.0)
        assert (world.writes, world.reads) == before == (1, 2)
        world.elect(0)
        wait(world, 5.0)
        assert world.writes == 1, "a new leader finds its own schedule"


@pytest.mark.parametrize(
    ("missed", "found"),
    [
        ("once", [(10, 0), (60, 4)]),
        ("all", [(each, 0) for each in range(10, 70, 10)]),
        ("skip", [(10, 0), (60, 4)]),
    ],
)
def test_occurrences_missed_for_a_while(missed: Any, found: list[tuple[int, int]]) -> None:
    app = qdo.App("clock")
    app.timer("t", every_seconds=10, queue="t", missed=missed)
    with world_of(app) as world:
        wait(world, 11.0)
        world.clock.move(50.0)
        wait(world, 0.0)
        wait(world, 1.0)
        assert sent(world, "t") == found


def test_occurrences_missed_for_long() -> None:
    """More than a hundred are sent as one, more than a thousand are not counted."""
    app = qdo.App("clock")
    for missed in ("once", "all", "skip"):
        app.timer(missed, every_seconds=600, queue=missed, missed=missed)
    with world_of(app) as world:
        wait(world, 1.0)
        world.clock.move_to(600 * 150 + 120.0)
        wait(world, 1.0)
        assert sent(world, "once") == sent(world, "all") == [(90_000, 149)]
        assert sent(world, "skip") == []
        world.clock.move_to(600 * 20_000 + 1.0)
        wait(world, 0.0)
        assert sent(world, "all")[-1] == sent(world, "skip")[-1] == (12_000_000, 1000)


def test_counting_missed_occurrences_does_not_block_the_loop() -> None:
    app = qdo.App("clock")
    for number in range(20):
        app.timer(f"t{number}", "* * * * *", queue="t")
    with world_of(app) as world:
        wait(world, 1.0)
        world.clock.move(86_400.0)
        ticks: list[int] = []
        ticker = gevent.spawn(lambda: [(ticks.append(n), gevent.sleep(0)) for n in range(100)])
        world.step(0)
        assert len(ticks) >= 20, "other greenlets ran between the timers"
        ticker.kill()
        assert len(sent(world, "t")) == 20


def test_a_timer_waits_for_the_messages_of_its_queue() -> None:
    app = qdo.App("clock")
    app.timer("poll", every_seconds=10, queue="poll", unless_waiting=True)
    with world_of(app) as world:
        wait(world, 35.0)
        assert sent(world, "poll") == [(10, 0)]
        [row] = world.store.contents["clock"].queue("poll").rows
        done = QueueNode(last=row.position).encode()
        world.nodes[LAYOUT.queue("poll")] = done, 0, 0.0
        wait(world, 10.0)
        assert sent(world, "poll") == [(10, 0), (40, 0)]


def test_a_changed_schedule_continues_from_the_last() -> None:
    """The leader writes it down at once, so that commands see its version."""
    app = qdo.App("clock")
    app.timer("t", every_seconds=10, queue="t")
    with world_of(app) as world:
        wait(world, 11.0)
        app.timers.clear()
        app.timer("t", every_seconds=25, queue="t")
        world.elect(0)
        wait(world, 1.0)
        assert ujson.loads(world.nodes[f"{LAYOUT.fleet.timers}/t"][0])["when"] == "every 25 s"
        wait(world, 39.0)
        assert sent(world, "t") == [(10, 0), (25, 0), (50, 0)]


def test_nodes_of_removed_timers_stay_for_thirty_days() -> None:
    app = declared()
    with world_of(app) as world:
        wait(world, 11.0)
        del app.timers["each"]
        world.elect(0)
        wait(world, 1.0)
        path = f"{LAYOUT.fleet.timers}/each"
        assert ujson.loads(world.nodes[path][0])["when"] == ""
        world.clock.move(UNUSED_SECONDS - 1)
        world.elect(0)
        world.step(0)
        assert path in world.nodes
        world.clock.move(2)
        world.elect(0)
        world.step(0)
        assert path not in world.nodes
        assert f"{LAYOUT.fleet.timers}/once" in world.nodes


@pytest.mark.parametrize("last", ["yesterday", "9999-12-31T23:59:59Z", "1969-12-31T23:59:59Z", 7])
def test_a_damaged_node_stops_its_own_timer_until_it_is_deleted(last: Any) -> None:
    with world_of(declared()) as world:
        path = f"{LAYOUT.fleet.timers}/each"
        world.nodes[path] = ujson.dumps({"last": last}).encode(), 3, START
        wait(world, 15.0)
        assert (sent(world, "each"), sent(world, "once")) == ([], [(7, 0), (14, 0)])
        assert world.nodes[path][1] == 3
        del world.nodes[path]
        wait(world, 60.0)
        assert sent(world, "each")[0] == (70, 0)


def test_a_queue_that_rejects_messages_delays_no_other_timer() -> None:
    """At brokers like SQS, where queues have rights of their own."""
    with world_of(declared()) as world:
        world.broker.capabilities = replace(world.broker.capabilities, dedup=False)
        world.full = "each"
        wait(world, 21.0)
        assert (sent(world, "each"), len(sent(world, "once"))) == ([], 3)
        world.full = ""
        wait(world, 5.0)
        assert sent(world, "each") == [(10, 0), (20, 0)]


def test_an_unreachable_broker_loses_no_occurrence() -> None:
    with world_of(declared()) as world:
        world.full = "*"
        wait(world, 21.0)
        assert not world.stored
        world.full = ""
        wait(world, 5.0)
        assert sent(world, "each") == [(10, 0), (20, 0)]
        assert sent(world, "once") == [(21, 2)]


def test_a_broker_that_cannot_count() -> None:
    app = qdo.App("clock")
    app.timer("poll", every_seconds=10, queue="poll", unless_waiting=True)
    broker = ScriptedBroker()
    broker.capabilities = replace(broker.capabilities, countable=False)
    with pytest.raises(UnsupportedError) as raised:
        TimerSender(app, broker)
    assert "'poll'" in raised.value.details["what"]


def test_a_broker_that_does_not_deduplicate(caplog: pytest.LogCaptureFixture) -> None:
    """Its worker warns at its start."""
    TimerSender(declared(), MemoryBroker(MemoryStore(), "clock"))
    assert not caplog.records
    TimerSender(declared(), ScriptedBroker())
    assert [each.levelname for each in caplog.records] == ["WARNING"]
