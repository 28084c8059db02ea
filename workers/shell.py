"""Runs a command for every message.

    export QDO_SHELL_COMMAND='jq -r .name >> names.txt'
    qdo-worker workers.shell:app
    qdo send --app shell visitors '{"name": "Ada"}'

The command is given to /bin/sh. On its standard input it gets the body: a line of JSON, or the
bytes that were sent. What else is known of the message stands in its environment:
QDO_MESSAGE_ID, _QUEUE, _POSITION, _ATTEMPT, _FENCE, _TIME, and _KEY if it has one. It never
becomes part of the command itself. Its exit code says how the attempt ended:

- 0: done.
- 75 (EX_TEMPFAIL of sysexits.h): try again, as the failure policy says.
- 65 (EX_DATAERR): a dead letter.
- any other, or a signal: a failed attempt, which the failure policy follows.

A command that takes too long gets SIGTERM and then SIGKILL, with everything in its process group.
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

import ujson

from qdo import App, DeadLetter, Message, QdoError, Retry
from qdo.checks import between, filled
from qdo.errors import SettingsError
from workers.options import expect, option, read, require_greenlet

EX_DATAERR = 65
EX_TEMPFAIL = 75

SHELL = "/bin/sh"
SHOWN_BYTES = 2000
"""How much of the end of a command's stderr becomes part of an error."""

_PR_SET_PDEATHSIG = 1


class CommandFailedError(QdoError):
    """the command {ended}{said}"""


class TryAgainError(Retry):
    """The command asked to be run again; `str` gives what it said."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.args = (reason,)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What can be set, as QDO_SHELL_COMMAND and so on."""

    PREFIX: ClassVar[str] = "QDO_SHELL_"

    command: str = option("what /bin/sh is to run for each message", check=filled)
    timeout_seconds: float = option("how long it may take", 60.0, between(0.01, 86_400))
    kill_seconds: float = option(
        "how long it may take to end after SIGTERM, before SIGKILL", 5.0, between(0, 3600)
    )


# --- what the command gets ----------------------------------------------------------


def standard_input(message: Message) -> bytes:
    """Return what the command reads."""
    if isinstance(message.body, bytes):
        return message.body
    text = ujson.dumps(message.body, ensure_ascii=False, escape_forward_slashes=False)
    return text.encode() + b"\n"


def variables(message: Message) -> dict[str, str]:
    """Return what the command finds in its environment beside that of the worker.

    :raises DeadLetter: the key cannot stand in an environment.
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
            raise DeadLetter("its key holds a NUL character, which no environment variable can")
        found["QDO_MESSAGE_KEY"] = message.key
    return found


# --- running it ---------------------------------------------------------------------


class Runner:
    """Runs the command.

    :param environ: what commands inherit; `os.environ` when None.
    :raises SettingsError: the shell does not understand the command.
    """

    def __init__(self, options: Options, environ: Mapping[str, str] | None = None) -> None:
        self._options = options
        inherited = os.environ if environ is None else environ
        self._environ = {
            name: value for name, value in inherited.items() if not name.startswith("QDO_MESSAGE_")
        }
        _check_syntax(options.command)

    def run(self, message: Message) -> None:
        """Run the command for a message, to its end.

        :raises DeadLetter: it exited with 65.
        :raises TryAgainError: it exited with 75.
        :raises CommandFailedError: it exited in another way or took too long.
        """
        environ = {**self._environ, **variables(message)}
        # Files, not pipes: nobody has to wait for a grandchild that keeps a pipe open.
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
        """Return the exit code, negative for a signal; leave no process of the group behind."""
        try:
            return process.wait(self._options.timeout_seconds)
        except subprocess.TimeoutExpired as error:
            self._end(process)
            ended = f"was ended: it took more than {self._options.timeout_seconds:g} s"
            raise CommandFailedError(ended=ended, said=_said(_tail(errors))) from error
        finally:
            if process.poll() is None:  # the attempt was aborted
                _signal_group(process, signal.SIGKILL)
                process.wait()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._options.kill_seconds)
        # Also where the command itself has ended: what it started may have not.
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _check_syntax(command: str) -> None:
    checked = subprocess.run(
        [SHELL, "-n", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if checked.returncode:
        said = " ".join(checked.stderr.decode(errors="replace").split())
        raise SettingsError(
            name="QDO_SHELL_COMMAND", reason=f"{SHELL} does not understand it: {said}"
        )


def _ending_with(parent: int) -> Callable[[], None]:
    """Return what makes the kernel kill a new process when the worker dies before it."""
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tail(errors: IO[bytes]) -> str:
    """Return the end of what the command wrote to stderr, as one line."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - SHOWN_BYTES))
    return " ".join(errors.read().decode(errors="replace").split())


def _said(text: str) -> str:
    return f": {text}" if text else ""


def _judge(code: int, text: str) -> None:
    """Return where the exit code says done, raise what it says otherwise."""
    if code == 0:
        return
    if code == EX_TEMPFAIL:
        raise TryAgainError(f"the command asks to be run again{_said(text)}")
    if code == EX_DATAERR:
        raise DeadLetter(f"the command refused the message{_said(text)}")
    ended = f"exited with {code}" if code > 0 else f"was ended by {_signal_name(-code)}"
    raise CommandFailedError(ended=ended, said=_said(text))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def job_context() -> Iterator[Runner]:
    """Yield a runner, made as the environment says.

    :raises SettingsError: an option is missing or will not do.
    """
    yield Runner(read(Options))


app = App("shell", job_context=job_context)


@app.job(executor="greenlet")
def job(message: Message, context: Runner) -> None:
    """Run the command for one message."""
    require_greenlet("shell")
    expect(context, Runner, "shell").run(message)
