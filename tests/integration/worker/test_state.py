"""State by key equals a replay of its messages, wherever its owners are killed or frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.soak.state_owners import MUTANTS
from tests.support.cli import command
from tests.support.paths import ROOT

SEED = 26
LONG = pytest.mark.long("500 owners in all")


def _play(url: str, kills: int, *mutant: str) -> dict[str, Any]:
    """Play owners, a quarter of which are frozen instead of killed; return what was found."""
    ended = command(
        "-m", "tests.soak.state_owners", url, str(SEED), str(kills), *mutant,
        cwd=ROOT, timeout_seconds=240,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out))


@pytest.mark.parametrize(
    ("database", "kills"),
    [
        ("sqlite", 40),
        ("postgresql", 20),
        pytest.param("sqlite", 350, marks=LONG),
        pytest.param("postgresql", 150, marks=LONG),
    ],
)
def test_kills_falsify_no_state(
    database: str, kills: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each frozen owner continues beside its successor, and is refused."""
    url = f"sqlite:{tmp_path}/app.db"
    if database == "postgresql":
        url = request.getfixturevalue("postgresql_url")
    found = _play(url, kills)
    assert found["violations"] == []
    assert found["windows"] > kills / 4
    assert found["refused"] > kills / 8


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_is_needed(mutant: str, tmp_path: Path) -> None:
    """Without it, a value is not that of its messages, or a former owner changes one."""
    assert _play(f"sqlite:{tmp_path}/app.db", 40, mutant)["violations"] != []
