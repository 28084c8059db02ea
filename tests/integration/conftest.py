"""Workers in the process of the tests, which end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import EngineSetup


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., EngineSetup]]:
    """Make engines that end with the test."""
    made: list[EngineSetup] = []

    def make_one(**settings: Any) -> EngineSetup:
        made.append(EngineSetup(tmp_path, **settings))
        return made[-1]

    yield make_one
    for engine in made:
        engine.close()
