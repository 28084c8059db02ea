"""The duty that sends timers: two workers that believe they lead, late statements, and deaths."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from types import SimpleNamespace
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
)
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import CoordinatorUnreachableError, UnsupportedError, UsageError
from qdo.fleet.timer_node import TimerNode
from qdo.ops.timers import timer_items
from qdo.settings.settings import Settings
from qdo.testing.clock import START, Clock
from qdo.testing.memory_broker import MemoryBroker, MemoryStore
from qdo.worker.duties.timers import AHEAD_SECONDS, UNUSED_SECONDS, TimerSender
from tests.simulation.mutants.edits import Edit
from tests.support.fakes.scripted_broker import ScriptedBroker
from tests.support.paths import ROOT

LAYOUT = Layout.of("clock")
FOLDER = LAYOUT.fleet.timers
TENANT = ContextVar[str]("tenant")
DUTY, SENDING = "qdo/worker/duties/timers.py", "qdo/sending/timers.py"
NODE = "qdo/fleet/timer_node.py"
SEND = "ended = self._send(due, nodes, changed, failed)"
RECORD = "if lost := write_timers(client, layout, fence, changed):"
LATER = f"lost = write_timers(client, layout, fence, changed)\n        {SEND}\n        if lost:"
ENDED = "if sent.ended is not None:"
NO_FENCE = Edit(NODE, "[(fence, op) for op in ops]", "[(op,) for op in ops]")
NO_VERSION = Edit(NODE, "SetOp(path, data, node.version)", "SetOp(path, data, -1)")
MUTANTS: dict[str, tuple[str, Sequence[Edit]]] = {
    "recorded before it is sent": (
        "T2: not stored",
        [Edit(DUTY, SEND, "ended = None"), Edit(DUTY, RECORD, LATER)],
    ),
    "recorded without an answer": ("T2: not stored", [Edit(DUTY, ENDED, "if (0,) == ():")]),
    "no key": (
        "T1: stored twice",
        [Edit(SENDING, "_store_once(messages, keys)", "_store(messages)")],
    ),
    "neither version nor fence": ("T2: last decreased", [NO_VERSION, NO_FENCE]),
    "no version": ("T2: last decreased", [NO_VERSION]),
    "no fence": ("", [NO_FENCE]),
    "written although idle": (
        "T4: written",
        [Edit(DUTY, "if new != node:", "if True:")],
    ),
}
"""A rule that is left out, and the invariant that breaks; "" for a second line of defense."""


def seconds_of(text: str) -> int:
    """Return the seconds from the start of the clock to a time as text."""
    return round(datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp() - START)


class Died(BaseException):
    """A worker is killed."""


@cache
def compiled(path: str, edits: tuple[Edit, ...]) -> Any:
    text = (ROOT / path).read_text()
    for edit in edits:
        text = edit.apply(text) if edit.file == path else text
    return compile(text, path, "exec", dont_inherit=True)


class Believer:
    """The leadership of a worker, as it believes: `fence` is None if it knows that it is over."""

    def __init__(self, world: TimerWorld) -> None:
        self._world = world
        self.fence: int | None = None

    def is_leader(self) -> bool:
        return self.fence is not None

    def with_fence(self, act: Callable[[Any, Layout, CheckOp], int]) -> int:
        return 0 if self.fence is None else act(self._world, LAYOUT, CheckOp("", self.fence))

    def read_queues(self, names: Sequence[str]) -> dict[str, QueueNode]:
        return {name: QueueNode(last=self._world.done) for name in names if self._world.done}


class TimerWorld(MemoryBroker):
    """A broker and a coordinator in memory, on a virtual clock, with faults from a seed.

    :ivar done: the recorded position of every queue.
    :ivar full: a queue that takes no messages, "*": the broker does not answer.
    :ivar coordinator_ahead: seconds by which the coordinator's clock is ahead.
    :ivar first: the time at which the first node of each timer was made.
    :ivar reads_and_writes: reads of the coordinator, and transactions.
    """

    def __init__(self, app: qdo.App, edits: Sequence[Edit], seed: int | None) -> None:
        self.app, self.clock = app, Clock()
        super().__init__(MemoryStore(self.clock.position), "clock")
        self.nodes: dict[str, NodeValue] = {}
        self.first: dict[str, str] = {}
        self.violations: list[str] = []
        self.reads_and_writes: Counter[str] = Counter()
        self.done, self.full = 0, ""
        self.coordinator_ahead = 0.0
        self._dice = None if seed is None else random.Random(seed)
        self._late: list[Callable[[], object]] = []
        self._fence = 0
        self._busy: list[int] = []
        self._names: dict[str, Any] = {"__name__": "qdo.fleet.timer_node"}
        for path in (DUTY, SENDING, NODE):  # a later one replaces what an earlier one imports
            exec(compiled(path, tuple(edits)), self._names)
        for name in ("commit_each", "read_nodes", "names_below", "make_folder"):
            self._names[name] = getattr(self, name)
        self.workers = [self._worker(), self._worker()]
        self.elect(0)

    def _worker(self) -> tuple[Any, Any]:
        duty = self._names["TimerSender"](self.app, self, now=lambda: self.clock.now)
        return duty, SimpleNamespace(name="worker", leader=Believer(self))

    def elect(self, index: int) -> None:
        self._fence += 1
        self.workers[index][1].leader.fence = self._fence

    def restart(self) -> None:
        """Let a new worker lead, alone."""
        self.workers[0] = self._worker()
        self.elect(0)

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

    def wait(self, seconds: float) -> None:
        """Let the leader act as its own loop would, until this time has passed."""
        end = self.clock.passed() + seconds
        while (pause := self.step(0)) <= end - self.clock.passed():
            self.clock.move(pause)
        self.clock.move_to(end)

    def play(self, steps: int) -> None:
        """Let everything happen in a random order; then the leader ends all doubt."""
        self._happen(steps)
        for each in self._late:
            each()
        self._dice = None
        self.elect(0)
        self.wait(20.0)

    def _happen(self, times: int) -> None:
        assert self._dice is not None
        for _ in range(times):
            what, index = self._dice.choice("ssssssssmmmmmmedk"), self._dice.randrange(2)
            if what == "s" and index not in self._busy:
                self.step(index)
            elif what == "m":
                self.clock.move(self._dice.choice((1.0, 7.0)))
            elif what == "e":
                self.elect(index)
            elif what == "k":
                self.workers[index][1].leader.fence = None
            elif what == "d" and self._late:
                self._late.pop(self._dice.randrange(len(self._late)))()

    def _meet(self, act: Callable[[], Any]) -> Any:
        """Do something now or later, and answer, lose the answer or kill the caller.

        Other workers act before and after it.
        """
        if self._dice is None:
            return act()
        before, after = (self._dice.choice((0, 0, 2)) for _ in "ab")
        fate = self._dice.choice(("done",) * 6 + ("late", "late", "lost", "died", "dies"))
        is_inner = len(self._busy) > 1
        self._happen(0 if is_inner else before)
        if fate == "late":
            self._late.append(act)
            return None
        answer = act() if fate != "died" else None
        if fate in ("died", "dies"):
            raise Died
        self._happen(0 if is_inner else after)
        return answer if fate == "done" else None

    # --- the coordinator ---

    def names_below(self, client: object, path: str) -> list[str]:
        self.reads_and_writes["read"] += 1
        return [each.rpartition("/")[2] for each in self.nodes]

    def read_nodes(self, client: object, paths: Sequence[str]) -> list[NodeValue]:
        self.reads_and_writes["read"] += len(paths)
        return [self.nodes[path] for path in paths if path in self.nodes]

    def make_folder(self, client: object, path: str) -> None:
        """Do nothing: `nodes` has no folders."""

    def commit_each(self, client: object, transactions: Sequence[Any]) -> list[Any]:
        self.reads_and_writes["write"] += len(transactions)
        return [self._meet(partial(self._commit, *ops)) or NoResponse() for ops in transactions]

    def _commit(self, *ops: Any) -> Committed | Rejected:
        *fences, op = ops
        node = self.nodes.get(op.path)
        version = -1 if node is None else node.version
        is_new = isinstance(op, CreateOp)
        fits = (node is None) == is_new and (is_new or op.version in (ANY_VERSION, version))
        if not fits or any(each.version != self._fence for each in fences):
            return Rejected(0, CommitError.BAD_VERSION)
        if isinstance(op, DeleteOp):
            del self.nodes[op.path]
        else:
            self._check(op.path.rpartition("/")[2], ujson.loads(op.data)["last"], node)
            written = self.clock.now + self.coordinator_ahead
            self.nodes[op.path] = NodeValue(op.path, op.data, version + 1, 0, written)
        return Committed(0, ())

    def _check(self, name: str, last: str, node: NodeValue | None) -> None:
        """Note the violations of a node that is written, and of the messages before it."""
        stored = Counter(body["at"] for body in self.bodies(name))
        self.first.setdefault(name, last)
        before = last if node is None else ujson.loads(node.data)["last"]
        right = datetime.fromtimestamp(self.clock.now + AHEAD_SECONDS, UTC).isoformat()
        if last < before < right:
            self.violations.append(f"T2: last decreased from {before} to {last}")
        if last > before and last not in stored:
            self.violations.append(f"T2: not stored: {name} at {last}")
        twice = [at for at, count in stored.items() if count > 1]
        self.violations += [f"T1: stored twice: {name} at {at}" for at in twice]

    # --- the broker ---

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        if any(each.queue == self.full for each in messages):
            raise UsageError(reason="this queue takes no messages")
        ids = None if self.full == "*" else self._meet(partial(super().send_many, messages))
        if ids is None:
            raise CoordinatorUnreachableError(url="memory", reason="no answer")
        return list(ids)

    def items(self) -> list[dict[str, Any]]:
        """Return what `qdo timers list` shows."""
        nodes = {
            path.rpartition("/")[2]: TimerNode.parse(node) for path, node in self.nodes.items()
        }
        return timer_items(nodes, self.clock.now)

    def bodies(self, queue: str) -> list[dict[str, Any]]:
        return [ujson.loads(body) for _, body, *_ in self.reader(queue, 0).fetch(10_000)]

    def sent(self, queue: str) -> list[tuple[int, int]]:
        """Return seconds since the start, and `missed`, of each message of a timer."""
        return [(seconds_of(each["at"]), each["missed"]) for each in self.bodies(queue)]


@contextmanager
def world_of(app: qdo.App, *edits: Edit, seed: int | None = None) -> Iterator[TimerWorld]:
    world = TimerWorld(app, edits, seed)
    with world.clock.installed(), app.override_broker(world, Settings(app="clock")):
        yield world


def declared(**timers: Any) -> qdo.App:
    """Return an app with timers, by their names: a period, or options."""
    app = qdo.App("clock")
    for name, given in timers.items():
        options = given if isinstance(given, dict) else {"every_seconds": given}
        app.timer(name, queue=name, **options)
    return app


PERIODS = {"ten": 10, "seven": 7}


def played(edits: Sequence[Edit], seed: int) -> list[str]:
    """Return the violations of a history; at its end, all occurrences since the first node."""
    with world_of(declared(**PERIODS), *edits, seed=seed) as world:
        world.play(60)
        for name, period in PERIODS.items():
            found = world.sent(name)
            covered = {at - period * each for at, missed in found for each in range(missed + 1)}
            due = range(period, int(world.clock.passed()), period)
            world.violations += [
                f"T1: not stored: {name} at {at}"
                for at in due
                if at > seconds_of(world.first[name]) and at not in covered
            ]
        writes = world.reads_and_writes["write"]
        world.restart()
        world.step(0)
        if world.reads_and_writes["write"] > writes:
            world.violations.append("T4: written")
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


def test_a_short_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of occurrences are known for longer than a leader may be away."""
    monkeypatch.setattr("qdo.sending.sender.LASTING_DEDUP_SECONDS", 0.5)
    violations = next(found for seed in range(300) if (found := played((), seed)))
    assert any(each.startswith("T1: stored twice") for each in violations)


