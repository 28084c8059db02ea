"""The low watermark and the runs above it, against the simplest record of done messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.worker.engine.lane import Run, WatermarkTracker


def covered(position: int, last: int, runs: tuple[Run, ...]) -> bool:
    return position <= last or any(first <= position <= newest for first, newest in runs)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Positions of messages in their order, and an order in which some of them get done."""
    positions = sorted(draw(st.sets(st.integers(1, 10_000), max_size=40)))
    done = draw(st.permutations(positions))
    return positions, done[: draw(st.integers(0, len(done)))]


@given(histories(), st.integers(0, 60), st.data())
def test_the_watermark_is_the_longest_done_prefix(
    history: tuple[list[int], list[int]], most: int, data: st.DataObject
) -> None:
    """Messages are read and done in any interleaving; the record is correct and complete."""
    positions, order = history
    window = WatermarkTracker(0)
    done: set[int] = set()
    read = 0
    for position in order:
        need = positions.index(position) + 1
        upto = data.draw(st.integers(max(need, read), len(positions))) if need else read
        for each in positions[read:upto]:
            assert window.add(each)
        read = max(read, upto)
        window.done(position)
        done.add(position)
        prefix = 0
        for each in positions[:read]:
            if each not in done:
                break
            prefix = each
        assert window.last == prefix
        assert len(window) == read - len(done)
        runs = window.runs(1000)
        for each in positions[:read]:
            assert covered(each, window.last, runs) == (each in done)
        assert list(runs) == sorted(runs)
        assert window.ranges == len(runs) <= len(window)
        assert window.runs(most) == runs[:most]


@given(histories(), st.integers(0, 40), st.integers(0, 40), st.data())
def test_an_heir_goes_on_with_what_is_not_done(
    history: tuple[list[int], list[int]], kept: int, look: int, data: st.DataObject
) -> None:
    """From the record, however much of it was kept: nothing pending counts as done, messages
    recorded as done do not run again, and the next owner's record is always correct too."""
    positions, order = history
    first = WatermarkTracker(0)
    for position in positions:
        first.add(position)
    for position in order:
        first.done(position)
    runs = first.runs(kept)
    heir = WatermarkTracker(first.last, runs)
    pending = set()
    for count, position in enumerate(each for each in positions if each > first.last):
        if heir.add(position):
            pending.add(position)
            assert not covered(position, first.last, runs)
        else:
            assert position in order
        if count == look:
            for each in positions:
                if covered(each, heir.last, heir.runs(1000)):
                    assert each in order or each <= first.last
                elif covered(each, first.last, runs):
                    pytest.fail(f"{each} was recorded as done and is not any more")
    assert heir.ranges == len(heir.runs(1000))
    for position in data.draw(st.permutations(sorted(pending))):
        heir.done(position)
    assert heir.last == (positions[-1] if positions else 0)
    assert heir.runs(1000) == ()


def test_what_is_not_pending_cannot_get_done() -> None:
    window = WatermarkTracker(0)
    window.add(5)
    with pytest.raises(KeyError):
        window.done(4)
    window.done(5)
    with pytest.raises(KeyError):
        window.done(5)


def test_memory_goes_with_what_is_pending() -> None:
    """One slow message and a hundred thousand done behind it: one run."""
    window = WatermarkTracker(0)
    window.add(1)
    for position in range(2, 100_001):
        window.add(position)
        window.done(position)
    assert len(window) == 1
    assert window.runs(10) == ((2, 100_000),)
    window.done(1)
    assert window.last == 100_000
    assert window.runs(10) == ()
