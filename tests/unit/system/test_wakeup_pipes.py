"""A notification wakes every listener of a folder, and never blocks."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.system.wakeup_pipes import WakeupPipe, notify_all


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "bells")


@pytest.fixture
def bell(folder: str) -> Iterator[WakeupPipe]:
    bell = WakeupPipe(folder)
    yield bell
    bell.close()


def is_rung(bell: WakeupPipe, seconds: float = 0) -> bool:
    poll = select.poll()
    poll.register(bell.fileno(), select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def test_a_ring_makes_the_bell_readable(bell: WakeupPipe, folder: str) -> None:
    """It is silent before the ring and silent again once drained."""
    assert not is_rung(bell)
    notify_all(folder)
    assert is_rung(bell, 5)
    bell.drain()
    assert not is_rung(bell)


def test_a_ring_reaches_every_listener(bell: WakeupPipe, folder: str) -> None:
    """Two listeners of one folder are both woken."""
    other = WakeupPipe(folder)
    notify_all(folder)
    assert is_rung(bell, 5)
    assert is_rung(other, 5)
    other.close()


def test_a_full_pipe_blocks_nobody(bell: WakeupPipe, folder: str) -> None:
    """A listener that does not read still has its ring waiting; one drain takes all rings."""
    for _ in range(70_000):
        bell.ring_self()
    notify_all(folder)
    assert is_rung(bell, 5)
    bell.drain()
    assert not is_rung(bell)


def test_a_bell_can_be_rung_alone(bell: WakeupPipe, folder: str) -> None:
    """ring_self() wakes its own listener only."""
    other = WakeupPipe(folder)
    bell.ring_self()
    assert is_rung(bell, 5)
    assert not is_rung(other)
    other.close()


def test_the_bell_of_a_dead_listener_is_removed(bell: WakeupPipe, folder: str) -> None:
    """The next notification removes a FIFO without a reader; others stay."""
    os.mkfifo(os.path.join(folder, "4711-dead"))
    notify_all(folder)
    assert not os.path.exists(os.path.join(folder, "4711-dead"))
    assert len(os.listdir(folder)) == 1
    assert is_rung(bell, 5)


def test_hidden_files_are_left_alone(bell: WakeupPipe, folder: str) -> None:
    """A bell still being made is hidden, and is not taken for a dead one."""
    os.mkfifo(os.path.join(folder, ".4712-new"))
    notify_all(folder)
    assert os.path.exists(os.path.join(folder, ".4712-new"))


def test_notifying_in_a_missing_folder_does_nothing(folder: str) -> None:
    """No listener has ever existed there."""
    notify_all(folder)
    assert not os.path.exists(folder)


def test_an_unreachable_listener_is_logged_and_skipped(
    bell: WakeupPipe, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is not a FIFO costs a warning; the other listeners are woken."""
    os.mkdir(os.path.join(folder, "0-folder"))
    with caplog.at_level(logging.WARNING):
        notify_all(folder)
    assert "0-folder" in caplog.text
    assert is_rung(bell, 5)


def test_other_files_are_not_written_to(bell: WakeupPipe, folder: str, tmp_path: Path) -> None:
    """A link would lend another user the rights of the sender; one line reports them all."""
    secret = tmp_path / "secret"
    secret.write_text("root's")
    os.symlink(secret, os.path.join(folder, "0-link"))
    for number in range(200):
        Path(folder, f"{number}-file").write_text("theirs")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("qdo.system.wakeup_pipes").addHandler(handler)
    try:
        notify_all(folder)
    finally:
        logging.getLogger("qdo.system.wakeup_pipes").removeHandler(handler)
    assert secret.read_text() == "root's"
    assert {Path(folder, f"{number}-file").read_text() for number in range(200)} == {"theirs"}
    assert len(records) == 1
    assert is_rung(bell, 5)


def test_a_link_in_place_of_the_folder_is_not_followed(folder: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.symlink(tmp_path / "theirs", folder)
    with pytest.raises(OSError, match="bells"):
        WakeupPipe(folder)
    os.mkfifo(tmp_path / "theirs" / "4711-dead")
    notify_all(folder)
    assert os.listdir(tmp_path / "theirs") == ["4711-dead"]


def test_closing_removes_the_bell_and_may_be_repeated(bell: WakeupPipe, folder: str) -> None:
    """After close() nothing is left in the folder."""
    bell.close()
    bell.close()
    assert os.listdir(folder) == []
