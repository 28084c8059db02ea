"""The key file and the key ring of a process."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from qdo.encryption.key_ring import (
    CHECK_SECONDS,
    Key,
    KeyRing,
    change_keys,
    new_key,
    read_keys,
    retired,
)
from qdo.errors import NotFoundError, SettingsError, UsageError
from tests.support.fakes.clocks import SettableClock
from tests.support.fakes.key_files import key, line, write_keys, write_text

OLD, NEW, SIGN = key("old"), key("new"), key("s", "sign")


def test_a_file_keeps_its_keys_and_its_mode(tmp_path: Path) -> None:
    """Comments and empty lines are allowed; a new file is for its owner alone."""
    path = write_keys(tmp_path / "keys", OLD, SIGN)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert read_keys(path) == (OLD, SIGN)
    write_text(tmp_path / "keys", f"# a comment\n\n  {line(NEW)}  \n")
    assert read_keys(path) == (NEW,)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610])
def test_a_file_that_others_may_use_is_rejected(tmp_path: Path, mode: int) -> None:
    """Readers could decrypt, and writers could choose the key."""
    path = write_text(tmp_path / "keys", line(OLD), mode)
    with pytest.raises(SettingsError) as caught:
        KeyRing(path)
    assert caught.value.details["name"] == "keys"


@pytest.mark.parametrize(
    "text",
    [
        "k1 encrypt",
        "k1 decrypt " + line(OLD).split()[2],
        "k1 encrypt c2hvcnQ=",
        "k1 encrypt *" + line(OLD).split()[2],
        "k/1 encrypt " + line(OLD).split()[2],
        f"{line(OLD)}\n{line(OLD)}",
    ],
)
def test_a_bad_line_is_an_error_without_key_bytes(tmp_path: Path, text: str) -> None:
    """A key in an error would be in a log."""
    with pytest.raises(SettingsError) as caught:
        read_keys(write_text(tmp_path / "keys", text))
    assert line(OLD).split()[2] not in str(caught.value)
    assert "c2hvcnQ" not in str(caught.value)


def test_what_is_not_a_readable_file_is_an_error(tmp_path: Path) -> None:
    """Without waiting for the other end of a FIFO."""
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    os.chmod(tmp_path / "binary", 0o600)
    for name in ("fifo", "binary", "missing", "."):
        with pytest.raises(SettingsError):
            read_keys(str(tmp_path / name))


def test_a_key_never_shows_its_bytes() -> None:
    """Neither in a log nor in a traceback."""
    made = new_key("encrypt")
    assert len(made.secret) == 32
    assert repr(made.secret) not in repr(made)


def test_a_retired_key_is_the_last_or_gone() -> None:
    """It is not the last of its purpose, unless it is deleted."""
    assert retired((OLD, NEW, SIGN), "old", delete=False) == [NEW, SIGN, OLD]
    assert retired((OLD, NEW), "old", delete=True) == [NEW]
    with pytest.raises(UsageError):
        retired((OLD, SIGN), "old", delete=False)
    with pytest.raises(NotFoundError):
        retired((OLD,), "new", delete=True)


def test_a_ring_follows_its_file(tmp_path: Path) -> None:
    """After a moment, or at once for a key that it does not know."""
    clock = SettableClock(0.0)
    path = write_keys(tmp_path / "keys", OLD)
    ring = KeyRing(path, clock)
    write_keys(tmp_path / "keys", NEW, OLD)
    assert ring.in_use("encrypt") == OLD
    clock.now += CHECK_SECONDS
    assert ring.in_use("encrypt") == NEW
    write_keys(tmp_path / "keys", OLD, SIGN)
    assert ring.find("sign", "s") == SIGN
    assert ring.find("encrypt", "s") is None
    assert ring.find("encrypt", "new") is None


@pytest.mark.parametrize(
    "text",
    ["nonsense", "", "# a heading\n", f"{line(NEW)}\n" + "#\n" * (1 << 20)],
    ids=["nonsense", "empty", "comment", "large"],
)
def test_a_ring_keeps_its_keys_when_the_file_is_bad(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """It says so once, and takes up the next good file. A file being copied is empty at first."""
    clock = SettableClock(0.0)
    path = write_keys(tmp_path / "keys", OLD)
    ring = KeyRing(path, clock)
    write_text(tmp_path / "keys", text)
    for _ in range(3):
        clock.now += CHECK_SECONDS
        assert ring.in_use("encrypt") == OLD
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    os.unlink(path)
    assert ring.find("encrypt", "new") is None
    write_keys(tmp_path / "keys", NEW)
    assert ring.find("encrypt", "new") == NEW


def test_a_ring_without_a_key_for_a_purpose_says_so(tmp_path: Path) -> None:
    """A sender must not send in clear instead."""
    with pytest.raises(SettingsError):
        KeyRing(write_keys(tmp_path / "keys", SIGN)).in_use("encrypt")


def test_a_process_without_any_key_does_not_start(tmp_path: Path) -> None:
    """It could neither send nor process."""
    with pytest.raises(SettingsError) as caught:
        KeyRing(write_keys(tmp_path / "keys"))
    assert caught.value.details["name"] == "keys"


def test_concurrent_changes_lose_no_key(tmp_path: Path) -> None:
    """A lost key could not decrypt what it has encrypted meanwhile."""
    path = write_keys(tmp_path / "keys", OLD)

    def add(number: int) -> None:
        extra: Key = key(f"k{number}")
        change_keys(path, lambda before: [*before, extra])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {each.id for each in read_keys(path)} == {"old", *(f"k{n}" for n in range(8))}
    assert os.listdir(tmp_path) == ["keys"]


def test_a_change_keeps_a_symbolic_link(tmp_path: Path) -> None:
    """The file that it names is replaced."""
    write_keys(tmp_path / "real", OLD)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_keys(tmp_path / "link", NEW)
    assert (tmp_path / "link").is_symlink()
    assert read_keys(str(tmp_path / "real")) == (NEW,)
