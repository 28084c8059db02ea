"""Workers of pools, which end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.pools import Make, PoolSetup


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[PoolSetup] = []

    def make(*args: Any, start: bool = True, **options: Any) -> PoolSetup:
        pool = PoolSetup(tmp_path, monkeypatch, *args, **options)
        made.append(pool)
        if start:
            pool.start()
        return pool

    yield make
    for pool in made:
        pool.store.down = False
        for gate in pool.gates.values():
            gate.set()
        pool.close()
