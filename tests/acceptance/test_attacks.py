"""Hostile nodes beside a fleet of real workers: each stops itself only, and says so.

``python -m tests.soak.attacks`` plays all attacks, and measures pauses on an idle machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.attacks import AttackedFleet, attacked_fleet
from tests.soak.hostile_nodes import TOUCHED, attacks

STANDING = ("queue: deep", "queue: many objects")
"""Attacks that stop a queue."""
OTHERS = (
    "queue: null",
    "assignment: bomb of objects",
    "worker: bomb of names",
    "worker: globs",
    "ghost candidate",
    "candidate: deleted",
    "workers: protected",
    "loop: swap_shares",
    "loop: forge_owner",
)
CONTENTS = "content: every kind"


GROUPS = ((*STANDING, *OTHERS[:3]), (*OTHERS[3:], CONTENTS))
PLAYED = [*itertools.product(("embedded", "zookeeper"), GROUPS), ("postgresql", GROUPS[0])]
"""Thousands of contents take 90 s on PostgreSQL."""


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AttackedFleet]:
    """A fleet that processes messages."""
    url = str(request.getfixturevalue(f"{request.param}_url"))
    with attacked_fleet(tmp_path, url) as fleet:
        yield fleet


@pytest.mark.slow
@pytest.mark.parametrize(("fleet", "names"), PLAYED, indirect=["fleet"])
def test_attacks_cost_the_touched_queue_only(fleet: AttackedFleet, names: tuple[str, ...]) -> None:
    """Fences never go back, nothing is lost, and the queue that stands has a reason."""
    for name in names:
        found = fleet.play(attacks()[name], seconds=5.0 if name == CONTENTS else 1.0)
        assert found.violations == [], name
        others = {each: why for each, why in found.reasons.items() if each not in (TOUCHED, "")}
        assert others == {}, name
        assert TOUCHED in found.reasons or name not in STANDING, name
    fleet.finish()
