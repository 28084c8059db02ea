"""Start a worker process from its parent, receive its reports, and reap its group.

`Reaper` reaps dead processes and closes their sessions, in an order that makes the close safe.
`Reaper` kills the process group while the dead leader still holds the group id, and then reaps the
leader. After all other members of the group and all job processes have died, `Reaper` closes the
coordinator sessions (`qdo.worker.supervisor.sessions`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from qdo.brokers.registry import kind_of
from qdo.coordination.access import ANYBODY, Access
from qdo.coordination.interrupted_attempts import InFlight
from qdo.coordination.znodes.layout import Layout
from qdo.errors import SettingsError
from qdo.settings.coordinator_access import coordinator_access
from qdo.settings.hosts import process_title
from qdo.settings.settings import Settings
from qdo.system.processes import LINUX, STOP_REQUEST, children, module_argv
from qdo.worker import shared_memory
from qdo.worker.executors.process_frames import NAME
from qdo.worker.metrics.monitor import ChildMetrics
from qdo.worker.shared_memory import LoopReport, read_loop
from qdo.worker.stacks import StackDumps
from qdo.worker.supervisor.sessions import Session, SessionCloser, SessionKeeper

CHILD_ARGV = module_argv("qdo.worker.main")
# Environment variable with the input of the child, as JSON. Settings may contain secrets, and every
# user of the machine can read command lines.
CHILD_VARIABLE = "QDO_CHILD"
# Maximum number of deaths that the next process of a place reports.
MOST_DEATHS = 20
# Process id, Unix time and description of the end of a process.
Death: TypeAlias = tuple[int, float, str]
# Maximum bytes of a report. The longest report contains the names of the app's files.
REPORT_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class ChildProcess:
    """A worker process, which leads its own process group and session.

    :ivar sessions: the open coordinator sessions that the child reported.
    :ivar settings: the settings in force, including settings in the app's code; None until the
      child reports them.
    :ivar files: the app's source files that the child reported; only with the setting `reload`.
    :ivar asked: operators' actions that the child has passed on to the parent.
    :ivar in_flight: after `reap`, the messages in flight at the child's death.
    :ivar blamed: the state of the blocked event loop if the parent kills the child; otherwise None.
    :ivar receipts: descriptor of the store of receipt handles. The code that reaps the child must
      close it.
    :param left: descriptors of dead processes' receipt stores. The child releases their messages.
    :param restarted: whether a process ran in this place before.
    """

    _keepers: Sequence[int] = ()

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        settings: Settings,
        target: str | None,
        left: Sequence[int] = (),
        restarted: bool = False,
        deaths: Sequence[Death] = (),
    ) -> None:
        self.name = name
        self.sessions: list[Session] = []
        self.settings: Settings | None = None
        self.files: list[str] = []
        self.asked: list[str] = []
        self._given = settings
        self._received = b""
        # With a socket pair, the child reads the end of the stream after the death of the parent.
        self.pipe, far_end = socket.socketpair()
        self.pipe.setblocking(False)
        self._table = shared_memory.make_memory()
        self._reading = threading.Lock()
        self.receipts = shared_memory.make_memory("qdo-receipts")
        self.dumps = StackDumps()
        self.metrics = ChildMetrics()
        self.in_flight: list[InFlight] = []
        self.blamed: LoopReport | None = None
        self.keeper: SessionKeeper | None = None
        shared = {
            "pipe": far_end.fileno(),
            "in_flight": self._table,
            "receipts": self.receipts,
            "stacks": self.dumps.fd,
            "metrics": self.metrics.fd,
        }
        child: dict[str, Any] = {"name": name, "target": target, **shared, "left": list(left)}
        child |= {"restarted": restarted, "deaths": list(deaths), "settings": asdict(settings)}
        try:
            self._process = subprocess.Popen(
                [*argv, process_title(name, settings, target)],
                stdin=subprocess.DEVNULL,
                env={**os.environ, CHILD_VARIABLE: json.dumps(child)},
                pass_fds=(*shared.values(), *left),
                start_new_session=True,
            )
        except BaseException:
            self._close(self._table, self.receipts)
            raise
        finally:
            far_end.close()

    def _close(self, *memories: int) -> None:
        self.pipe.close()
        self.dumps.close()
        self.metrics.close()
        for fd in memories:
            os.close(fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def registered(self) -> bool:
        """Whether the child has reported an open session."""
        return bool(self.sessions)

    def terminate(self) -> None:
        """Ask the process to stop, over its socket and by SIGTERM; see `ParentLink`."""
        with contextlib.suppress(OSError):
            self.pipe.send(STOP_REQUEST)
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the whole process group. Call this only before `reap`."""
        os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Reap the dead process, and read its last reports; return the exit code or -signal."""
        # Only the parent's main loop may reap. Kill the group before reaping, because until then
        # the kernel cannot reuse the pid and group id. So the signal never reaches an unrelated
        # process.
        if self.keeper is not None:
            self.keeper.stop()
        self.kill()
        # The child's job processes and their descendants end by themselves, see the keeper. After
        # the child's death, their keepers are children of this process.
        self._keepers = children(os.getpid(), NAME) if LINUX else []
        self.dumps.close()
        code = self._process.wait()
        self.receive()
        self.pipe.close()
        self.metrics.close()
        # If the parent killed the child because a message blocked its loop, count an attempt only
        # for that message. If the loop ran again before the signal arrived, the guilty message is
        # unknown.
        guilty = self.blamed.entry if self.blamed is not None and self.blamed == self.loop() else 0
        self.in_flight = shared_memory.read_in_flight(self._table, guilty)
        with self._reading:
            os.close(self._table)
            self._table = -1
        return code

    def loop(self) -> LoopReport | None:
        """Return the state of the child's event loop; None if it is unwatched. Thread-safe."""
        with self._reading:
            return None if self._table < 0 else read_loop(self._table)

    def is_stopped(self) -> bool:
        """Return whether a signal or a debugger has stopped the process (Linux)."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                return file.read().rpartition(b") ")[2][:1] in b"Tt"
        except OSError:
            return False

    def group_gone(self) -> bool:
        """Return whether the group and the job processes are dead. Call this after `reap`."""
        # The parent adopts orphans (`adopt_orphans`). So every living member of the group is a
        # child of the parent, until the parent reaps the member.
        groups = [(os.P_PGID, self.pid), *((os.P_PID, pid) for pid in self._keepers)]
        return not any(_has_children(*group) for group in groups)

    def receive(self) -> bool:
        """Read the child's reports; return False after the child has closed its end."""
        # Limit the number of bytes, because a child may write faster than the parent reads.
        for _ in range(REPORT_BYTES >> 16):
            try:
                data = self.pipe.recv(1 << 16)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not data:
                return False
            *lines, self._received = (self._received + data).split(b"\n")
            if len(self._received) > REPORT_BYTES:
                self._ignore(self._received)
                self._received = b""
            for line in lines:
                self._handle(line)
        return True

    def _handle(self, line: bytes) -> None:
        try:
            value = json.loads(line)
            if "settings" in value:
                # The worker sends its settings before its first job runs.
                self.settings = self.settings or Settings(**value["settings"])
                return
            if "files" in value:
                self.files = list(map(str, value["files"]))
                return
            if "ask" in value:
                self.asked.append(str(value["ask"]))
                return
            session = self._session_of(value)
        except Exception:  # noqa: BLE001 - a job may have written anything
            self._ignore(line)
            return
        if session is None:
            del self.sessions[-1:]
        elif session not in self.sessions:
            self.sessions.append(session)

    def _ignore(self, line: bytes) -> None:
        _log.warning("%s (pid %d): ignoring invalid report %r", self.name, self.pid, line[:100])

    def _session_of(self, value: dict[str, Any]) -> Session | None:
        if value["session"] is None:
            return None
        # An app may set its coordinator in code, which only the child imports.
        settings = self.settings or self._given
        url = value.get("coordinator") or settings.coordinator
        root = str(value.get("root", ""))
        timeout = float(value.get("timeout") or settings.session_timeout_seconds)
        if not 0 < timeout < math.inf:
            raise ValueError(timeout)
        return Session(
            url,
            int(value["session"], 16),
            bytes.fromhex(value["password"]),
            root,
            timeout,
            self._access(settings, root),
        )

    def _access(self, settings: Settings, root: str) -> Access:
        try:
            return coordinator_access(settings, Layout(root))
        except SettingsError as error:
            _log.warning("%s: its session will time out if it dies: %s", self.name, error)
            return ANYBODY


