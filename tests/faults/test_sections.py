"""Sections over queues that cannot begin, or that an operator ends.

`tests/integration/fleet/test_pause_command.py` shows what runs beside a section, and its end with a
maker that is killed or frozen.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qdo import App
from qdo.coordination.client import Client
from qdo.errors import PauseNotObeyedError, QueueNameError, SectionLostError, UsageError
from qdo.fleet.pause_machine import PauseNode
from qdo.fleet.pauses import add_pause, end_pauses, new_pause, resume_pause
from tests.support.app_runs import AppRuns
from tests.support.processes import wait_until


@pytest.fixture
def app(coordinator_url: str) -> Iterator[App]:
    with App("desk", coordinator=coordinator_url, session_timeout_seconds=1) as app:
        yield app


def test_a_section_is_lost_when_an_operator_ends_it(
    app: App, runs: AppRuns, outsider: Client
) -> None:
    """Also if other pauses change before, and with its node."""
    for number in range(3):
        pause = new_pause(["other-*"])
        with app.exclusive("tenant-*", timeout_seconds=30) as section:
            add_pause(outsider, runs.layout, pause)
            end_pauses(outsider, runs.layout, [pause.id])
            (pause,) = PauseNode.parse(outsider.get(runs.layout.fleet.holds)[0]).pauses
            section.check()
            if number == 2:
                outsider.delete(runs.layout.fleet.holds)
            else:
                resume_pause(outsider, runs.layout, pause.id, "by mistake")
            wait_until(lambda lost=section: not lost.valid, "the section is lost")  # type: ignore[misc]
            with pytest.raises(SectionLostError) as caught:
                section.check()
            assert "operator" in caught.value.details["reason"]


def test_a_section_that_cannot_begin_is_lifted(app: App, runs: AppRuns) -> None:
    """It names the workers that it waits for; a later section waits for an earlier one."""
    held = runs.folder / "hold-1"
    held.touch()
    runs.app.send("tenant-1", 1)
    with runs.work(order="none", concurrency=2), App("desk", coordinator=runs.coordinator) as other:
        wait_until(lambda: runs.runs("tenant-1") == [("1", 1)], "a long job")
        with pytest.raises(PauseNotObeyedError) as caught:
            app.exclusive("tenant-*", timeout_seconds=0.2).__enter__()
        assert "worker-" in caught.value.details["names"]
        runs.app.send("tenant-1", 2)
        wait_until(lambda: len(runs.runs("tenant-1")) == 2, "the queue goes on")
        held.unlink()
        with app.exclusive("tenant-*", timeout_seconds=30):
            with (
                pytest.raises(PauseNotObeyedError) as caught,
                other.exclusive("tenant-1", timeout_seconds=0.3),
            ):
                pass
            assert "section" in caught.value.details["names"]
            with other.exclusive("other", timeout_seconds=30):
                pass


def test_bad_calls(app: App) -> None:
    for queues, error in (((), UsageError), (("a/b",), QueueNameError)):
        with pytest.raises(error), app.exclusive(*queues):
            pass
