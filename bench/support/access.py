"""How the processes of a benchmark connect to the coordinator."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from qdo.coordination.access import ANYBODY, Access
from qdo.coordination.znodes.layout import Layout
from qdo.settings.coordinator_access import coordinator_access
from qdo.settings.sources import load

VARIABLE = "BENCH_ACCESS"
"""File with the settings of this process and of those that it starts."""


def access_of(layout: Layout) -> Access:
    """Return the access that `secured` has chosen; outside of it, no TLS and no account."""
    path = os.environ.get(VARIABLE)
    return ANYBODY if path is None else coordinator_access(load(config=path, environ={}), layout)


@contextlib.contextmanager
def secured(path: Path, settings: Mapping[str, str]) -> Iterator[None]:
    """Connect with settings until the end of the block, which are written to a file."""
    path.write_text("".join(f"{name} = {json.dumps(settings[name])}\n" for name in settings))
    os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