def next_ended() -> int | None:
    """Return the pid of a dead child without reaping the child; None without a dead child."""
    try:
        state = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if state is None else state.si_pid


def _has_children(kind: int, number: int) -> bool:
    try:
        os.waitid(kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@dataclass(slots=True)
class _DyingProcess:
    """A reaped child whose group may still have living members."""

    child: ChildProcess
    give_up_at: float
    in_flight: list[InFlight]
    reason: str


class Reaper:
    """Reaps the children of one parent, and closes their sessions.

    :ivar left: descriptors of the receipt stores of dead children. The next child releases their
      messages. The code that takes a descriptor must close it.
    :param wakeup: called on another thread after a closer has ended.
    """

    def __init__(self, settings: Settings, wakeup: Callable[[], None]) -> None:
        self.left: list[int] = []
        self.settings = settings
        self._wakeup = wakeup
        self._deaths: dict[str, deque[Death]] = {}
        self._dying: list[_DyingProcess] = []
        self._closers: list[SessionCloser] = []

    @property
    def busy(self) -> bool:
        """Whether a group may have living members, or a thread is closing sessions."""
        return bool(self._dying or self._closers)

    @property
    def next_at(self) -> float | None:
        """The time of the next `step` without a signal; None for never."""
        return min((dying.give_up_at for dying in self._dying), default=None)

    def reap(self, child: ChildProcess, *, stopping: bool) -> int:
        """Reap a dead child; return its exit code. `stopping` means a requested exit."""
        code = child.reap()
        how = _how(child, code)
        if child.registered:
            give_up_at = time.monotonic() + self.settings.session_timeout_seconds
            # After a requested exit, count no attempts, unless a message blocked the loop.
            in_flight = [] if stopping and child.blamed is None else child.in_flight
            reason = f"{child.name} (pid {child.pid}) {how}"
            self._dying.append(_DyingProcess(child, give_up_at, in_flight, reason))
        else:
            os.close(child.receipts)
        self._reap_dying()
        level = _exit_level(code, stopping=stopping)
        if level != logging.INFO:
            deaths = self._deaths.setdefault(child.name, deque(maxlen=MOST_DEATHS))
            deaths.append((child.pid, time.time(), how))
        _log.log(level, "%s (pid %d) %s", child.name, child.pid, how if code else "finished")
        return code

    def deaths(self, name: str) -> Sequence[Death]:
        """Return the unexpected deaths of a place's processes, with the oldest first."""
        return tuple(self._deaths.get(name, ()))

    def step(self) -> None:
        """Close the sessions of children whose groups are dead; forget finished closers."""
        self._reap_dying()
        self._closers = [closer for closer in self._closers if not closer.finished]

    def _reap_dying(self) -> None:
        for dying in list(self._dying):
            if dying.child.group_gone() and self._close_sessions(dying):
                self._dying.remove(dying)
                self.left.append(dying.child.receipts)
            elif dying.give_up_at <= time.monotonic():
                self._dying.remove(dying)
                os.close(dying.child.receipts)
                _log.warning(
                    "%s (pid %d): cannot kill part of its process group, or start a thread that"
                    " closes its session; its queues are free when its session times out",
                    dying.child.name,
                    dying.child.pid,
                )

    def _close_sessions(self, dying: _DyingProcess) -> bool:
        """Begin to close a dead child's sessions; return False while no thread can start."""
        child = dying.child
        closer = SessionCloser(
            f"{child.name} (pid {child.pid})",
            child.sessions,
            self.settings.session_timeout_seconds,
            self._wakeup,
            dying.in_flight,
            dying.reason,
            kind_of(self.settings.broker).positions,
            after=child.keeper,
        )
        if not begun(closer):
            return False
        self._closers.append(closer)
        return True


def begun(thread: threading.Thread) -> bool:
    """Start a thread of the parent; return False if the system has no thread left."""
    try:
        thread.start()
    except RuntimeError as error:
        _log.warning("cannot start the thread %s, retrying: %s", thread.name, error)
        return False
    return True


def _exit_level(code: int, *, stopping: bool) -> int:
    expected = code == 0 or (stopping and code == -signal.SIGTERM)
    return logging.INFO if expected else logging.WARNING


def _how(child: ChildProcess, code: int) -> str:
    if child.blamed is not None:
        return f"was killed: its event loop was blocked for {child.blamed.limit_seconds:g} s"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"died of signal {-code}"