# --- the duty without faults ------------------------------------------------------------


def test_idle_timers_read_and_write_nothing() -> None:
    with world_of(declared(yearly={"cron": "0 0 1 1 *"})) as world:
        world.wait(1.0)
        before = dict(world.reads_and_writes)
        world.wait(86_400.0)
        assert world.reads_and_writes == before == {"read": 2, "write": 1}
        world.restart()
        world.wait(5.0)
        assert world.reads_and_writes["write"] == 1, "a new leader finds its own schedule"


@pytest.mark.parametrize(
    ("period", "away", "once", "skip"),
    [
        (10, 50, (60, 4), (60, 4)),
        (600, 90_000, (90_600, 149), None),
        (600, 11_999_400, (12_000_000, 1000), (12_000_000, 1000)),
    ],
)
def test_missed_occurrences(period: int, away: int, once: Any, skip: Any) -> None:
    """More than a thousand are not counted; one that is older than a minute may be skipped."""
    options = {"every_seconds": period}
    app = declared(once=options, skip={**options, "missed": "skip"})
    with world_of(app) as world:
        world.wait(period + 1.0)
        world.clock.move(away + (100 if skip is None else 0))
        world.wait(1.0)
        assert world.sent("once") == [(period, 0), once]
        assert world.sent("skip") == [each for each in ((period, 0), skip) if each]


