"""Live settings, against every order of proposals, stale reads, answers and deaths.

Processes of several versions of qdo register, check proposals and end; operators propose settings,
wait, put them into force or die. The text of a version is the least level that understands it.
Mutants leave out one rule each, and must be found.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, replace
from typing import Any

import pytest

from qdo.coordination.protocol.machine import NodeRead
from qdo.fleet.settings_machine import (
    MAX_TEXT_BYTES,
    MAX_WHY_CHARACTERS,
    SettingsNode,
    SettingsReport,
    SettingsVersion,
    SettingsWatch,
)
from tests.support.fakes.one_node import OneNode, OneNodeSession

PATH = "/app/settings"
STEPS = 300
LEVELS = 3
MUTANTS = {
    "use without checking": "refused by its own code",
    "list before proposing": "came into force although",
    "count answers by number": "came into force although",
    "write at any version": "came into force although",
    "no read after a reconnection": "does not use",
}


class SettingsWorld(OneNode):
    """The coordinator and its clients.

    :ivar registered: the processes with a session, and what each has published.
    :ivar flips: number of versions that came into force.
    """

    def __init__(self, seed: int, mutant: str = "") -> None:
        super().__init__(seed)
        self.mutant = mutant
        self.registered: dict[int, SettingsReport] = {}
        self.processes: list[SettingsProcess] = []
        self.operators = [SettingsOperator(self), SettingsOperator(self)]
        self.numbers = self.flips = self.refusals = 0
        # Nothing but a proposal puts settings into force: not even in an app without any.
        self.write(SettingsNode().encode())

    def read(self) -> SettingsNode:
        return SettingsNode.parse(self.node.data if self.node else b"")

    def play(self) -> None:
        for _ in range(STEPS):
            choice = self.random.random()
            if choice < 0.05 and len(self.processes) < 4:
                self.processes.append(SettingsProcess(self))
            elif choice < 0.3:
                self.random.choice(self.operators).step()
            elif self.processes:
                self.random.choice(self.processes).step()
            for process in self.processes:
                process.check_use()
        for process in self.processes:
            process.settle()
            process.check_use()
            process.check_newest()


class SettingsOperator:
    """Proposes settings, lists the processes, waits for them, and puts the settings into force."""

    def __init__(self, world: SettingsWorld) -> None:
        self._world = world
        self._proposal: SettingsVersion | None = None
        self._listed: set[int] | None = None

    def step(self) -> None:
        world = self._world
        if self._proposal is None:
            if world.mutant == "list before proposing" and self._listed is None:
                self._listed = set(world.registered)
            elif world.random.random() < 0.2:
                self._propose()
        elif world.random.random() < 0.05:
            self._proposal = self._listed = None  # it dies
        elif self._listed is None:
            self._listed = set(world.registered)
        else:
            self._look()

    def _propose(self) -> None:
        world, node = self._world, self._world.read()
        world.numbers += 1
        text = str(world.random.randint(1, LEVELS))
        self._proposal = SettingsVersion(f"{world.numbers:08x}", node.number + 1, text)
        world.write(replace(node, proposal=self._proposal).encode())

    def _look(self) -> None:
        world, proposal = self._world, self._proposal
        assert proposal is not None
        assert self._listed is not None
        reports = [world.registered[n] for n in self._listed if n in world.registered]
        mine, node = self._name(proposal), world.read()
        is_mine = node.proposal is not None and node.proposal.id == proposal.id
        if any(report.refuses == mine for report in reports):
            world.refusals += 1
            if is_mine:
                world.write(replace(node, proposal=None).encode())
        elif any(report.accepts != mine for report in reports):
            return
        elif is_mine or world.mutant == "write at any version":
            self._check_flip(proposal, node if is_mine else None)
            world.flips += 1
            world.write(SettingsNode(proposal).encode())
        self._proposal = self._listed = None

    def _name(self, proposal: SettingsVersion) -> str:
        by_number = self._world.mutant == "count answers by number"
        return str(proposal.number) if by_number else proposal.id

    def _check_flip(self, proposal: SettingsVersion, node: SettingsNode | None) -> None:
        """Check that no worker refuses that was registered when the proposal was written."""
        world = self._world
        assert node is not None, "a proposal came into force although another replaced it"
        for process in world.processes:
            if process.began < int(proposal.id, 16):
                accepts = process.level >= int(proposal.text)
                assert accepts, "a proposal came into force although a process refuses it"


class SettingsProcess:
    """A process with live settings; `SettingsUser` of its machine.

    :ivar level: the newest settings that it understands.
    :ivar began: number of proposals before it registered.
    """

    def __init__(self, world: SettingsWorld) -> None:
        self.in_use: SettingsVersion | None = None
        self.level = world.random.randint(1, LEVELS)
        self.began = world.numbers
        self._world = world
        self._number = len(world.states) * 1000 + world.random.randrange(1000)
        world.registered[self._number] = SettingsReport()
        self._published: deque[SettingsReport] = deque()
        machine = SettingsWatch(PATH, self)
        if world.mutant == "no read after a reconnection":
            connected, machine.connected = machine.connected, lambda: None  # type: ignore[method-assign]
            connected()
        self._session = OneNodeSession(world, PATH, machine)

    def check(self, version: SettingsVersion) -> str | None:
        if self._world.mutant == "use without checking" and version == self._world.read().current:
            return None
        return None if int(version.text) <= self.level else "too new"

    def use(self, version: SettingsVersion | None) -> None:
        self.in_use = version

    def answer(self, report: SettingsReport) -> None:
        if self._world.mutant == "count answers by number":
            number = str(self._world.read().number + 1)
            accepts = number if report.accepts else ""
            report = replace(report, accepts=accepts, refuses=number if report.refuses else "")
        self._published.append(report)

    def step(self) -> None:
        chance = self._world.random.random()
        if chance < 0.02:
            del self._world.registered[self._number]
            self._world.processes.remove(self)
        elif chance < 0.05:
            self._session.reconnect()
        elif chance < 0.5:
            self._session.answer()
        elif chance < 0.8:
            self._session.notify()
        elif self._published:
            self._world.registered[self._number] = self._published.popleft()

    def settle(self) -> None:
        """Receive everything that is under way."""
        for _ in range(2 * len(self._world.states)):
            self._session.notify()
            self._session.answer()

    def check_use(self) -> None:
        if self.in_use is not None:
            assert int(self.in_use.text) <= self.level, "settings are refused by its own code"

    def check_newest(self) -> None:
        current = self._world.read().current
        if current is not None and int(current.text) <= self.level:
            assert self.in_use == current, "a process does not use the settings in force"


def play_many(mutant: str = "") -> list[SettingsWorld]:
    worlds = [SettingsWorld(seed, mutant) for seed in range(1500)]
    for world in worlds:
        world.play()
    return worlds


@pytest.mark.slow
def test_settings_come_into_force_only_where_accepted() -> None:
    worlds = play_many()
    assert sum(world.flips for world in worlds) > 1000
    assert sum(world.refusals for world in worlds) > 300


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_each_rule_of_live_settings_is_needed(mutant: str) -> None:
    with pytest.raises(AssertionError, match=MUTANTS[mutant]):
        play_many(mutant)


def test_damaged_node_changes_nothing() -> None:
    world = SettingsWorld(0)
    process = SettingsProcess(world)
    process.level = LEVELS
    version = SettingsVersion("0123456789", 1, "2")
    for data, expected in (
        (SettingsNode(version).encode(), version),
        (b"null", version),
        (b'{"current": 7}', version),
        (b"", None),
    ):
        world.write(data)
        process.settle()
        assert process.in_use == expected


def test_refusal_names_the_version_and_the_reason() -> None:
    world = SettingsWorld(0)
    process = SettingsProcess(world)
    process.level = 1
    old, new = (SettingsVersion(f"0123456{n}", n, str(n)) for n in (1, 2))
    world.write(SettingsNode(old, new).encode())
    process.settle()
    assert process._published[-1] == SettingsReport(1, refuses=new.id, why="too new")
    world.write(SettingsNode(new).encode())
    process.settle()
    assert process.in_use == old
    assert isinstance(world.node, NodeRead)


def test_an_accepted_id_with_another_text_is_checked_again() -> None:
    """An operator may edit the node by hand."""
    world = SettingsWorld(0)
    process = SettingsProcess(world)
    process.level = 1
    version = SettingsVersion("0123456789", 1, "1")
    world.write(SettingsNode(version).encode())
    process.settle()
    world.write(SettingsNode(replace(version, text="2")).encode())
    process.settle()
    process.check_use()
    assert process.in_use == version


# --- the node ------------------------------------------------------------------------------


VERSION = SettingsVersion("0123456789abcdef", 3, "attempts = 5\n", "ann@host", 1.5e9, "busy")


def test_node_keeps_its_versions() -> None:
    other = SettingsVersion("fedcba9876543210", 4, "attempts = 6  # größer\n")
    for node in (SettingsNode(), SettingsNode(VERSION), SettingsNode(VERSION, other)):
        assert SettingsNode.parse(node.encode()) == node
    assert SettingsNode.parse(b"") == SettingsNode()
    assert SettingsNode(VERSION).number == 3
    assert SettingsNode().text == ""


def test_the_largest_texts_fit_into_a_request() -> None:
    text = "\U0001f600" * (MAX_TEXT_BYTES // 4)
    full = SettingsVersion("0123456789abcdef", 1, text, "é" * 200, 1.0, "\n" * MAX_WHY_CHARACTERS)
    assert len(SettingsNode(full, full).encode()) < 512 * 1024
    quotes = SettingsVersion("0123456789abcdef", 1, '"' * MAX_TEXT_BYTES)
    assert len(SettingsNode(quotes, quotes).encode()) < 512 * 1024


@pytest.mark.parametrize(
    "change",
    [
        {"id": "x"},
        {"id": None},
        {"number": 0},
        {"number": True},
        {"number": 1.0},
        {"number": 2**70},
        {"text": None},
        {"text": "a" * (MAX_TEXT_BYTES + 1)},
    ],
)
@pytest.mark.parametrize("key", ["current", "proposal"])
def test_one_bad_version_makes_the_node_unreadable(key: str, change: dict[str, Any]) -> None:
    data = json.dumps({"current": asdict(VERSION), key: asdict(VERSION) | change}).encode()
    node = SettingsNode.parse(data)
    assert node.fault
    assert node.current is None
    assert node.proposal is None


@pytest.mark.parametrize("data", [b"null", b"[]", b"\xff", b'{"current": []}', b'{"current": NaN}'])
def test_foreign_nodes_are_unreadable(data: bytes) -> None:
    assert SettingsNode.parse(data).fault


@pytest.mark.parametrize("change", [{"who": 7}, {"why": []}, {"at": "now"}, {"at": -1}])
def test_other_values_of_wrong_types_are_missing(change: dict[str, Any]) -> None:
    version = SettingsVersion.parse(asdict(VERSION) | change)
    assert version.text == VERSION.text
    assert getattr(version, next(iter(change))) in ("", 0.0)


def test_reports_survive_their_node() -> None:
    for report in (
        SettingsReport(),
        SettingsReport(3, accepts="01234567"),
        SettingsReport(3, refuses="01234567", why="too new"),
    ):
        assert SettingsReport.parse(report.dump()) == report


@pytest.mark.parametrize("value", [None, 7, [], {}, {"uses": "3"}, {"uses": True}])
def test_a_process_without_a_report_has_none(value: Any) -> None:
    assert SettingsReport.parse(value) is None


def test_reports_of_wrong_types_accept_nothing() -> None:
    report = SettingsReport.parse({"uses": 1, "accepts": 7, "refuses": None, "why": []})
    assert report == SettingsReport(1)
