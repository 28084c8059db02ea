"""Fleets of members for tests of coordination."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.support.fleet import MemberFleet


@pytest.fixture
def open_fleet() -> Iterator[Callable[..., MemberFleet]]:
    """Open fleets that end with the test, also if it fails: their threads would go on."""
    with ExitStack() as stack:

        def opened(*args: Any, **options: Any) -> MemberFleet:
            return stack.enter_context(closing(MemberFleet(*args, **options)))

        yield opened