def test_counting_missed_occurrences_does_not_block_the_loop() -> None:
    with world_of(declared(**{f"t{n}": {"cron": "* * * * *"} for n in range(20)})) as world:
        world.wait(1.0)
        world.clock.move(86_400.0)
        ticks: list[int] = []

        def tick() -> None:
            while len(ticks) < 100:
                ticks.append(1)
                gevent.sleep(0)

        ticker = gevent.spawn(tick)
        world.step(0)
        assert len(ticks) >= 20, "other greenlets ran between the timers"
        ticker.kill()
        assert all(world.bodies(f"t{number}") for number in range(20))


def test_a_timer_waits_for_the_messages_of_its_queue() -> None:
    with world_of(declared(poll={"every_seconds": 10, "unless_waiting": True})) as world:
        world.wait(35.0)
        assert world.sent("poll") == [(10, 0)]
        world.done = world.clock.position()
        world.wait(10.0)
        assert world.sent("poll") == [(10, 0), (40, 0)]


def test_a_changed_schedule_begins_at_the_change() -> None:
    """The leader writes it down at once, so that commands see its version."""
    with world_of(declared(t=10)) as world:
        world.wait(11.0)
        world.app.timers.update(declared(t=25).timers)
        world.clock.move(20.0)  # over a time of both schedules
        world.restart()
        world.wait(1.0)
        assert ujson.loads(world.nodes[f"{FOLDER}/t"].data)["when"] == "every 25 s"
        world.wait(28.0)
        assert world.sent("t") == [(10, 0), (50, 0)]


