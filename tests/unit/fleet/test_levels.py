"""Format levels: their node, and the steps of the leader while workers register."""

from __future__ import annotations

import random

import pytest

from qdo.fleet.components import AppLevel, next_step

MUTANTS = ("raise at once", "do not read after registering")


def test_node_keeps_what_others_wrote() -> None:
    found = AppLevel.parse(b'{"level": 3, "next_level": 4, "mine": [1]}')
    assert found == AppLevel(3, 4, {"mine": [1]})
    assert AppLevel.parse(found.encode()) == found


@pytest.mark.parametrize("data", [b"", b"null", b'{"level": "3"}', b'{"level": -1}', b"\xff"])
def test_foreign_nodes_have_no_level(data: bytes) -> None:
    found = AppLevel.parse(data)
    assert (found.format_level, found.next_level) == (0, 0)


def test_level_rises_in_two_steps_and_never_falls() -> None:
    announced = next_step(AppLevel(1), 2)
    assert announced == AppLevel(1, 2)
    assert next_step(announced, 2) == AppLevel(2)
    assert next_step(announced, 1) == AppLevel(1)  # an older worker has registered
    assert next_step(AppLevel(2), 1) == AppLevel(2)
    assert next_step(AppLevel(2), 2) == AppLevel(2)


def play(seed: int, mutant: str = "") -> bool:
    """Return whether a worker runs below the level of the app, in one random history."""
    chance = random.Random(seed)
    node = read = AppLevel()
    running: list[int] = []
    starting: list[tuple[int, str]] = []
    listed: int | None = None
    for _ in range(60):
        choice = chance.random()
        if choice < 0.3:
            level = chance.randint(1, 3)
            if level >= max(node.format_level, node.next_level):
                starting.append((level, "checked"))
        elif choice < 0.6 and starting:
            level, step = starting.pop(chance.randrange(len(starting)))
            if step == "checked":
                starting.append((level, "registered"))
            elif mutant == MUTANTS[1] or level >= max(node.format_level, node.next_level):
                running.append(level)
        elif choice < 0.7 and running:
            running.pop(chance.randrange(len(running)))
        elif choice < 0.85:
            # A listing has every registered worker, also one that did not read the node again yet.
            levels = [*running, *(level for level, step in starting if step == "registered")]
            listed, read = min(levels, default=0), node
        elif listed is not None:
            if read == node:  # the write is at the version read
                at_once = AppLevel(max(listed, node.format_level))
                node = at_once if mutant == MUTANTS[0] else next_step(node, listed)
            listed = None
        if any(level < node.format_level for level in running):
            return True
    return False


@pytest.mark.slow
def test_no_worker_runs_below_the_level_of_the_app() -> None:
    assert not any(play(seed) for seed in range(20_000))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_of_levels_is_needed(mutant: str) -> None:
    assert any(play(seed, mutant) for seed in range(20_000))
