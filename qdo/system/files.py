"""Folders and files that the processes of a machine share, with exact permissions.

A new folder has mode 0700 and a new file 0600, whatever the umask, because messages and progress
are private to one user. The other files of a database (log, heartbeats and wakeup pipes) get the
owner, group and mode of the database, as SQLite does for its log. If an operator changes the
permissions of a database, later files get the new permissions.

A symbolic link in place of a file is an error. Users who can write to the folder could use a link
to misuse the permissions of this process.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from qdo.errors import SettingsError, UsageError
from qdo.text import describe

# Do not block. Otherwise opening a FIFO in place of a file would wait for the FIFO's other end.
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Maximum size of a file that `private_text` reads.
_MOST_PRIVATE_BYTES = 4096


def sqlite_path(url: str) -> str | None:
    """Return the path in an address ``sqlite:PATH``, or None for any other address."""
    return url.removeprefix("sqlite:") if url.startswith("sqlite:") else None


def absolute(url: str) -> str:
    """Return the address. Make the path in a ``sqlite:PATH`` absolute."""
    path = sqlite_path(url)
    return url if path is None else f"sqlite:{os.path.abspath(path)}"


@dataclass(frozen=True, slots=True)
class Rights:
    """Mode, owner and group of a new file. -1 leaves the owner or the group unchanged."""

    mode: int = 0o600
    uid: int = -1
    gid: int = -1

    @classmethod
    def of(cls, path: str) -> Rights:
        """Return the rights of an existing file, for related new files."""
        found = os.stat(path)
        return cls(found.st_mode & 0o666 | 0o600, found.st_uid, found.st_gid)

    @property
    def folder_mode(self) -> int:
        """Mode of a folder.

        Readers of its files may enter, and new files inherit the group of the folder.
        """
        mode = self.mode | (self.mode & 0o444) >> 2
        return mode | stat.S_ISGID if mode & 0o060 else mode

    def apply(self, fd: int) -> None:
        """Give an open file, folder or pipe these rights."""
        found = os.fstat(fd)
        uid = self.uid if os.geteuid() == 0 else -1
        if uid not in (-1, found.st_uid) or self.gid not in (-1, found.st_gid):
            # Only root and members of the group may set the group. The files of other users stay
            # private.
            with contextlib.suppress(PermissionError):
                os.fchown(fd, uid, self.gid)
        mode = self.folder_mode if stat.S_ISDIR(found.st_mode) else self.mode
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)


PRIVATE = Rights()


def make_folder(path: str, rights: Rights = PRIVATE) -> None:
    """Create a folder and its missing parents. Leave an existing folder unchanged."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return
    except FileNotFoundError:
        make_folder(os.path.dirname(os.path.abspath(path)), rights)
        make_folder(path, rights)
        return
    with opened_folder(path) as fd:
        rights.apply(fd)


@contextlib.contextmanager
def opened_folder(path: str) -> Iterator[int]:
    """Yield a descriptor of a folder; raise OSError if the path is a symbolic link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            reason = f"{path} must be a folder; symbolic links are not followed"
            raise OSError(error.errno, reason) from error
        raise
    try:
        yield fd
    finally:
        os.close(fd)


def open_file(path: str, flags: int, rights: Rights, folder: int | None = None) -> int:
    """Open a regular file and return its descriptor. Create a missing file with `rights`.

    :param folder: descriptor of the folder that `path` is relative to.
    """
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=folder)
    except FileExistsError:
        return _open_existing(path, flags, folder)
    rights.apply(fd)
    return fd


def _open_existing(path: str, flags: int, folder: int | None) -> int:
    try:
        fd = os.open(path, flags | _SAFE, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _irregular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _irregular(path)
    return fd


def _irregular(path: str) -> OSError:
    return OSError(errno.EINVAL, f"{path} must be a regular file; symbolic links are not followed")


def create_database(path: str, rights: Rights = PRIVATE) -> None:
    """Create an empty file for a database; raise OSError if the path is not a regular file."""
    # Never open an existing database here. If a process closes any descriptor of a database, the
    # system releases all of SQLite's locks for the process.
    try:
        os.mknod(path, stat.S_IFREG | 0o600)
    except FileExistsError:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise _irregular(path) from None
        return
    found = os.stat(path)
    if rights.gid not in (-1, found.st_gid):
        os.chown(path, -1, rights.gid)
    if stat.S_IMODE(found.st_mode) != rights.mode:
        os.chmod(path, rights.mode)


def share_database(path: str, group: str) -> None:
    """Create a missing database and its folder for the members of a group."""
    gid = _gid_of(group)
    if os.geteuid() != 0 and gid not in (os.getegid(), *os.getgroups()):
        raise SettingsError(
            name="group", reason=f"the user of this process must be a member of group {group!r}"
        )
    rights = Rights(0o660, -1, gid)
    absolute = os.path.abspath(path)
    make_folder(os.path.dirname(absolute), rights)
    create_database(absolute, rights)


def _gid_of(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise SettingsError(
            name="group", reason=f"it must be a group of this machine, got {group!r}"
        ) from None


def rights_problems(path: str, group: str = "") -> list[str]:
    """Return the problems with the permissions of a database, as sentences with a remedy."""
    absolute = os.path.abspath(path)
    folder = os.path.dirname(absolute)
    names = (absolute, *(absolute + each for each in ("-wal", "-shm", ".beats", ".wakeups")))
    modes = [os.stat(name).st_mode for name in names if os.path.exists(name)]
    if not modes:
        return []
    problems = []
    if _reachable(folder):
        if any(mode & stat.S_IRWXO for mode in modes):
            problems.append(
                f"every user of this machine can use {absolute}; run `chmod -R o= {absolute}*`"
            )
        if os.stat(folder).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            problems.append(
                f"every user of this machine can replace {absolute}; run `chmod o-w {folder}`"
            )
    if group and not _shared(folder, absolute, _gid_of(group)):
        problems.append(
            f"{absolute} is not shared with group {group}; stop its processes and run "
            f"`chgrp -R {group} {folder} && chmod -R u=rwX,g=rwX,o= {folder} && chmod g+s {folder}`"
        )
    return problems


def _reachable(folder: str) -> bool:
    while os.stat(folder).st_mode & stat.S_IXOTH:
        if folder == "/":
            return True
        folder = os.path.dirname(folder)
    return False


def _shared(folder: str, path: str, gid: int) -> bool:
    above = os.stat(folder)
    file = os.stat(path)
    return (
        (above.st_gid, file.st_gid) == (gid, gid)
        and above.st_mode & 0o2070 == 0o2070
        and file.st_mode & 0o060 == 0o060
    )


def private_text(path: str, what: str) -> str:
    """Return the text of the file `what`; raise UsageError if other users can read it."""
    try:
        with open(path, encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                reason = f"only its owner may read the {what} {path}: chmod 600 {path}"
                raise UsageError(reason=reason)
            return file.read(_MOST_PRIVATE_BYTES).strip()
    except (OSError, ValueError) as error:
        raise UsageError(reason=f"cannot read the {what} {path}: {describe(error)}") from error
