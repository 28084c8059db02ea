"""A real moto_server process on loopback, spoken to over HTTP as if it were AWS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.support.aws.server import ServerProcess, serving


@contextlib.contextmanager
def moto_server() -> Iterator[ServerProcess]:
    """Run moto's server on a free port for the time of the block.

    ``server.ask("/moto-api/reset", {})`` forgets everything that it holds.
    """
    with serving("moto.server", "--host", "127.0.0.1", "--port", "0") as server:
        yield server
