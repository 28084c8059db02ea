"""Each call that waits has a twin for coroutines, and warns on a thread whose loop runs."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Iterator

import pytest

from qdo.app import App
from qdo.errors import BlockedLoopWarning
from qdo.fleet.documents import Documents
from qdo.fleet.permits import HeldPermit, PermitAsk
from qdo.message import Message
from qdo.requests.calls import Handle
from qdo.requests.jobs import Request
from qdo.sending.streams import Stream
from qdo.testing import TestKit

WITHOUT_WAITING = {
    App: """job_for job jobs context middleware failure observer timer webhook handle stream
        documents lock limit exclusive use anchor ready settings origin override_broker
        override_coordinator broker live""",
    Handle: "id",
    Request: f"of pool take {' '.join(dir(Message))}",
    Stream: "",
    Documents: "get items keys values version entries ltime on_change",
    PermitAsk: "",
    HeldPermit: "valid check",
}
"""The public names that return at once; the last ones of `App` wait at their first use only."""


def waiting_calls() -> Iterator[tuple[type, str]]:
    for owner, names in WITHOUT_WAITING.items():
        public = {each for each in dir(owner) if not each.startswith("_")}
        twins = {each for each in public if each[0] == "a" and each[1:] in public}
        calls = public - twins - set(names.split()) - set(getattr(owner, "__slots__", ()))
        yield from ((owner, each) for each in sorted(calls))


@pytest.mark.parametrize(("owner", "name"), [*waiting_calls()])
def test_each_waiting_call_has_a_twin_with_its_parameters(owner: type, name: str) -> None:
    """The list above has the calls that need no twin; a new call belongs there or gets one."""
    found = getattr(owner, name)
    own = getattr(owner, f"a{name}")
    assert inspect.iscoroutinefunction(own)
    plain = found.fget if isinstance(found, property) else found
    own_code = [vars(each).get(name) for each in owner.__mro__ if name in vars(each)][-1]
    assert "warn_if_blocking" in getattr(own_code, "fget", own_code).__code__.co_names
    expected = inspect.signature(plain).replace(return_annotation=None)
    assert inspect.signature(own).replace(return_annotation=None) == expected


@pytest.fixture
def app() -> Iterator[App]:
    app = App("twins")
    with TestKit(app, without_job="*"):
        yield app


def warnings_of(call: Callable[[], object]) -> list[tuple[str, type[Warning]]]:
    """Return the file and category of each warning of a call on the thread of a running loop."""

    async def main() -> None:
        call()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(main())
    return [(each.filename, each.category) for each in caught]


@pytest.mark.parametrize(
    "call",
    [
        lambda app: app.send("q", 1),
        lambda app: app.request("sums", [1]).state,
        lambda app: app.peek("q"),
        lambda app: app.stream("user").send("ada", 1),
        lambda app: app.documents("plans").put("acme", 1),
        lambda app: app.limit("crm", max=1).try_acquire(),
        lambda app: app.lock("report").__enter__(),
        lambda app: app.close(),
    ],
)
def test_waiting_calls_warn_on_a_running_loop(app: App, call: Callable[[App], object]) -> None:
    app.send("q", 0)  # without a loop: no warning, which pytest would raise
    found = warnings_of(lambda: call(app))
    assert set(found) == {(__file__, BlockedLoopWarning)}


def test_twins_do_not_warn_and_return_the_results(app: App) -> None:
    async def main() -> None:
        async with app as opened:
            id = await opened.asend("q", 1)
            handle = await app.arequest("sums", [1, 2], id="sum")
            plans = app.documents("plans")
            await plans.aput("acme", 3)
            assert [each.id for each in await app.apeek("q")] == [id]
            assert await handle.astate() == "waiting"
            assert await handle.acancel("no") is True
            assert await plans.afresh() == plans.ltime

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
