"""A real Redis server on loopback, and the broker in docs/examples/redis_streams that uses it."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import tomllib
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.processes import Proc
from tests.support.zookeeper import free_ports, need

EXAMPLE = ROOT / "docs" / "examples" / "redis_streams"
REQUIRED = "TESTS_REQUIRE_REDIS"


def require() -> None:
    """Skip the test without Redis, or fail it if Redis is required."""
    missing = None
    if shutil.which("redis-server") is None:
        missing = "no `redis-server` on the PATH (Debian: apt install redis-server)"
    elif importlib.util.find_spec("redis") is None:
        missing = "no redis (pip install redis)"
    need("Redis", missing, REQUIRED)


def installed_example(folder: Path) -> tuple[str, str]:
    """Return the folders of `sys.path` that an installed example adds: metadata, and module."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(head)
    points = project["entry-points"]["qdo.brokers"].items()
    lines = ["[qdo.brokers]", *(f"{scheme} = {value}" for scheme, value in points)]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return str(folder), str(EXAMPLE)


class RedisServer:
    """A server that keeps every message, as the page of the example says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self._folder, "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
        argv = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self.proc = Proc(["redis-server", *argv])
        self.proc.wait_for_line("Ready to accept connections")

    def cut_all(self) -> None:
        """Close the connections of all clients, if the server responds."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as on:
            on.sendall(b"CLIENT KILL TYPE normal\r\nCLIENT KILL TYPE pubsub\r\n")
            on.settimeout(1.0)
            on.recv(64)

    def close(self) -> None:
        self.proc.__exit__(None, None, None)
