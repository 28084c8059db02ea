"""The machine that does actions, against lost connections, a second actor and forged nodes.

Whatever is lost, an action runs at most once, and ends with one entry. `tests.simulation.mutants`
leaves out one rule at a time.
"""

from __future__ import annotations

import json

import pytest

from qdo.fleet.action_machine import (
    AHEAD_SECONDS,
    AT_ONCE,
    MAX_OUTPUT_BYTES,
    PARENT,
    RUNNING,
    WORKER,
    Action,
    Result,
)
from qdo.fleet.audit_entries import entry_name
from tests.support.fakes.actions_world import FLEET, NAME, NOW, ActionsWorld


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[" * 5000,
        b"\xff",
        b'{"action": "mark", "expires": NaN}',
        b'{"action": "mark", "expires": 1e300}',
        b'{"action": "mark", "expires": 9223372036854775808}',
        b'{"action": "mark", "expires": true}',
        b'{"action": ["mark"], "expires": 1790000060}',
        b'{"action": "mark", "expires": 1790000060, "args": {"id": {}}}',
        b'{"action": "mark", "expires": 1790000060, "by": 1}',
        b'{"action": "mark", "expires": 1790000060, "state": "begun"}',
        b'{"action": "mark", "expires": 1790000060, "actor": "me"}',
        b'{"action": "mark", "expires": 1790000060, "actor": []}',
        json.dumps({"action": "x" * 51, "expires": NOW + 60}).encode(),
        b" " * 20_000,
        Action("other", {}, NOW + 60).encode(),
        Action("\ud800", {}, NOW + 60).encode(),
        Action("mark", {}, NOW + AHEAD_SECONDS + 1).encode(),
        Action("mark", {}, NOW + 60, state=RUNNING).encode(),
        Action("mark", {}, NOW + 60, state=RUNNING, actor=WORKER).encode(),
    ],
)
def test_forged_actions_are_rejected_in_the_log(data: bytes) -> None:
    world = ActionsWorld()
    world.put("forged", data)
    sent = world.send(1)
    world.worker.machine.connected()
    world.finish()
    assert sorted(world.outcomes()) == ["done", "rejected"]
    assert world.done == {sent: 1}


def test_expired_actions_are_not_begun() -> None:
    world = ActionsWorld()
    world.put(entry_name(NOW, "0" * 8), Action("mark", {"id": "a"}, NOW))
    world.worker.machine.connected()
    world.finish()
    assert world.outcomes() == ["expired"]
    assert not world.done


@pytest.mark.parametrize(
    ("action", "after"),
    [
        ("fail", {"outcome": "failed", "result": "ValueError: no"}),
        ("unfit", {"outcome": "rejected", "result": "not today"}),
    ],
)
def test_failed_actions_end_with_their_error(action: str, after: dict[str, str]) -> None:
    world = ActionsWorld()
    sent = world.send(1, action)
    world.worker.machine.connected()
    world.finish()
    [entry] = world.entries()
    assert entry.after == {**after, "id": sent}


def test_arguments_are_in_the_entry() -> None:
    world = ActionsWorld()
    sent = world.send(1, level="debug", outcome="forged")
    world.worker.machine.connected()
    world.finish()
    [entry] = world.entries()
    assert (entry.command, entry.target, entry.by) == ("action mark", NAME, "ann@office")
    assert entry.after == {"outcome": "done", "result": "marked", "id": sent, "level": "debug"}


def test_outputs_are_kept_beside_the_log_and_cut() -> None:
    world = ActionsWorld()
    name = entry_name(NOW, "0" * 8)
    world.put(name, Action("later", {"id": name}, NOW + 60))
    world.worker.machine.connected()
    while not world.worker.unfinished:
        world.worker.step()
    world.worker.unfinished.popleft()(Result("long", "line\n" * MAX_OUTPUT_BYTES))
    world.finish()
    [output] = world.outputs()
    assert MAX_OUTPUT_BYTES / 2 < len(output) <= MAX_OUTPUT_BYTES
    assert output.endswith("bytes omitted\n")
    assert f"{FLEET.actionoutput}/{name}" in world.nodes


def test_actions_end_without_a_folder_for_outputs() -> None:
    world = ActionsWorld()
    sent = world.send(1, output="text")
    world.nodes[f"{FLEET.actionoutput}/{sent}"] = b"taken", 0
    world.worker.machine.connected()
    world.finish()
    assert world.outcomes() == ["done"]
    assert world.outputs() == ["taken"]


def test_names_of_other_entries_are_kept() -> None:
    world = ActionsWorld()
    sent = world.send(1)
    world.nodes[FLEET.log_entry(sent)] = b"{}", 0
    world.worker.machine.connected()
    world.finish()
    assert world.nodes[FLEET.log_entry(sent)] == (b"{}", 0)
    assert world.done == {sent: 1}
    assert world.outcomes().count("done") == 1


# --- the parent -------------------------------------------------------------------------------


def test_the_parent_leaves_what_it_cannot_do() -> None:
    """Unknown, unreadable, expired and running actions belong to the worker."""
    world = ActionsWorld()
    values = [
        b"null",
        Action("fail", {}, NOW + 60).encode(),
        Action("mark", {}, NOW).encode(),
        Action("mark", {}, NOW + 60, state=RUNNING, actor=WORKER).encode(),
        Action("mark", {}, NOW + 60, state=RUNNING, actor=PARENT).encode(),
    ]
    for number, value in enumerate(values):
        world.put(entry_name(NOW, f"{number:08x}"), value)
    parent = world.add_parent()
    sent = world.send(9)
    while parent.step():
        pass
    assert world.done == {sent: 1}
    assert len(world.waiting()) == len(values)
    parent.machine.close()
    assert parent.machine.ended


def test_the_worker_leaves_what_its_parent_does() -> None:
    """More of them than it does at a time do not keep it busy."""
    world = ActionsWorld()
    value = Action("mark", {}, NOW + 60, state=RUNNING, actor=PARENT)
    for number in range(2 * AT_ONCE):
        world.put(entry_name(NOW, f"{number:08x}"), value)
    world.worker.machine.connected()
    sent = world.send(99)
    world.finish()
    assert world.done == {sent: 1}
    assert len(world.waiting()) == 2 * AT_ONCE
