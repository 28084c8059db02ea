"""An app and its dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.dashboard.shop import FilledShop


def filled(folder: Path, coordinator: str) -> Iterator[FilledShop]:
    made = FilledShop(folder, coordinator)
    try:
        made.fill()
        yield made
    finally:
        made.close()


@pytest.fixture
def shop(tmp_path: Path, coordinator_url: str) -> Iterator[FilledShop]:
    """An app with queues in several states, on each kind of coordinator."""
    yield from filled(tmp_path, coordinator_url)


@pytest.fixture
def local_shop(tmp_path: Path, embedded_url: str) -> Iterator[FilledShop]:
    """The same on the embedded coordinator, where the kind does not matter."""
    yield from filled(tmp_path, embedded_url)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is to be closed after the test."""
    with ExitStack() as kept:
        yield kept
