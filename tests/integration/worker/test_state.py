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
KILLS = [("sqlite", 40, 26), ("postgresql", 20, 26)]
# Five and three parts of different seeds, because one of 350 owners took too long beside others.
LONG_KILLS = [
    *(pytest.param("sqlite", 70, seed, marks=LONG) for seed in range(5)),
    *(pytest.param("postgresql", 50, seed, marks=LONG) for seed in range(3)),
]


def play(url: str, kills: int, seed: int, *mutant: str) -> Any:
    """Play owners; return what was found."""
    argv = ("-m", "tests.soak.state_owners", url, str(seed), str(kills), *mutant)
    ended = command(*argv, cwd=ROOT)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@pytest.mark.parametrize(("database", "kills", "seed"), [*KILLS, *LONG_KILLS])
def test_kills_falsify_no_state(
    database: str, kills: int, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each frozen owner continues beside its successor, and is refused."""
    url = f"sqlite:///{tmp_path}/app.db"
    if database == "postgresql":
        url = request.getfixturevalue("postgresql_url").replace(":", "+psycopg:", 1)
    found = play(url, kills, seed)
    assert found["violations"] == []
    assert found["windows"] > kills / 4
    assert found["refused"] > kills / 8


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_is_needed(mutant: str, tmp_path: Path) -> None:
    """Without it, a value is not that of its messages, or a former owner changes one."""
    assert play(f"sqlite:///{tmp_path}/app.db", 20, 26, mutant)["violations"] != []
