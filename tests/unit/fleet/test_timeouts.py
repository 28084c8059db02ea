"""Durations that apps give: what no timer can hold is refused at the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qdo import App
from qdo.errors import UsageError
from qdo.testing import TestKit

WAITS: dict[str, Callable[[App, Any], object]] = {
    "lock": lambda app, seconds: app.lock("nightly", timeout_seconds=seconds).__enter__(),
    "section": lambda app, seconds: app.exclusive("a-*", timeout_seconds=seconds).__enter__(),
    "limit": lambda app, seconds: app.limit("crm", timeout_seconds=seconds),
    "documents": lambda app, seconds: app.documents("plans").fresh(timeout_seconds=seconds),
}


@pytest.fixture
def app() -> Iterator[App]:
    app = App("shop")
    with TestKit(app):
        yield app


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan, 1e300, 10**400, "5", True])
@pytest.mark.parametrize("name", WAITS)
def test_a_timeout_is_a_number_that_a_timer_holds(app: App, name: str, seconds: Any) -> None:
    with pytest.raises(UsageError, match="timeout_seconds must be a number"):
        WAITS[name](app, seconds)


@pytest.mark.parametrize("name", WAITS)
def test_nothing_left_of_a_deadline_is_no_wait(app: App, name: str) -> None:
    WAITS[name](app, -0.5)


async def _never_runs(name: str, value: object) -> None: ...


@pytest.mark.parametrize("function", [5, "f", None, _never_runs])
def test_a_listener_of_documents_is_a_plain_function(app: App, function: Any) -> None:
    with pytest.raises(UsageError, match="on_change"):
        app.documents("plans").on_change(function)
