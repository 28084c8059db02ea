"""Server processes on loopback: starting, waiting and stopping by their id."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.support.aws.clients import surroundings
from tests.support.paths import ROOT
from tests.support.processes import wait_until

START_SECONDS = 60.0
_SAYS_PORT = re.compile(r"http://127\.0\.0\.1:(\d+)")


class ServerProcess:
    """A server of this Python that prints the address it listens on; a context manager."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Start it with arguments; see `wait_ready`."""
        # close() closes and thereby removes it.
        self._log = tempfile.NamedTemporaryFile(prefix="server-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=ROOT,
            env={**surroundings(), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.port = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        """Return its output so far."""
        return Path(self._log.name).read_text(errors="replace")

    def wait_ready(self, timeout_seconds: float = START_SECONDS) -> None:
        """Wait until it has printed its address."""

        def said() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended at start:\n{self.log()}")
            found = _SAYS_PORT.search(self.log())
            self.port = int(found[1]) if found else 0
            return found is not None

        wait_until(said, f"the server says its address; it said:\n{self.log()}", timeout_seconds)

    def ask(self, path: str, value: object = None) -> Any:
        """GET a path, or POST a value as JSON to it; return the JSON response."""
        data = None if value is None else json.dumps(value).encode()
        with urlopen(Request(self.url + path, data=data), timeout=10) as answer:
            return json.loads(answer.read())

    def close(self) -> None:
        """Stop it at once. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> ServerProcess:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serving(module: str, *arguments: str) -> ServerProcess:
    """Start a server module on a free port, which runs during the block."""
    return ServerProcess(["-m", module, *arguments])
