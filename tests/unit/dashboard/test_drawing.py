"""Charts, samples and pages of lists: pure functions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.coordination.znodes.worker_report import LastHour, WorkerReport
from qdo.dashboard.answers import last_hour, paged
from qdo.dashboard.pages import glob_of
from qdo.dashboard.rendering import HEIGHT, WIDTH, bars, line_chart, without_empty_cells
from qdo.dashboard.samples import MOST_SUMS, QueueSamples
from qdo.ops.dead_letters import error_kind_of
from qdo.ops.status import QueueStatus, Statuses
from qdo.ops.worker_status import WorkerStatus
from tests.support.fakes.statuses import queue_status


def status(queue: str, age: float | None, backlog: int | None) -> QueueStatus:
    return queue_status(queue, backlog=backlog, behind_seconds=age)


def test_a_line_goes_through_its_points() -> None:
    """From the left edge to the right one; zero is at the bottom."""
    chart = line_chart([(0.0, 0.0), (10.0, 50.0), (20.0, 100.0)], 10.0)
    assert chart is not None
    assert chart.line == f"M0 {HEIGHT:g}L{WIDTH / 2:g} {HEIGHT / 2:g}L{WIDTH:g} 0"
    assert (chart.top, chart.last, chart.most) == (100.0, 100.0, 100.0)


def test_a_line_may_begin_within_its_span() -> None:
    """The beginning of the readings is in the picture."""
    chart = line_chart([(30.0, 1.0), (60.0, 2.0)], 60.0, 1.0, (0.0, 60.0))
    assert chart is not None
    assert (chart.begin, chart.first, chart.first_x) == (0.0, 30.0, WIDTH / 2)
    assert chart.line.startswith(f"M{WIDTH / 2:g} ")


def test_backlogs_are_sums_of_queues_and_requests() -> None:
    """Of the last hour; what is unknown is not zero."""
    samples = QueueSamples()
    samples.add(Statuses([status("a", None, 3), status("b", None, None)], at=1.0), 4)
    samples.add(Statuses([status("a", None, None)], at=10.0))
    samples.add(Statuses([status("a", None, 1)], at=20.0), None)
    samples.add(Statuses([], at=30.0))
    samples.add(Statuses([], at=31.0), 9)
    assert samples.backlogs(0.0) == [(1.0, 7.0), (10.0, None), (20.0, None), (31.0, 9.0)]
    assert samples.backlogs(15.0)[0] == (20.0, None)
    for at in range(0, 100_000, 10):
        samples.add(Statuses([], at=float(at)))
    assert len(samples.backlogs(0.0)) == MOST_SUMS


def test_the_last_hour_is_the_sum_of_all_workers() -> None:
    """What no worker can have counted is left out, and shifts nothing."""
    hours = [
        LastHour(100, (5, 0, 4), (1,)),
        LastHour(99, (2, 3), (), (7,)),
        LastHour(130, (9,) * 5000, (-1,) * 40, (10**400,) * 40),
        LastHour(10**400, (1,) * 60),
        None,
    ]
    workers = [WorkerStatus("w", 0, 0, 0.0, WorkerReport(last_hour=each)) for each in hours]
    found = last_hour(workers, 100)
    assert [each[0] for each in found] == [*range(41, 101)]
    assert found[-4:] == [[97, 9, 0, 0], [98, 16, 0, 0], [99, 11, 0, 7], [100, 14, 1, 0]]
    assert found[0] == [41, 0, 0, 0]


def test_unknown_values_and_gaps_interrupt_a_line() -> None:
    """Unknown is not zero, and a time without readings is not a slope."""
    values = [(0.0, 1.0), (1.0, 1.0), (2.0, None), (3.0, 1.0), (4.0, 1.0), (100.0, 1.0)]
    chart = line_chart(values, 2.0)
    assert chart is not None
    assert chart.line.count("M") == 3
    few = line_chart([(0.0, 1.0), (5.0, 1.0), (605.0, 1.0)], 21.0)
    assert few is not None
    assert few.line.count("M") == 2


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)], [(1.0, None), (2.0, 3.0)], [(1.0, 1.0)] * 2])
def test_too_few_points_have_no_line(points: list[tuple[float, float | None]]) -> None:
    assert line_chart(points, 10.0) is None


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e12)), min_size=2, max_size=30))
def test_a_line_stays_within_its_drawing(values: list[float | None]) -> None:
    chart = line_chart([(float(at), value) for at, value in enumerate(values)], 1.0)
    if chart is None:
        return
    numbers = [float(each) for each in re.findall(r"-?[\d.]+(?:e[-+]?\d+)?", chart.line)]
    assert all(0 <= each <= WIDTH for each in numbers[::2])
    assert all(0 <= each <= HEIGHT for each in numbers[1::2])


def test_bars_stand_on_each_other() -> None:
    """The failed attempts of a minute above those that are done."""
    done, failed = bars([(60.0, 3, 1), (600.0, 9, 9)], 0.0, 120.0)
    assert (done.kind, failed.kind) == ("done", "failed")
    assert done.y + done.height == HEIGHT
    assert failed.y + failed.height == done.y
    assert done.x == WIDTH / 2
    assert bars([(60.0, 0, 0)], 0.0, 120.0) == []


def test_samples_keep_each_queue_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown stays unknown; queues may come and go."""
    monkeypatch.setattr("qdo.dashboard.samples.MOST_VALUES", 400)
    samples = QueueSamples()
    samples.add(Statuses([status("a", 1.5, 3), status("b", None, None)], at=1.0))
    samples.add(Statuses([status("b", 2.0, 4)], at=2.0))
    assert [(each.at, each.age_seconds, each.backlog) for each in samples.of("b")] == [
        (1.0, None, None),
        (2.0, 2.0, 4),
    ]
    assert len(samples.of("a")) == 1
    assert samples.of("c") == []
    many = [status(f"q{number}", 0.0, 0) for number in range(100)]
    for at in range(10):
        samples.add(Statuses(many, at=float(at)))
    assert len(samples.of("q1")) == 4


