"""Runs a command for every message.

    export QDO_SHELL_COMMAND='jq -r .name >> names.txt'
    qdo-worker qdo.programs.shell:app
    qdo send --app shell visitors '{"name": "Ada"}'

/bin/sh runs the command. The standard input is the body, as a line of JSON or the bytes that were
sent. The environment contains the other properties of the message: QDO_MESSAGE_ID, _QUEUE,
_POSITION, _ATTEMPT, _FENCE, _TIME, and _KEY if the message has a key. The program inserts no part
of a message into the command itself. The exit code determines how the attempt ended:

- 0: done.
- 75 (EX_TEMPFAIL of sysexits.h): retry, under the failure policy.
- 65 (EX_DATAERR): a dead letter.
- any other code, or a signal: a failed attempt, under the failure policy.

A command that exceeds its timeout gets SIGTERM and then SIGKILL, with its whole process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, ClassVar

from qdo import App, DeadLetter, Message, QdoError, Retry
from qdo.errors import SettingsError
from qdo.programs._json import json_bytes
from qdo.programs._options import expect, option, read, require_greenlet
from qdo.settings.values import between

EX_DATAERR = 65
EX_TEMPFAIL = 75

SHELL = "/bin/sh"
SHOWN_BYTES = 2000
"""Length of the end of a command's stderr that becomes part of an error."""

_PR_SET_PDEATHSIG = 1


class CommandFailedError(QdoError):
    """the command {ended}{said}"""


class TryAgainError(Retry):
    """The command requested a retry. `str` returns the command's stderr."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.args = (reason,)


def _non_empty(value: str) -> str | None:
    return None if value else "it must not be empty"


@dataclass(frozen=True, kw_only=True)
class ShellOptions:
    """Options of the program, such as QDO_SHELL_COMMAND."""

    PREFIX: ClassVar[str] = "QDO_SHELL_"

    command: str = option("command that /bin/sh runs for each message", check=_non_empty)
    timeout_seconds: float = option("timeout for the command", 60.0, between(0.01, 86_400))
    kill_seconds: float = option(
        "time for the command to end after SIGTERM, before SIGKILL", 5.0, between(0, 3600)
    )


# --- input of the command -----------------------------------------------------------


def standard_input(message: Message) -> bytes:
    if isinstance(message.body, bytes):
        return message.body
    return json_bytes(message.body) + b"\n"


def variables(message: Message) -> dict[str, str]:
    """Return the environment variables of a command that the worker's environment lacks.

    :raises DeadLetter: the key cannot be the value of an environment variable.
    """
    found = {
        "QDO_MESSAGE_ID": message.id,
        "QDO_MESSAGE_QUEUE": message.queue,
        "QDO_MESSAGE_POSITION": str(message.position),
        "QDO_MESSAGE_ATTEMPT": str(message.attempt),
        "QDO_MESSAGE_FENCE": str(message.fence),
        "QDO_MESSAGE_TIME": f"{message.time:.6f}",
    }
    if message.key is not None:
        if "\0" in message.key:
            raise DeadLetter("the key has a NUL character; an environment variable cannot hold it")
        found["QDO_MESSAGE_KEY"] = message.key
    return found


# --- running it ---------------------------------------------------------------------


class Runner:
    """Runs the command.

    :param environ: the environment that commands inherit, except for the coordinator's password;
        None for `os.environ`.
    :raises SettingsError: the command is not valid shell syntax.
    """

    def __init__(self, options: ShellOptions, environ: Mapping[str, str] | None = None) -> None:
        self._options = options
        inherited = os.environ if environ is None else environ
        self._environ = {
            name: value
            for name, value in inherited.items()
            if not name.startswith("QDO_MESSAGE_") and name != "QDO_COORDINATOR_PASSWORD"
        }
        _check_syntax(options.command)

    def run(self, message: Message) -> None:
        """Run the command for a message and wait until it ends.

        :raises DeadLetter: the command exited with 65.
        :raises TryAgainError: the command exited with 75.
        :raises CommandFailedError: the command failed in another way or timed out.
        """
        environ = {**self._environ, **variables(message)}
        # Use files, not pipes. A grandchild that keeps a pipe open would block the worker.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
            given.write(standard_input(message))
            given.seek(0)
            process = subprocess.Popen(
                [SHELL, "-c", self._options.command],
                stdin=given,
                stderr=errors,
                env=environ,
                start_new_session=True,
                preexec_fn=_ending_with(os.getpid()),
            )
            code = self._wait(process, errors)
            _judge(code, _tail(errors))

    def _wait(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> int:
        """Return the exit code, negative for a signal. On timeout or abort, kill the group."""
        try:
            return process.wait(self._options.timeout_seconds)
        except subprocess.TimeoutExpired as error:
            self._end(process)
            ended = f"timed out after {self._options.timeout_seconds:g} s"
            raise CommandFailedError(ended=ended, said=_said(_tail(errors))) from error
        finally:
            if process.poll() is None:  # the attempt was aborted
                _signal_group(process, signal.SIGKILL)
                process.wait()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._options.kill_seconds)
        # Kill the group even if the command itself has ended, because its children may still run.
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _check_syntax(command: str) -> None:
    checked = subprocess.run(
        [SHELL, "-n", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if checked.returncode:
        said = " ".join(checked.stderr.decode(errors="replace").split())
        raise SettingsError(
            name="QDO_SHELL_COMMAND", reason=f"{SHELL} cannot parse the command: {said}"
        )


def _ending_with(parent: int) -> Callable[[], None]:
    """Return a preexec_fn with which the kernel kills the command when the worker dies."""
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the worker died before prctl
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tail(errors: IO[bytes]) -> str:
    """Return the end of the command's stderr as one line."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - SHOWN_BYTES))
    return " ".join(errors.read().decode(errors="replace").split())


def _said(text: str) -> str:
    return f": {text}" if text else ""


def _judge(code: int, text: str) -> None:
    """Raise the error or outcome of an exit code; do nothing for 0."""
    if code == 0:
        return
    if code == EX_TEMPFAIL:
        raise TryAgainError(f"the command requested a retry (exit code {EX_TEMPFAIL}){_said(text)}")
    if code == EX_DATAERR:
        raise DeadLetter(f"the command rejected the message (exit code {EX_DATAERR}){_said(text)}")
    ended = f"exited with {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
    raise CommandFailedError(ended=ended, said=_said(text))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def job_context() -> Iterator[Runner]:
    """Yield a runner with the options from the environment.

    :raises SettingsError: an option is missing or invalid.
    """
    yield Runner(read(ShellOptions))


app = App("shell", job_context=job_context)


@app.job(executor="greenlet")
def job(message: Message, context: Runner) -> None:
    require_greenlet("shell")
    expect(context, Runner, "shell").run(message)
