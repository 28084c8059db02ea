"""A word of docs/concepts.rst has one meaning: the classes and files named after it have one home.

A class for something else gets another word. A new part of the same thing is added here.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.support.doc_pages import read
from tests.support.paths import ROOT

QDO = ROOT / "qdo"
HOMES = {
    "pool": r"brokers/request|requests/|testing/process|worker/pools/",
    "request": r"errors|request|testing/|worker/pools/",
    "timer": r"jobs/timers|timer_node|/timers|testing/memory_fleet",
    "share": r"fleet/shares|fleet/limit_node|testing/memory_fleet|worker/engine/limits",
    "permit": r"errors|fleet/permit|worker/engine/lane|worker/engine/limits",
    "slot": r"worker/engine/",
    "turn": r"worker/engine/|worker/executors/wait",
    "lane": r"worker/engine/",
    "gate": r"fleet/pause_machine|worker/engine/limits|worker/engine/pauses",
    "pause": r"errors|pause|testing/memory_fleet",
    "chore": r"fleet/chores|fleet/components|worker/duties/leading",
    "duty": r"worker/",
    "section": r"errors|fleet/locks|fleet/pause_machine",
}
"""The files whose names, and the names of whose classes, may have a word."""
PAUSE = "hold"
"""The former word for a pause, which nodes and JSON keep; messages are held, too."""


def words_of(name: str) -> set[str]:
    """Return the words of the name of a class or file, each in the singular."""
    parts = re.findall(r"[A-Z]?[a-z]+", name)
    return {re.sub(r"(?<=[a-z]{3})s$", "", part.lower()) for part in parts}


@cache
def named() -> list[tuple[str, str]]:
    """Return each file below qdo/ with its own name, and with the name of each of its classes."""
    names = []
    for path in sorted(QDO.rglob("*.py")):
        file = path.relative_to(QDO).with_suffix("").as_posix()
        names.append((file, path.stem))
        names += [(file, name) for name in re.findall(r"^ *class (\w+)", path.read_text(), re.M)]
    return names


@pytest.mark.parametrize("word", HOMES)
def test_a_word_has_one_home(word: str) -> None:
    users = [(file, name) for file, name in named() if word in words_of(name)]
    strangers = [f"{file}: {name}" for file, name in users if not re.search(HOMES[word], file)]
    assert (bool(users), strangers) == (True, [])


def test_no_class_is_called_a_hold() -> None:
    """An operator pauses a queue."""
    assert [name for _, name in named() if PAUSE in words_of(name)] == []


def test_the_page_explains_each_word() -> None:
    terms = set(re.findall(r"\w+", " ".join(re.findall(r"^(\w.*)$", read("concepts"), re.M))))
    assert HOMES.keys() - terms == set()
