"""For development: which files an app is made of, and when they change.

A worker process says which files it imported; its parent, which never imports the app, looks at
them from time to time. Nothing of it is done unless the setting `reload` asks for it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator

import qdo

POLL_SECONDS = 0.3
"""How often files are looked at. A change is reported when nothing more changes for so long: an
editor or a checkout writes many files."""

_Mark = tuple[int, int, int]


class FileWatch:
    """Looks at files; see `look`."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark | None] = {}
        self._changed: set[str] = set()

    def add(self, paths: Iterable[str]) -> None:
        """Look at these files as well; one that does not exist changes when it is made."""
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
    """Return what is another value once a file was written or replaced, None without one."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def app_files() -> set[str]:
    """Return the Python files this process has imported, without what is installed and qdo."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in names}
    installed.add(os.path.dirname(os.path.realpath(qdo.__file__)) + os.sep)
    files = (getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()])
    paths = {os.path.realpath(file) for file in files if isinstance(file, str)}
    return {path for path in paths if not path.startswith(tuple(installed))}


def failure_files(error: BaseException, target: str) -> set[str]:
    """Return the files that an import failed in, and those where the target should be.

    :param target: MODULE:NAME, or "".
    """
    found = {os.path.abspath(name) for name in _names(error) if os.path.exists(name)}
    module = target.partition(":")[0]
    if module:
        path = os.path.abspath(os.path.join(*module.split(".")))
        found |= {f"{path}.py", os.path.join(path, "__init__.py")}
    return found


def _names(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            yield frame.filename
        if isinstance(error, SyntaxError) and error.filename:
            yield error.filename
        error = error.__cause__ or error.__context__