def test_a_timer_that_comes_back_has_missed_nothing() -> None:
    with world_of(declared(t=10, other=7)) as world:
        world.wait(11.0)
        timer = world.app.timers.pop("t")
        world.restart()
        world.wait(30.0)
        world.app.timers["t"] = timer
        world.restart()
        world.wait(10.0)
        assert world.sent("t") == [(10, 0), (50, 0)]


def test_a_time_of_a_clock_that_was_ahead_is_repaired(caplog: pytest.LogCaptureFixture) -> None:
    with world_of(declared(t=10)) as world:
        world.wait(11.0)
        node = world.nodes[f"{FOLDER}/t"]
        ahead = replace(TimerNode.parse(node), last=int(world.clock.now + 2 * AHEAD_SECONDS))
        world.nodes[f"{FOLDER}/t"] = replace(node, data=ahead.encode())
        (item,) = world.items()
        assert not item["is_well"]
        world.restart()
        world.wait(10.0)
        assert world.sent("t") == [(10, 0), (20, 0)]
        assert world.items()[0]["is_well"]
        assert "begins anew" in caplog.text


def test_a_leader_whose_clock_is_behind_repairs_nothing() -> None:
    """The coordinator agrees with the time that it read."""
    with world_of(declared(t=10)) as world:
        world.wait(11.0)
        world.coordinator_ahead = 2 * AHEAD_SECONDS
        node = world.nodes[f"{FOLDER}/t"]
        last = int(world.clock.now + world.coordinator_ahead)
        data = replace(TimerNode.parse(node), last=last).encode()
        world.nodes[f"{FOLDER}/t"] = replace(node, data=data)
        world.restart()
        world.wait(20.0)
        assert world.sent("t") == [(10, 0)]
        assert TimerNode.parse(world.nodes[f"{FOLDER}/t"]).last == last
        assert world.items()[0]["state"].startswith("refused")


