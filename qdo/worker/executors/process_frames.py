"""The link between a worker process and a job's process: frames, errors, and the keeper.

A frame is two lengths (32 bits each, network order), a JSON object and raw bytes. The raw bytes are
a body of bytes or the JSON of a large body; other frames have none. Frames do not use pickle, so an
answer is only data, even if the job's process ran hostile code.

==========  ===========================================================================
frame       JSON
==========  ===========================================================================
ready       ``ready`` and its `pid`, or ``{"failed": "why"}`` and the process ends
message     its fields, and ``serial``
answer      ``serial``, ``ended`` (see `requests.jobs.reporting`), and ``done``, or an
            `outcome`, or an `error`, see below; or ``undecodable`` with the reason
==========  ===========================================================================

The job's process describes an error in its answer, and the worker process raises the error.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from qdo import outcomes
from qdo.encoding import JsonText
from qdo.errors import BodyDecodeError, BodyTypeError, UnknownKindError
from qdo.message import Message, Origin
from qdo.outcomes import Outcome
from qdo.positions import position_of_time
from qdo.system.processes import LINUX, SIGN, adopt_orphans, children, die_with_parent, set_name
from qdo.text import describe_traceback, one_line
from qdo.worker.large_bodies import load_large

_LENGTHS = struct.Struct("!II")
# Maximum bytes of an answer. Answers that qdo writes are never longer.
ANSWER_LIMIT = 4 << 20
_CHUNK = 1 << 18
VARIABLE = "QDO_JOB_PROCESS"
# The signal that makes the keeper kill the job. Init systems send SIGTERM to every process, so
# SIGTERM is not suitable.
END = signal.SIGUSR2 if LINUX else signal.SIGKILL
# Name of the keepers, by which the parent of a dead worker process finds them.
NAME = "qdo-keeper"


# Errors that end a message at once, as outcomes do. Their details are texts.
_MISFITS = {each.__name__: each for each in (BodyTypeError, UnknownKindError)}


class WireError(Exception):
    """The other process sent an invalid frame."""


def pack(head: dict[str, Any], blob: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return b"".join((_LENGTHS.pack(len(text), len(blob)), text, blob))


def read(
    receive: Callable[[int], bytes], limit: int | None = None
) -> tuple[dict[str, Any], bytes] | None:
    """Return the next frame; None at the end of the stream.

    :param receive: returns at most the requested number of bytes; no bytes at the end.
    :raises WireError: the frame is longer than `limit`, or its head is not a JSON object.
    """
    lengths = _exactly(receive, _LENGTHS.size)
    if lengths is None:
        return None
    text_size, blob_size = _LENGTHS.unpack(lengths)
    if limit is not None and text_size + blob_size > limit:
        raise WireError(f"a frame must have at most {limit} bytes, got {text_size + blob_size}")
    text = _exactly(receive, text_size)
    blob = _exactly(receive, blob_size)
    if text is None or blob is None:
        return None
    try:
        head = json.loads(text)
    except ValueError as error:
        raise WireError("its head is not JSON") from error
    if not isinstance(head, dict):
        raise WireError("its head is not a JSON object")
    return head, blob


def _exactly(receive: Callable[[int], bytes], size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = receive(min(size, _CHUNK))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def pack_message(message: Message, serial: int) -> bytes:
    raw = isinstance(message.body, bytes)
    head = {
        "serial": serial,
        "queue": message.queue,
        "position": message.position,
        "key": message.key,
        "headers": dict(message.headers),
        "fence": message.fence,
        "attempt": message.attempt,
        "id": message.id,
        "app": message.app,
        "stream": message.stream,
        "registration": SIGN.registration(),
        "time": message.time,
        "stable": message.stable,
        "raw": raw,
        "large": type(message.body) is JsonText,
        "body": None if raw else message.body,
    }
    return pack(head, message.body if raw else b"")


def message_of(head: dict[str, Any], blob: bytes) -> Message:
    """Return the message of a frame; raise ValueError if a large body is not JSON."""
    positions = _WorkerPositions(head["id"], head["time"], head["stable"])
    message = Message(
        head["queue"],
        head["position"],
        load_large(blob) if head["large"] else blob if head["raw"] else head["body"],
        head["key"],
        head["headers"],
        head["fence"],
        head["attempt"],
        Origin(head["app"], head["stream"], positions),
    )
    message._registration = head["registration"]
    return message


@dataclass(frozen=True, slots=True)
class _WorkerPositions:
    """Values that the worker process derived from the position of one message."""

    id: str
    time: float
    stable: bool

    def to_time(self, position: int) -> int:
        return position_of_time(self.time)

    def message_id(self, position: int, node: int) -> str:
        return self.id


class RemoteError(Exception):
    """The worker process's copy of an error from a job's process."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RemoteTraceback(Exception):
    """The traceback of an error from a job's process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def dump(error: BaseException | None) -> dict[str, Any]:
    """Return the end of an attempt as JSON values, in the job's process."""
    if error is None:
        return {"done": True}
    if isinstance(error, Outcome):
        return _dump_outcome(error)
    if isinstance(error, BodyTypeError | UnknownKindError):
        return {"outcome": type(error).__name__, "state": error.details}
    return {
        "error": type(error).__qualname__[:200],
        "module": str(type(error).__module__)[:200],
        "text": one_line(error),
        "traceback": describe_traceback(error),
    }


