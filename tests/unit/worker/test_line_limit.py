"""Log lines about one queue are limited, and those that are left out are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qdo.worker.line_limit import (
    BROKER_LOGGERS,
    LIKE_LINES,
    LINES,
    MESSAGE_LOGGERS,
    QUEUE_LOGGERS,
    LineLimit,
    queue_of,
    sentence_of,
)
from tests.support.paths import ROOT

NAME = "qdo.worker.engine.outcomes"


class Postponed:
    """Remembers what to call."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        self.calls.append((seconds, lambda: function(*args)))


@pytest.fixture
def later() -> Postponed:
    return Postponed()


@pytest.fixture
def now(later: Postponed) -> Iterator[list[float]]:
    times = [100.0]
    limit = LineLimit(queue_of, LINES, lambda: times[0], later)
    logging.getLogger(NAME).addFilter(limit)
    yield times
    logging.getLogger(NAME).removeFilter(limit)


def arguments(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record.args for record in caplog.records]


def test_further_lines_of_a_second_are_counted(
    caplog: pytest.LogCaptureFixture, now: list[float], later: Postponed
) -> None:
    """Lines about other queues pass, and so do those of the next second."""
    log = logging.getLogger(NAME)
    with caplog.at_level(logging.INFO):
        for number in range(LINES + 1234):
            log.info("%s: message %d skipped", "a", number)
        log.error("%s: message %d is a dead letter", "a", 0)
        log.info("%s: message %d skipped", "b", 0)
        assert len(caplog.records) == LINES + 1
        ((seconds, report),) = later.calls
        assert seconds == 1.0
        caplog.clear()
        report()
        assert arguments(caplog) == [("a", 1235, "ERROR")]
        assert caplog.records[0].levelno == logging.ERROR
        now[0] += 1.0
        log.info("%s: message %d skipped", "a", 7)
    assert arguments(caplog)[1:] == [("a", 7)]


@pytest.mark.slow
def test_quiet_queues_are_forgotten(now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """A worker may have many thousands."""
    log = logging.getLogger(NAME)
    with caplog.at_level(logging.INFO):
        for number in range(5000):
            now[0] += 0.01
            log.info("%s: message skipped", f"queue {number}")
    assert len(caplog.records) == 5000
    (limit,) = (each for each in log.filters if isinstance(each, LineLimit))
    assert len(limit._windows) <= 1001


def test_queues_that_all_say_the_same_are_counted(
    caplog: pytest.LogCaptureFixture, later: Postponed
) -> None:
    """As when the broker of ten thousand queues is away; other sentences pass."""
    log = logging.getLogger(NAME)
    limit = LineLimit(sentence_of, LIKE_LINES, lambda: 100.0, later)
    log.addFilter(limit)
    try:
        with caplog.at_level(logging.INFO):
            for number in range(10_000):
                log.warning("%s: cannot read the queue", f"queue {number}")
            log.error("%s: message %d is a dead letter", "a", 0)
            assert len(caplog.records) == LIKE_LINES + 1
            caplog.clear()
            ((_, report),) = later.calls
            report()
        shown, left_out, level = arguments(caplog)[0]
        assert f"queue {LIKE_LINES}: cannot read the queue" in shown
        assert (left_out, level) == (10_000 - LIKE_LINES, "WARNING")
    finally:
        log.removeFilter(limit)


@pytest.mark.parametrize("name", [*MESSAGE_LOGGERS, *QUEUE_LOGGERS, *BROKER_LOGGERS])
def test_limited_loggers_exist(name: str) -> None:
    path = ROOT / name.removesuffix(".broker").replace(".", "/")
    source = path.with_suffix(".py").read_text()
    assert "getLogger(__name__)" in source
    assert not name.endswith(".broker") or 'getLogger(f"{__name__}.broker")' in source
