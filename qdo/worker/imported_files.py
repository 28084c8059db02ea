"""The source files of an app that the process has imported."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator


def app_files() -> set[str]:
    """Return the Python files this process has imported, without installed packages and qdo."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in names}
    installed.add(os.path.realpath(__file__).rpartition("/worker/")[0] + os.sep)
    files = (getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()])
    paths = {os.path.realpath(file) for file in files if isinstance(file, str)}
    return {path for path in paths if not path.startswith(tuple(installed))}


def failure_files(error: BaseException, target: str) -> set[str]:
    """Return the files in which an import failed, and the possible files of the target.

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
