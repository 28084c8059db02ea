"""Command lines of further Python processes of qdo."""

from __future__ import annotations

import sys

_RUN = "import sys; del sys.path[0]; import runpy; runpy.run_module({!r}, None, '__main__', True)"


def module_argv(module: str) -> tuple[str, ...]:
    """Return the command that runs a module, with a path that lacks the current folder.

    ``python -m`` searches the current folder first: a file there could replace a module of qdo, of
    its libraries or of Python. The app may be in this folder; `qdo.loading` appends it to the path.
    """
    if sys.version_info >= (3, 11):
        return (sys.executable, "-P", "-m", module)
    return (sys.executable, "-c", _RUN.format(module))
