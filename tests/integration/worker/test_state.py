"""State by key equals a replay of its messages, wherever its owners are killed or frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.soak.state_owners import MUTANTS
from tests.support.cli import command
from tests.support.paths import ROOT

LONG = pytest.mark.long("500 owners in all")
KILLS = [("sqlite", 40), ("postgresql", 20)]
LONG_KILLS = [pytest.param(*each, marks=LONG) for each in (("sqlite", 350), ("postgresql", 150))]


def play(url: str, *given: str) -> Any:
    """Play owners; return what was found."""
    argv = ("-m", "tests.soak.state_owners", url, "26", *given)
    ended = command(*argv, cwd=ROOT, timeout_seconds=240)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@pytest.mark.parametrize(("database", "kills"), [*KILLS, *LONG_KILLS])
def test_kills_falsify_no_state(
    database: str, kills: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each frozen owner continues beside its successor, and is refused."""
    url = f"sqlite:///{tmp_path}/app.db"
    if database == "postgresql":
        url = request.getfixturevalue("postgresql_url").replace(":", "+psycopg:", 1)
    found = play(url, str(kills))
    assert found["violations"] == []
    assert found["windows"] > kills / 4
    assert found["refused"] > kills / 8


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_is_needed(mutant: str, tmp_path: Path) -> None:
    """Without it, a value is not that of its messages, or a former owner changes one."""
    assert play(f"sqlite:///{tmp_path}/app.db", "20", mutant)["violations"] != []
