"""Real ZooKeeper servers on loopback ports, for tests: a single one, or an ensemble."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.processes import log_tail, wait_until

CLASSPATH = ":".join(
    (
        "/etc/zookeeper/conf",
        # Debian's jar of ZooKeeper does not name all parts of Netty, which TLS needs.
        *(f"/usr/share/java/{each}.jar" for each in ("zookeeper", "netty-codec", "netty-resolver")),
    )
)
MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
TICK_MILLISECONDS = 500
START_SECONDS = 60.0
REQUIRED = "TESTS_REQUIRE_ZOOKEEPER"
SMALL = (
    *("-Xms32m", "-Xmx160m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    *("-XX:-UsePerfData", "-Dzookeeper.forceSync=no"),
)
"""Options of the Java machine: starts fast, and many fit on one computer. Nothing here cuts the
power, so no server waits for its disk: that took a fifth of the time of the tests of fleets, and a
slow disk makes an ensemble of which one server is frozen lose its quorum."""


def missing() -> str | None:
    """Return why no ZooKeeper can be started here, None when it can."""
    if shutil.which("java") is None:
        return "no `java` on the PATH (Debian: apt install default-jre-headless)"
    if not Path("/usr/share/java/zookeeper.jar").exists():
        return "no /usr/share/java/zookeeper.jar (Debian: apt install zookeeper)"
    return None


def need(what: str, reason: str | None, variable: str) -> None:
    """Skip the test if something is missing for a reason, or fail it in CI or by a variable."""
    if reason is not None:
        if os.environ.get("CI") or os.environ.get(variable) == "1":
            pytest.fail(f"these tests need {what}: {reason}")
        pytest.skip(f"needs {what}: {reason}")


def require() -> None:
    """Skip the test without ZooKeeper, or fail it if ZooKeeper is required."""
    need("ZooKeeper", missing(), REQUIRED)


def free_ports(count: int) -> list[int]:
    """Return unused ports; all different, because all are held until the last is found.

    They are below those that the system gives to clients, which could get the port of a server
    that is down for a while.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port, held = random.randrange(10_000, 32_000), stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                held.bind(("127.0.0.1", port))
                found.append(port)
    return found


class ZooKeeperServer:
    """One server process, alone or of an ensemble."""

    def __init__(
        self,
        folder: Path,
        port: int,
        ensemble: str = "",
        number: int = 0,
        options: Sequence[str] = SMALL,
    ) -> None:
        self.folder = folder
        self._options = options
        self.port = port
        self.log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        data = folder / "data"
        data.mkdir(parents=True)
        if number:
            (data / "myid").write_text(f"{number}\n")
        self._config = folder / "zoo.cfg"
        self._config.write_text(
            f"tickTime={TICK_MILLISECONDS}\ninitLimit=20\nsyncLimit=10\n"
            f"dataDir={data}\nclientPort={port}\nclientPortAddress=127.0.0.1\n"
            "admin.enableServer=false\nmaxClientCnxns=0\n"
            "4lw.commands.whitelist=ruok,srvr,mntr,stat,envi,isro\n"
            "autopurge.purgeInterval=0\n" + ensemble
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self) -> None:
        """Start the process; see `wait_ready`."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "java", *self._options, "-Dzookeeper.skipACL=no", "-cp", CLASSPATH, MAIN,
                    str(self._config),
                ],
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def wait_ready(self, timeout_seconds: float = START_SECONDS) -> None:
        """Wait until the server serves clients: alone, or as part of a quorum."""
        try:
            wait_until(self.serving, f"server at {self.address} serves", timeout_seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None

    def serving(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"the server at {self.address} ended\n{self.tail()}")
        return "Mode:" in self.command("srvr")

    def mode(self) -> str:
        """Return "standalone", "leader", "follower", or "" while it does not serve."""
        for line in self.command("srvr").splitlines():
            if line.startswith("Mode:"):
                return line.split(":", 1)[1].strip()
        return ""

    def command(self, word: str) -> str:
        """Send a four-letter command; return "" without an answer."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
                connection.sendall(word.encode())
                parts = []
                while part := connection.recv(8192):
                    parts.append(part)
        except OSError:
            return ""
        return b"".join(parts).decode(errors="replace")

    def kill(self) -> None:
        """End the process at once, as a power cut would; its data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Freeze the process (SIGSTOP)."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """Resume a frozen process (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Start again on the data that is there, and wait until it serves."""
        self.kill()
        self.start()
        self.wait_ready()

    def tail(self) -> str:
        """Return the end of the server's log."""
        return log_tail(self.log)


class Ensemble:
    """One server, or several that form a quorum; start with `start`, end with `close`."""

    def __init__(self, folder: Path, size: int, options: Sequence[str] = SMALL) -> None:
        ports = free_ports(3 * size)
        lines = "".join(
            f"server.{number}=127.0.0.1:{quorum}:{election}\n"
            for number, (quorum, election) in enumerate(
                zip(ports[size : 2 * size], ports[2 * size :], strict=True), 1
            )
        )
        self.servers = [
            ZooKeeperServer(
                folder / f"server-{number}",
                port,
                lines if size > 1 else "",
                number * (size > 1),
                options,
            )
            for number, port in enumerate(ports[:size], 1)
        ]

    @property
    def hosts(self) -> str:
        return ",".join(server.address for server in self.servers)

    def url(self, chroot: str = "") -> str:
        """Return the address for `qdo.coordination.client.connect`."""
        return f"zookeeper://{self.hosts}{chroot}"

    def start(self) -> None:
        """Start all servers and wait until all serve."""
        try:
            for server in self.servers:
                server.start()
            for server in self.servers:
                server.wait_ready()
        except BaseException:
            self.close()
            raise

    def leader(self) -> ZooKeeperServer:
        """Return the leader, or the only server; wait for an election that is under way."""
        found: list[ZooKeeperServer] = []

        def elected() -> bool:
            found[:] = [s for s in self.servers if s.mode() in ("leader", "standalone")]
            return bool(found)

        wait_until(elected, "a leader is elected", START_SECONDS)
        return found[0]

    def logs(self) -> str:
        return "\n".join(server.tail() for server in self.servers)

    def close(self) -> None:
        """End all processes."""
        for server in self.servers:
            server.kill()
