"""Jobs with a rate or limits in one worker: what happens to the messages between two permits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import EngineSetup, until


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[EngineSetup]:
    setup = EngineSetup(tmp_path)
    yield setup
    setup.close()


@pytest.mark.parametrize("checkpoint", ["message", "interval"])
def test_a_worker_outlives_a_failure_without_a_permit(setup: EngineSetup, checkpoint: Any) -> None:
    """After a failure messages run one by one, and the next one may have to wait."""
    seen: list[tuple[int, int]] = []

    @setup.app.job("own-*", per_queue_rate="50/s", checkpoint=checkpoint)
    def job(message: Any, context: Any) -> None:
        seen.append((message.body, message.attempt))
        if message.body == 1 and message.attempt == 1:
            raise ValueError("it fails once")

    setup.send("own-1", *range(5))
    setup.start("own-1")
    until(lambda: len(seen) == 6, "all messages ran")
    assert seen == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1), (4, 1)]
    assert not setup.ended()
