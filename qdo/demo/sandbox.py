"""The processes and files of the demo, all in one folder."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from qdo.brokers.base import Broker
from qdo.brokers.registry import open_broker
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.demo import job
from qdo.errors import QdoError
from qdo.system.python import module_argv

APP = job.app.name
TARGET = "qdo.demo.job:app"
_WORKER = module_argv("qdo.cli.worker")
_LAST_LINES = 15


class DemoError(QdoError):
    """the demo failed: {reason}"""


class Sandbox:
    """A broker, a coordinator, and worker processes. All of them end with the block.

    :ivar parents: the running `qdo-worker` commands, in the order in which they started.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker_url = f"sqlite:{folder / 'messages.db'}"
        self.coordinator_url = f"sqlite:{folder / 'coordination.db'}"
        self.log = folder / "workers.log"
        self.layout = Layout.of(APP)
        self.parents: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Sandbox:
        with ExitStack() as stack:
            self.broker: Broker = open_broker(self.broker_url, APP)
            stack.callback(self.broker.close)
            self.client: Client = connect(self.coordinator_url)
            self.client.open(10.0)
            stack.callback(self.client.close)
            stack.callback(self.client.stop)
            stack.callback(self._clear)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def ledger(self) -> Path:
        """The folder of the workers' ledgers."""
        return self.folder / job.LEDGER_FOLDER

    def start_workers(self, processes: int, concurrency: int) -> None:
        """Start one `qdo-worker` command.

        :param processes: number of worker processes.
        :param concurrency: how many jobs each of them runs at the same time.
        """
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
                raise DemoError(reason=f"qdo-worker exited with code {code}\n{self.last_log()}")

    def drain(self, timeout_seconds: float) -> list[int]:
        """Send SIGTERM to every parent process; return their exit codes."""
        for parent in self.parents:
            parent.send_signal(signal.SIGTERM)
        try:
            return [parent.wait(timeout_seconds) for parent in self.parents]
        except subprocess.TimeoutExpired as error:
            raise DemoError(
                reason=f"workers did not drain within {timeout_seconds:g} s\n{self.last_log()}"
            ) from error
        finally:
            self.parents = [parent for parent in self.parents if parent.poll() is None]

    def last_log(self) -> str:
        """Return the last lines of the workers' log."""
        if not self.log.exists():
            return ""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:])

    def _clear(self) -> None:
        """Stop the processes that still run: drain, abort, kill."""
        for parent in self.parents:
            for _ in range(3):
                if parent.poll() is None:
                    parent.send_signal(signal.SIGTERM)
                    _wait(parent, 5.0)
            if parent.poll() is None:
                parent.kill()
                parent.wait()


def _wait(process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return


def _own_settings_only(environ: Mapping[str, str]) -> dict[str, str]:
    """Remove the user's settings: the demo has its own."""
    return {name: value for name, value in environ.items() if not name.startswith("QDO_")}
