"""What the unit tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdo.worker.shared_memory import make_memory


@pytest.fixture
def fuzz(
    request: pytest.FixtureRequest,
) -> Callable[[st.SearchStrategy[Any], Callable[[Any], None]], None]:
    """Check as many inputs as `--fuzz` says."""
    count = request.config.getoption("--fuzz")

    def run(inputs: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
        quiet = settings(max_examples=count, suppress_health_check=list(HealthCheck), database=None)
        quiet(given(inputs)(check))()

    return run


@pytest.fixture
def memory() -> Iterator[int]:
    """Memory for a table of messages in flight."""
    fd = make_memory()
    yield fd
    os.close(fd)
