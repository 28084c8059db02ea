"""The processes of the demo, and its files, which are all in one folder."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from qdo.brokers.base import Broker
from qdo.brokers.registry import open_broker
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.demo import ledger
from qdo.errors import QdoError
from qdo.system.processes import module_argv

APP = ledger.app.name
TARGET = "qdo.demo.ledger:app"
_WORKER = module_argv("qdo.cli.worker")
_LAST_LINES = 15


class DemoError(QdoError):
    """the demo failed: {reason}"""


class Sandbox(ExitStack):
    """A broker, a coordinator and worker commands (`parents`), which end with the block."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.broker_url = f"sqlite:{folder / 'messages.db'}"
        self.coordinator_url = f"sqlite:{folder / 'coordination.db'}"
        self.log = folder / "workers.log"
        self.layout = Layout.of(APP)
        self.parents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Sandbox:
        with ExitStack() as stack:
            self.broker: Broker = open_broker(self.broker_url, APP)
            stack.callback(self.broker.close)
            self.client: Client = connect(self.coordinator_url)
            self.client.open(10.0)
            stack.callback(self.client.close)
            stack.callback(self.client.stop)
            stack.callback(self._clear)
            self.push(stack.pop_all())
        return self

    @property
    def ledger(self) -> Path:
        return self.folder / ledger.LEDGER_FILE

    def start_workers(self, processes: int, concurrency: int) -> None:
        """Start one `qdo-worker` command. Each process runs `concurrency` jobs at the same time."""
        flags = {
            "--broker": self.broker_url,
            "--coordinator": self.coordinator_url,
            "--processes": str(processes),
            "--concurrency": str(concurrency),
        }
        with self.log.open("ab") as log:
            parent = subprocess.Popen(
                [*_WORKER, TARGET, *(word for pair in flags.items() for word in pair)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_own_settings_only(os.environ),
            )
        self.parents.append(parent)

    def check(self) -> None:
        """Raise DemoError if a parent process has exited."""
        for parent in self.parents:
            code = parent.poll()
            if code is not None:
                raise self.failure(f"qdo-worker exited with code {code}")

    def drain(self, timeout_seconds: float) -> list[int]:
        """Send SIGTERM to every parent process; return their exit codes."""
        for parent in self.parents:
            parent.send_signal(signal.SIGTERM)
        try:
            return [parent.wait(timeout_seconds) for parent in self.parents]
        except subprocess.TimeoutExpired as error:
            raise self.failure(f"workers did not drain within {timeout_seconds:g} s") from error
        finally:
            self.parents = [parent for parent in self.parents if parent.poll() is None]

    def failure(self, reason: str) -> DemoError:
        """Return an error with the last lines of the workers' log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return DemoError(reason="\n".join([reason, *lines[-_LAST_LINES:]]))

    def _clear(self) -> None:
        """Stop the running processes: drain them, then abort, then kill."""
        for parent in self.parents:
            for _ in range(3):
                if parent.poll() is None:
                    parent.send_signal(signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        parent.wait(5.0)
            if parent.poll() is None:
                parent.kill()
                parent.wait()


def _own_settings_only(environ: Mapping[str, str]) -> dict[str, str]:
    """Remove the user's settings, because the demo uses separate settings."""
    return {name: value for name, value in environ.items() if not name.startswith("QDO_")}