def test_nodes_of_removed_timers_stay_for_thirty_days() -> None:
    with world_of(declared(**PERIODS)) as world:
        world.wait(11.0)
        del world.app.timers["ten"]
        for seconds, stays in ((0.0, True), (UNUSED_SECONDS - 1, True), (2.0, False)):
            world.clock.move(seconds)
            world.restart()
            world.step(0)
            node = world.nodes.get(f"{FOLDER}/ten")
            assert (node is not None and ujson.loads(node.data)["when"] == "") == stays
        assert f"{FOLDER}/seven" in world.nodes


@pytest.mark.parametrize("last", ["yesterday", "9999-12-31T23:59:59Z", "1969-12-31T23:59:59Z", 7])
def test_a_damaged_node_stops_its_own_timer_until_it_is_deleted(last: Any) -> None:
    with world_of(declared(**PERIODS)) as world:
        path = f"{FOLDER}/ten"
        data = ujson.dumps({"last": last}).encode()
        world.nodes[path] = NodeValue(path, data, 3, 0, START)
        world.wait(15.0)
        assert (world.sent("ten"), world.sent("seven")) == ([], [(7, 0), (14, 0)])
        assert world.nodes.pop(path).version == 3
        world.wait(60.0)
        assert world.sent("ten")[0] == (70, 0)


@pytest.mark.parametrize(("full", "dedup"), [("ten", False), ("ten", True), ("*", True)])
def test_rejected_occurrences_are_sent_later(full: str, dedup: bool) -> None:
    """A refused timer delays no other, and says so; without the broker all wait."""
    with world_of(declared(**PERIODS)) as world:
        world.capabilities = replace(world.capabilities, dedup=dedup)
        world.restart()
        world.full = full
        world.wait(21.0)
        assert (world.sent("ten"), len(world.sent("seven"))) == ([], 3 if full == "ten" else 0)
        states = {each["timer"]: each["state"] for each in world.items()}
        assert states["ten"].startswith("refused: UsageError") is (full == "ten")
        assert states["seven"] == "ok"
        world.full = ""
        world.wait(5.0)
        assert world.sent("ten") == [(20, 1)]
        assert world.sent("seven")[-1] == (21, 0 if full == "ten" else 2)
        assert [each["is_well"] for each in world.items()] == [True, True]


def test_what_an_app_raises_is_shown_for_its_timers() -> None:
    """Its default headers may need a context; the occurrences wait, and nothing is written."""
    with world_of(declared(**PERIODS)) as world:
        world.app.default_headers = lambda: {"tenant": TENANT.get()}
        world.wait(11.0)
        written = world.reads_and_writes["write"]
        world.wait(20.0)
        states = [each["state"] for each in world.items()]
        assert {each[:20] for each in states} == {"refused: LookupError"}
        assert world.reads_and_writes["write"] == written
        world.clock.move(31.0)
        assert [each["state"] for each in world.items()] == states
        world.app.default_headers = None
        world.wait(1.0)
        assert (world.sent("ten"), world.sent("seven")) == ([(60, 5)], [(56, 7), (63, 0)])


def test_a_broker_that_lacks_something(caplog: pytest.LogCaptureFixture) -> None:
    """A worker does not start if it cannot count, and warns if it does not deduplicate."""
    TimerSender(declared(), MemoryBroker(MemoryStore(), "clock"))
    assert not caplog.records
    broker = ScriptedBroker()
    TimerSender(declared(), broker)
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    broker.capabilities = replace(broker.capabilities, countable=False)
    with pytest.raises(UnsupportedError) as raised:
        TimerSender(declared(poll={"every_seconds": 10, "unless_waiting": True}), broker)
    assert "'poll'" in raised.value.details["what"]
