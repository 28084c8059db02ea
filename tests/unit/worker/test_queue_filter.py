"""The filter that a worker announces."""

from __future__ import annotations

import logging

import pytest

from qdo.app import App
from qdo.message import Message
from qdo.queues import MAX_GLOBS_CHARACTERS, QueueFilter
from qdo.settings.settings import Settings
from qdo.worker.worker import filter_of


def app_with(*globs: str) -> App:
    app = App("a")

    def work(message: Message, context: object) -> None:
        """Do nothing."""

    for glob in globs:
        app.job(glob)(work)
    return app


def test_a_filter_has_the_settings_and_the_globs_of_the_jobs() -> None:
    """In an order of its own: equal apps have equal filters."""
    settings = Settings(queues=("m*",), exclude=("mx",))
    expected = QueueFilter(("m*",), ("mx",), ("mail-*", "sms-*"))
    assert filter_of(app_with("sms-*", "mail-*"), settings) == expected
    assert filter_of(app_with("mail-*", "sms-*"), settings) == expected


def test_a_job_for_every_queue_hides_the_others() -> None:
    """The node of such a worker stays as short as ever."""
    assert filter_of(app_with("mail-*", "*"), Settings()) == QueueFilter()


def test_too_many_globs_are_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    """The worker then takes every queue, and the log says so."""
    globs = [f"{n:050}-*" for n in range(400)]
    with caplog.at_level(logging.WARNING):
        assert filter_of(app_with(*globs[:300]), Settings()).jobs == tuple(globs[:300])
        assert not caplog.records
        assert filter_of(app_with(*globs), Settings()) == QueueFilter()
    [record] = caplog.records
    assert record.args == (400 * 52, MAX_GLOBS_CHARACTERS)


def test_pools_are_announced_and_are_no_queues() -> None:
    """A pool that the settings exclude is not one of the worker's."""
    app = app_with("mail-*")
    for glob in ("sms", "build-*"):
        app.job(glob, pool=True)(lambda request, context: None)
    expected = QueueFilter(("*",), ("sms", "build-*"), ("mail-*",), ("build-*",))
    assert filter_of(app, Settings(exclude=("sms",))) == expected
