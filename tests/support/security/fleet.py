"""Workers and commands with settings in a file, for tests of accounts and rights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.settings.coordinator_access import coordinator_access
from qdo.settings.settings import Settings
from qdo.settings.sources import load
from tests.support.cli import QDO, WORKER, Ended, clean_environment, command
from tests.support.processes import Proc, wait_until, whole_lines

APP = "shop"
HANGS = 13
"""A message with this body hangs at its first attempt, once the file `hangs` exists."""
LAYOUT = Layout.of(APP)
_JOB = """
import time

def job(message, context):
    if message.body == HANGS and message.attempt == 1:
        open("hangs", "w").close()
        time.sleep(60)
    with open("done", "a") as file:
        file.write(f"{message.queue} {message.body}\\n")
"""


class SecureFleet:
    """An app in a folder of its own; each account has a settings file.

    :ivar shared: settings of all accounts.
    """

    def __init__(self, folder: Path, **shared: Any) -> None:
        self.folder = folder
        self.shared = {"session_timeout_seconds": 4.0, "connect_seconds": 5.0, **shared}
        folder.mkdir(exist_ok=True)
        (folder / "work.py").write_text(_JOB.replace("HANGS", str(HANGS)))

    def config(self, **settings: Any) -> str:
        """Write a settings file and return its path."""
        values = {"app": APP, **self.shared, **settings}
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in values.items()]
        path = self.folder / f"{len(os.listdir(self.folder))}.toml"
        path.write_text("".join(lines))
        return str(path)

    def password(self, text: str, mode: int = 0o600) -> str:
        """Write a password file and return its path."""
        path = self.folder / f"password-{len(os.listdir(self.folder))}"
        path.write_text(f"{text}\n")
        path.chmod(mode)
        return str(path)

    def login(self, auth: str, password: str) -> dict[str, str]:
        """Return the settings of an account."""
        return {
            "coordinator_auth": auth,
            "coordinator_password_file": self.password(password),
        }

    def qdo(self, *arguments: str, config: str, env: Mapping[str, str] | None = None) -> Ended:
        """Run a command of `qdo`; its name may have two words."""
        name, *rest = arguments
        words = [*name.split(), "-c", config, *rest]
        return command(*QDO, *words, cwd=self.folder, env=env)

    def worker_ends(self, config: str, env: Mapping[str, str] | None = None) -> Ended:
        """Run a worker that is expected to end by itself."""
        return command(*WORKER, "-c", config, "--job", "work:job", cwd=self.folder, env=env)

    @contextlib.contextmanager
    def worker(self, config: str, env: Mapping[str, str] | None = None) -> Iterator[Proc]:
        """Run a worker until the end of the block, which drains it."""
        arguments = (*WORKER, "-c", config, "--job", "work:job")
        with Proc.python(*arguments, env=clean_environment(env), cwd=self.folder) as worker:
            worker.wait_for_line("registered;")
            yield worker
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0, worker.output

    def done(self) -> list[str]:
        """Return the processed messages as "QUEUE BODY", in order."""
        return whole_lines(self.folder / "done")

    def process(self, queue: str, body: int, config: str) -> None:
        """Send a message and wait until it is processed."""
        assert self.qdo("send", queue, str(body), config=config).code == 0
        wait_until(lambda: f"{queue} {body}" in self.done(), f"{queue} {body} is done")

    def settings(self, config: str) -> Settings:
        return load(config=config, environ={})

    @contextlib.contextmanager
    def client(self, config: str) -> Iterator[Client]:
        """Yield a client with the settings of a file."""
        settings = self.settings(config)
        client = connect(settings.coordinator, access=coordinator_access(settings, LAYOUT))
        client.open(10.0)
        try:
            yield client
        finally:
            client.stop()
            client.close()
