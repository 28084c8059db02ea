"""The actions that a worker does itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any, cast

import gevent
import pytest
from gevent.event import Event

from qdo.fleet.action_machine import Result, UnfitError
from qdo.settings.live import SettingsInForce
from qdo.settings.settings import Settings
from qdo.system import logs
from qdo.worker.actions import OwnActions, all_stacks
from qdo.worker.drain import StopSignals
from qdo.worker.engine.cancellations import Cancellations
from qdo.worker.engine.context import Engine
from qdo.worker.runs import Runs

NO_QUEUES = Cancellations(cast(Engine, None), {})


def perform(actions: OwnActions, name: str, **args: Any) -> Result | None:
    given: Mapping[str, Any] = args
    return actions.table()[name](given, lambda result: None)


def in_force(level: str = "info", log_config: str = "") -> SettingsInForce:
    return SettingsInForce(Settings(log_level=level, log_config=log_config))


@pytest.fixture
def actions() -> OwnActions:
    """A worker without a parent."""
    return OwnActions(StopSignals(), in_force(), None, Runs(list), NO_QUEUES)


@pytest.fixture
def level() -> Iterator[None]:
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in _LOGGERS]
    yield
    for logger, number in before:
        logger.setLevel(number)


_LOGGERS = (None, "kazoo", "botocore")


def test_a_second_drain_aborts_no_job() -> None:
    """Without a parent and without a handler of signals."""
    stop = StopSignals()
    actions = OwnActions(stop, in_force(), None, Runs(list), NO_QUEUES)
    assert [perform(actions, "drain"), perform(actions, "drain")] == 2 * [Result("draining")]
    assert stop.signals == 1


@pytest.mark.parametrize("name", ["restart", "reload"])
def test_nobody_restarts_a_worker_without_a_parent(actions: OwnActions, name: str) -> None:
    with pytest.raises(UnfitError):
        perform(actions, name)


@pytest.mark.parametrize("name", ["drain", "restart", "reload"])
def test_the_parent_is_asked_once(name: str) -> None:
    stop, asked = StopSignals(), list[str]()
    perform(OwnActions(stop, in_force(), asked.append, Runs(list), NO_QUEUES), name)
    assert (asked, stop.signals) == ([name], 0)


def test_log_levels_have_a_name_and_a_length(actions: OwnActions) -> None:
    wrong = [("debug", each) for each in (None, 0, -1, 86_401, True, "1", float("nan"), 2**63)]
    wrong += [(each, 1) for each in (None, "loud", "", 10, "DEBUG")]
    for level, seconds in wrong:
        with pytest.raises(UnfitError):
            perform(actions, "log-level", level=level, seconds=seconds)


@pytest.mark.parametrize(
    ("log_config", "left"), [("", logging.ERROR), ("logs.json", logging.WARNING)]
)
def test_levels_lead_back_to_the_configured_one(level: None, log_config: str, left: int) -> None:
    """Also after a second change; to the settings in force, or to those of a `log_config`."""
    actions = OwnActions(StopSignals(), in_force("error", log_config), None, Runs(list), NO_QUEUES)
    logs.set_level("warning")
    for wanted in ("debug", "info"):
        result = perform(actions, "log-level", level=wanted, seconds=0.01)
        assert result is not None
        assert result.text.startswith(f"{wanted} until ")
    assert logging.getLogger().level == logging.INFO
    actions._level_timer.join()
    assert logging.getLogger().level == left
    assert logging.getLogger("kazoo").level == logging.ERROR


def test_stacks_are_without_values_and_equal_ones_are_one() -> None:
    """The calling thread is left out: it only shows the action itself."""
    event = Event()

    def wait_for_it(secret: str) -> None:
        event.wait()

    greenlets = [gevent.spawn(wait_for_it, "s3cr3t") for _ in range(3)]
    gevent.idle()
    try:
        text = all_stacks()
    finally:
        event.set()
        gevent.joinall(greenlets)
    assert "greenlet (3 with this stack)" in text
    assert text.count("in wait_for_it") == 1
    for hidden in ("s3cr3t", "all_stacks", threading.current_thread().name):
        assert hidden not in text


class LyingObject:
    """An object of an app that answers no question about itself."""

    def __getattribute__(self, name: str) -> object:
        raise SystemExit(name)


def test_objects_of_an_app_do_not_disturb_stacks() -> None:
    lying = LyingObject()
    assert "test_objects_of_an_app" not in all_stacks()
    assert type(lying) is LyingObject
