"""Which sessions the embedded coordinator expires, by the signs of life one process could see."""

from __future__ import annotations

from pathlib import Path

from qdo.coordination.embedded_sessions import Beats, Watchdog, boot, clock
from qdo.coordination.embedded_store import SessionRow


def session(number: int, timeout_seconds: float = 10.0, started: str | None = None) -> SessionRow:
    return SessionRow(
        id=number,
        password=b"",
        timeout_milliseconds=int(timeout_seconds * 1000),
        generation=1,
        slot=number,
        boot=started or boot(),
    )


ROWS = [session(0), session(1, 20)]


def test_silent_for_the_whole_timeout() -> None:
    """Each session by its own time-out; the next due time is that of the next to end."""
    dog = Watchdog()
    assert dog.silent(ROWS, [100.0, 100.0], 105.0) == []
    assert dog.due() == 110.0
    assert dog.silent(ROWS, [100.0, 100.0], 110.0) == [0]
    assert dog.due() == 120.0
    assert dog.silent(ROWS, [100.0, 100.0], 120.0) == [0, 1]


def test_sign_of_life_starts_the_time_again() -> None:
    dog = Watchdog()
    dog.silent(ROWS, [100.0, 100.0], 105.0)
    assert dog.silent(ROWS, [109.9, 100.0], 110.0) == []
    assert dog.due() == 119.9


def test_new_judge_counts_the_time_before_it_began() -> None:
    """Sessions left behind by dead processes do not get their time-out again."""
    assert Watchdog().silent(ROWS, [100.0, 100.0], 115.0) == [0]


def test_time_asleep_does_not_count() -> None:
    """After an hour in which the judge did not run, only what it saw is silence."""
    dog = Watchdog()
    dog.silent(ROWS, [100.0, 100.0], 102.0)
    dog.expect(104.0)
    assert dog.silent(ROWS, [100.0, 100.0], 3704.0) == []
    assert dog.due() == 3710.0
    assert dog.silent(ROWS, [100.0, 100.0], 3710.0) == [0]


def test_sign_of_life_that_was_not_seen_before_sleeping() -> None:
    """What a session did just before the machine went to sleep counts as well."""
    dog = Watchdog()
    dog.silent(ROWS, [100.0, 100.0], 102.0)
    dog.expect(104.0)
    assert dog.silent(ROWS, [103.0, 103.0], 3704.0) == []
    assert dog.due() == 3713.0


def test_judge_that_is_always_late_still_judges() -> None:
    """An event loop that jobs block again and again delays an expiry, and does not prevent it."""
    dog = Watchdog()
    now, looks = 100.0, 0
    while not dog.silent([session(0)], [100.0], now):
        dog.expect(now + 2.5)
        now += 5.5
        looks += 1
    assert looks == 4


def test_session_from_before_a_reboot() -> None:
    """The clock began again: its times mean nothing now."""
    assert Watchdog().silent([session(0, 10, "another")], [1e9], 5.0) == [0]


def test_slots(tmp_path: Path) -> None:
    """Times are read as written; a slot never written is as old as the machine's start."""
    beats = Beats(str(tmp_path / "beats"))
    beats.reserve(600)
    begun = clock()
    beats.beat(600)
    found = beats.read()
    assert begun <= found[600] <= clock()
    assert found[599] == 0.0
    beats.close()
    beats.close()