@given(st.integers(0, 200), st.one_of(st.none(), st.text(max_size=5)), st.integers(1, 60))
def test_any_number_of_a_page_shows_a_page(total: int, number: str | None, size: int) -> None:
    part = paged(range(total), number, size)
    assert 1 <= part.number <= part.pages
    assert len(part.items) == (part.last - part.first + 1 if total else 0)
    assert len(part.items) <= size
    assert bool(part.items) == bool(total)


def test_errors_of_one_kind_differ_in_numbers_only() -> None:
    first = error_kind_of("KeyError: order 17 at 0x7f00aa of 78c68382-e806-11f1-8000-1d7025e3dc44")
    second = error_kind_of("KeyError: order 4 at 0x11 of 11c68382-e806-11f1-8000-1d7025e3dc44")
    assert first == second == "KeyError: order # at # of #"
    assert error_kind_of("KeyError: other") != first


@pytest.mark.parametrize(("text", "glob"), [("", "*"), ("eu", "*eu*"), ("eu-*", "eu-*")])
def test_plain_text_of_a_filter_matches_anywhere(text: str, glob: str) -> None:
    assert glob_of(text) == glob


@pytest.mark.parametrize(
    ("cell", "is_empty"),
    [
        ('<td class="why">\n</td>', True),
        ('<td data-label="Zone">-</td>', True),
        ('<td><span class="name"></span></td>', True),
        ("<dd></dd>", True),
        ("<td>0</td>", False),
        ('<td><input type="checkbox"></td>', False),
        ("<td></td><td>x</td>", True),
    ],
)
def test_no_cell_of_a_page_is_empty(cell: str, is_empty: bool) -> None:
    """Whichever template printed it."""
    assert (">-</span></" in without_empty_cells(cell)) is is_empty