def _dump_outcome(error: Outcome) -> dict[str, Any]:
    # A subclass in the app counts as the qdo outcome from which it derives.
    kind = next(base for base in type(error).__mro__ if base.__module__ == outcomes.__name__)
    names = list(inspect.signature(kind).parameters)
    state = {name: getattr(error, name, None) for name in names}
    return {"outcome": kind.__name__, "state": {n: v for n, v in state.items() if _is_plain(v)}}


def load(answer: dict[str, Any]) -> BaseException | None:
    """Return the error to raise, or None for a done message, in the worker process.

    This function never fails. For an invalid answer, the returned error shows the answer.
    """
    if answer.get("done") is True:
        return None
    name = str(answer.get("outcome"))
    kind = _MISFITS.get(name) or getattr(outcomes, name, None)
    if isinstance(kind, type) and issubclass(kind, (Outcome, BodyDecodeError)):
        try:
            return kind(**answer["state"])
        except Exception as error:  # noqa: BLE001 - another process may have written anything
            return RemoteError(f"cannot recreate the outcome {kind.__name__}: {error}")
    name = str(answer.get("error", "RemoteError"))
    remote = _instance(name, str(answer.get("module")), str(answer.get("text", "")))
    remote.__cause__ = RemoteTraceback(str(answer.get("traceback", "")))
    return remote


# For an error that is not an outcome, the answer has name, text and traceback. If this process
# knows the type, the instance also has that type, so rules by exception work.
def _instance(name: str, module: str, text: str) -> RemoteError:
    known = _known(name, module)
    if known is not None:
        try:
            kind = type(known.__name__, (RemoteError, known), {"__module__": module})
            # The first built-in base type creates the instance, so code of the app does not run.
            maker: Any = next(base for base in known.__mro__ if base.__module__ == "builtins")
            made: RemoteError = maker.__new__(kind, text)
            made.args = (text,)
            return made
        except Exception:  # noqa: BLE001 - a type may forbid these steps; then use only its name
            known = None
    last = name.rpartition(".")[2]
    shown = last if last.isidentifier() else RemoteError.__name__
    by_name = type(shown, (RemoteError,), {"__module__": module})
    unknown: RemoteError = by_name(text)
    return unknown


def _known(name: str, module: str) -> type[Exception] | None:
    """Return the type of an app's error if this process has imported its module."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
    return None if module.partition(".")[0] == "qdo" or issubclass(found, Outcome) else found


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))


# The keeper is the parent of a job's process. A job may start programs, which may start other
# programs, in separate groups and sessions. The keeper adopts all orphans among these programs
# (`PR_SET_CHILD_SUBREAPER`). After the end of the job's process, every leftover process sooner or
# later becomes a child of the keeper. The keeper kills its children until it has none. Then the
# keeper ends in the same way as the job's process. The keeper does not run code of the app. To kill
# the job, the worker process sends `END` to the keeper. When the worker process dies, the kernel
# sends `END`.
def keep(worker: int, fds: Iterable[int]) -> None:
    """Fork; return in the job's process, and stay in the keeper until all processes have ended.

    :param fds: descriptors for the job's process only. The keeper closes them.
    """
    if not LINUX:  # the parent of the worker kills the worker's group
        _exit_unless(die_with_parent(worker))
        return
    os.setpgid(0, 0)
    adopt_orphans()
    _exit_unless(die_with_parent(worker, END))
    keeper = os.getpid()
    name = set_name(NAME)
    job = os.fork()
    if job == 0:
        # The keeper and the job's process each lead a process group in the session of the worker
        # process.
        os.setpgid(0, 0)
        set_name(name)
        _exit_unless(die_with_parent(keeper))
        return

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job, signal.SIGKILL)

    # Before this line, `END` ends both the keeper and the job's process, which has not begun the
    # job.
    signal.signal(END, end)
    for fd in fds:
        os.close(fd)
    _end_as(_watch(job))


def _watch(job: int) -> int:
    """Reap orphans until the job's process ends, then kill the others; return the exit code."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_pid == job:
            break
        if ended is not None:
            os.waitpid(ended.si_pid, 0)
    # Kill the job's group first, because a process that forks endlessly could outrun the next
    # steps.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(job, signal.SIGKILL)
    signal.signal(END, _ignore)
    code = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
    while True:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return code


def _end_as(code: int) -> None:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the job's core dump is enough
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _exit_unless(alive: bool) -> None:
    if not alive:
        os._exit(1)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. The job has ended, and the keeper is about to kill the leftover processes."""
