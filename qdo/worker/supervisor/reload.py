"""For development: notices when the source files of an app change.

A worker process reports which files it imported. Its parent, which never imports the app, polls
these files. All of this happens only with the setting `reload`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

POLL_SECONDS = 0.3
"""How often files are checked. A change is reported once no file has changed for this long,
because an editor or a checkout writes many files."""

_Mark = tuple[int, int, int]


class SourceWatcher:
    """Polls source files; see `look`."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark | None] = {}
        self._changed: set[str] = set()

    def add(self, paths: Iterable[str]) -> None:
        """Watch these files as well. A missing file counts as changed once it exists."""
        for path in paths:
            if path not in self._marks:
                self._marks[path] = _mark(path)

    def look(self) -> list[str]:
        """Return the files that have changed, once they have stopped changing."""
        now = {path: _mark(path) for path in self._marks}
        fresh = {path for path, mark in now.items() if mark != self._marks[path]}
        self._marks = now
        self._changed |= fresh
        if fresh or not self._changed:
            return []
        found, self._changed = sorted(self._changed), set()
        return found


def _mark(path: str) -> _Mark | None:
    """Return a value that changes when the file is written or replaced; None without a file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
