"""The pytest plugin: fixtures for the tests of apps. It loads qdo only where they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from qdo.app import App
    from qdo.testing.kit import TestKit


@pytest.fixture
def qdo_kit() -> Iterator[Callable[..., TestKit]]:
    """Make a `qdo.testing.TestKit`: ``kit = qdo_kit(app)``, with what `TestKit` takes.

    Each is closed at the end of the test. A crash or a lost lease that was asked for and has not
    happened fails the test: it has not tested what it says.
    """
    from qdo.testing.kit import TestKit

    kits: list[TestKit] = []
    with contextlib.ExitStack() as closing:

        def make(app: App, **options: Any) -> TestKit:
            kit = closing.enter_context(TestKit(app, **options))
            kits.append(kit)
            return kit

        yield make
    left = sum(kit.faults_left for kit in kits)
    if left:
        pytest.fail(f"{left} crashes or lost leases that were asked for have not happened")
