"""A process with a client of the coordinator, driven by lines: commands in, JSON out.

    python -m tests.support.coordinator_process URL HANDLER TIMEOUT_SECONDS

Lines out: ``{"state": ...}`` at every change of the connection's state, ``{"event": [type,
path]}`` for watches that fire, ``{"answer": ...}`` or ``{"error": ...}`` for each command.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.argv[2] == "gevent":
    from gevent import monkey

    monkey.patch_all()

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

from qdo.coordination.client import Client, connect
from tests.support.forks.processes import Popen
from tests.support.paths import ROOT

ANSWER_SECONDS = 20.0


@contextlib.contextmanager
def clients(*urls: str, timeout_seconds: float) -> Iterator[Callable[..., Client]]:
    """Return a function that opens clients of this process; they are stopped at the end.

    :param urls: of the coordinator; without, it is the first argument of the function.
    """
    with contextlib.ExitStack() as stack:

        def opened(*url: str, **options: Any) -> Client:
            client = connect(*urls, *url, **{"session_timeout_seconds": timeout_seconds, **options})
            stack.callback(client.close)
            stack.callback(client.stop)
            client.open(20)
            return client

        yield opened


@contextlib.contextmanager
def connected(url: str, **options: Any) -> Iterator[Client]:
    """Give a client with a session, which ends with the block."""
    client = connect(url, **options)
    client.open(20.0)
    try:
        yield client
    finally:
        client.stop()
        client.close()


class Remote:
    """The test's end: a client in another process."""

    def __init__(self, url: str, handler: str = "threading", timeout_seconds: float = 2.0) -> None:
        self.process = Popen(
            [sys.executable, "-m", __name__, url, handler, str(timeout_seconds)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: dict[str, queue.Queue[Any]] = {
            kind: queue.Queue() for kind in ("answer", "event", "state")
        }
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.client_id = self.answer()
        self.client_id = (self.client_id[0], bytes.fromhex(self.client_id[1]))

    def _read(self) -> None:
        if self.process.stdout is None:
            raise RuntimeError("the process has no output")
        with self.process.stdout as lines:
            for line in lines:
                for kind, value in json.loads(line).items():
                    self.lines["answer" if kind == "error" else kind].put(
                        CommandError(value) if kind == "error" else value
                    )

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reader.join()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def tell(self, *command: Any) -> None:
        """Send a command; see `answer`."""
        if self.process.stdin is None:
            raise RuntimeError("the process has no input")
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_seconds: float = ANSWER_SECONDS) -> Any:
        """Return the next answer; raise CommandError for an error."""
        value = self.lines["answer"].get(timeout=timeout_seconds)
        if isinstance(value, CommandError):
            raise value
        return value

    def ask(self, *command: Any) -> Any:
        """Send a command and return its answer."""
        self.tell(*command)
        return self.answer()

    def event(self, timeout_seconds: float = ANSWER_SECONDS) -> Any:
        """Return the next watch event."""
        return self.lines["event"].get(timeout=timeout_seconds)

    def state(self, timeout_seconds: float = ANSWER_SECONDS) -> Any:
        """Return the next change of state."""
        return self.lines["state"].get(timeout=timeout_seconds)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait()


class CommandError(Exception):
    """A command failed in the other process."""


def _say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class _Commands:
    """The commands that the process accepts."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def create(self, path: str, ephemeral: bool = False) -> str:
        return str(self.client.create(path, b"", ephemeral=ephemeral))

    def set(self, path: str, text: str) -> int:
        return int(self.client.set(path, text.encode()).version)

    def get(self, path: str) -> str:
        return str(self.client.get(path)[0].decode())

    def watch(self, path: str) -> bool:
        found = self.client.exists(path, lambda event: _say(event=[event.type, event.path]))
        return found is not None

    def increment(self, path: str, times: int) -> int:
        """Increment a node by compare-and-swap; return how often another process was faster."""
        from kazoo.exceptions import BadVersionError

        lost = 0
        while times:
            data, stat = self.client.get(path)
            try:
                self.client.set(path, b"%d" % (int(data) + 1), stat.version)
                times -= 1
            except BadVersionError:
                lost += 1
        return lost

    def flood(self, path: str) -> list[Any]:
        """Write as fast as possible until a write fails; return the error and the last version.

        Writes are not guarded: what ends with the session must be ended by the coordinator.
        """
        from kazoo.exceptions import KazooException

        version, count = -1, 0
        answers: list[Any] = []
        while True:
            answers.append(self.client.set_async(path, b"%d" % count))
            count += 1
            if len(answers) < 20:
                continue
            try:
                version = answers.pop(0).get().version
            except KazooException as error:
                late = [answer for answer in answers if _applied(answer)]
                return [type(error).__name__, version, len(late), self.client.state]


def _applied(answer: Any) -> bool:
    from kazoo.exceptions import KazooException

    try:
        answer.get()
    except KazooException:
        return False
    return True


def _line_reader(handler: str) -> Callable[[], str]:
    if handler != "gevent":
        return sys.stdin.readline
    import gevent

    # Reading in the loop's own thread would stop the loop.
    return lambda: str(gevent.get_hub().threadpool.apply(sys.stdin.readline))


def main() -> None:
    """Serve commands until the input ends."""
    _, url, handler, timeout = sys.argv
    client = connect(url, handler=handler, session_timeout_seconds=float(timeout))
    client.add_listener(lambda state: _say(state=str(state)))
    client.open(20)
    _say(answer=[client.client_id[0], client.client_id[1].hex()])
    commands = _Commands(client)
    for line in iter(_line_reader(handler), ""):
        name, *arguments = json.loads(line)
        try:
            _say(answer=getattr(commands, name)(*arguments))
        except Exception as error:  # noqa: BLE001 - every error is reported to the test
            _say(error=f"{type(error).__name__}: {error}")
    client.stop()
    client.close()


if __name__ == "__main__":
    main()
