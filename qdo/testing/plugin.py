"""The pytest plugin, with fixtures for the tests of apps. Only tests that use them load qdo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from qdo.app import App
    from qdo.testing.kit import TestKit

# pytest explains only the failed assertions of modules that it rewrites, such as test files.
pytest.register_assert_rewrite("qdo.testing.contracts")


@pytest.fixture
def qdo_kit() -> Iterator[Callable[..., TestKit]]:
    """Return a function that makes kits. ``kit = qdo_kit(app)`` takes the parameters of `TestKit`.

    The fixture closes each kit at the end of the test. The test fails if a requested crash or lost
    lease has not happened, or if messages remain without a job.
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
        pytest.fail(f"qdo_kit: {left} requested crashes or lost leases have not happened")
