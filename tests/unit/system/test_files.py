"""Rights of new folders and files, and names that are not what they should be."""

from __future__ import annotations

import grp
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qdo.errors import SettingsError
from qdo.system.files import (
    Rights,
    create_database,
    make_folder,
    open_file,
    rights_problems,
    share_database,
)

Umask = Callable[[int], int]


@pytest.fixture
def umask() -> Iterator[Umask]:
    """Returns os.umask; the old one applies again afterwards."""
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


@pytest.fixture
def passable() -> Iterator[Path]:
    """A folder that others may enter; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory(prefix="qdo-test-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o577])
def test_new_files_are_private_for_every_umask(tmp_path: Path, umask: Umask, mask: int) -> None:
    umask(mask)
    make_folder(str(tmp_path / "a" / "b"))
    create_database(str(tmp_path / "a" / "database"))
    os.close(open_file(str(tmp_path / "a" / "file"), os.O_RDWR, Rights()))
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o700, 0o700)
    assert (mode(tmp_path / "a" / "database"), mode(tmp_path / "a" / "file")) == (0o600, 0o600)


def test_existing_files_stay_as_they_are(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    folder.chmod(0o755)
    file.write_text("kept")
    file.chmod(0o644)
    make_folder(str(folder))
    create_database(str(file))
    os.close(open_file(str(file), os.O_RDWR, Rights()))
    assert (mode(folder), mode(file), file.read_text()) == (0o755, 0o644, "kept")


@pytest.mark.parametrize(
    ("of_database", "files", "folders"),
    [
        (0o600, 0o600, 0o700),
        (0o640, 0o640, 0o2750),
        (0o660, 0o660, 0o2770),
        (0o400, 0o600, 0o700),
        (0o755, 0o644, 0o2755),
    ],
)
def test_files_follow_their_database(
    tmp_path: Path, of_database: int, files: int, folders: int
) -> None:
    """An operator changes the rights of one file, and those of new ones follow."""
    database = tmp_path / "database"
    database.touch()
    database.chmod(of_database)
    rights = Rights.of(str(database))
    make_folder(str(tmp_path / "folder"), rights)
    os.close(open_file(str(tmp_path / "file"), os.O_RDWR, rights))
    assert (mode(tmp_path / "file"), mode(tmp_path / "folder")) == (files, folders)


@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO", "folder"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    """Nothing is written through a link, and nothing waits for a FIFO."""
    target, path = tmp_path / "target", tmp_path / "name"
    if kind == "link":
        target.write_text("secret")
    if kind.endswith("link"):
        path.symlink_to(target)
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(OSError, match="name"):
        open_file(str(path), os.O_RDWR, Rights())
    with pytest.raises(OSError, match="regular file"):
        create_database(str(path))
    assert target.exists() == (kind == "link")


def test_a_group_shares_new_databases(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getegid()).gr_name
    share_database(str(tmp_path / "a" / "database"), group)
    folder, file = (tmp_path / "a").stat(), (tmp_path / "a" / "database").stat()
    assert (stat.S_IMODE(folder.st_mode), folder.st_gid) == (0o2770, os.getegid())
    assert (stat.S_IMODE(file.st_mode), file.st_gid) == (0o660, os.getegid())
    assert rights_problems(str(tmp_path / "a" / "database"), group) == []


def test_an_unknown_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        share_database(str(tmp_path / "database"), "no such group")
    assert caught.value.details["name"] == "group"


def test_rights_of_others_are_reported(passable: Path) -> None:
    """With the command that takes them away; not where others cannot reach the file."""
    database = passable / "folder" / "database"
    assert rights_problems(str(database)) == []
    make_folder(str(database.parent))
    create_database(str(database))
    assert rights_problems(str(database)) == []
    database.chmod(0o644)
    assert rights_problems(str(database)) == []  # the folder keeps others away
    database.parent.chmod(0o755)
    [problem] = rights_problems(str(database))
    assert f"`chmod -R o= {database}*`" in problem
    database.parent.chmod(0o757)
    assert len(rights_problems(str(database))) == 2
    database.parent.chmod(0o1777)
    database.chmod(0o600)
    assert rights_problems(str(database)) == []  # as in /tmp


def test_a_file_of_another_group_is_reported(tmp_path: Path) -> None:
    """The file was there before the setting."""
    database = tmp_path / "database"
    create_database(str(database))
    [problem] = rights_problems(str(database), grp.getgrgid(os.getegid()).gr_name)
    assert "chgrp -R" in problem
