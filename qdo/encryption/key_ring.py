"""The key ring: a file of keys, one per line, that only its owner may read.

=========  ============================================================================
purpose    what its keys do
=========  ============================================================================
encrypt    encrypt and decrypt bodies
sign       mark the ids of messages, so that foreign senders cannot choose them
=========  ============================================================================

Processes encrypt and sign with the first key of a purpose, and accept all keys of the purpose. For
a rotation, an operator adds a key at the end, distributes the file, and then moves the old key to
the end; see `retired`. Processes reload the file when it changes. A key ring raises SettingsError
if its file is unreadable, or has no key for a purpose.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from qdo.errors import NotFoundError, SettingsError, UsageError
from qdo.system.files import Rights, opened_folder

Purpose: TypeAlias = Literal["encrypt", "sign"]
PURPOSES: tuple[Purpose, ...] = ("encrypt", "sign")
KEY_BYTES = 32
# Seconds between a process's checks for changes of the file.
CHECK_SECONDS = 1.0
_MOST_BYTES = 1 << 20
_ID = re.compile(r"[A-Za-z0-9_-]{1,32}")
_HEADING = (
    "# Keys of qdo, see `qdo admin keys`: id, purpose, 32 bytes in base64. Keep this file secret.\n"
)
_log = logging.getLogger(__name__)
# A value that changes with each write or replacement of a file.
_Stamp: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Key:
    """One key. Its `repr` never contains the key bytes."""

    id: str
    purpose: Purpose
    secret: bytes = field(repr=False)


# --- the file ---


def _fault(path: str, reason: str) -> SettingsError:
    return SettingsError(name="keys", reason=f"{path}: {reason}")


def parse_keys(text: str, path: str) -> tuple[Key, ...]:
    """Return the keys of a file.

    :raises SettingsError: a line is not a key, or an id occurs twice. The errors never contain key
      bytes.
    """
    found: dict[str, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key = _key(line.split())
        if key is None:
            raise _fault(
                path,
                f"line {number} must have an id, a purpose ({' or '.join(PURPOSES)}) and "
                f"{KEY_BYTES} bytes in base64; make keys with `qdo admin keys new`",
            )
        if key.id in found:
            raise _fault(path, f"line {number} repeats the id {key.id!r}; remove one of them")
        found[key.id] = key
    return tuple(found.values())


def _key(words: Sequence[str]) -> Key | None:
    if len(words) != 3 or not _ID.fullmatch(words[0]):
        return None
    try:
        secret = base64.b64decode(words[2], validate=True)
    except ValueError:
        return None
    for purpose in PURPOSES:
        if words[1] == purpose and len(secret) == KEY_BYTES:
            return Key(words[0], purpose, secret)
    return None


def read_keys(path: str) -> tuple[Key, ...]:
    """Return the keys of a valid file that only its owner may read, or raise SettingsError."""
    return _read(path)[0]


def _read(path: str) -> tuple[tuple[Key, ...], _Stamp]:
    try:
        # O_NONBLOCK: if the path is a FIFO, the call must not block.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            _check_rights(path, found)
            data = file.read(_MOST_BYTES)
            if len(data) < found.st_size:
                raise _fault(
                    path, f"it must have less than {_MOST_BYTES} bytes, got {found.st_size}"
                )
        return parse_keys(data.decode(), path), _stamp(found)
    except UnicodeDecodeError as error:
        raise _fault(path, "it must be text; see `qdo admin keys`") from error
    except (OSError, ValueError) as error:  # ValueError: the path has a null character
        raise _fault(path, getattr(error, "strerror", None) or str(error)) from error


def _stamp(found: os.stat_result) -> _Stamp:
    return found.st_mtime_ns, found.st_ino, found.st_size


def _check_rights(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _fault(path, "it must be a regular file")
    if found.st_mode & 0o077:
        raise _fault(
            path,
            f"only its owner may have rights, got mode {stat.S_IMODE(found.st_mode):04o}; "
            f"run `chmod 600 {path}`, and replace its keys if others may have read them",
        )
    if os.geteuid() not in (0, found.st_uid) and found.st_uid != 0:
        raise _fault(path, f"it must belong to this user or to root, got user {found.st_uid}")


def change_keys(path: str, change: Callable[[tuple[Key, ...]], Sequence[Key]]) -> None:
    """Replace the keys of a file atomically, so that readers see the whole change or nothing."""
    try:
        real = os.path.realpath(path)  # keep a symbolic link
        with opened_folder(os.path.dirname(real)) as folder:
            fcntl.flock(folder, fcntl.LOCK_EX)  # held until the descriptor is closed
            exists = os.path.lexists(real)
            lines = [_line(key) for key in change(read_keys(path) if exists else ())]
            _replace(real, "".join([_HEADING, *lines]), exists)
            os.fsync(folder)
    except (OSError, ValueError) as error:
        raise _fault(path, getattr(error, "strerror", None) or str(error)) from error


def _line(key: Key) -> str:
    return f"{key.id} {key.purpose} {base64.b64encode(key.secret).decode()}\n"


def _replace(path: str, text: str, exists: bool) -> None:
    fd, new = tempfile.mkstemp(prefix=".qdo-keys-", dir=os.path.dirname(path))  # mode 0600
    try:
        with open(fd, "w", encoding="ascii") as file:
            if exists:  # root may change the file of another user
                before = os.stat(path)
                Rights(0o600, before.st_uid, before.st_gid).apply(fd)
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        raise


# --- changes ---


def new_key(purpose: Purpose) -> Key:
    return Key(secrets.token_hex(4), purpose, secrets.token_bytes(KEY_BYTES))


def retired(keys: Sequence[Key], id: str, delete: bool) -> list[Key]:
    """Move the key `id` to the end, where no process uses it to encrypt or sign, or delete it.

    :raises NotFoundError: no key has this id.
    :raises UsageError: the key's purpose would have no other key.
    """
    gone = next((key for key in keys if key.id == id), None)
    if gone is None:
        raise NotFoundError(what="key", name=id)
    rest = [key for key in keys if key is not gone]
    if not delete and all(key.purpose != gone.purpose for key in rest):
        raise UsageError(
            reason=f"key {id} is the only one to {gone.purpose}; make another with `qdo"
            " admin keys new`, and copy the file to all hosts, before you retire it",
        )
    return rest if delete else [*rest, gone]


# --- in a process ---


class KeyRing:
    """The keys of a file in a running process. This class is thread-safe.

    If the file becomes unreadable, the known keys stay in force.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._keys: tuple[Key, ...]
        self._by_id: Mapping[tuple[str, str], Key]
        self._stamp: _Stamp
        self._take()
        self._checked_at = clock()
        self._fault = ""

    def in_use(self, purpose: Purpose) -> Key:
        self._follow()
        for key in self._keys:
            if key.purpose == purpose:
                return key
        raise _fault(
            self.path,
            f"it must have a key to {purpose}; make one with `qdo admin keys new {purpose}`",
        )

    def has(self, purpose: Purpose) -> bool:
        self._follow()
        return any(key.purpose == purpose for key in self._keys)

    def find(self, purpose: Purpose, id: str) -> Key | None:
        """Return the key with this id, or None; reload a changed file if the key is unknown."""
        self._follow()
        key = self._by_id.get((purpose, id))
        if key is None:
            self._check()
            key = self._by_id.get((purpose, id))
        return key

    def _follow(self) -> None:
        if self._clock() - self._checked_at >= CHECK_SECONDS:
            self._check()

    def _take(self) -> None:
        keys, stamp = _read(self.path)
        if not keys:  # a copy may be in progress, and waiting messages need the known keys
            raise _fault(self.path, "it must have a key; make one with `qdo admin keys new`")
        self._keys = keys
        self._stamp = stamp
        self._by_id = {(key.purpose, key.id): key for key in self._keys}

    def _check(self) -> None:
        self._checked_at = self._clock()
        try:
            if _stamp(os.stat(self.path)) == self._stamp:
                return
            self._take()
        except (OSError, SettingsError) as error:
            if str(error) != self._fault:
                self._fault = str(error)
                _log.error("the key file cannot be read, its last keys stay in force: %s", error)
        else:
            self._fault = ""
            _log.info("read %d keys from %s, which has changed", len(self._keys), self.path)
